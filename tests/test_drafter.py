"""The drafter on pages: parity with the reference, checkpoints, configs and their errors."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import TINY_LAYER_IDS, DraftRollout, make_tiny_drafter, tiny_draft_config

from dflash_paged.drafter import (
    UNSUPPORTED_FIELDS,
    DraftModel,
    PagedContext,
    check_drafter_fits,
    default_target_layer_ids,
    draft_config_dict,
    draft_tokens,
    load_drafter,
    read_draft_config,
    save_drafter,
)
from dflash_paged.models import find_drafter
from dflash_paged.store import read_rows_ref

PARITY = 1e-4  # design: relative, fp32; 1e-6 is what other summation orders cost
FIRST = (11, 8, 3)  # prompt rows: past a page's end, exactly a page, part of one
LATER = ((1, 5, 2), (5, 5, 5), (3, 1, 5), (5, 2, 1), (1, 1, 4))  # of 5 rows: full blocks and rejections
SLIDING = dict(use_sliding_window=True, sliding_window=6)


@pytest.fixture(scope="module")
def reference():
    """The reference implementation's module."""
    return pytest.importorskip("dflash.model", reason="parity needs PyPI's dflash 0.1.0")


class ReferenceDrafter:
    """The reference model and one cache for each request, used as its own `dflash_generate` does."""

    def __init__(self, module, config: dict, state: dict, num_requests: int):
        from transformers import Qwen3Config

        self.module, self.model = module, module.DFlashDraftModel(Qwen3Config(**config)).float().eval()
        self.model.load_state_dict(state, strict=True)
        self.caches = [module._make_cache(self.model.config) for _ in range(num_requests)]

    @torch.inference_mode()
    def draft(self, r: int, features, start: int, noise):
        """Hidden states [B, hidden] of `noise` at start.., after context rows `features` that end there."""
        positions = torch.arange(start - len(features), start + len(noise))[None]
        hidden = self.model(
            target_hidden=features[None], noise_embedding=noise[None], position_ids=positions,
            past_key_values=self.caches[r], use_cache=True,
        )[0]
        self.module._crop_to(self.caches[r], start)
        return hidden


def assert_parity(reference, config: dict, model: DraftModel, state=None, **options) -> None:
    """Hidden states of every pass of a rollout equal the reference's, and no pass writes a page."""
    rollout = DraftRollout(model, **options)
    ref = ReferenceDrafter(reference, config, state or model.state_dict(), len(rollout.ids))
    block = model.config.draft_block_size
    later = [[min(k, block) if k < 5 else block for k in kept] for kept in LATER]
    for step, features in rollout.steps(FIRST, later):
        rollout.paged.store(step, features)
        noise = rollout.randn(len(step.rows), block, model.config.hidden_size)
        before = [pool.clone() for pool in rollout.manager.pools.tensors]
        hidden = model(noise, step.inputs.query_positions.view(-1, block), rollout.paged.attend)
        for old, pool in zip(before, rollout.manager.pools.tensors):
            assert torch.equal(old.view(torch.uint8), pool.view(torch.uint8)), "a draft pass wrote a page"
        for r, kept in enumerate(rollout.kept):
            start = rollout.manager.num_tokens(r) + kept
            want = ref.draft(r, rollout.features[r, start - kept : start], start, noise[r])
            error = ((hidden[r] - want).abs().max() / want.abs().max()).item()
            assert error < PARITY, f"request {r} at {start}: relative error {error:.1e}"


# Parity with the reference


