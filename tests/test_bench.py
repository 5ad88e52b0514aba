"""The benchmarks' cases without a GPU: legal arguments, bytes by hand, and refusals."""

import csv
import importlib.metadata
import importlib.util
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from dflash_paged import bench
from dflash_paged.attention import KernelConfig, _launch_draft_attention, draft_attention_ref
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


@pytest.mark.parametrize("names", [("attentions",), ("inputs", "stores"), "store"])
def test_an_unknown_benchmark_is_refused_before_anything_runs(tmp_path, names):
    with pytest.raises(ValueError, match="^names: expected some of inputs, store, attention, attention_st.*, got"):
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


def test_attention_cases_have_the_issues_lengths():
    cases = bench.ATTENTION_CASES
    assert {name: (len(n), sum(n)) for name, n in cases.items() if name != "B64mix"} == {
        "B1x128k": (1, 131_072), "B8x32k": (8, 262_144), "B64x4k": (64, 262_144), "B64x512": (64, 32_768),
    }
    mixed = cases["B64mix"]
    assert len(mixed) == 64 and mixed[0] == max(mixed) == 131_072 and min(mixed) >= 64
    assert 600_000 < sum(mixed) < 620_000 and mixed == bench.mixed_lengths()


@pytest.mark.parametrize("lengths,num_sets,width", [
    ([1], 1, None), ([32, 33, 31], 3, None), ([0, 5, 0, 64], 2, 2), ([0, 0], 1, None), ([4096] * 3, 1, None),
])
def test_tables_are_a_permutation_of_the_pages(lengths, num_sets, width):
    tables = bench.shuffled_tables(lengths, num_sets, width)
    pages = [-(-n // 32) for n in lengths]
    assert tables.dtype == torch.int32 and tables.shape[:2] == (num_sets, len(lengths))
    assert tables.shape[2] == width if width else tables.shape[2] % 16 == 0 and tables.shape[2] >= max(pages) + 16
    live = torch.arange(tables.shape[2]) < torch.tensor(pages)[:, None]
    assert torch.equal(tables >= 0, live.expand_as(tables)) and (tables[~live.expand_as(tables)] == -1).all()
    ids = tables[tables >= 0].tolist()
    assert sorted(ids) == list(range(num_sets * sum(pages)))
    assert len(ids) < 10 or ids != sorted(ids)
    assert torch.equal(tables, bench.shuffled_tables(lengths, num_sets, width))


@pytest.mark.parametrize("dtype,v_layout", [
    (torch.bfloat16, "row"), (FP8, "row"), (FP8, "transposed"), (FP8, "transposed16"),
])
@pytest.mark.parametrize("group", [4, 8])
def test_attention_sets_are_legal_calls(dtype, v_layout, group):
    lengths = [40, 1, 64]
    sets = bench.attention_sets(lengths, group=group, dtype=dtype, v_layout=v_layout, num_sets=2, device="cpu")
    view = sets[0]["page_view"]
    assert len(sets) == 2 and sets[1]["page_view"] is view
    assert (view.num_pages, view.dtype, view.v_layout, view.layout) == (2 * 5, dtype, v_layout, "NHD")
    assert (view.k_scale is None) == (dtype != FP8)
    for case in sets:
        assert case["q"].shape == (3, 16, 4 * group, 128) and case["q"].dtype == torch.bfloat16
        assert case["k_noise"].shape == case["v_noise"].shape == (3, 16, 4, 128)
        assert case["ctx_lens"].tolist() == lengths and case["ctx_starts"].tolist() == [0, 0, 0]
        exact = {**case, "q": case["q"].double()}
        assert draft_attention_ref(**exact).isfinite().all()
    assert not torch.equal(sets[0]["q"], sets[1]["q"])
    k, v = (x.float().flatten() for x in read_rows_ref(view, torch.arange(view.num_slots)))
    for x in (k, v):  # normal values, all of them written, K not V
        assert abs(float(x.mean())) < 0.05 and abs(float(x.std()) - 1) < 0.05
    assert abs(float((k * v).mean())) < 0.05


def test_small_contexts_are_rotated_over_more_than_the_cache(monkeypatch):
    monkeypatch.setattr(bench, "ROTATED_BYTES", 1_000_000)
    count = lambda *lengths, **options: len(bench.attention_sets(lengths, device="cpu", **options))
    assert count(64) == 8 and count(64, dtype=FP8) == 16  # 131,072 bytes a set of bf16
    assert count(300, 300) == 1 and count(1) == bench.MAX_SETS


def test_the_floor_is_the_larger_of_bytes_and_products_by_hand():
    rates = bench.Rates(copy_gbps=4_000, bf16_tflops=700, fp8_tflops=1_400)
    floor = lambda n, **options: bench.attention_floor_us(n, rates, **options)
    read = 131_072 * 2 * 4 * 128 * 2 / 4_000e9 * 1e6
    assert read == pytest.approx(67.11, abs=0.01)
    assert floor(131_072, dtype=torch.bfloat16) == pytest.approx(read)
    assert floor(131_072, dtype=FP8) == pytest.approx(read / 2)
    flop = 4 * 131_072 * (4 * 8) * 16 * 128
    assert floor(131_072, dtype=FP8, group=8) == pytest.approx(flop / 700e12 * 1e6)  # 49 us, over 34 of bytes
    assert floor(131_072, dtype=FP8, group=8, mode="fast") == pytest.approx(read / 2)
    assert floor(0, dtype=FP8) == 0
    assert bench.context_bytes(64 * 512, torch.bfloat16) == 67_108_864


def test_the_peers_reference_is_attention_over_the_context_alone():
    """Rows of a context may as well be handed over as its suffix."""
    lengths = [16, 17, 48, 100]
    for dtype, v_layout in ((torch.bfloat16, "row"), (FP8, "transposed16")):
        (case,) = bench.attention_sets(lengths, dtype=dtype, v_layout=v_layout, num_sets=1, device="cpu")
        suffix = []
        for table, n in zip(case["block_table"], lengths):
            positions = torch.arange(n - 16, n)
            slots = table[positions // 32].long() * 32 + positions % 32
            suffix.append(read_rows_ref(case["page_view"], slots))
        k, v = (torch.stack(x).double() for x in zip(*suffix))
        shorter = {**case, "q": case["q"].double(), "ctx_lens": case["ctx_lens"] - 16, "k_noise": k, "v_noise": v}
        want = draft_attention_ref(**shorter)
        torch.testing.assert_close(bench.context_attention_ref(case), want, rtol=1e-9, atol=1e-9)  # fp64 rounding


def fake_fa3(seen):
    """Stands for the operator: the arguments that matter, in its order."""
    def forward(*args):
        q, k, v, table, lens, starts = *args[:3], args[14], args[11], args[7]
        seen.append(args)
        heads = q.shape[1]
        out = torch.empty_like(q, dtype=torch.bfloat16)
        for r, n in enumerate(lens.tolist()):
            ids = table[r, : -(-n // 32)].long()
            rows = [x.to(torch.float32)[ids].flatten(0, 1)[:n].repeat_interleave(heads // 4, 1) for x in (k, v)]
            queries = q[starts[r] : starts[r + 1]].float()
            p = torch.softmax(torch.einsum("qhd,nhd->hqn", queries, rows[0]) * args[23], -1)
            out[starts[r] : starts[r + 1]] = torch.einsum("hqn,nhd->qhd", p, rows[1]).bfloat16()
        return out, None, None, None
    return forward


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_flash_attention_3_gets_its_arguments_in_order(monkeypatch, dtype):
    """The order of vLLM 0.24's `_vllm_fa3_C.fwd`, 37 arguments."""
    seen = []
    monkeypatch.setattr(bench, "load_fa3", lambda: fake_fa3(seen))
    kernel = bench.AttentionKernel(
        "FlashAttention-3", "exact" if dtype != FP8 else "fast", dtype, "row", ("automatic", "1"), bench.fa3_attention,
        suffix=False,
    )
    error = bench.attention_error(kernel, 4, [1, 32, 70], device="cpu")
    assert 0 < error < (5e-3 if dtype != FP8 else 5e-2)  # of bf16's output, of Q in e4m3
    args, one_split = seen
    assert len(args) == 37 and (args[12], args[13]) == (16, 70) and args[23] == 128**-0.5
    assert args[7].tolist() == [0, 16, 32, 48] and args[0].shape == (48, 16, 128) and args[0].dtype == dtype
    assert args[24] is False and args[25:28] == (-1, -1, 0.0)
    assert (args[30], one_split[30]) == (0, 1)
    for scale in args[20:23]:
        assert scale is None if dtype != FP8 else scale.shape == (3, 4)


class FakeWrapper:
    """Stands for FlashInfer's: a plan of ragged pages, then the attention that the plan says."""

    def __init__(self, scratch, layout, use_cuda_graph, backend, **buffers):
        assert layout == "NHD" and use_cuda_graph and backend == "fa2"
        self.buffers = buffers

    def plan(self, starts, loc, ids, last, heads, kv_heads, dim, page, causal, q_data_type, kv_data_type):
        assert not causal and page == 32 and kv_heads == 4 and dim == 128
        assert all(x.dtype == torch.int32 for x in (starts, loc, ids, last))
        assert [x.numel() for x in self.buffers.values()] == [x.numel() for x in (starts, loc, ids, last)]
        self.arguments = starts, loc, ids, last, q_data_type, kv_data_type

    def run(self, q, pages, out):
        starts, loc, ids, last, q_dtype, kv_dtype = self.arguments
        assert (q.dtype, pages[0].dtype) == (q_dtype, kv_dtype)
        for r in range(len(last)):
            mine = ids[loc[r] : loc[r + 1]].long()
            n = (len(mine) - 1) * 32 + int(last[r])
            k, v = (x.float()[mine].flatten(0, 1)[:n].repeat_interleave(q.shape[1] // 4, 1) for x in pages)
            rows = slice(int(starts[r]), int(starts[r + 1]))
            p = torch.softmax(torch.einsum("qhd,nhd->hqn", q[rows].float(), k) * 128**-0.5, -1)
            out[rows] = torch.einsum("hqn,nhd->qhd", p, v).to(out.dtype)
        return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_flashinfer_is_planned_over_the_contexts_pages(monkeypatch, dtype):
    fake = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=FakeWrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    kernel = bench.AttentionKernel(
        "FlashInfer fa2", "exact", dtype, "row", ("automatic",), bench.flashinfer_attention, suffix=False
    )
    assert 0 < bench.attention_error(kernel, 8, [1, 32, 33, 96], device="cpu") < 5e-3  # of bf16's output


def without(monkeypatch, *names):
    found = importlib.util.find_spec
    absent = lambda name, *rest: None if name in names else found(name, *rest)
    monkeypatch.setattr(importlib.util, "find_spec", absent)
    monkeypatch.delenv("DFLASH_PAGED_FA3", raising=False)


def test_absent_peers_give_no_rows(monkeypatch):
    without(monkeypatch, "flashinfer")
    kernels = bench.attention_kernels()
    assert {k.name for k in kernels} == {"draft_attention", "draft_attention, 1 split"}
    assert all(k.suffix and not k.version for k in kernels)
    assert [(k.mode, k.dtype, k.v_layout) for k in kernels[:4]] == [
        ("exact", torch.bfloat16, "row"), ("exact", FP8, "row"), ("fast", FP8, "transposed"),
        ("fast", FP8, "transposed16"),
    ]
    monkeypatch.setenv("DFLASH_PAGED_FA3", "/nowhere/fa3.so")
    with pytest.raises(ValueError, match="^DFLASH_PAGED_FA3: expected the file"):
        bench.attention_kernels()


def test_present_peers_come_last_with_their_versions(tmp_path, monkeypatch):
    """Nothing of a peer is loaded before its turn: one that can't be loaded takes no row of ours with it."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name == "flashinfer" or found(name, *rest))
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {"flashinfer": ["flashinfer-python"]})
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"flashinfer-python": "0.6.8"}[name])
    (tmp_path / "fa3.so").write_bytes(b"abc")
    monkeypatch.setenv("DFLASH_PAGED_FA3", str(tmp_path / "fa3.so"))
    peers = [k for k in bench.attention_kernels() if not k.suffix]
    assert peers == bench.attention_kernels()[-4:]
    assert [(k.name, k.mode, k.dtype, k.version) for k in peers] == [
        ("FlashAttention-3", "exact", torch.bfloat16, "sha256 ba7816bf8f01"),
        ("FlashAttention-3", "fast", FP8, "sha256 ba7816bf8f01"),
        ("FlashInfer fa2", "exact", torch.bfloat16, "0.6.8"), ("FlashInfer fa2", "exact", FP8, "0.6.8"),
    ]
    assert {k.v_layout for k in peers} == {"row"} and {k.groups for k in peers} == {(4, 8)}
    with pytest.raises((OSError, RuntimeError)):
        bench.load_fa3()


@needs_interpreter
@pytest.mark.parametrize("index", range(6))
def test_our_kernels_run_the_attention_cases(monkeypatch, index):
    """The makers' workspace, output and sets suit the kernel; its error is that of its formats."""
    config = KernelConfig(rows=64, tile=64, stages=2, warps=4, programs=3)
    monkeypatch.setattr(bench, "draft_attention", partial(_launch_draft_attention, config=config))
    kernel = bench.attention_kernels()[index]
    assert 0 < bench.attention_error(kernel, 4, [1, 40], device="cpu") < {"exact": 5e-3, "fast": 5e-2}[kernel.mode]


def exact_kernel(**changes):
    """A kernel for the loops below: the reference, rounded."""
    def make(sets, splits):
        return [lambda case=case: draft_attention_ref(**case) for case in sets]
    kernel = bench.AttentionKernel("draft_attention", "exact", torch.bfloat16, "row", ("automatic", "1"), make)
    return kernel._replace(**changes)


def on_cpu(monkeypatch, *kernels):
    sets, clock = bench.attention_sets, iter(range(1000, 0, -1))
    monkeypatch.setattr(bench, "attention_sets", lambda *a, **o: sets(*a, **{"num_sets": 1, **o, "device": "cpu"}))
    monkeypatch.setattr(bench, "CHECK_LENGTHS", [1, 33])
    monkeypatch.setattr(bench, "ATTENTION_CASES", {"a": [40], "b": [3, 64]})
    monkeypatch.setattr(bench, "attention_us", lambda calls, *rest: float(next(clock)))
    monkeypatch.setattr(bench, "attention_kernels", lambda: list(kernels))


def test_a_kernel_that_fails_its_check_is_named_and_not_timed(monkeypatch, capsys):
    def wrong(sets, splits):
        return [lambda: draft_attention_ref(**sets[0]) * 1.5]
    def broken(sets, splits):
        raise RuntimeError("no such device\nlong trace")
    nan = exact_kernel(name="nan", make=lambda sets, splits: [lambda: torch.full_like(sets[0]["q"], float("nan"))])
    bad = [exact_kernel(name=fn.__name__, make=fn) for fn in (wrong, broken)]
    on_cpu(monkeypatch, *bad, nan, exact_kernel())
    rates, failures = bench.Rates(1.0, 1.0, 1.0), []
    rows = list(bench.measure_attention(rates, failures))
    assert [(r["kernel"], r["G"], r["case"]) for r in rows] == [
        ("draft_attention", g, case) for g in (4, 8) for case in ("a", "b")
    ]
    assert len(failures) == 6 and all(f in capsys.readouterr().out for f in failures[:1])
    assert [name in f for name, f in zip(("wrong", "wrong", "broken", "broken", "nan", "nan"), failures)] == [True] * 6
    assert "5.00e-01" in failures[0] and "\n" not in failures[2]
    for row in rows:  # the later, faster way counts
        assert row["splits"] == "1" and float(row["error"]) < 5e-3
        assert row["share"] == pytest.approx(row["floor_us"] / row["us"])
    assert rows[0]["num_tokens"] == 40 and rows[1]["num_tokens"] == 67
    assert rows[0]["floor_us"] == bench.attention_floor_us(40, rates, dtype=torch.bfloat16, group=4)


def test_rows_are_on_disk_as_soon_as_they_are_measured(tmp_path, monkeypatch, capsys):
    def cut_off():
        yield {"kernel": "a", "us": 1.23456}
        yield {"kernel": "b", "us": 2.0}
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        bench.record_rows(tmp_path / "bench_x.csv", cut_off(), device="d")
    text = (tmp_path / "bench_x.csv").read_text(encoding="utf-8")
    assert text == "kernel,us,device\na,1.235,d\nb,2.0,d\n"
    assert capsys.readouterr().out.splitlines()[0] == "bench_x kernel=a us=1.235"
    bench.record_rows(tmp_path / "none.csv", iter(()))
    assert not (tmp_path / "none.csv").exists()


def test_failures_end_the_run_after_all_tables_are_written(tmp_path, monkeypatch):
    broken = exact_kernel(name="broken", make=None)
    on_cpu(monkeypatch, broken, exact_kernel())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "copy_bandwidth_gbps", lambda: 4000.46)
    monkeypatch.setattr(bench, "measure_rates", lambda gbps: bench.Rates(gbps, 700.04, 1300.0))
    monkeypatch.setattr(bench, "environment", lambda: {"device": "a"})
    monkeypatch.setattr(bench, "measure_inputs", lambda: [{"kernel": "i"}])
    with pytest.raises(RuntimeError, match="^not measured: G 4, V row, broken, exact, torch.bfloat16: TypeError"):
        bench.run_benchmarks(tmp_path, ["attention", "inputs"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bench_attention.csv", "bench_inputs.csv"]
    with open(tmp_path / "bench_attention.csv", newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert list(read[0]) == [
        "case", "kernel", "mode", "page_dtype", "v_layout", "G", "num_tokens", "splits", "us", "floor_us", "share",
        "error", "sets", "version", "device", "copy_gbps", "bf16_tflops", "fp8_tflops",
    ]
    assert len(read) == 4 and read[0]["copy_gbps"] == "4000.5" and read[0]["bf16_tflops"] == "700.0"


def test_the_scaling_sweep_covers_the_issues_ranges_within_two_million_tokens(monkeypatch):
    points = bench.scaling_points()
    assert max(b * n for _, b, n in points) == 2**21
    lengths = {b: [n for sweep, batch, n in points if sweep == "context" and batch == b] for b in (1, 8, 64)}
    assert lengths[1] == lengths[8] == [2**i for i in range(7, 18)] and lengths[64] == [2**i for i in range(7, 16)]
    for length in (1024, 4096):
        assert [b for sweep, b, n in points if sweep == "batch" and n == length] == [2**i for i in range(9)]
    on_cpu(monkeypatch)
    monkeypatch.setattr(bench, "our_kernels", lambda: [exact_kernel(), exact_kernel(make=None)])
    monkeypatch.setattr(bench, "scaling_points", lambda: [("context", 2, 32), ("batch", 1, 64)])
    failures = []
    rows = list(bench.measure_attention_scaling(bench.Rates(1.0, 1.0, 1.0), failures))
    assert [(r["sweep"], r["batch"], r["context"], r["num_tokens"]) for r in rows] == [
        ("context", 2, 32, 64), ("batch", 1, 64, 64)
    ]
    assert len(failures) == 1 and failures[0].startswith("scaling of draft_attention")


@pytest.mark.parametrize("window,num_sets,count", [(64, 9, 4), (64, 3, 3), (50, 9, 4), (1000, 9, 1)])
def test_windows_see_other_pages_in_each_set(window, num_sets, count):
    (case,) = bench.attention_sets([256, 256], num_sets=1, width=10, device="cpu")
    sets = bench.window_sets(case, window, num_sets)
    assert len(sets) == count
    live, pages = case["block_table"][:, :8], -(-window // 32)
    for seen in (slice(8 - pages, 8), slice(0, pages)):  # what a window reads, and what a short context does
        read = torch.cat([s["block_table"][:, seen].flatten() for s in sets]) if count > 1 else live.flatten()
        assert read.unique().numel() == read.numel()
    for s in sets:
        assert torch.equal(s["block_table"][:, :8].sort(1).values, live.sort(1).values)  # each request keeps its pages
        assert (s["block_table"][:, 8:] == -1).all() and s["q"] is case["q"]
    inputs = bench.window_inputs(case, window, num_sets)
    assert inputs["window"][1:] == (window, window - 1) and inputs["short"][1:] == (None, window)
    for wide, short in zip(inputs["window"][0], inputs["short"][0]):
        assert torch.equal(wide["block_table"], short["block_table"])
        assert wide["ctx_lens"].tolist() == [256, 256] and short["ctx_lens"].tolist() == [window, window]


@pytest.mark.parametrize("first_us,length", [(1.0, 100), (70.0, 72), (4_700.0, 2), (1e6, 2)])
def test_graphs_are_as_long_as_their_calls_are_short(monkeypatch, first_us, length):
    seen = []
    monkeypatch.setattr(bench, "chained_us", lambda calls, *rest: seen.append((len(calls), *rest)) or first_us)
    assert bench.attention_us([print] * 3) == first_us
    assert seen == [(1, 2, 3), (3, length, 9)]
