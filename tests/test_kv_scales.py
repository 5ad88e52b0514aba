"""fp8 draft pages: scales that travel with the drafter, and an engine that writes and reads with them."""

import copy
import random
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_drafter, make_tiny_target
from safetensors.torch import load_file, save_file
from test_engine import Oracle, Script, run_all

from dflash_paged.drafter import (
    KV_SCALES_FILE,
    check_kv_scale,
    load_drafter,
    read_kv_scales,
    save_drafter,
    save_kv_scales,
)
from dflash_paged.engine import DRAFT_KV_DTYPES, Engine
from dflash_paged.evaluate import Judge, calibrate_drafter, collect_projections
from dflash_paged.store import SCALE_RANGE, read_rows_ref
from dflash_paged.target import PagedTarget

SHIPPED = Path(__file__).parent.parent / "dflash_paged" / "data" / "drafter"
FP8 = torch.float8_e4m3fn
NAMES = ("k_scale", "v_scale")


def scales(seed=0):
    """Another scale for each head and layer of the tiny drafter."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.rand(2, 2, generator=generator) + 2.0**-10 for _ in NAMES)


@pytest.fixture
def saved(tmp_path):
    """A drafter with scales, and the directory where it was saved."""
    model = make_tiny_drafter()
    model.kv_scales = scales()
    return model, save_drafter(model, tmp_path / "drafter", torch.float32)


# ------------------------------------------------------------------ files


def test_scales_come_back_bit_by_bit_with_the_drafter(saved):
    model, directory = saved
    for got in (load_drafter(directory).kv_scales, read_kv_scales(directory, model.config)):
        assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(got, scales()))
    narrow = load_drafter(directory, dtype=torch.bfloat16)
    assert narrow.fc.weight.dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(narrow.kv_scales, scales()))  # fp32 still
    assert not list(directory.glob("*.part"))


def test_scales_are_a_file_of_their_own_and_weights_stay_strictly_loadable(saved):
    model, directory = saved
    state = load_file(directory / "model.safetensors")
    assert state.keys() == model.state_dict().keys()
    make_tiny_drafter(seed=5).load_state_dict(state, strict=True)
    assert sorted(load_file(directory / KV_SCALES_FILE)) == list(NAMES)
    assert "scale" not in (directory / "config.json").read_text().replace("rope_scaling", "")


def test_a_drafter_without_the_file_has_no_scales(tmp_path):
    model = make_tiny_drafter()
    directory = save_drafter(model, tmp_path)
    assert not (directory / KV_SCALES_FILE).exists()
    assert read_kv_scales(directory, model.config) is None and load_drafter(directory).kv_scales is None
    with pytest.raises(ValueError, match="^drafter: expected calibrated scales"):
        save_kv_scales(model, directory)
    assert not (directory / KV_SCALES_FILE).exists()


def test_saving_a_drafter_without_scales_leaves_none_of_another(saved):
    _, directory = saved
    save_drafter(make_tiny_drafter(seed=9), directory)
    assert load_drafter(directory).kv_scales is None


def test_saving_scales_replaces_the_file_as_a_whole(saved):
    model, directory = saved
    weights = (directory / "model.safetensors").read_bytes()
    model.kv_scales = tuple(s.t() for s in scales(1))  # not contiguous
    assert save_kv_scales(model, directory) == directory / KV_SCALES_FILE
    assert all(torch.equal(a, b) for a, b in zip(load_drafter(directory).kv_scales, model.kv_scales))
    before = (directory / KV_SCALES_FILE).read_bytes()
    model.kv_scales = (scales()[0], torch.zeros(2, 2))
    with pytest.raises(ValueError, match="^v_scale: expected scales of"):
        save_kv_scales(model, directory)
    assert (directory / KV_SCALES_FILE).read_bytes() == before
    assert (directory / "model.safetensors").read_bytes() == weights and not list(directory.glob("*.part"))


@pytest.mark.parametrize("content", [b"", b"not safetensors", b"\xff" * 64, "cut"])
def test_a_damaged_file_is_refused_by_name(saved, content):
    model, directory = saved
    path = directory / KV_SCALES_FILE
    path.write_bytes(path.read_bytes()[:-4] if content == "cut" else content)
    for read in (lambda: read_kv_scales(directory, model.config), lambda: load_drafter(directory)):
        with pytest.raises(ValueError, match=f"^drafter: {KV_SCALES_FILE} can't be read as safetensors"):
            read()


@pytest.mark.parametrize("names", [[], ["k_scale"], ["v_scale"], ["k_scale", "v"], [*NAMES, "q_scale"]])
def test_other_names_in_the_file_are_refused(saved, names):
    model, directory = saved
    save_file({n: torch.ones(2, 2) for n in names}, directory / KV_SCALES_FILE)
    with pytest.raises(ValueError, match=f"^drafter: expected k_scale and v_scale in {KV_SCALES_FILE}, got"):
        load_drafter(directory)


BAD = {
    "shape": [torch.ones(2), torch.ones(2, 3), torch.ones(3, 2), torch.ones(2, 2, 1), torch.ones(())],
    "dtype": [torch.ones(2, 2).double(), torch.ones(2, 2).bfloat16(), torch.ones(2, 2).int()],
    "scales of": [
        torch.tensor([[1.0, 1.0], [value, 1.0]])
        for value in (float("nan"), float("inf"), -float("inf"), -1.0, 0.0, -0.0, 1e-40, 2.0**-101, 2.0**101)
    ],
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("expected,scale", [
    pytest.param(expected, s, id=f"{expected}-{i}".replace(" ", "-"))
    for expected, tensors in BAD.items() for i, s in enumerate(tensors)
])
def test_a_scale_that_does_not_fit_is_refused_by_name(saved, name, expected, scale):
    """Where it is read, and where it is written."""
    model, directory = saved
    pair = dict(zip(NAMES, scales())) | {name: scale}
    save_file(pair, directory / KV_SCALES_FILE)
    model.kv_scales = tuple(pair.values())
    with pytest.raises(ValueError, match=f"^{name}: expected {expected}"):
        load_drafter(directory)
    with pytest.raises(ValueError, match=f"^{name}: expected {expected}"):
        save_kv_scales(model, directory)


def test_the_ends_of_the_range_are_legal():
    config = make_tiny_drafter().config
    for value in (*SCALE_RANGE, 1.0):
        check_kv_scale("k_scale", torch.full((2, 2), value), config)


@pytest.mark.skipif(not (SHIPPED / KV_SCALES_FILE).is_file(), reason="the shipped drafter has no scales")
def test_the_shipped_drafter_has_scales():
    for scale in load_drafter(SHIPPED).kv_scales:
        assert scale.shape == (4, 3) and scale.dtype == torch.float32
        assert scale.isfinite().all() and (scale > 0).all()
        assert scale.unique().numel() > 1 and not (scale == 1).any()  # calibrated, not filled in


# ------------------------------------------------------------------ the engine


@pytest.fixture(scope="module")
def target(tiny_target, tiny_drafter):
    return PagedTarget(tiny_target, tiny_drafter.config.target_layer_ids)


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(11)
    return [[rng.randrange(5, 97) for _ in range(n)] for n in (3, 9, 16, 26)]


OPTIONS = dict(max_seq_len=96, tokens_per_block=8)


@pytest.fixture(scope="module")
def calibrated(target, tiny_drafter, prompts):
    """The tiny drafter with scales of its own; the shared one stays as it is."""
    model = copy.deepcopy(tiny_drafter)
    return calibrate_drafter(model, collect_projections(Engine(target, model, **OPTIONS), prompts[:2], 8))


@pytest.fixture
def make(target, calibrated):
    """An engine whose pages, with nothing in them yet, read as NaN."""

    def engine(draft_kv_dtype="float8_e4m3fn", drafter=calibrated, **options):
        engine = Engine(target, drafter, draft_kv_dtype=draft_kv_dtype, **{**OPTIONS, **options})
        for pool in engine.manager.pools.tensors:
            pool.view(torch.uint8).fill_(0xFF)  # NaN in every dtype here
        return engine

    return engine


def test_fp8_pages_need_the_drafters_scales(make, tiny_drafter):
    assert tiny_drafter.kv_scales is None
    with pytest.raises(ValueError, match="^drafter: expected calibrated scales"):
        make(drafter=tiny_drafter)
    for dtype in set(DRAFT_KV_DTYPES) - {"float8_e4m3fn"}:
        make(dtype, drafter=tiny_drafter)


@pytest.mark.parametrize("dtype", ["float8_e5m2", "fp8", "int8", "auto", None, torch.bfloat16, ""])
def test_an_unknown_draft_dtype_is_refused(make, dtype):
    with pytest.raises(ValueError, match="^draft_kv_dtype: expected one of 'inherit'"):
        make(dtype)


@pytest.mark.parametrize("dtype", sorted(set(DRAFT_KV_DTYPES) - {"inherit"}))
def test_a_dense_context_has_no_pages_to_give_a_dtype(make, dtype):
    with pytest.raises(ValueError, match="^draft_kv_dtype: expected 'inherit' with context 'dense'"):
        make(dtype, context="dense")
    assert make("inherit", context="dense").context.name == "dense"


def test_the_targets_pages_can_not_be_fp8_without_scales(make):
    with pytest.raises(ValueError, match="^kv_dtype: expected a target with calibrated scales"):
        make(kv_dtype="float8_e4m3fn")


def test_fp8_draft_pages_are_fp8_and_carry_the_drafters_scales(make, calibrated):
    engine = make()
    k_scale, v_scale = calibrated.kv_scales
    assert k_scale.unique().numel() == v_scale.unique().numel() == 4  # so that a mix-up shows
    assert len(engine.context.pages) == 2
    for i, view in enumerate(engine.context.pages):
        assert view.dtype == view.v.dtype == FP8
        assert torch.equal(view.k_scale, k_scale[i]) and torch.equal(view.v_scale, v_scale[i])
    for view in engine.target_pages:
        assert view.dtype == torch.float32 and view.k_scale is None


@pytest.mark.parametrize(
    "dtype,size", [("inherit", 4), ("float32", 4), ("bfloat16", 2), ("float16", 2), ("float8_e4m3fn", 1)]
)
def test_draft_bytes_a_token_follow_the_dtype(make, dtype, size):
    """2 layers, K and V, 2 heads of 16; the target's 4 layers of 2 heads of 8 stay fp32."""
    engine, manager = make(dtype), make(dtype).manager
    draft, target = 2 * 2 * 2 * 16 * size, 4 * 2 * 2 * 8 * 4
    assert manager.get_cache_size_per_token("draft") == draft == engine.draft_row_bytes
    assert manager.get_cache_size_per_token("target") == target
    assert manager.pools.num_bytes == manager.num_blocks * 8 * (draft + target)
    budget = 100 * 8 * (target + 2 * 2 * 2 * 16 * 4)
    blocks = make(dtype, kv_cache_bytes=budget).manager.num_blocks
    assert blocks == budget // (8 * (draft + target)) >= 100