@pytest.mark.parametrize("changes", [
    pytest.param({}, id="full"),
    pytest.param(dict(layer_types=["sliding_attention", "full_attention"], **SLIDING), id="sliding-causal"),
    pytest.param(dict(layer_types=["sliding_attention"] * 2, is_causal=False, **SLIDING), id="two-sided"),
    pytest.param(dict(is_causal=True), id="all-causal"),
    pytest.param(dict(num_attention_heads=6), id="3-q-heads-a-kv-head"),
    pytest.param(dict(num_key_value_heads=4), id="no-gqa"),
    pytest.param(dict(num_attention_heads=3, num_key_value_heads=1, num_hidden_layers=1), id="mqa-1-layer"),
    pytest.param(dict(attention_bias=True, rms_norm_eps=1e-3), id="bias"),
    pytest.param(dict(block_size=9, rope_theta=500.0), id="block-of-9"),
    pytest.param(dict(rope_scaling={"rope_type": "linear", "factor": 2.0}), id="rope-linear"),
    pytest.param(
        dict(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}), id="rope-yarn"
    ),
])
def test_hidden_states_equal_the_references_over_steps_with_rejections_and_full_blocks(reference, changes):
    """Pitfalls 6 (pages bitwise unchanged by a pass), 23 and 24 (windows of each layer, two-sided or not)."""
    config = tiny_draft_config(**changes)
    assert_parity(reference, config, make_tiny_drafter(**changes))


@pytest.mark.parametrize("tokens_per_block", [16, 32])
def test_parity_does_not_depend_on_the_page_size(reference, tokens_per_block):
    assert_parity(reference, tiny_draft_config(), make_tiny_drafter(), tokens_per_block=tokens_per_block, seed=3)


def test_shipped_checkpoint_loads_into_the_reference_strictly_and_drafts_the_same(reference):
    from safetensors.torch import load_file

    directory = find_drafter()
    model = load_drafter(directory)
    config = json.loads((directory / "config.json").read_text())
    state = {name: tensor.float() for name, tensor in load_file(directory / "model.safetensors").items()}
    assert_parity(reference, config, model, state)
    assert sum(file.stat().st_size for file in directory.iterdir()) <= 25e6


def test_reference_loads_what_save_drafter_writes(reference, tmp_path):
    changes = dict(layer_types=["sliding_attention", "full_attention"], is_causal=False, **SLIDING)
    model = make_tiny_drafter(**changes)
    directory = save_drafter(model, tmp_path / "made" / "here", dtype=torch.float32)
    theirs = reference.DFlashDraftModel.from_pretrained(directory)
    assert theirs.target_layer_ids == list(TINY_LAYER_IDS) and theirs.block_size == 5 and theirs.mask_token_id == 3
    windows = [(a.is_causal, a.sliding_window) for a in (layer.self_attn for layer in theirs.layers)]
    assert windows == [(False, 6), (False, None)]
    assert theirs.config.rms_norm_eps == 1e-5
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_default_layer_ids_equal_the_references(reference):
    for num_target in range(5, 65):
        for num_draft in range(1, 9):
            want = tuple(reference.build_target_layer_ids(num_target, num_draft))
            assert default_target_layer_ids(num_target, num_draft) == want
    assert default_target_layer_ids(36, 5) == (1, 9, 17, 25, 33)  # by hand: 1 + i * 32 / 4


# Context rows


