"""Shared fixtures: a tiny random target and drafter for every test, the demo's real ones where marked `model`."""

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    from dflash_paged.interpreter import interpret_kernels

    interpret_kernels()  # before anything imports Triton: kernels run on CPU tensors

torch.set_num_threads(1)
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

TINY_LAYER_IDS = (0, 2, 3)


def make_tiny_target(seed: int = 0, **overrides):
    """A random Llama of 4 layers with 6 q and 2 KV heads, in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    options = dict(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, eos_token_id=1, pad_token_id=1,
        bos_token_id=0, tie_word_embeddings=False, initializer_range=0.2,
    )
    model = LlamaForCausalLM(LlamaConfig(**{**options, **overrides})).float().eval()
    model.generation_config.eos_token_id = model.config.eos_token_id
    return model


def tiny_draft_config(**overrides) -> dict:
    """A z-lab style config.json of a tiny drafter, as a dict; an override of None removes a field."""
    config = dict(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=512,
        block_size=5, num_target_layers=4,
        dflash_config={"target_layer_ids": list(TINY_LAYER_IDS), "mask_token_id": 3},
    )
    return {name: value for name, value in {**config, **overrides}.items() if value is not None}


def make_tiny_drafter(seed: int = 1, **overrides):
    """A random drafter of 2 layers that fits `make_tiny_target`."""
    from dflash_paged.drafter import DraftModel, read_draft_config

    torch.manual_seed(seed)
    model = DraftModel(read_draft_config(tiny_draft_config(**overrides)))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)  # a norm whose weight is forgotten shows
    return model.freeze()


def poison_pages(manager) -> None:
    """Fill every page of every layer with NaN: a row that was never written ruins what reads it."""
    for pool in manager.pools.tensors:
        pool.fill_(float("nan"))


def poison_free_blocks(manager) -> None:
    """NaN into what nobody holds and the index doesn't know, those that a window gave back among it."""
    for group, pools in enumerate(manager.pools.group_tensors):
        free = [block for block, owner in enumerate(manager.block_owners(group)) if owner == "free"]
        for pool in pools:
            pool[free] = float("nan")


