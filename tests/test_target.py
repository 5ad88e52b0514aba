"""The target on pages: transformers' own numbers through the manager's blocks, and an untouched `generate`."""

import random
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY_LAYER_IDS, make_tiny_target, poison_pages

from dflash_paged.manager import KVCacheManager
from dflash_paged.store import SCALE_RANGE, read_rows_ref
from dflash_paged.target import (
    ATTENTION_NAME,
    TARGET_SCALES_FILE,
    PagedTarget,
    TargetBatch,
    TargetModel,
    calibrate_target,
    load_target_scales,
    paged_attention_forward,
    recorded_rows,
    save_target_scales,
    stored_value,
)

TOL = dict(rtol=2e-5, atol=2e-5)  # fp32 sums in another order; hidden states are of size 1
Q = 4  # rows of a verify pass


def tiny_qwen3(**overrides):
    """A random Qwen3 (norms on q and k, head_dim apart from hidden size), in fp32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    options = dict(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, eos_token_id=1, initializer_range=0.2,
    )
    return Qwen3ForCausalLM(Qwen3Config(**{**options, **overrides})).float().eval()


def other_scale():
    """A target whose attention scale isn't head_dim ** -0.5."""
    model = make_tiny_target()
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.2
    return model


TARGETS = {
    "gqa": make_tiny_target,
    "scale": other_scale,
    "no-gqa": lambda: make_tiny_target(num_key_value_heads=6),
    "mqa": lambda: make_tiny_target(num_key_value_heads=1, tie_word_embeddings=True),
    "bias": lambda: make_tiny_target(attention_bias=True),
    "qwen3": tiny_qwen3,
    "qwen3-sliding": lambda: tiny_qwen3(use_sliding_window=True, sliding_window=6, max_window_layers=2),
}