def rows_of(rollout, layer: int, request: int, first: int, last: int):
    """Stored (k, v) of a request's positions first..last-1, read through its block table by hand."""
    table = rollout.manager.get_batch_cache_indices([request], layer_idx=1 + layer)[0]
    size = rollout.manager.tokens_per_block
    slots = torch.tensor([table[p // size] * size + p % size for p in range(first, last)])
    return read_rows_ref(rollout.paged.pages[layer], slots)


def test_pages_hold_what_context_kv_computes_and_nothing_of_rejected_rows():
    model = make_tiny_drafter(layer_types=["sliding_attention", "full_attention"], **SLIDING)
    rollout = DraftRollout(model, tokens_per_block=8)
    for step, features in rollout.steps(FIRST, LATER[:3]):
        rollout.paged.store(step, features)
        for r, kept in enumerate(rollout.kept):
            end = rollout.manager.num_tokens(r) + kept
            k, v = model.context_kv(rollout.features[r, :end], torch.arange(end))
            for layer in range(2):
                window = model.config.layer_window(layer)
                first = 0 if window is None else max(0, end - window + 1)  # older rows may be gone
                got_k, got_v = rows_of(rollout, layer, r, first, end)
                torch.testing.assert_close(got_k, k[first:, layer], rtol=1e-5, atol=1e-5)  # other summation order
                torch.testing.assert_close(got_v, v[first:, layer], rtol=1e-5, atol=1e-5)
                held = len(rollout.manager.get_batch_cache_indices([r], layer_idx=1 + layer)[0]) * 8
                beyond = rows_of(rollout, layer, r, end, held)
                assert all(x.isnan().all() for x in beyond), "a rejected row was written"


def test_context_kv_is_what_the_reference_layers_compute(reference):
    model = make_tiny_drafter()
    from transformers import Qwen3Config

    theirs = reference.DFlashDraftModel(Qwen3Config(**tiny_draft_config())).eval()
    theirs.load_state_dict(model.state_dict(), strict=True)
    features, positions = torch.randn(9, 144), torch.arange(20, 29)
    model.ensure_positions(40)
    k, v = model.context_kv(features, positions)
    context = theirs.hidden_norm(theirs.fc(features))
    cos, sin = theirs.rotary_emb(context[None], positions[None])
    for i, layer in enumerate(theirs.layers):
        attn = layer.self_attn
        want = attn.k_norm(attn.k_proj(context).view(1, 9, 2, 16)).transpose(1, 2)
        want = reference.apply_rotary_pos_emb(want, want, cos, sin)[1][0].transpose(0, 1)
        torch.testing.assert_close(k[:, i], want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(v[:, i], attn.v_proj(context).view(9, 2, 16), rtol=1e-5, atol=1e-5)


def test_rows_before_ctx_start_are_never_read():
    """Pitfall 16: rows [0, start) have no draft K/V (their pages are NaN), and only the rest counts."""
    model, starts = make_tiny_drafter(), (0, 8, 13)
    rollout = DraftRollout(model, starts)
    shorter = DraftRollout(model, (0, 0, 0))
    shorter.features = rollout.features
    for step, features in rollout.steps(FIRST, LATER):
        rollout.paged.store(step, features)
        noise = rollout.randn(4, 5, 48)
        hidden = model(noise, step.inputs.query_positions.view(-1, 5), rollout.paged.attend)
        assert hidden[:3].isfinite().all()
        for r, start in enumerate(starts):
            end = rollout.manager.num_tokens(r) + rollout.kept[r]
            want = plain_attention(model, rollout.features[r, start:end], start, noise[r])
            torch.testing.assert_close(hidden[r], want, rtol=PARITY, atol=PARITY)


def plain_attention(model, features, start: int, noise):
    """One request's pass with torch's own attention over the context rows `features`, which begin at `start`."""
    end, dims = start + len(features), model.config
    k, v = model.context_kv(features, torch.arange(start, end))

    def attend(layer, q, k_noise, v_noise):
        keys, values = torch.cat([k[:, layer], k_noise[0]]), torch.cat([v[:, layer], v_noise[0]])
        heads = [x.transpose(0, 1)[None] for x in (q[0], keys, values)]
        out = torch.nn.functional.scaled_dot_product_attention(*heads, enable_gqa=True)
        return out[0].transpose(0, 1)[None]

    return model(noise[None], torch.arange(end, end + dims.draft_block_size)[None], attend)[0]


def test_draft_tokens_are_the_targets_greedy_choice_after_each_mask_row(tiny_target):
    model = make_tiny_drafter()
    scaled = make_tiny_drafter(input_embedding_scale=2.0, output_multiplier=3.0, final_logit_softcapping=5.0)
    rollout = DraftRollout(model, (0, 0))
    scaled.ensure_positions(101)
    embed, head = tiny_target.get_input_embeddings(), tiny_target.get_output_embeddings()
    for step, features in rollout.steps((9, 4), [(2, 5)]):
        rollout.paged.store(step, features)
        got = draft_tokens(model, rollout.paged.attend, step.inputs, 3, embed, head)
        twice = draft_tokens(
            scaled, rollout.paged.attend, step.inputs, 3, lambda ids: embed(ids) / 2, head
        )
        for r in range(2):
            end = rollout.manager.num_tokens(r) + rollout.kept[r]
            noise = embed(torch.tensor([7, 3, 3, 3, 3]))
            want = head(plain_attention(model, rollout.features[r, :end], 0, noise)).argmax(-1)
            assert got[r].tolist() == want[1:].tolist()
            assert twice[r].tolist() == want[1:].tolist()
    assert got.shape == (3, 4)


def test_paged_context_wants_a_page_view_for_each_draft_layer():
    rollout = DraftRollout(make_tiny_drafter())
    with pytest.raises(ValueError, match="pages: expected 2 draft layers, got 1"):
        PagedContext(rollout.model, rollout.paged.pages[:1], [0])


# The RoPE table and fused weights


def test_rope_table_only_grows():
    """Pitfall 10."""
    model = make_tiny_drafter()
    assert model.ensure_positions(40).shape == (40, 16)
    first = model.cos_sin
    assert model.ensure_positions(8) is first and len(model.cos_sin) == 40
    grown = model.ensure_positions(200)
    assert grown is model.cos_sin and len(grown) == 200
    assert torch.equal(grown[:40], first)


def test_rope_table_stays_fp32_when_the_weights_change_dtype():
    model = make_tiny_drafter()
    first = model.ensure_positions(40)
    assert torch.equal(model.to(torch.bfloat16).cos_sin, first) and model.cos_sin.dtype == torch.float32


def test_a_context_follows_a_rope_table_that_grows_later():
    """Pitfall 10: the probe's smaller table must not stay."""
    model = make_tiny_drafter()
    rollout = DraftRollout(model, (0, 0, 0), max_seq_len=96)
    model.cos_sin = model.cos_sin[:8].clone()
    rollout.paged.model.ensure_positions(101)
    for step, features in rollout.steps((30, 12, 9), []):
        rollout.paged.store(step, features)
        assert rows_of(rollout, 0, 0, 0, 30)[0].isfinite().all()


def test_fused_weights_follow_the_parameters():
    model, other = make_tiny_drafter(1), make_tiny_drafter(2)
    features = torch.randn(4, 144)
    assert not torch.allclose(model.project_context(features), other.project_context(features), atol=1e-3)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model.project_context(features), other.project_context(features))
    wide = model.to(torch.float64)
    assert wide.project_context(features.double()).dtype == torch.float64
    half = make_tiny_drafter(2).to(torch.bfloat16)
    assert all(x.dtype == torch.bfloat16 for x in half.fused_kv() if x is not None)
    assert half.project_context(features.bfloat16()).dtype == torch.bfloat16


def test_projection_equals_each_layers_own_projections():
    model = make_tiny_drafter(num_hidden_layers=3, num_attention_heads=6, attention_bias=True)
    features = torch.randn(7, 144)
    kv = model.project_context(features)
    assert kv.shape == (7, 3, 2, 2, 16)
    context = model.hidden_norm(model.fc(features))
    for i, layer in enumerate(model.layers):
        for j, projection in enumerate((layer.self_attn.k_proj, layer.self_attn.v_proj)):
            torch.testing.assert_close(kv[:, i, j].flatten(1), projection(context), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"features: .*144.*143"):
        model.project_context(torch.randn(7, 143))


# Checkpoints


def test_save_and_load_are_bit_exact_in_bf16(tmp_path):
    model = make_tiny_drafter(attention_bias=True, is_causal=False).to(torch.bfloat16)
    loaded = load_drafter(save_drafter(model, tmp_path), dtype=torch.bfloat16)
    assert loaded.config == model.config
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, model.state_dict()[name]), name
    assert not any(p.requires_grad for p in loaded.parameters()) and not loaded.training
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    wide = load_drafter(tmp_path)
    assert all(torch.equal(t, model.state_dict()[n].float()) for n, t in wide.state_dict().items())


def test_parameter_names_are_the_references(reference):
    from transformers import Qwen3Config

    theirs = reference.DFlashDraftModel(Qwen3Config(**tiny_draft_config())).state_dict()
    ours = make_tiny_drafter().state_dict()
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}


@pytest.mark.parametrize("changes", [
    {}, dict(is_causal=True), dict(layer_types=["full_attention", "sliding_attention"], **SLIDING),
    dict(rope_scaling={"rope_type": "linear", "factor": 2.0}), dict(head_dim=8, block_size=16),
    dict(dflash_config={"mask_token_id": 5, "input_embedding_scale": 2.0, "final_logit_softcapping": 30.0}),
])
def test_a_written_config_reads_back_the_same(changes):
    config = read_draft_config(tiny_draft_config(**changes))
    assert read_draft_config(json.loads(json.dumps(draft_config_dict(config)))) == config


@pytest.fixture
def saved(tmp_path):
    """A saved drafter's directory and a function that rewrites its tensors."""
    from safetensors.torch import load_file, save_file

    save_drafter(make_tiny_drafter(), tmp_path / "d", dtype=torch.float32)
    path = tmp_path / "d" / "model.safetensors"

    def rewrite(change):
        state = load_file(path)
        change(state)
        save_file(state, path)
        return path.parent

    return rewrite


@pytest.mark.parametrize("change,words", [
    (lambda s: s.pop("layers.1.mlp.up_proj.weight"), "1 tensors missing.*layers.1.mlp.up_proj.weight"),
    (lambda s: s.pop("fc.weight"), "missing.*fc.weight"),
    (lambda s: s.update(lm_head=torch.ones(1)), "1 unexpected.*lm_head"),
    (lambda s: s.update({"norm.weight": torch.ones(47)}), r"expected norm.weight of shape \[48\], got \[47\]"),
    (lambda s: s.update({"fc.weight": torch.ones(48, 96)}), r"fc.weight of shape \[48, 144\], got \[48, 96\]"),
])
def test_tensors_that_do_not_fit_are_refused_by_name(saved, change, words):
    with pytest.raises(ValueError, match=words):
        load_drafter(saved(change))


def test_weights_may_come_in_several_files(saved):
    from safetensors.torch import load_file, save_file

    directory = saved(lambda s: None)
    state = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(state)
    for i, part in enumerate((names[:9], names[9:])):
        save_file({n: state[n] for n in part}, directory / f"model-0000{i + 1}-of-00002.safetensors")
    assert torch.equal(load_drafter(directory).fc.weight, state["fc.weight"])


def test_directories_without_a_drafter_are_refused(tmp_path, saved):
    with pytest.raises(ValueError, match="nowhere/config.json.*no such file"):
        load_drafter(tmp_path / "nowhere")
    directory = saved(lambda s: None)
    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="model.safetensors can't be read as safetensors"):
        load_drafter(directory)
    weights.write_bytes(b"\x80\x04not safetensors")
    with pytest.raises(ValueError, match="model.safetensors can't be read as safetensors"):
        load_drafter(directory)
    weights.unlink()
    torch.save({"fc.weight": torch.ones(1)}, directory / "pytorch_model.bin")
    with pytest.raises(ValueError, match="safetensors.*found none.*pickled weights are not read"):
        load_drafter(directory)
    (directory / "config.json").write_text("{not json")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        load_drafter(directory)
    (directory / "config.json").write_text(json.dumps(tiny_draft_config(hidden_size=0)))
    with pytest.raises(ValueError, match="config.json.*hidden_size"):
        load_drafter(directory)


