"""The benchmarks' cases without a GPU: legal arguments, bytes by hand, and refusals."""

import csv
import importlib.util

import pytest
import torch

from dflash_paged import bench
from dflash_paged.block_table import (
    DraftInputs,
    VerifyInputs,
    _launch_draft_inputs,
    _launch_verify_inputs,
    build_draft_inputs,
    build_verify_inputs,
)
from dflash_paged.store import _launch_store_draft_context, read_rows_ref, store_draft_context

needs_interpreter = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or torch.cuda.is_available(),
    reason="kernels run on CPU tensors in Triton's interpreter only",
)
FP8 = torch.float8_e4m3fn
SIZES = [(1, 1, 1, 1), (5, 4, 3, 2), (8, 16, 2, 3)]  # num_reqs, rows, width, num_groups


@pytest.mark.parametrize("reqs,rows,width,groups", SIZES)
def test_draft_cases_are_legal_steps_of_decoding_requests(monkeypatch, reqs, rows, width, groups):
    monkeypatch.setenv("DFLASH_PAGED_DEBUG", "1")
    case = bench.draft_inputs_case(reqs, rows, width, groups, device="cpu")
    out = build_draft_inputs(**case)
    assert out is case["out"] and case["num_draft_tokens"] == rows - 1
    kept = rows - case["num_rejected"]
    assert ((1 <= kept) & (kept <= rows)).all()
    slots = out.context_slot_mapping.view(groups, reqs, rows)
    real = torch.arange(rows) < kept[:, None]
    assert ((slots >= 0) == real).all() and (slots < 2**20 * 32).all()
    positions = case["row_positions"].view(reqs, rows)
    assert (0 <= positions).all() and (positions < width * 32).all()
    pages = case["block_tables"].gather(2, (positions // 32).expand(groups, -1, -1))
    assert torch.equal(slots[:, real], (pages * 32 + positions % 32)[:, real].long())
    assert torch.equal(out.ctx_lens, (positions[:, 0] + kept).int())


@pytest.mark.parametrize("reqs,rows,width,groups", SIZES)
def test_verify_cases_belong_to_the_draft_case(monkeypatch, reqs, rows, width, groups):
    monkeypatch.setenv("DFLASH_PAGED_DEBUG", "1")
    draft = bench.draft_inputs_case(reqs, rows, width, groups, device="cpu")
    case = bench.verify_inputs_case(draft)
    out = build_verify_inputs(**case)
    assert out is case["out"] and case["draft_token_ids"].shape == (reqs, rows - 1)
    assert torch.equal(out.positions, draft["row_positions"])  # the rows that it drafted for
    assert (out.slot_mapping >= 0).all() and (out.slot_mapping < 2**20 * 32).all()
    assert torch.equal(out.token_ids.view(reqs, rows)[:, 0], draft["next_token_ids"])


@needs_interpreter
def test_the_kernels_run_the_cases(monkeypatch):
    draft = bench.draft_inputs_case(9, 4, 3, 2, device="cpu")
    verify = bench.verify_inputs_case(draft)
    for build, launch, case, out in (
        (build_draft_inputs, _launch_draft_inputs, draft, DraftInputs.allocate(2, 36, 9, 3)),
        (build_verify_inputs, _launch_verify_inputs, verify, VerifyInputs.allocate(2, 9, 3)),
    ):
        want, got = build(**case), launch(**{**case, "out": out})
        for name, tensor in vars(want).items():
            assert torch.equal(getattr(got, name), tensor), name
    bench._empty_kernel[(2,)](torch.zeros(1), N=1)


def test_a_case_is_the_same_every_time():
    first, again = (bench.draft_inputs_case(4, 3, 5, 2, device="cpu") for _ in range(2))
    assert all(torch.equal(first[n], again[n]) for n in first if isinstance(first[n], torch.Tensor))
    options = dict(num_layers=2, num_kv_heads=2, head_dim=8, num_pages=8, rows_per_request=4, device="cpu")
    first, again, other = (bench.store_case(8, seed=s, **options) for s in (1, 1, 2))
    for name in ("kv", "positions", "slot_mapping"):
        assert torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name])


FORMS = [("NHD", "row", FP8), ("HND", "row", FP8), ("NHD", "transposed", FP8), ("NHD", "transposed16", FP8),
         ("HND", "transposed", FP8), ("NHD", "row", torch.bfloat16)]
SMALL = dict(num_layers=2, num_kv_heads=2, head_dim=16, num_pages=12, device="cpu")