class PagedRun:
    """Sequences of random tokens in a manager's pages, run through a `PagedTarget` in steps."""

    def __init__(self, model, lens, *, dtype="float32", tokens_per_block=8, layer_ids=TINY_LAYER_IDS, seed=0):
        rng = random.Random(seed)
        self.target = PagedTarget(model, layer_ids)
        self.tokens = [[rng.randrange(97) for _ in range(n)] for n in lens]
        self.manager = KVCacheManager(
            target_layers=self.target.layer_specs(dtype), tokens_per_block=tokens_per_block, max_seq_len=128,
            num_blocks=16 * len(lens), max_batch_size=len(lens), num_lookahead_tokens=Q, enable_prefix_reuse=False,
        )
        if dtype == "float8_e4m3fn":
            calibrate_target(self.target, self.tokens)
            for i, pair in enumerate(zip(*self.target.kv_scales)):
                self.manager.set_scales(i, *pair)
        poison_pages(self.manager)
        self.pages = [self.manager.page_view(i) for i in range(self.target.num_layers)]
        for i, tokens in enumerate(self.tokens):
            self.manager.add_sequence(i, tokens)

    def slots(self, i, first, last, group=0):
        """Slots of positions first..last-1 by hand."""
        layer, size = self.manager.groups[group].layers[0], self.manager.tokens_per_block
        table = self.manager.get_batch_cache_indices([i], layer)[0]
        return [table[p // size] * size + p % size for p in range(first, last)]

    def batch(self, decode=(), prefill=()) -> TargetBatch:
        """Q rows of each request in `decode`, `n` rows of each (request, n) in `prefill`."""
        self.manager.prepare_resources([(i, 0) for i in decode] + list(prefill))
        before = {i: self.manager.num_tokens(i) for i in [*decode, *(i for i, _ in prefill)]}
        spans = [(i, before[i], before[i] + Q) for i in decode] + [(i, before[i], before[i] + n) for i, n in prefill]
        self.spans = spans
        lens = lambda ids: torch.tensor([before[i] for i in ids], dtype=torch.int32)
        chunks = [i for i, _ in prefill]
        return TargetBatch(
            token_ids=torch.tensor([t for i, a, b in spans for t in self.tokens[i][a:b]]),
            positions=torch.tensor([p for _, a, b in spans for p in range(a, b)]),
            slot_mapping=torch.tensor([
                [s for i, a, b in spans for s in self.slots(i, a, b, g)] for g in range(self.manager.num_groups)
            ]),
            num_decode=len(decode), num_query_rows=Q,
            decode_tables=self.manager.block_tables(list(decode)), decode_lens=lens(decode),
            prefill_tables=self.manager.block_tables(chunks), prefill_lens=lens(chunks),
            prefill_row_starts=torch.tensor([0, *(n for _, n in prefill)]).cumsum(0).to(torch.int32),
            pages=self.pages, layer_to_group=self.manager.layer_to_group,
        )

    def step(self, decode=(), prefill=(), kept=()):
        """Run one pass, keep `kept` rows of the decode requests; returns [(request, first, hidden, features)]."""
        hidden, features = self.target.forward(self.batch(decode, prefill))
        sizes = [b - a for _, a, b in self.spans]
        parts = zip(self.spans, hidden.split(sizes), features.split(sizes))
        keeps = {**dict(zip(decode, kept)), **dict(prefill)}
        out = [(i, a, h, f) for (i, a, _), h, f in parts]
        self.manager.update_resources([(i, self.tokens[i][a : a + keeps[i]]) for i, a, _ in self.spans])
        self.manager.check_invariants()
        return out


@torch.inference_mode()
def own_numbers(model, tokens, layer_ids=TINY_LAYER_IDS):
    """transformers' own logits, and its hidden_states[id + 1] side by side."""
    out = model(torch.tensor([tokens]), output_hidden_states=True)
    return out.logits[0], torch.cat([out.hidden_states[i + 1][0] for i in layer_ids], -1)


def assert_rows_equal(run, parts) -> None:
    """Every row's logits and features equal transformers' own."""
    for i, first, hidden, features in parts:
        logits, own = own_numbers(run.target.model, run.tokens[i], run.target.target_layer_ids)
        rows = slice(first, first + len(hidden))
        torch.testing.assert_close(run.target.lm_head(hidden), logits[rows], **TOL)
        torch.testing.assert_close(features, own[rows], **TOL)


@pytest.fixture(params=TARGETS)
def any_target(request):
    return TARGETS[request.param]()


def test_logits_and_features_of_a_whole_prompt_equal_transformers(any_target):
    """Pitfall 29: features are hidden_states[id + 1], the last layer's included."""
    run = PagedRun(any_target, (45,))
    assert_rows_equal(run, run.step(prefill=[(0, 45)]))


@pytest.mark.parametrize("tokens_per_block", [8, 32])
def test_chunked_prefill_equals_transformers(any_target, tokens_per_block):
    """Chunks that end within a page, at its end and past it, over pages that start as NaN."""
    run = PagedRun(any_target, (45,), tokens_per_block=tokens_per_block)
    for n in (1, 7, 8, 19, 10):
        assert_rows_equal(run, run.step(prefill=[(0, n)]))


def test_mixed_batches_of_verify_passes_and_chunks_equal_transformers(any_target):
    run = PagedRun(any_target, (40, 44, 37, 30))
    assert_rows_equal(run, run.step(prefill=[(0, 9), (1, 16), (2, 3)]))
    assert_rows_equal(run, run.step(decode=[0, 1], prefill=[(2, 12)], kept=[2, 4]))
    assert_rows_equal(run, run.step(decode=[1, 0], prefill=[(3, 1), (2, 8)], kept=[1, 1]))
    for kept in ((4, 4, 4, 4), (1, 2, 3, 4)):
        assert_rows_equal(run, run.step(decode=[0, 1, 2, 3], kept=kept))


def test_rejected_rows_do_not_show_in_later_passes():
    run = PagedRun(make_tiny_target(), (60,))
    run.step(prefill=[(0, 6)])
    for kept in (1, 3, 4, 1, 2):
        n, right = run.manager.num_tokens(0), run.tokens[0]
        run.tokens[0] = right[: n + kept] + [(t + 1) % 97 for t in right[n + kept :]]  # wrong past the kept rows
        run.step(decode=[0], kept=[kept])
        run.tokens[0] = right
    assert_rows_equal(run, run.step(decode=[0], kept=[4]))


def test_rows_go_to_their_slots_and_nowhere_else():
    """Padding slots (-1) write nothing; what isn't a slot of the batch stays NaN."""
    run = PagedRun(make_tiny_target(), (20, 17))
    batch = run.batch(prefill=[(0, 20), (1, 17)])
    batch.slot_mapping[0, 5] = -1
    run.target.forward(batch)
    written = [s for s in batch.slot_mapping[0].tolist() if s >= 0]
    rest = torch.tensor(sorted(set(range(run.pages[0].num_slots)) - set(written)))
    for view in run.pages:
        assert all(x.isfinite().all() for x in read_rows_ref(view, torch.tensor(written)))
        assert all(x.isnan().all() for x in read_rows_ref(view, rest))


@pytest.mark.parametrize("layer_ids", [(3, 0, 2), (1, 1), (2,), (0, 1, 2, 3), ()])
def test_features_keep_the_drafters_order(layer_ids):
    """Pitfall 29; ids may come in any order, and twice."""
    run = PagedRun(make_tiny_target(), (21,), layer_ids=layer_ids)
    [(_, _, hidden, features)] = run.step(prefill=[(0, 21)])
    assert features.shape == (21, 48 * len(layer_ids))
    if layer_ids:
        torch.testing.assert_close(features, own_numbers(run.target.model, run.tokens[0], layer_ids)[1], **TOL)
    neighbour = own_numbers(run.target.model, run.tokens[0], [max(i - 1, 0) for i in layer_ids] or [0])[1]
    assert not torch.allclose(features, neighbour[:, : features.shape[1]], atol=0.1) or not layer_ids


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_pages_give_the_same_numbers_however_the_rows_arrive(dtype):
    """A row attends to its own step's rows as stored, so one pass, chunks and verify passes agree."""
    model = make_tiny_target()
    whole = PagedRun(model, (44,), dtype=dtype)
    [(_, _, want, _)] = whole.step(prefill=[(0, 44)])
    parts = PagedRun(model, (44,), dtype=dtype)
    got = [parts.step(prefill=[(0, n)]) for n in (13, 1, 18)] + [parts.step(decode=[0], kept=[4]) for _ in range(3)]
    got = torch.cat([hidden for [(_, _, hidden, _)] in got])
    # Sums in another order can move a stored value across a rounding boundary (2^-8 of it for bf16), so nearly
    # all rows agree closely, and all of them far better than an unrounded suffix would (0.02 and more).
    assert ((got - want).abs().amax(1) < 2e-4).float().mean() > 0.8
    exact = own_numbers(model, whole.tokens[0])[0]
    assert not torch.allclose(whole.target.lm_head(want), exact, atol=1e-3), "pages weren't narrow"
    for view, own in zip(whole.pages, parts.pages):
        assert str(view.dtype) == f"torch.{dtype}"
        for x, y in zip(read_rows_ref(view, torch.tensor(whole.slots(0, 0, 44))),
                        read_rows_ref(own, torch.tensor(parts.slots(0, 0, 44)))):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


def test_stored_value_is_what_a_reader_of_the_pages_sees():
    x = torch.randn(5, 2, 8)
    assert stored_value(x, torch.float32, None) is x
    assert torch.equal(stored_value(x, torch.bfloat16, None), x.bfloat16().float())
    assert stored_value(x.bfloat16(), torch.float16, None).dtype == torch.bfloat16


def test_stored_value_of_fp8_pages_has_the_scale_applied():
    x = torch.randn(5, 2, 8)
    scale = torch.tensor([0.01, 0.5])
    codes = (x / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(stored_value(x, torch.float8_e4m3fn, scale), codes * scale[:, None])
    assert stored_value(x.bfloat16(), torch.float8_e4m3fn, scale).dtype == torch.bfloat16


def test_generate_on_the_same_model_stays_transformers_own():
    model = make_tiny_target()
    ids = torch.randint(5, 97, (1, 12))
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    own, logits, tokens = model.config._attn_implementation, model(ids).logits, model.generate(ids, **options)
    run = PagedRun(model, (30,))
    run.step(prefill=[(0, 20)])
    run.step(decode=[0], kept=[2])
    assert model.config._attn_implementation == own
    assert torch.equal(model(ids).logits, logits)
    assert torch.equal(model.generate(ids, **options), tokens)
    assert not any(layer._forward_hooks for layer in model.model.layers)


def test_a_failed_pass_leaves_the_model_as_it_was():
    model = make_tiny_target()
    run = PagedRun(model, (30,))
    own, logits = model.config._attn_implementation, model(torch.tensor(run.tokens)).logits
    batch = run.batch(prefill=[(0, 20)])
    batch.slot_mapping[0, 3] = 10**6
    with pytest.raises(ValueError, match="slots"):
        run.target.forward(batch)
    assert model.config._attn_implementation == own
    assert not any(layer._forward_hooks for layer in model.model.layers)
    assert torch.equal(model(torch.tensor(run.tokens)).logits, logits)
    batch = run.batch(prefill=[(0, 20)])
    hidden, _ = run.target.forward(batch)
    torch.testing.assert_close(run.target.lm_head(hidden), logits[0, :20], **TOL)


def test_attention_without_a_batch_says_what_is_missing():
    """Pitfall 8: raise, naming what is missing, instead of reading some block."""
    model = make_tiny_target()
    PagedTarget(model)
    own = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION_NAME)
    try:
        with pytest.raises(ValueError, match="paged_batch.*TargetBatch"):
            model(torch.tensor([[5, 6, 7]]))
    finally:
        model.set_attn_implementation(own)


def test_forward_checks_ids_and_positions():
    run = PagedRun(make_tiny_target(), (30,))
    batch = run.batch(prefill=[(0, 20)])
    batch.token_ids = batch.token_ids.int()
    with pytest.raises(ValueError, match="token_ids.*int64"):
        run.target.forward(batch)
    batch = run.batch(prefill=[(0, 20)])
    batch.positions = batch.positions[:-1]
    with pytest.raises(ValueError, match="positions.*20.*19"):
        run.target.forward(batch)


def test_layer_specs_state_the_targets_own_geometry():
    specs = TargetModel(tiny_qwen3(use_sliding_window=True, sliding_window=6, max_window_layers=3)).layer_specs("float16")
    assert [(s.num_kv_heads, s.head_dim, s.dtype) for s in specs] == [(2, 16, "float16")] * 4
    assert [s.sliding_window for s in specs] == [None, None, None, 6]
    specs = TargetModel(make_tiny_target(num_key_value_heads=3, head_dim=None)).layer_specs("float32")
    assert [(s.num_kv_heads, s.head_dim, s.sliding_window) for s in specs] == [(3, 8, None)] * 4


@pytest.mark.parametrize("eos,want", [(7, (7,)), ([7, 9], (7, 9)), (None, ()), ([], ())])
def test_end_of_sequence_tokens_are_those_of_the_generation_config(eos, want):
    model = make_tiny_target()
    model.generation_config.eos_token_id = eos
    target = TargetModel(model)
    assert target.eos_token_ids == want
    assert TargetModel(model, eos_token_ids=[3, 4]).eos_token_ids == (3, 4)
    assert target.max_positions == 512 and target.dtype == torch.float32


@pytest.mark.parametrize("layer_ids", [(4,), (-1,), (0, 2, 17)])
def test_layer_ids_outside_the_target_are_refused(layer_ids):
    with pytest.raises(ValueError, match=f"target_layer_ids: expected 0..3, got {layer_ids[-1]}"):
        PagedTarget(make_tiny_target(), layer_ids)


def test_a_model_without_layers_or_head_is_refused():
    with pytest.raises(ValueError, match="target: expected a decoder with model.layers.*SimpleNamespace"):
        TargetModel(SimpleNamespace())
    with pytest.raises(ValueError, match="LlamaModel"):
        TargetModel(make_tiny_target().model)


def test_a_target_stays_in_inference_mode():
    target = TargetModel(make_tiny_target().train())
    assert not target.model.training and not any(p.requires_grad for p in target.model.parameters())


# Architectures whose attention is more than pages of K and V under a softmax


@pytest.mark.parametrize(
    "fields, reason",
    [
        (dict(layer_types=["full_attention", "linear_attention"]), "linear_attention"),
        (dict(layer_types=["conv"]), "conv"), (dict(attention_chunk_size=8192), "chunk"),
        (dict(rope_parameters={"rope_type": "longrope"}), "longrope"), (dict(rope_scaling={"type": "dynamic"}), "dynamic"),
        (dict(layers_block_type=["recurrent"]), "recurrent"),
    ],
)
def test_architectures_that_pages_cannot_serve_are_refused(fields, reason):
    from types import SimpleNamespace

    from dflash_paged.target import check_architecture

    check_architecture(SimpleNamespace(layer_types=["full_attention", "sliding_attention"]))
    with pytest.raises(ValueError, match=reason):
        check_architecture(SimpleNamespace(**fields))


def test_attention_arguments_that_change_the_softmax_are_refused():
    x = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match="s_aux"):
        paged_attention_forward(torch.nn.Module(), x, x, x, paged_batch=object(), s_aux=torch.zeros(2))


# fp8 pages

FP8 = "float8_e4m3fn"


@pytest.mark.parametrize("name", ["gqa", "scale", "qwen3", "qwen3-sliding"])
def test_recorded_rows_are_those_that_the_pages_hold(name):
    """K after RoPE, V plain, of every layer; rows behind a window too, and what a window hides stays hidden."""
    run = PagedRun(TARGETS[name](), (45,))
    batch = run.batch(prefill=[(0, 45)])
    run.target.forward(batch)
    rows = recorded_rows(run.target, run.tokens[0])
    for layer, view in enumerate(run.pages):
        slots = batch.slot_mapping[run.manager.layer_to_group[layer]]
        for part, want in enumerate(read_rows_ref(view, slots)):
            torch.testing.assert_close(rows[:, layer, part], want, **TOL)


def test_scales_are_the_largest_values_over_448_a_layer_and_head():
    """Over all prompts, with the margin asked for; one head's outlier widens that head's scale only."""
    target, prompts = PagedTarget(make_tiny_target()), [[5, 6, 7, 8], [], [9], list(range(2, 40))]
    rows = torch.cat([recorded_rows(target, p) for p in prompts if p])
    want = rows.abs().amax((0, 4)) / 448
    assert calibrate_target(target, prompts) is target
    for part, scale in enumerate(target.kv_scales):
        assert scale.shape == (4, 2) and scale.dtype == torch.float32 and not scale.is_inference()
        torch.testing.assert_close(scale, want[:, part])
    wide = calibrate_target(PagedTarget(make_tiny_target()), prompts, margin=2.0).kv_scales
    torch.testing.assert_close(wide[1], 2 * target.kv_scales[1])
    model = make_tiny_target()
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight[8:] *= 100
    outlier = calibrate_target(PagedTarget(model), prompts).kv_scales[1]
    torch.testing.assert_close(outlier[2], target.kv_scales[1][2] * torch.tensor([1, 100.0]), rtol=1e-4, atol=0)
    torch.testing.assert_close(outlier[:2], target.kv_scales[1][:2])


def test_calibration_leaves_the_model_as_it_was():
    model = make_tiny_target()
    own, ids = model.config._attn_implementation, torch.randint(5, 97, (1, 12))
    logits, target = model(ids).logits, PagedTarget(model)
    calibrate_target(target, ids.tolist())
    assert model.config._attn_implementation == own and torch.equal(model(ids).logits, logits)
    with pytest.raises(ValueError, match="prompts"):
        calibrate_target(target, [[5, 97]])
    model.model.layers[3].self_attn.forward = lambda *args, **kwargs: 1 / 0
    with pytest.raises(ZeroDivisionError):
        calibrate_target(target, ids.tolist())
    assert model.config._attn_implementation == own


@pytest.mark.parametrize("prompts,options,words", [
    ([], {}, "at least one row"), ([[], []], {}, "at least one row"), ([[5, 97]], {}, "prompts: expected an int in 0..96, got 97"),
    ([[5, -1]], {}, "prompts.*-1"), ([[5, 1.5]], {}, "prompts.*1.5"), ([[5]], dict(margin=0), "margin.*got 0"),
    ([[5]], dict(margin=float("nan")), "margin.*nan"),
])
def test_calibration_refuses_by_name(prompts, options, words):
    target = PagedTarget(make_tiny_target())
    with pytest.raises(ValueError, match=words):
        calibrate_target(target, prompts, **options)
    assert target.kv_scales is None


def test_values_that_are_not_finite_are_refused_with_their_place():
    model = make_tiny_target()
    with torch.no_grad():
        model.model.layers[3].self_attn.v_proj.weight[8] = float("inf")
    with pytest.raises(ValueError, match="V of layer 3, head 1"):
        calibrate_target(PagedTarget(model), [[5, 6]])


@pytest.mark.parametrize("window", [None, 6])
def test_attention_over_fp8_pages_is_plain_attention_over_the_dequantised_rows(window):
    """A whole prompt, chunks, verify passes and single tokens give the same; rows are the same, so only sums differ."""
    run, n = PagedRun(make_tiny_target(), (44,), dtype=FP8), 44
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 6, n, 8), torch.randn(1, 2, n, 8), torch.randn(1, 2, n, 8)
    view = run.pages[1]
    rows = [stored_value(x[0].transpose(0, 1), view.dtype, s) for x, s in ((k, view.k_scale), (v, view.v_scale))]
    distance = torch.arange(n)[:, None] - torch.arange(n)
    mask = (distance >= 0) & (distance < (window or n))
    want = torch.nn.functional.scaled_dot_product_attention(
        q, *(x.transpose(0, 1)[None] for x in rows), attn_mask=mask, enable_gqa=True
    )[0].transpose(0, 1)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
    assert (want - exact).abs().max() > 1e-2, "pages weren't narrow"
    chunks, module = [[44], [13, 1, 30], [20] + [Q] * 6, [3] + [1] * 41], SimpleNamespace(layer_idx=1)
    for sizes in chunks:
        run, first = PagedRun(make_tiny_target(), (44,), dtype=FP8), 0
        run.pages = [view] * 4
        for size in sizes:
            part, is_verify = slice(first, first + size), size == Q
            batch = run.batch(decode=[0] if is_verify else [], prefill=[] if is_verify else [(0, size)])
            got, _ = paged_attention_forward(
                module, q[:, :, part], k[:, :, part], v[:, :, part], scaling=8**-0.5, paged_batch=batch, sliding_window=window
            )
            torch.testing.assert_close(got[0], want[part], rtol=1e-5, atol=1e-5)
            run.manager.update_resources([(0, run.tokens[0][part])])
            first += size