def chi_square_p(observed, expected) -> float:
    """The p-value of counts against expected counts of the same sum; cells below 5 are taken together."""
    large = expected >= 5
    cells = [(o, e) for o, e in zip(observed[large].tolist(), expected[large].tolist())]
    rest = float(observed[~large].sum()), float(expected[~large].sum())
    cells += [rest] if rest[1] >= 1 else []
    total = sum(o for o, _ in cells) / sum(e for _, e in cells)
    statistic = sum((o - e * total) ** 2 / (e * total) for o, e in cells)
    half = torch.tensor([len(cells) - 1, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(half[0], half[1]))


@torch.inference_mode()
def joint_probs(model, prompt, temperature, top_p=1.0, top_k=0):
    """Exact probabilities [V, V] of the next two tokens, by transformers' own warpers."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []

    def probs(ids):
        logits = model(ids).logits[:, -1].float()
        for warp in warpers:
            logits = warp(ids, logits)
        return logits.softmax(-1).cpu()

    vocab, device = model.config.vocab_size, model.device
    first = probs(torch.tensor([prompt], device=device))[0]
    second = probs(torch.tensor([[*prompt, t] for t in range(vocab)], device=device))
    return first[:, None] * second


class DraftRollout:
    """Requests that grow by given numbers of kept rows, over pages that start as NaN: a draft pass's data.

    `features` [R, max_seq_len, n * hidden] are what the target would give at each position; rejected rows get
    other values. Request r's first `starts[r]` rows are in the manager without draft rows, as after a prefix hit
    that restored none. The last row of each step's tables belongs to a padded request.
    """

    def __init__(self, model, starts=(0, 0, 0), *, tokens_per_block=8, max_seq_len=96, seed=0):
        from dflash_paged.drafter import PagedContext
        from dflash_paged.manager import KVCacheManager
        from dflash_paged.memory import LayerSpec

        config = model.config
        self.model, self.config, self.starts = model, config, list(starts)
        self.num_rows_max = config.draft_block_size
        self.generator = torch.Generator().manual_seed(seed)
        self.manager = KVCacheManager(
            target_layers=[LayerSpec(1, 8, "float32")], draft_layers=config.layer_specs("float32"),
            tokens_per_block=tokens_per_block, num_blocks=len(starts) * (max_seq_len // tokens_per_block),
            max_seq_len=max_seq_len, max_batch_size=len(starts), num_lookahead_tokens=config.draft_block_size,
            enable_prefix_reuse=False,
        )
        poison_pages(self.manager)
        model.ensure_positions(max_seq_len + config.draft_block_size)
        self.paged = PagedContext(model, [self.manager.page_view(1 + i) for i in range(config.num_hidden_layers)],
                                  self.manager.layer_to_group[1:])
        width = len(config.target_layer_ids) * config.hidden_size
        self.features = self.randn(len(starts), max_seq_len, width)
        self.ids = list(range(len(starts)))
        for i in self.ids:
            self.manager.add_sequence(i, [1])
        for i, start in enumerate(starts):
            if start:
                self.manager.prepare_resources([(i, start)])
                self.manager.update_resources([(i, [1] * start)])

    def randn(self, *shape):
        """Random numbers of this rollout's own stream."""
        return torch.randn(*shape, generator=self.generator)

    def step(self, rows, kept, prefill=False):
        """Reserve `rows[r]` rows of each request, of which `kept[r]` count; returns (DraftStep, features)."""
        from dflash_paged.block_table import build_draft_inputs
        from dflash_paged.drafter import DraftStep

        manager, config = self.manager, self.config
        before = [manager.num_tokens(i) for i in self.ids]
        manager.prepare_resources([(i, n if prefill else 0) for i, n in zip(self.ids, rows)])
        positions = torch.cat([torch.arange(b, b + n) for b, n in zip(before, rows)])
        features = torch.cat([
            torch.cat([self.features[i, b : b + k], 3 * self.randn(n - k, self.features.shape[2])])
            for i, b, n, k in zip(self.ids, before, rows, kept)
        ])
        ids = [*self.ids, None]
        row_start_loc = torch.tensor([0, *rows, 0]).cumsum(0).to(torch.int32)
        tables = manager.block_tables(ids)
        inputs = build_draft_inputs(
            torch.tensor([7] * len(ids)), positions, row_start_loc,
            torch.tensor([n - k for n, k in zip(rows, kept)] + [0], dtype=torch.int32), tables,
            tokens_per_block=manager.tokens_per_block, mask_token_id=config.mask_token_id,
            num_draft_tokens=config.draft_block_size - 1, num_pages=manager.num_blocks,
        )
        starts = torch.tensor([*self.starts, 0], dtype=torch.int32)
        self.kept = kept
        table_rows = torch.tensor(manager.table_rows(ids))
        return DraftStep(table_rows, row_start_loc, positions, inputs, tables, starts), features

    def commit(self):
        """The step is over: its kept rows count."""
        self.manager.update_resources([(i, [1] * k) for i, k in zip(self.ids, self.kept)])
        self.manager.check_invariants()
        poison_free_blocks(self.manager)

    def steps(self, first, later):
        """Run a prefill of `first[r]` rows, then passes that keep `later[s][r]`; yields (DraftStep, features)."""
        yield self.step(first, first, prefill=True)
        self.commit()
        for kept in later:
            yield self.step([self.num_rows_max] * len(self.ids), kept)
            self.commit()


@pytest.fixture(scope="session")
def tiny_target():
    """A tiny random transformers target."""
    return make_tiny_target()


@pytest.fixture(scope="session")
def tiny_drafter():
    """A tiny random drafter that fits `tiny_target`."""
    return make_tiny_drafter()


@pytest.fixture(scope="session")
def real_model():
    """The demo's target and tokenizer, loaded once a worker (10 to 20 s)."""
    from dflash_paged.models import find_target, load_target_model

    return load_target_model(find_target())


@pytest.fixture(scope="session")
def real_drafter():
    """The shipped drafter in fp32."""
    from dflash_paged.drafter import load_drafter
    from dflash_paged.models import find_drafter

    return load_drafter(find_drafter())