def test_a_failed_save_leaves_the_old_weights(tmp_path, monkeypatch):
    import safetensors.torch

    save_drafter(make_tiny_drafter(1), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def broken(state, path, metadata=None):
        Path(path).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(safetensors.torch, "save_file", broken)
    with pytest.raises(OSError, match="no space"):
        save_drafter(make_tiny_drafter(2), tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    shutil.rmtree(tmp_path)


# Reading configs


def test_reads_the_fields_of_z_labs_config():
    config = read_draft_config({
        "architectures": ["DFlashDraftModel"], "attention_bias": False, "attention_dropout": 0.0, "block_size": 16,
        "bos_token_id": 151643, "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
        "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560,
        "initializer_range": 0.02, "intermediate_size": 9728, "layer_types": ["full_attention"] * 5,
        "max_position_embeddings": 40960, "max_window_layers": 5, "model_type": "qwen3", "num_attention_heads": 32,
        "num_hidden_layers": 5, "num_key_value_heads": 8, "num_target_layers": 36, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    })
    assert (config.draft_block_size, config.mask_token_id) == (16, 151669)
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    assert (config.rope_theta, config.rope_scaling) == (1e6, None)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 8, 128)
    assert [config.layer_window(i) for i in range(5)] == [None] * 5
    assert [config.layer_causal(i) for i in range(5)] == [False] * 5
    specs = config.layer_specs("bfloat16")
    assert sum(s.bytes_per_token for s in specs) == 5 * 2 * 8 * 128 * 2


def test_fields_that_are_missing_take_qwen3s_defaults():
    from transformers import Qwen3Config

    names = ("head_dim", "rms_norm_eps", "max_position_embeddings")
    config = read_draft_config(tiny_draft_config(
        **{name: None for name in (*names, "rope_theta", "block_size")}, dflash_config={"mask_token_id": 3}
    ))
    theirs = Qwen3Config()
    assert all(getattr(config, name) == getattr(theirs, name) for name in names)
    assert config.rope_theta == 10000.0 and config.attention_bias is False
    assert config.draft_block_size == 16  # the reference's own default
    assert config.target_layer_ids == default_target_layer_ids(4, 2) == (1, 1)
    assert config.layer_types == ("full_attention",) * 2 and config.sliding_window is None


@pytest.mark.parametrize("changes,theta,scaling", [
    (dict(rope_theta=5e5), 5e5, None),
    (dict(rope_theta=None), 1e4, None),
    (dict(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 1e6}), 1e6, None),
    (dict(rope_theta=3e3, rope_parameters={"rope_theta": 1e6}), 1e6, None),
    (dict(rope_theta=3e3, rope_parameters={"rope_type": "linear", "factor": 2.0}), 3e3,
     {"rope_type": "linear", "factor": 2.0}),
    (dict(rope_theta=3e3, rope_scaling={"type": "linear", "factor": 4.0}), 3e3, {"type": "linear", "factor": 4.0}),
    (dict(rope_theta=3e3, rope_scaling={"rope_type": "default"}), 3e3, None),
])
def test_rope_is_read_from_both_generations_of_fields(changes, theta, scaling):
    config = read_draft_config(tiny_draft_config(**changes))
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize("is_causal,inner,want", [
    (None, None, [True, False]), (None, False, [False, False]), (None, True, [True, True]),
    (False, True, [False, False]), (True, False, [True, True]), (True, None, [True, True]),
])
def test_causality_goes_by_is_causal_then_dflash_config_then_layer_type(is_causal, inner, want):
    dflash = {"mask_token_id": 3, **({} if inner is None else {"causal": inner})}
    config = read_draft_config(tiny_draft_config(
        is_causal=is_causal, dflash_config=dflash, layer_types=["sliding_attention", "full_attention"], **SLIDING
    ))
    assert [config.layer_causal(i) for i in range(2)] == want
    assert [config.layer_window(i) for i in range(2)] == [6, None]
    assert [spec.sliding_window for spec in config.layer_specs()] == [6, None]