def test_fp8_pages_give_the_same_numbers_however_the_rows_arrive():
    """Up to the first row whose code differs: products of other shapes round differently, seldom across a boundary."""
    whole = PagedRun(make_tiny_target(), (44,), dtype=FP8)
    [(_, _, want, _)] = whole.step(prefill=[(0, 44)])
    exact = own_numbers(whole.target.model, whole.tokens[0])[0]
    assert not torch.allclose(whole.target.lm_head(want), exact, atol=1e-2), "pages weren't narrow"
    for chunks, num_verify in (((13, 1, 18), 3), ((3, *[1] * 41), 0)):
        parts = PagedRun(make_tiny_target(), (44,), dtype=FP8)
        got = [parts.step(prefill=[(0, n)]) for n in chunks]
        got += [parts.step(decode=[0], kept=[4]) for _ in range(num_verify)]
        got = torch.cat([hidden for [(_, _, hidden, _)] in got])
        differs = torch.zeros(44, dtype=torch.bool)
        for layer in range(4):
            codes = [read_rows_ref(r.pages[layer], torch.tensor(r.slots(0, 0, 44))) for r in (whole, parts)]
            for a, b in zip(*codes):
                differs |= (a != b).flatten(1).any(1)
        same = int(differs.float().argmax()) if differs.any() else 44
        assert same >= 20, f"codes differ from row {same} on"
        logits = [whole.target.lm_head(x)[:same] for x in (got, want)]
        torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


