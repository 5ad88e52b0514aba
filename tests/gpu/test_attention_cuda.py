"""Attention kernels on a CUDA device: limits of error, bits, graphs, no sync, large pools, no late compilation."""

import copy
import os

import numpy as np
import pytest
import torch
from test_attention import FP8, NAN, generator, i32, nan_like, oracle
from test_attention_kernel import (
    BAD_PAGE_IDS, BF16, F16, F32, all_codes_case, arguments_of, attend, check, check_prefill, fill_unreadable, make,
    moved, pick, prefill_inputs, random_case, reference, relocated, same_bits, workspace_for,
)
from test_block_table_cuda import capture, num_compiled, quietly

from dflash_paged import attention
from dflash_paged.attention import (
    AttentionWorkspace,
    draft_attention,
    draft_attention_ref,
    explain_backend,
    prefill_attention,
    prefill_attention_ref,
)
from dflash_paged.store import PageView

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LONG = os.environ.get("DFLASH_PAGED_LONG") == "1"

# A kernel is compiled for each of these (1 to 3 s), so the tests share them.
DRAFT = dict(dtype=BF16, num_query_rows=8, heads=8, kv_heads=2, dim=128, tokens=32)
FAST = dict(DRAFT, dtype=FP8, layout="HND", v_layout="transposed16")
WIDE = dict(dtype=F32, num_query_rows=5, heads=3, kv_heads=1, dim=64, tokens=16, layout="HND")
HALF = dict(dtype=F16, num_query_rows=3, heads=2, kv_heads=2, dim=64, tokens=16, v_layout="transposed")
SHAPES = {
    "bf16, G 4, D 128, Q 8": DRAFT,
    "fp8, G 4, D 128, Q 8": FAST,
    "fp32, G 3, D 64, Q 5": WIDE,
    "fp16, G 1, D 64, Q 3": HALF,
    "bf16, G 8, D 128, Q 16": dict(DRAFT, num_query_rows=16, kv_heads=1, layout="HND"),
    "bf16, G 8, D 64, Q 64": dict(DRAFT, num_query_rows=64, kv_heads=1, dim=64),
    "bf16, G 1, D 256, Q 16": dict(DRAFT, num_query_rows=16, heads=2, dim=256),
    "bf16, G 3, D 128, Q 1": dict(DRAFT, num_query_rows=1, heads=3, kv_heads=1, v_layout="transposed"),
    "fp8, G 8, D 128, Q 16": dict(FAST, num_query_rows=16, kv_heads=1),
    "fp8, G 3, D 256, Q 16": dict(FAST, num_query_rows=16, heads=3, kv_heads=1, dim=256),
    "fp8, G 1, D 64, Q 64": dict(FAST, num_query_rows=64, heads=2, dim=64, layout="NHD", v_layout="transposed"),
    "fp8 rows, G 4, D 128, Q 1": dict(FAST, num_query_rows=1, v_layout="row", tokens=256),
    "fp32 q, bf16 pages": dict(DRAFT, q_dtype=F32),
}
by_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@pytest.fixture(autouse=True)
def ieee_products():
    """The references' fp32 products are IEEE here, never TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False


def modes_of(shape):
    return ("exact", "fast") if shape["dtype"] == FP8 and shape["v_layout"] != "row" else ("exact",)


# ------------------------------------------------------------------ limits of error


@by_shape
def test_errors_stay_within_the_limits(shape):
    """fp32 1e-5, half precision 3e-3, fp8 products 5e-2; empty contexts, single rows and page boundaries."""
    tokens = shape["tokens"]
    case = make([0, 1, tokens - 1, tokens, tokens + 1, 500, 3000], **shape)
    for mode in modes_of(shape):
        check(case, mode=mode, launch=draft_attention, definition=reference)


@pytest.mark.parametrize("shape", [DRAFT, FAST], ids=["bf16", "fp8"])
def test_a_hundred_thousand_rows(shape):
    """Many splits of one request beside short and empty ones; with a window of a few pages too."""
    case = make([100_000, 0, 1, 4097], **shape)
    for mode in modes_of(shape):
        check(case, mode=mode, launch=draft_attention, definition=reference)
        check(case, mode=mode, launch=draft_attention, definition=reference, window=2049)


RANDOM = [DRAFT, FAST, WIDE]


@pytest.mark.parametrize("count", [200, pytest.param(3000, marks=pytest.mark.skipif(
    not LONG, reason="takes minutes: DFLASH_PAGED_LONG=1 runs it"
))])
def test_random_drafts_equal_the_reference(count):
    """Pitfalls 4, 5, 16, 22, 23, 24: lengths, starts, widths, holes, windows and order of any kind."""
    rng = np.random.default_rng(31 + count)
    for i in range(count):
        shape = RANDOM[i % len(RANDOM)]
        case, options = random_case(rng, shape, max_len=int(pick(rng, 40, 300, 1500)), max_reqs=6)
        if not options["causal"] and "fast" in modes_of(shape) and rng.random() < 0.5:
            options |= {"mode": "fast", "sm_scale": None}  # rounding of q grows with the logits
        check(case, launch=draft_attention, definition=reference, **options)


@pytest.mark.parametrize("count", [100, pytest.param(3000, marks=pytest.mark.skipif(
    not LONG, reason="takes minutes: DFLASH_PAGED_LONG=1 runs it"
))])
def test_random_prefills_equal_the_reference(count):
    """Pitfalls 4, 5, 23: chunks of none, one and hundreds of rows, over prefixes of any kind."""
    rng = np.random.default_rng(57 + count)
    for i in range(count):
        case, options = random_case(rng, RANDOM[i % len(RANDOM)], max_len=int(pick(rng, 40, 600)), max_reqs=4)
        del options["causal"]
        sizes = [int(pick(rng, 0, 1, rng.integers(20), rng.integers(300))) for _ in case.lens]
        check_prefill(
            case, sizes, trailing=int(rng.integers(3)), launch=prefill_attention, definition=reference, **options
        )


def test_a_long_prefill_equals_the_reference():
    """A chunk of 2,048 rows behind 8,192 beside decoding rows."""
    case = make([8192, 0, 777], **DRAFT)
    check_prefill(case, [2048, 1, 16], launch=prefill_attention, definition=reference)


def test_fp8_decoded_from_bytes_gives_the_same_bits():
    """As Ampere does it; all 256 codes, NaN codes stay NaN."""
    for case in (make([0, 31, 700], **FAST), all_codes_case(False)):
        assert same_bits(attend(case), attend(case, native_fp8=False))
    case = all_codes_case(True)
    native, decoded, want = attend(case)[0], attend(case, native_fp8=False)[0], oracle(case)[0]
    assert bool(native[0].isnan().all())
    assert torch.equal(native.isnan(), want.isnan()) and torch.equal(decoded.isnan(), want.isnan())


# ------------------------------------------------------------------ bits


BITS = pytest.mark.parametrize("shape, mode", [(DRAFT, "exact"), (FAST, "exact"), (FAST, "fast"), (WIDE, "exact")],
                               ids=["bf16", "fp8", "fast", "fp32"])
LENS = [9000, 0, 1, 600, 20_000]


@BITS
def test_reruns_give_the_same_bits(shape, mode):
    """Whichever program takes which piece: nothing is added up in the order of arrival."""
    case = make(LENS, **shape)
    options = dict(mode=mode, workspace=workspace_for(case, reqs=8), arguments=arguments_of(case))
    first = attend(case, draft_attention, **options)
    for _ in range(30):
        assert same_bits(attend(case, draft_attention, **options), first)


@BITS
def test_a_requests_bits_depend_on_nothing_beside_it(shape, mode):
    """Its place, its neighbours, their number, and where its pages are."""
    case, elsewhere = (make(LENS, **shape, page_seed=seed) for seed in (0, 1))
    assert not torch.equal(case.table, elsewhere.table)
    options = dict(mode=mode, workspace=workspace_for(case, reqs=64))
    whole = attend(case, draft_attention, **options)
    assert same_bits(attend(elsewhere, draft_attention, **options), whole)
    for order in ([3, 0, 4, 1, 2], [4], [0], [1], [2, 3], list(range(5)) * 12):
        part = copy.copy(case)
        part.q = case.q[order]
        got = attend(part, draft_attention, arguments=moved(case, order), **options)
        assert same_bits(got, [x[order] for x in whole]), order


@BITS
def test_unreadable_bytes_change_nothing(shape, mode):
    """Every byte that no request may read holds NaN; numbers there give the same bits."""
    case = make(LENS, starts=[37, 0, 0, 600, 15_003], **shape)
    first = attend(case, draft_attention, mode=mode)
    assert all(bool(torch.isfinite(x).all()) for x in first)
    fill_unreadable(case)
    assert same_bits(attend(case, draft_attention, mode=mode), first)


@pytest.mark.parametrize("shape", [DRAFT, FAST], ids=["bf16", "fp8"])
def test_a_window_reads_only_its_pages(shape):
    """Pitfalls 22, 23 (vLLM PR 40898): pages out of the window may be gone, and hold NaN where they are not."""
    case, window = make([5000, 700, 20, 9000], **shape), 600
    want, _ = check(case, launch=draft_attention, window=window, definition=reference)
    want_prefill, _ = check_prefill(case, [8] * 4, window=window, launch=prefill_attention, definition=reference)
    for r, n in enumerate(case.lens):
        first = max(n - window + 1, 0)  # what the first row, at n, still sees
        block, offset = divmod(first, case.tokens)
        case.table[r, :block] = i32([BAD_PAGE_IDS[b % 3] for b in range(block)])
        page = case.table[r, block].item()
        k, v = case.view.codes
        nan_like(k[page, :offset] if case.view.layout == "NHD" else k[page, :, :offset])
        if case.view.v_layout == "row":
            nan_like(v[page, :offset])
        else:
            v[page, :, :, case.view.v_columns[:offset]] = 0xFF
    assert same_bits([attend(case, draft_attention, sliding_window=window)[0]], [want])
    q, k, v, bounds = (x.cuda() for x in prefill_inputs(case, [8] * 4))
    view, table, starts, lens = arguments_of(case)[1:5]
    got = prefill_attention(q, view, table, bounds, starts, lens, k, v, sliding_window=window)
    assert same_bits([got.cpu()], [want_prefill])


# ------------------------------------------------------------------ large pools


def test_the_last_pages_of_a_pool_past_two_to_the_31_elements():
    """Pitfall 39 (vLLM PR 47671): page id times stride is an int64 product, in both kernels.

    A bf16 pool of 4.3 GB, NaN everywhere but on its last pages.
    """
    case = make([0, 31, 700, 70], dtype=BF16, num_query_rows=8, heads=8, kv_heads=4, dim=128, tokens=32)
    pages = 2**31 // (2 * 32 * 4 * 128) + case.view.num_pages + 5
    pool = nan_like(torch.empty(pages, 2, 32, 4, 128, dtype=BF16, device="cuda"))
    assert pool.numel() > 2**31
    far = relocated(case, (pool[:, 0], pool[:, 1]), pages - case.view.num_pages, 1)
    assert int(far.table.max()) * pool.stride(0) >= 2**31
    check(far, launch=draft_attention, definition=reference)
    check_prefill(far, [3, 0, 9, 1], launch=prefill_attention, definition=reference)
    assert same_bits(reference(far), reference(case))


def test_query_rows_past_two_to_the_31_elements():
    """Pitfall 39: rows of queries and outputs may lie far apart too; here 2^29 elements from request to request."""
    case = make([5, 40, 0, 9, 33], **DRAFT)
    size, step = case.q[0].numel(), 2**29
    room = torch.empty(4 * step + 2 * size, dtype=BF16, device="cuda")  # 4.3 GB
    q, out = (room.as_strided(case.q.shape, (step, *case.q.stride()[1:]), offset) for offset in (0, size))
    q.copy_(case.q)
    draft_attention(q, *arguments_of(case)[1:], out=out)
    assert same_bits([out.cpu(), q.cpu()], [attend(case, draft_attention)[0], case.q])


# ------------------------------------------------------------------ graphs, syncs, allocations


class Step:
    """Buffers of a layer's call at fixed addresses over a pool of finite random rows: what a graph captures."""

    def __init__(self, dtype=BF16, reqs=6, width=700, pages=2000, mode="exact", window=None, causal=False):
        self.reqs, self.width, self.pages = reqs, width, pages
        fp8 = dtype == FP8
        case = make([0] * reqs, **(FAST if fp8 else DRAFT))
        rng = torch.Generator(device="cuda").manual_seed(1)
        new = lambda *shape: torch.randn(*shape, generator=rng, device="cuda").to(dtype)
        row = case.view.k.shape[1:]
        both = new(pages, 3, 2, *row)  # with the strides of a Case's pages
        k, v = both[:, 1, 0], new(pages, 3, *case.view.v.shape[1:])[:, 1] if fp8 else both[:, 1, 1]
        scales = torch.tensor([[0.5, 1.0], [2.0, 0.7]], device="cuda") if fp8 else (None, None)
        view = PageView(k, v, case.view.layout, case.view.v_layout, *scales, tokens_per_block=32)
        arguments = arguments_of(case)
        names = ("q", "page_view", "block_table", "ctx_starts", "ctx_lens", "k_noise", "v_noise")
        self.inputs = dict(zip(names, arguments), page_view=view)
        self.inputs["block_table"] = torch.full((reqs, width), -1, dtype=torch.int32, device="cuda")
        self.options = dict(mode=mode, sliding_window=window, causal=causal)
        self.out, self.workspace = torch.empty_like(self.inputs["q"]), self.new_workspace()
        self.lse = torch.empty(self.out.shape[:3], device="cuda")

    def new_workspace(self):
        return AttentionWorkspace.allocate(self.reqs, 8, 8, 2, 128, device="cuda")

    def call(self):
        draft_attention(**self.inputs, **self.options, out=self.out, lse=self.lse, workspace=self.workspace)

    def change(self, lens, seed):
        """Other lengths, starts, pages and rows, in place."""
        rng = generator(seed)
        inputs = self.inputs
        table = torch.randint(self.pages, (self.reqs, self.width), generator=rng, dtype=torch.int32)
        table[torch.rand(table.shape, generator=rng) < 0.01] = -1
        inputs["block_table"].copy_(table)
        inputs["ctx_lens"].copy_(i32(lens))
        inputs["ctx_starts"].copy_(i32([n // 3 if n % 2 else 0 for n in lens]))
        for name in ("q", "k_noise", "v_noise"):
            x = inputs[name]
            x.copy_(torch.randn(x.shape, generator=rng))

    def eager(self):
        """The same call outside of the graph, with a workspace of its own; returns out and lse."""
        lse = torch.empty_like(self.lse)
        return draft_attention(**self.inputs, **self.options, lse=lse, workspace=self.new_workspace()), lse


STEPS = [dict(), dict(dtype=FP8, mode="fast"), dict(window=900), dict(causal=True, window=900)]


@pytest.mark.parametrize("options", STEPS, ids=["bf16", "fast", "window", "verify"])
def test_a_captured_call_follows_lengths_and_tables(options):
    """Captured over short requests, replayed with ones of many splits, none, and again: eager's bits each time."""
    step = Step(**options)
    step.change([1, 5, 0, 33, 64, 100], 0)
    graph, nodes = capture(step.call)
    assert set(nodes) == {0}  # kernels alone
    for seed, lens in enumerate((
        [1, 5, 0, 33, 64, 100], [511, 512, 513, 1025, 4096, 4097], [20_000, 1, 0, 9000, 8191, 22_000], [0] * 6,
        [22_400, 10**6, 2, 31, 32, 33], [3, 0, 0, 0, 0, 0],
    )):
        step.change(lens, seed + 1)
        step.out.fill_(NAN)
        step.lse.fill_(NAN)
        graph.replay()
        got = step.out.clone()
        assert same_bits([got, step.lse], step.eager())
        inputs = {name: x.double() if name in ("q", "k_noise", "v_noise") else x for name, x in step.inputs.items()}
        want = draft_attention_ref(
            **inputs, causal=step.options["causal"], sliding_window=step.options["sliding_window"]
        )
        limit = 5e-2 if step.options["mode"] == "fast" else 3e-3
        assert (got.double() - want).norm() <= limit * want.norm()


def prefill_step():
    """A prefill call with fixed buffers: arguments by name, and the row starts to change."""
    case = make([3000, 17, 0], **DRAFT)
    q, k, v, bounds = prefill_inputs(case, [200, 1, 55])
    view, table, starts, lens = arguments_of(case)[1:5]
    arguments = dict(
        q=q.cuda(), page_view=view, block_table=table, row_start_loc=bounds.cuda(), ctx_starts=starts, ctx_lens=lens,
        k_new=k.cuda().nan_to_num(), v_new=v.cuda().nan_to_num(),
    )
    arguments["q"].nan_to_num_()
    return arguments, torch.empty_like(arguments["q"])


def test_a_captured_prefill_follows_its_rows():
    arguments, out = prefill_step()
    graph, nodes = capture(lambda: prefill_attention(**arguments, out=out))
    assert set(nodes) == {0}
    for bounds, lens in (([0, 1, 2, 3], [9, 0, 1]), ([0, 0, 200, 258], [3000, 17, 0]), ([0, 0, 0, 0], [0, 0, 0])):
        arguments["row_start_loc"].copy_(i32(bounds))
        arguments["ctx_lens"].copy_(i32(lens))
        out.fill_(NAN)
        graph.replay()
        assert same_bits([out], [prefill_attention(**arguments)])
        want = prefill_attention_ref(**{
            name: x.double() if name in ("q", "k_new", "v_new") else x for name, x in arguments.items()
        })
        assert (out.double() - want).norm() <= 3e-3 * want.norm()


@pytest.mark.parametrize("options", STEPS, ids=["bf16", "fast", "window", "verify"])
def test_nothing_waits_for_the_device_and_nothing_is_allocated(options):
    """Pitfall 11 (TensorRT-LLM PR 18343): with out and workspace given, a call takes no byte more."""
    step = Step(**options)
    step.change([20_000, 1, 0, 9000, 8191, 33], 1)
    quietly(step.call)


def test_a_prefill_waits_for_nothing_and_allocates_nothing():
    arguments, out = prefill_step()
    quietly(lambda: prefill_attention(**arguments, out=out))


def test_allocation_during_capture_raises():
    """Pitfall 33 (TensorRT-LLM dflash.py, PR 16916): a graph that owns its output or workspace would go stale."""
    step, (arguments, out) = Step(), prefill_step()
    step.change([100, 5, 0, 33, 64, 1], 0)
    step.call()
    prefill_attention(**arguments, out=out)
    torch.cuda.synchronize()
    buffers = dict(out=step.out, workspace=step.workspace)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        for missing in buffers:
            with pytest.raises(RuntimeError, match=rf"^{missing}\b"):
                draft_attention(**step.inputs, **{**buffers, missing: None})
        with pytest.raises(RuntimeError, match=r"^out\b"):
            prefill_attention(**arguments)
        step.call()
        prefill_attention(**arguments, out=out)


# ------------------------------------------------------------------ compilation


def test_nothing_is_compiled_after_warm_up():
    """Pitfall 40 (vLLM PR 49903): requests, widths, lengths, windows, pages and slices of tensors share a variant."""
    cases = {pages: make([(pages - 3) * 32], **DRAFT) for pages in (4, 5, 16, 17, 32)}
    assert all(case.view.num_pages == pages for pages, case in cases.items())
    workspace = workspace_for(cases[4], reqs=70)

    def call(case, window, reqs, offset=0, width=None):
        q, view, table, starts, lens, k, v = arguments_of(case)
        many = lambda x: x.repeat(-(-(reqs + offset) // len(x)), *[1] * (x.dim() - 1))[offset : offset + reqs]
        table = many(table)[:, :width]
        arguments = (many(q), view, table, many(starts), many(lens), many(k), many(v))
        draft_attention(*arguments, sliding_window=window, workspace=workspace)
        sizes = [n % 40 for n in range(reqs)]
        rows, k_new, v_new, bounds = (x.cuda() for x in prefill_inputs(case, sizes, trailing=1 + offset))
        prefill_attention(
            rows[offset:], view, table, bounds, *arguments[3:5], k_new[offset:], v_new[offset:],
            sliding_window=window,
        )

    for window in (None, 20):
        for reqs in (3, 20):  # powers of two of requests may each have a variant
            call(cases[5], window, reqs)
    compiled = num_compiled(attention)
    for case in cases.values():
        call(case, None, 5)
    for window in (None, 1, 2, 16, 17, 1000):
        for reqs in (1, 2, 11, 16, 17, 31):
            call(cases[16], window, reqs)
            call(cases[17], window, reqs, offset=1)
            call(cases[32], window, reqs, offset=3, width=1)
    assert num_compiled(attention) == compiled


# ------------------------------------------------------------------ backends and errors


def test_cuda_tensors_run_the_kernels_unless_the_reference_is_asked_for(monkeypatch):
    """Nothing falls back in silence."""
    case = make([5, 40, 0], **DRAFT)
    arguments, (prefill, out) = arguments_of(case), prefill_step()

    def refuse(*args, **options):
        raise AssertionError("the reference ran")

    for name in ("draft_attention_ref", "prefill_attention_ref"):
        monkeypatch.setattr(attention, name, refuse)
    assert explain_backend(arguments[1]).name == "triton"
    for backend in (None, "triton"):
        draft_attention(*arguments, backend=backend)
        prefill_attention(**prefill, out=out, backend=backend)
    for call in (lambda: draft_attention(*arguments, backend="reference"),
                 lambda: prefill_attention(**prefill, backend="reference")):
        with pytest.raises(AssertionError, match="the reference ran"):
            call()


def test_a_wrong_argument_on_cuda_is_named_and_nothing_is_written():
    """Tensors of the other device, fp64 queries, a workspace that doesn't fit, an unknown backend."""
    case = make([5, 40, 0], **FAST)
    names = ("q", "page_view", "block_table", "ctx_starts", "ctx_lens", "k_noise", "v_noise")
    arguments = dict(zip(names, arguments_of(case)))
    out = torch.full_like(arguments["q"], 3.0)
    wrong = [(name, x.cpu()) for name, x in arguments.items() if isinstance(x, torch.Tensor)]
    geometry = dict(max_num_reqs=3, num_query_rows=8, num_q_heads=8, num_kv_heads=2, head_dim=128)
    wrong += [
        ("q", arguments["q"].double()), ("backend", "cuda"), ("backend", "flash"), ("mode", "quick"),
        ("workspace", AttentionWorkspace.allocate(**geometry, device="cpu")),
    ]
    for change in (dict(max_num_reqs=2), dict(num_q_heads=4), dict(num_kv_heads=4), dict(head_dim=64)):
        wrong.append(("workspace", AttentionWorkspace.allocate(**{**geometry, **change}, device="cuda")))
    for name, value in wrong:
        options = {**arguments, "out": torch.full_like(value, 3.0) if name == "q" else out, name: value}
        with pytest.raises(ValueError, match=rf"^{name}: expected .* got "):
            draft_attention(**options)
    rows = arguments_of(make([5, 40, 0], **{**FAST, "v_layout": "row"}))[1]
    for options in (dict(causal=True), dict(page_view=rows)):
        with pytest.raises(ValueError, match=r"^mode: expected .* got "):
            draft_attention(**{**arguments, **options}, mode="fast", out=out)
    assert bool((out == 3.0).all())