@pytest.mark.parametrize("rows,per_request", [(16, 4), (16, 16), (40, 40), (70, 70)])
@pytest.mark.parametrize("layout,v_layout,dtype", FORMS)
def test_store_cases_fill_distinct_rows(monkeypatch, layout, v_layout, dtype, rows, per_request):
    monkeypatch.setenv("DFLASH_PAGED_DEBUG", "1")  # distinct slots, positions within the table
    form = dict(layout=layout, v_layout=v_layout, dtype=dtype)
    case = bench.store_case(rows, rows_per_request=per_request, **form, **SMALL)
    slots, positions = case["slot_mapping"], case["positions"]
    assert slots.shape == (1, rows) and slots.unique().numel() == rows
    assert (slots >= 0).all() and (slots < 12 * 32).all()
    assert torch.equal(slots[0] % 32, positions % 32)
    steps = positions.view(-1, per_request)
    assert torch.equal(steps, steps[:, :1] + torch.arange(per_request))
    for view in case["pages"]:
        assert (view.layout, view.v_layout, view.dtype, view.num_pages) == (layout, v_layout, dtype, 12)
        view.k.view(torch.uint8).fill_(0x7F)
        view.v.view(torch.uint8).fill_(0x7F)
    store_draft_context(**case)
    for i, view in enumerate(case["pages"]):
        k, v = read_rows_ref(view, slots[0])
        # Scales of 0.01 hold values up to 4.48, nearly all of what randn gives; 1/16 is fp8's half step.
        want = case["kv"][:, i, 1].float().clamp(-4.48, 4.48) if dtype == FP8 else case["kv"][:, i, 1].float()
        torch.testing.assert_close(v, want, rtol=1 / 16, atol=0.01 * 2**-8)
        assert k.isfinite().all() and k.abs().sum() > 0


@needs_interpreter
@pytest.mark.parametrize("layout,v_layout,dtype", FORMS)
def test_the_store_kernel_runs_the_cases(layout, v_layout, dtype):
    """The bytes of V are the reference's; K may round one code away, since its sums run in another order."""
    pools = []
    for store in (store_draft_context, _launch_store_draft_context):
        pool = torch.full((12 * 2 * 2 * 32 * 2 * 16 * dtype.itemsize,), 0x11, dtype=torch.uint8).view(dtype)
        inner = (32, 2) if layout == "NHD" else (2, 32)
        pool = pool.view(12, 2, 2, *inner, 16)
        case = bench.store_case(
            32, layout=layout, v_layout=v_layout, dtype=dtype, rows_per_request=16, pool=pool, **SMALL
        )
        store(**case)
        pools.append(pool)
    want, got = pools
    assert torch.equal(got[:, :, 1].view(torch.uint8), want[:, :, 1].view(torch.uint8))
    # One code of fp8 is 1/8 of a value at most, one of bf16 1/128.
    # atol is the smallest step of an fp8 code.
    rtol = 1 / 8 if dtype == FP8 else 1 / 128
    torch.testing.assert_close(got[:, :, 0].float(), want[:, :, 0].float(), rtol=rtol, atol=2**-9)
    assert (got != want).float().mean() < 0.01


def test_a_case_can_share_a_pool():
    pool = torch.zeros(12, 2, 2, 32, 2, 16, dtype=FP8)
    case = bench.store_case(8, pool=pool, rows_per_request=8, **SMALL)
    store_draft_context(**case)
    assert all(v.k.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr() for v in case["pages"])
    assert (pool.view(torch.uint8) != 0).any((0, 3, 4, 5)).all()  # K and V of both layers


def test_bytes_of_a_store_are_counted_by_hand():
    options = dict(num_layers=3, num_kv_heads=2, head_dim=16, num_pages=8, rows_per_request=4, device="cpu")
    values = 8 * 3 * 2 * 2 * 16
    assert bench.store_bytes(bench.store_case(8, **options)) == values * (2 + 1)
    assert bench.store_bytes(bench.store_case(8, dtype=torch.bfloat16, **options)) == values * (2 + 2)
    issue = bench.store_case(16, **bench.ISSUE_DRAFTER, num_pages=4, device="cpu")
    assert bench.store_bytes(issue) == 16 * 5 * 2 * 4 * 128 * 3


def test_rows_are_written_with_the_machine_that_made_them(tmp_path, monkeypatch):
    rows = [{"kernel": "a", "cold_us": 1.23456, "rows": 7}, {"kernel": "b", "cold_us": 2.0, "rows": 8}]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "copy_bandwidth_gbps", lambda: 4000.46)
    monkeypatch.setattr(bench, "measure_inputs", lambda: rows)
    monkeypatch.setattr(bench, "environment", lambda: {"torch": torch.__version__, "device": "a", "date": "b"})
    bench.run_benchmarks(tmp_path, ["inputs"])
    (path,) = tmp_path.iterdir()
    assert path.name == "bench_inputs.csv"
    with open(path, newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert [(r["kernel"], r["cold_us"], r["rows"]) for r in read] == [("a", "1.235", "7"), ("b", "2.0", "8")]
    assert list(read[0])[:3] == ["kernel", "cold_us", "rows"]
    assert all(r["torch"] == torch.__version__ and r["device"] and r["date"] for r in read)
    assert all(r["copy_gbps"] == "4000.5" for r in read)
    assert b"\r" not in path.read_bytes() and rows[0]["cold_us"] == 1.23456


@pytest.mark.parametrize("names", [("attention",), ("inputs", "stores"), "store"])
def test_an_unknown_benchmark_is_refused_before_anything_runs(tmp_path, names):
    with pytest.raises(ValueError, match="^names: expected inputs or store, got"):
        bench.run_benchmarks(tmp_path, names)
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_nothing_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="^device: expected a CUDA device"):
        bench.run_benchmarks(tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_flashinfer_there_is_no_peer(monkeypatch):
    found = importlib.util.find_spec
    absent = lambda name, *rest: None if name == "flashinfer" else found(name, *rest)
    monkeypatch.setattr(importlib.util, "find_spec", absent)
    case = bench.store_case(4, rows_per_request=4, **SMALL)
    assert bench.flashinfer_store(case) is None