# Scales in a file


@pytest.fixture
def calibrated():
    return calibrate_target(PagedTarget(make_tiny_target()), [[5, 6, 7, 8]])


def test_scales_come_back_from_their_file(calibrated, tmp_path):
    """Beside a drafter's scales, which stay."""
    (tmp_path / "kv_scales.safetensors").write_bytes(b"the drafter's")
    path = save_target_scales(calibrated, tmp_path)
    assert path == tmp_path / TARGET_SCALES_FILE and path.stat().st_mode & 0o777 == 0o644
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kv_scales.safetensors", TARGET_SCALES_FILE]
    again = load_target_scales(PagedTarget(make_tiny_target()), str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(again.kv_scales, calibrated.kv_scales))


def test_files_that_do_not_fit_are_refused(calibrated, tmp_path):
    from safetensors.torch import save_file

    target, path = PagedTarget(make_tiny_target()), tmp_path / TARGET_SCALES_FILE
    k, v = calibrated.kv_scales
    refusals = [
        (None, "target: expected .*target_kv_scales.safetensors, found no such file"),
        (b"nonsense", "target: target_kv_scales.safetensors can't be read"),
        ({"k_scale": k}, "target: expected k_scale and v_scale"),
        ({"k_scale": k, "v_scale": v[:, :1]}, "v_scale: expected shape"),
        ({"k_scale": k.double(), "v_scale": v}, "k_scale.*float32"),
        ({"k_scale": k, "v_scale": v.clone().fill_(2 * SCALE_RANGE[1])}, "v_scale: expected scales of"),
        ({"k_scale": k.clone().fill_(float("nan")), "v_scale": v}, "k_scale: expected scales of"),
    ]
    for content, words in refusals:
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content:
            save_file({name: x.contiguous() for name, x in content.items()}, path)
        with pytest.raises(ValueError, match=words):
            load_target_scales(target, tmp_path)
        assert target.kv_scales is None
    with pytest.raises(ValueError, match="target: expected calibrated scales.*calibrate_target"):
        save_target_scales(target, tmp_path / "other")
    target.kv_scales = (k, v[:2])
    with pytest.raises(ValueError, match="v_scale: expected shape"):
        save_target_scales(target, tmp_path)
