"""Step costs: fitted parts are those that the recorded times give, and a step is the sum of what it has to do."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_paged.step_costs import GPUS, MEASURED, MODELS, ModelWork, Part, StepCosts, StepWork, fit_error, fit_part

DATA = Path(__file__).parent.parent / "figures" / "data"
H200, TARGET, DRAFTER = GPUS["H200"], MODELS["MiniMax-M2.5-NVFP4"], MODELS["MiniMax-M2.5-DFlash"]
SIZES, FLOPS = (1e4, 1e6, 1e7, 1e8, 1e9, 1e10), (0, 1e9, 1e11, 1e13)
BUSY = StepWork(
    num_rows=4000, num_sampled=161, num_drafting=32, target_bytes=2e10, draft_bytes=2e9, prefill_pairs=1e8,
    stored_rows=4000,
)
COSTS = StepCosts(GPUS["B200"], TARGET, DRAFTER, tp_size=2, num_query_rows=5, draft_row_bytes=10_240)


def read_rows(name: str, **wanted) -> list[dict]:
    """Rows of a recorded table with these values."""
    with open(DATA / f"{name}.csv", newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if all(row[key] == value for key, value in wanted.items())]


def timed_rows(part: str) -> list[tuple[float, float, float]]:
    """(bytes, flop, us) that were recorded for a part."""
    if part in ("linear", "experts", "prefill", "all_reduce"):
        table = "bench_all_reduce" if part == "all_reduce" else "bench_model_parts"
        rows = read_rows(table, part=part, dtype="bfloat16")
        return [(float(r["mbytes"]) * 1e6, float(r["gflop"]) * 1e9, float(r["us"])) for r in rows]
    if part == "store":
        rows = read_rows("bench_store", kernel="store_draft_context", layout="NHD", v_layout="row")
        return [(float(r["bytes"]), 0, float(r["chained_us"])) for r in rows]
    dtype, size = {"attention_bf16": ("bfloat16", 2), "attention_fp8": ("float8_e4m3fn", 1)}[part]
    wanted = dict(kernel="draft_attention", mode="exact", page_dtype=dtype, G="4", splits="automatic")
    rows = [*read_rows("bench_attention", **wanted), *read_rows("bench_attention_scaling", **wanted)]
    return [(int(r["num_tokens"]) * 2 * 4 * 128 * size, 0, float(r["us"])) for r in rows]


# Parts


def test_a_call_takes_its_fixed_time_and_the_longer_of_moving_and_computing():
    part = Part(0.5, 0.25, 10)
    assert part.seconds(H200, 0) == pytest.approx(10e-6)
    assert part.seconds(H200, 2.4e9) == pytest.approx(10e-6 + 1e-3)
    assert part.seconds(H200, 1, 989e9) == pytest.approx(10e-6 + 4e-3)
    assert part.seconds(H200, 2.4e9, 989e9) == pytest.approx(10e-6 + 4e-3)
    assert part.seconds(GPUS["B200"], 0, 4500e9, "fp8") == pytest.approx(10e-6 + 4e-3)
    assert part.seconds(GPUS["B200"], 0, 4500e9, "fp4") == pytest.approx(10e-6 + 2e-3)


@pytest.mark.parametrize("name", [
    "linear", "experts", "prefill", "attention_bf16", "attention_fp8", "all_reduce", "store",
])
@pytest.mark.parametrize("gpu", GPUS)
def test_more_bytes_or_products_never_take_less(name, gpu):
    part = getattr(MEASURED, name)
    table = [[part.seconds(GPUS[gpu], b, f) for f in FLOPS] for b in SIZES]
    assert all(row == sorted(row) for row in table) and all(list(column) == sorted(column) for column in zip(*table))
    assert part.fixed_us * 1e-6 < table[0][0] < table[-1][0] and table[0][0] < table[0][-1]


def test_a_gpu_knows_three_dtypes():
    for gpu in GPUS.values():
        assert gpu.flops("bfloat16") < gpu.flops("fp8") <= gpu.flops("fp4")
        with pytest.raises(ValueError, match="dtype"):
            gpu.flops("int8")


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("want", [Part(0.5, 0.3, 7), Part(0.05, 0.9, 20), Part(0.9, 0.1, 1), Part(0.83, 0.74, 3.5)])
def test_a_fit_recovers_the_part_that_made_its_times(want, dtype):
    rows = [(b, f, want.seconds(H200, b, f, dtype) * 1e6) for b in SIZES for f in FLOPS]
    got = fit_part(H200, rows, dtype)
    for name in ("read_share", "flop_share", "fixed_us"):
        assert getattr(got, name) == pytest.approx(getattr(want, name), rel=0.01), name
    assert fit_error(H200, want, rows, dtype) < 1e-9 and fit_error(H200, got, rows, dtype) < 0.01


def test_the_error_is_the_largest_ratio_either_way():
    part = Part(1.0, 1.0, 10)
    assert fit_error(H200, part, [(0, 0, 10), (0, 0, 8)]) == pytest.approx(0.25)
    assert fit_error(H200, part, [(0, 0, 10), (0, 0, 15), (0, 0, 9)]) == pytest.approx(0.5)


@pytest.mark.parametrize("rows", [[], [(1.0, 1.0, 0.0)], [(1.0, 1.0, -2.0)]])
def test_rows_without_times_cannot_be_fitted(rows):
    with pytest.raises(ValueError, match="rows"):
        fit_part(H200, rows)


@pytest.mark.parametrize("name, fields, count", [
    ("linear", ("read_share", "flop_share", "fixed_us"), 18), ("experts", ("read_share", "flop_share", "fixed_us"), 9),
    ("prefill", ("flop_share", "fixed_us"), 3), ("all_reduce", ("read_share", "fixed_us"), 9),
    ("attention_bf16", ("read_share", "fixed_us"), 54), ("attention_fp8", ("read_share", "fixed_us"), 54),
    ("store", ("read_share", "fixed_us"), 8),
])
def test_the_constants_are_what_the_recorded_times_give(name, fields, count):
    rows, constant = timed_rows(name), getattr(MEASURED, name)
    assert len(rows) == count
    got = fit_part(H200, rows)
    for field in fields:
        assert getattr(constant, field) == pytest.approx(getattr(got, field), rel=0.01), field
    assert fit_error(H200, constant, rows) == pytest.approx(fit_error(H200, got, rows), rel=0.05)


# Models


def test_tokens_touch_experts_as_random_picks_do():
    assert TARGET.experts_touched(0) == 0 and TARGET.experts_touched(1) == pytest.approx(8 / 256)
    assert TARGET.experts_touched(2) == pytest.approx(1 - (248 / 256) ** 2)
    assert TARGET.experts_touched(10_000) == pytest.approx(1)
    shares = [TARGET.experts_touched(n) for n in range(600)]
    assert shares == sorted(shares) and shares[-1] <= 1 and DRAFTER.experts_touched(100) == 0


@pytest.mark.parametrize("rows, touched", [(8, 55), (64, 231), (256, 256)])
def test_the_recorded_picks_touched_as_many(rows, touched):
    assert f"{touched} touched" in {r["shape"] for r in read_rows("bench_model_parts", part="experts", rows=str(rows))}
    assert 256 * TARGET.experts_touched(rows) == pytest.approx(touched, abs=10)  # one draw of the picks


def test_models_have_the_parameters_of_their_cards():
    total = TARGET.num_layers * (TARGET.layer_params + TARGET.expert_params) + 2 * TARGET.head_params
    assert total == pytest.approx(228.69e9, rel=0.005)
    assert total * TARGET.bytes_per_param == pytest.approx(126e9, rel=0.005)
    assert DRAFTER.num_layers * DRAFTER.layer_params * DRAFTER.bytes_per_param == pytest.approx(2.53e9, rel=0.01)
    assert TARGET.source and DRAFTER.source and TARGET.head_params == pytest.approx(200_064 * 3072, rel=0.001)


@pytest.mark.parametrize("name, value", [
    ("num_layers", 0), ("hidden_size", 1.5), ("num_q_heads", 0), ("head_dim", -1), ("layer_params", -1.0),
    ("head_params", float("nan")), ("bytes_per_param", "2"), ("expert_params", -1.0), ("product_dtype", "int8"),
    ("num_experts", -1), ("experts_per_token", -1), ("experts_per_token", 257),
])
def test_bad_models_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        replace(TARGET, **{name: value})


# Steps


@pytest.mark.parametrize("drafter", [DRAFTER, None])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_step_is_the_sum_of_its_parts(drafter, tp):
    costs = replace(COSTS, drafter=drafter, tp_size=tp)
    parts = costs.parts_s(BUSY)
    assert costs.step_s(BUSY) == pytest.approx(sum(parts.values())) and min(parts.values()) >= 0
    assert parts["host"] == pytest.approx(300e-6)
    has_draft = [parts[name] > 0 for name in ("draft products", "draft attention", "store and metadata")]
    assert has_draft == [drafter is not None] * 3


@pytest.mark.parametrize("field, part", [
    ("num_rows", "target products"), ("num_sampled", "target products"), ("target_bytes", "target attention"),
    ("draft_bytes", "draft attention"), ("prefill_pairs", "target attention"), ("stored_rows", "store and metadata"),
    ("num_drafting", "draft products"),
])
def test_a_step_takes_longer_for_more_of_anything(field, part):
    more = replace(BUSY, **{field: 10 * getattr(BUSY, field)})
    before, after = COSTS.parts_s(BUSY), COSTS.parts_s(more)
    assert after[part] > before[part] and COSTS.step_s(more) > COSTS.step_s(BUSY)
    grown = {name for name in before if after[name] > before[name]}
    assert grown == {part} and all(after[name] >= before[name] for name in before)


def test_context_bytes_cost_what_a_share_of_the_bandwidth_says():
    """The fixed time is that of each layer; fp8 pages reach a smaller share."""
    plain, fp8 = COSTS.attention_s(TARGET, 1e10, 8, "bfloat16"), COSTS.attention_s(TARGET, 1e10, 8, "float8_e4m3fn")
    assert plain == pytest.approx(62 * MEASURED.attention_bf16.fixed_us * 1e-6 + 1e10 / (8e12 * 0.8), rel=0.01)
    assert fp8 == pytest.approx(62 * MEASURED.attention_fp8.fixed_us * 1e-6 + 1e10 / (8e12 * 0.411), rel=0.01)
    assert COSTS.attention_s(TARGET, 1e10, 0, "bfloat16") == 0


def test_the_dtype_of_either_context_is_its_own():
    target, draft = replace(COSTS, kv_dtype="float8_e4m3fn"), replace(COSTS, draft_kv_dtype="float8_e4m3fn")
    base = COSTS.parts_s(BUSY)
    assert {n for n, s in target.parts_s(BUSY).items() if s != base[n]} == {"target attention"}
    assert {n for n, s in draft.parts_s(BUSY).items() if s != base[n]} == {"draft attention"}


def test_products_of_a_pass_by_hand():
    """A dense model of two layers on one rank and on two: weights, activations, products, all-reduces, head."""
    model, linear, gpu = ModelWork("m", 2, 1000, 8, 64, 1e9, 5e8, 1.0, "fp8"), MEASURED.linear, H200
    layer = linear.seconds(gpu, 1e9 + 4 * 2 * 64 * 1000, 2 * 64 * 1e9, "fp8")
    head = linear.seconds(gpu, 2 * 5e8, 2 * 16 * 5e8)
    costs = StepCosts(gpu, model, None)
    assert costs.pass_s(model, 64, 16) == pytest.approx(2 * layer + head)
    layer = linear.seconds(gpu, 5e8 + 4 * 2 * 64 * 1000, 64 * 1e9, "fp8")
    layer += 2 * MEASURED.all_reduce.seconds(gpu, 2 * 64 * 1000)
    head = linear.seconds(gpu, 5e8, 16 * 5e8)
    assert replace(costs, tp_size=2).pass_s(model, 64, 16) == pytest.approx(2 * layer + head)


def test_experts_read_what_is_touched_and_compute_what_is_picked():
    dense, fixed = replace(TARGET, num_experts=0), MEASURED.experts.fixed_us * 1e-6
    one = replace(COSTS, tp_size=1)
    extra = (one.pass_s(TARGET, 1, 1) - one.pass_s(dense, 1, 1)) / 62 - fixed
    weights = 8 / 256 * TARGET.expert_params * TARGET.bytes_per_param
    assert extra == pytest.approx(weights / (8e12 * MEASURED.experts.read_share), rel=0.01)
    extra = (one.pass_s(TARGET, 50_000, 1) - one.pass_s(dense, 50_000, 1)) / 62 - fixed
    flop = 2 * 50_000 / 32 * TARGET.expert_params
    assert extra == pytest.approx(flop / (9000e12 * MEASURED.experts.flop_share), rel=0.01)


def test_prompts_alone_draft_nothing():
    parts = COSTS.parts_s(replace(BUSY, num_drafting=0, target_bytes=0, draft_bytes=0))
    assert parts["draft products"] == parts["draft attention"] == 0 < parts["store and metadata"]
    assert 0 < parts["target attention"] < COSTS.parts_s(BUSY)["target attention"]