def test_layer_types_follow_max_window_layers_as_in_qwen3():
    from transformers import Qwen3Config

    options = dict(num_hidden_layers=4, max_window_layers=2, use_sliding_window=True, sliding_window=6)
    config = read_draft_config(tiny_draft_config(**options))
    theirs = Qwen3Config(**tiny_draft_config(**options))
    assert list(config.layer_types) == list(theirs.layer_types)
    assert [config.layer_window(i) for i in range(4)] == [None, None, 6, 6]


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "num_target_layers")
MASK = {"mask_token_id": 3}
REFUSED = [
    *[({name: value}, name) for name in SIZES for value in (0, -1, "48", 4.0, True)],
    *[({name: None}, name) for name in SIZES],
    ({"num_key_value_heads": 3}, "num_attention_heads.*num_key_value_heads"),
    ({"head_dim": 15}, "head_dim"), ({"head_dim": 0}, "head_dim"), ({"head_dim": "16"}, "head_dim"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"layer_types": ["full_attention"]}, "layer_types"), ({"layer_types": "full_attention"}, "layer_types"),
    ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types.*chunked_attention"),
    ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}, "use_sliding_window"),
    ({"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}, "sliding_window"),
    ({"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
    ({"use_sliding_window": "yes"}, "use_sliding_window"),
    ({"rope_theta": -1.0}, "rope_theta"), ({"rope_theta": "1e4"}, "rope_theta"),
    ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type.*spiral"), ({"rope_scaling": "yarn"}, "rope_scaling"),
    ({"rope_parameters": []}, "rope_parameters"),
    ({"dflash_config": [1]}, "dflash_config"), ({"dflash_config": {}}, "mask_token_id"),
    ({"dflash_config": {"mask_token_id": 97}}, "mask_token_id"),
    ({"dflash_config": {"mask_token_id": -1}}, "mask_token_id"),
    ({"dflash_config": {**MASK, "target_layer_ids": []}}, "target_layer_ids"),
    ({"dflash_config": {**MASK, "target_layer_ids": 2}}, "target_layer_ids"),
    ({"dflash_config": {**MASK, "target_layer_ids": [0, 4]}}, "target_layer_ids.*4"),
    ({"dflash_config": {**MASK, "target_layer_ids": [-1]}}, "target_layer_ids.*-1"),
    ({"dflash_config": {**MASK, "target_layer_ids": ["0"]}}, "target_layer_ids"),
    ({"dflash_config": {**MASK, "causal": 1}}, "causal"), ({"is_causal": "no"}, "causal"),
    ({"block_size": 0}, "block_size"), ({"block_size": 65}, "block_size"), ({"block_size": 5.0}, "block_size"),
    ({"rms_norm_eps": -1e-6}, "rms_norm_eps"), ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ({"max_position_embeddings": 0}, "max_position_embeddings"),
    ({"attention_bias": 1}, "attention_bias"),
    ({"input_embedding_scale": 0.0}, "input_embedding_scale"), ({"output_multiplier": "2"}, "output_multiplier"),
    ({"output_multiplier": -1.0}, "output_multiplier"),
    ({"final_logit_softcapping": -30.0}, "final_logit_softcapping"),
    *[({name: 4}, name) for name in UNSUPPORTED_FIELDS],
    *[({"dflash_config": {**MASK, name: 4}}, name) for name in UNSUPPORTED_FIELDS],
]


@pytest.mark.parametrize("changes,words", REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_fields_out_of_range_are_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=f"somewhere: .*{words}"):
        read_draft_config(tiny_draft_config(**changes), where="somewhere")


@pytest.mark.parametrize("d", [[], None, "config", 3])
def test_a_config_that_is_no_object_is_refused(d):
    with pytest.raises(ValueError, match="the file"):
        read_draft_config(d)


@pytest.mark.parametrize("name,value", [("hidden_size", 64), ("vocab_size", 98), ("num_layers", 5)])
def test_a_drafter_for_another_target_is_refused_with_both_numbers(name, value):
    sizes = dict(hidden_size=48, vocab_size=97, num_layers=4)
    config = make_tiny_drafter().config
    check_drafter_fits(config, **sizes)
    field = {"num_layers": "num_target_layers"}.get(name, name)
    with pytest.raises(ValueError, match=f"{field} {value}.* got {sizes[name]}"):
        check_drafter_fits(config, **{**sizes, name: value})


# Weights that are not what they seem


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda s: s.update({"fc.weight": s["fc.weight"] * float("nan")}), "finite"),
        (lambda s: s.update({"fc.weight": s["fc.weight"].to(torch.int8)}), "int8"),
    ],
)
def test_weights_that_are_nan_or_integers_are_refused(saved, change, reason):
    with pytest.raises(ValueError, match=f"fc.weight.*{reason}|{reason}.*fc.weight"):
        load_drafter(saved(change))


def test_other_safetensors_beside_the_model_change_nothing(saved):
    from safetensors.torch import load_file, save_file

    directory = saved(lambda s: None)
    state = load_file(directory / "model.safetensors")
    save_file({k: torch.zeros_like(v) for k, v in state.items()}, directory / "old.safetensors")
    assert torch.equal(load_drafter(directory).fc.weight, state["fc.weight"])