@pytest.mark.parametrize("k", [0, None], ids=["K-0", "no-drafter"])
def test_plain_decoding_pays_for_no_draft_page_of_any_dtype(target, calibrated, tiny_target, prompts, k):
    drafter = calibrated if k == 0 else None
    engine = Engine(target, drafter, num_draft_tokens=k, draft_kv_dtype="float8_e4m3fn", **OPTIONS)
    assert engine.context is None and len(engine.manager.layers) == 4
    judge = Judge(tiny_target, prompts[:1], 6)
    assert judge(0, engine.generate(prompts[:1], 6)[0].token_ids) == (True, [])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float16"])
def test_narrow_draft_pages_cost_no_token(make, tiny_target, prompts, dtype):
    """Drafts only propose: whatever their pages hold, the output is the target's own."""
    engine, judge = make(dtype, max_step_tokens=24), Judge(tiny_target, prompts, 14)
    results = engine.generate(prompts, 14)
    assert [judge(i, r.token_ids) for i, r in enumerate(results)] == [(True, [])] * len(prompts)
    engine.manager.check_invariants()


def read_all(engine, cache_id, rows):
    """K and V of a sequence's first `rows` rows in every draft layer, as a reader sees them."""
    [table] = engine.manager.get_batch_cache_indices([cache_id])
    slots = torch.tensor([table[p // 8] * 8 + p % 8 for p in range(rows)])
    return [read_rows_ref(view, slots) for view in engine.context.pages]


def test_fp8_rows_read_back_what_was_meant(make, prompts):
    """The rows of prompts that were not calibrated on, beside those of fp32 pages."""
    engines = [make(), make("float32")]
    stored = []
    for engine in engines:
        engine.add_request(prompts[3], 10)
        engine.step()
        [request] = engine.running
        stored.append(read_all(engine, request.cache_id, len(prompts[3])))
    for i, (got, want) in enumerate(zip(*stored)):
        for name, x, y in zip(NAMES, got, want):
            scale = getattr(engines[0].context.pages[i], name)[:, None]
            y = y.clamp(-448 * scale, 448 * scale)  # past the largest value seen it saturates
            # 4 significant bits: half a step is 1/16 of the value at most, 2^-10 of a scale among subnormals;
            # 1e-5 for fp32's own error.
            assert ((x - y).abs() <= torch.maximum(y.abs() / 16, scale * 2**-10) + 1e-5).all()
            assert not torch.equal(x, y)


@pytest.fixture(scope="module")
def oracle():
    return Oracle()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
def test_a_prefix_hit_reads_narrow_pages_as_the_cold_run_did(make, oracle, monkeypatch, dtype):
    """Lossless, equally accepted, and the drafter itself proposes the same tokens at every step."""
    prompt, logs, stats = oracle.prompts[10], [], []
    engine = make(dtype, max_batch_size=1)
    for _ in ("cold", "hit"):
        script = Script(monkeypatch, oracle, accept=lambda num_tokens: num_tokens % 5, log_real=True)
        script.engine = engine
        engine.add_request(prompt, 19, stop_token_ids=[])
        [result] = run_all(engine).values()
        assert result.token_ids == oracle(prompt, 19)
        script.log = {result.request_id: script.log[result.request_id]}
        script.check(result)
        logs.append([(tokens, drafts) for tokens, _, drafts in script.real_log])
        stats.append(result.stats)
        monkeypatch.undo()
    cold, hit = stats
    assert (cold.num_reused_tokens, hit.num_reused_tokens) == (0, 32) and hit.num_reused_blocks == 4
    assert hit.ctx_start == 0  # the reused draft rows are there
    assert cold.acceptance_length == hit.acceptance_length > 1.5
    assert logs[0] == logs[1] and len(logs[0]) > 3


def test_a_hit_leaves_fp8_codes_of_the_prefix_alone(make, prompts):
    engine = make(max_batch_size=1)
    engine.generate([prompts[3]], 4)
    before = [pool.view(torch.uint8).clone() for pool in engine.manager.pools.tensors]
    cached = [b for b, owner in enumerate(engine.manager.block_owners()) if owner != "free"]
    assert len(cached) >= 3
    [result] = engine.generate([prompts[3]], 4)
    assert result.stats.num_reused_tokens == 24
    hit = engine.manager.add_sequence(99, prompts[3])
    [table] = engine.manager.get_batch_cache_indices([99])
    assert hit.num_reused_tokens == 24
    for pool, old in zip(engine.manager.pools.tensors, before):
        assert torch.equal(pool.view(torch.uint8)[table[:3]], old[table[:3]])


def test_each_engine_has_the_scales_of_its_own_drafter(make, calibrated, target):
    """Scales are copied into the manager: a drafter that is calibrated anew changes no running engine."""
    other = copy.deepcopy(calibrated)
    engine = make(drafter=other)
    kept = [view.k_scale.clone() for view in engine.context.pages]
    other.kv_scales[0].mul_(3)
    assert all(torch.equal(v.k_scale, k) for v, k in zip(engine.context.pages, kept))
    assert torch.equal(make(drafter=other).context.pages[1].k_scale, kept[1] * 3)


def test_wrong_scales_cost_drafts_and_no_tokens(make, calibrated, prompts):
    """Scales so small that every value saturates."""
    other = copy.deepcopy(calibrated)
    other.kv_scales = tuple(torch.full_like(s, 2.0**-60) for s in calibrated.kv_scales)
    model = make_tiny_target()
    results = make(drafter=other).generate(prompts, 8)
    judge = Judge(model, prompts, 8)
    assert [judge(i, r.token_ids)[0] for i, r in enumerate(results)] == [True] * 4


# ------------------------------------------------------------------ fast attention


def test_fast_attention_reads_pages_whose_v_is_transposed_and_stays_lossless(make, target, prompts):
    """The draft's arithmetic never reaches the output; the target's pages keep their layout."""
    judge = Judge(target.model, prompts, 24)
    engine = make(draft_attention_mode="fast", tokens_per_block=16)
    assert {view.v_layout for view in engine.context.pages} == {"transposed"}
    assert {view.v_layout for view in engine.target_pages} == {"row"}
    assert engine.context.mode == "fast"
    for i, result in enumerate(engine.generate(prompts, 24)):
        assert judge(i, result.token_ids)[0], i
    assert engine.manager.num_blocks * 16 * 2 * 2 * 2 * 16 == sum(
        view.k.numel() + view.v.numel() for view in engine.context.pages
    )
    engine.manager.check_invariants()


@pytest.mark.parametrize("options, words", [
    (dict(draft_attention_mode="quick"), "draft_attention_mode: expected one of 'exact', 'fast', got 'quick'"),
    (dict(draft_attention_mode="fast", draft_kv_dtype="bfloat16"), "draft_attention_mode: expected 'exact' unless"),
    (dict(draft_attention_mode="fast", draft_kv_dtype="inherit"), "draft_attention_mode: expected 'exact' unless"),
    (dict(draft_attention_mode="fast", draft_kv_dtype="inherit", context="dense"), "draft_attention_mode: expected"),
])
def test_fast_attention_that_can_not_be_had_is_refused_by_name(make, options, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        make(**options)


def test_fast_attention_needs_pages_of_16_tokens(make):
    """Said before anything is allocated for a request."""
    with pytest.raises(ValueError, match="^tokens_per_block: expected at least 16"):
        make(draft_attention_mode="fast", tokens_per_block=8)


def test_a_causal_drafter_has_no_fast_attention(target, calibrated, monkeypatch):
    """`mode="fast"` refuses a causal suffix, so the engine says it first."""
    model = copy.deepcopy(calibrated)
    monkeypatch.setattr(type(model.config), "layer_causal", lambda self, layer: True)
    with pytest.raises(ValueError, match="^draft_attention_mode: expected 'exact' for a drafter with causal layers"):
        Engine(target, model, draft_kv_dtype="float8_e4m3fn", draft_attention_mode="fast", **OPTIONS)
