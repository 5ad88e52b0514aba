"""Attention kernels against the fp64 oracle over NaN-filled pages: interpreted on a CPU, compiled on a GPU."""

import copy
import importlib.util
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_attention import FP8, LAYOUTS, NAN, Case, draft_arguments, generator, i32, nan_like, oracle
from test_block_table_kernel import on_device

from dflash_paged import attention
from dflash_paged.attention import (
    AttentionWorkspace,
    KernelConfig,
    _launch_draft_attention,
    _launch_prefill_attention,
    draft_attention,
    draft_attention_ref,
    explain_backend,
    prefill_attention,
    prefill_attention_ref,
)
from dflash_paged.store import PAGE_DTYPES, ROW_DTYPES, PageView, read_rows_ref, store_kv

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, which has no wheel for this platform"
)
pytestmark = [
    needs_triton,
    pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning"),  # NumPy's, in the interpreter
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CANARY = 0x5A  # every byte around an output
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
QUERY_DTYPE = {F32: F32, BF16: BF16, F16: F16, FP8: BF16}  # of the queries that go with pages
BAD_PAGE_IDS = (-1, -9, 2**31 - 1)
FAST_LAYOUTS = [x for x in LAYOUTS if x[1] != "row"]


# ------------------------------------------------------------------ cases and comparisons


SMALL = KernelConfig(rows=16, tile=16, stages=2, warps=4, programs=3)


def make(lens, dtype=F32, **options):
    """A `Case` whose queries have the dtype that goes with its pages."""
    return Case(lens, dtype=dtype, **{"q_dtype": QUERY_DTYPE[dtype], **options})


def on_kernel_device(x):
    """A tensor or view where kernels run: itself if it is there, else a copy with the same strides."""
    if x is None or x.device.type == DEVICE:
        return x
    if not isinstance(x, PageView):
        return on_device(x)
    return replace(x, **{name: on_kernel_device(getattr(x, name)) for name in ("k", "v", "k_scale", "v_scale")})


def arguments_of(case):
    return [on_kernel_device(x) for x in case.arguments()]


def guarded(*shape, dtype):
    """A NaN-filled slice of a larger tensor of canaries, and that tensor."""
    whole = torch.empty(*(n + 1 for n in shape[:-1]), shape[-1] + 16, dtype=dtype, device=DEVICE)
    whole.view(torch.uint8).fill_(CANARY)
    part = whole[(*(slice(n) for n in shape[:-1]), slice(8, 8 + shape[-1]))]
    return part.fill_(NAN), whole


def take(part, whole):
    """The slice's values on the CPU, once the canaries around it are found to be there."""
    values = part.cpu().clone()
    part.copy_(torch.full((8,), CANARY, dtype=torch.uint8, device=DEVICE).view(whole.dtype)[0])
    assert bool((whole.view(torch.uint8) == CANARY).all()), "a canary around an output was overwritten"
    return values


def attend(case, launch=_launch_draft_attention, *, arguments=None, **options):
    """Run `launch` into guarded outputs that hold NaN; returns out and lse on the CPU.

    Without splits unless a workspace is given, and in as few programs as there can be: the interpreter is slow.
    """
    if launch is _launch_draft_attention:
        options.setdefault("workspace", workspace_for(case, reqs=1024, max_splits=1))
    out, lse = (guarded(*shape, dtype=dtype) for shape, dtype in (
        (case.q.shape, case.q.dtype), (case.q.shape[:-1], F32)
    ))
    assert launch(*(arguments or arguments_of(case)), out=out[0], lse=lse[0], **options) is out[0]
    return take(*out), take(*lse)


def limit_of(case, mode="exact"):
    """The issue's limits of ||out - ref|| / ||ref||: fp32 arithmetic, half-precision arithmetic, fp8 products."""
    if mode == "fast":
        return 5e-2
    return 1e-5 if case.q.dtype == F32 and case.view.dtype != FP8 else 3e-3


def assert_within(out, lse, want, want_lse, limit):
    """`limit` bounds the whole error and, doubled, each request's, so that a short one can't hide.

    lse is logits: its bound is absolute, fp32 rounding of sums or 3 times what the format does to a logit.
    """
    error = (out.double() - want).flatten(1).norm(dim=1)
    size = want.flatten(1).norm(dim=1)
    assert error.norm() <= limit * size.norm(), f"error {error.norm() / size.norm():.2e} > {limit}"
    worst = int((error / size).argmax())
    assert bool((error <= 2 * limit * size).all()), f"request {worst}: error {error[worst] / size[worst]:.2e}"
    torch.testing.assert_close(lse.double(), want_lse, rtol=limit / 3, atol=max(limit, 2e-5) * 3)


def check(case, *, causal=False, window=None, sm_scale=None, limit=None, definition=oracle, **options):
    """Compare a launch with the definition; returns out and lse."""
    got = attend(case, causal=causal, sliding_window=window, sm_scale=sm_scale, **options)
    limit = limit or limit_of(case, options.get("mode", "exact"))
    assert_within(*got, *definition(case, causal, window, sm_scale), limit)
    return got


def reference(case, causal=False, window=None, sm_scale=None):
    """`oracle` by way of the fp64 reference: for cases too large for the loop over rows."""
    q, view, table, starts, lens, k, v = arguments_of(case)
    lse = torch.empty(q.shape[:-1], device=q.device)
    out = draft_attention_ref(
        q.double(), view, table, starts, lens, k.double(), v.double(), causal=causal, sliding_window=window,
        sm_scale=sm_scale, lse=lse,
    )
    return out.cpu(), lse.cpu().double()


def same_bits(got, want):
    """Whether pairs of tensors are equal bit for bit, NaN included."""
    as_bytes = lambda x: x.contiguous().view(torch.uint8)
    return all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(got, want, strict=True))


def some_config(rows=16, tile=32, programs=3):
    return KernelConfig(rows=rows, tile=tile, stages=1, warps=4, programs=programs)


def workspace_for(case, reqs=None, **options):
    num_reqs, num_rows, heads, dim = case.q.shape
    return AttentionWorkspace.allocate(
        reqs or num_reqs, num_rows, heads, case.k_noise.shape[2], dim, device=DEVICE, **options
    )


def tensors_of(workspace):
    values = [getattr(workspace, name) for name in dir(workspace) if not name.startswith("__")]
    return [x for x in values if isinstance(x, torch.Tensor)]


def slots_of(case, r):
    """Positions and slots of the rows of request r that its table can reach, readable or not."""
    stop = min(case.lens[r], case.table.shape[1] * case.tokens)
    positions = torch.arange(min(case.starts[r], stop), stop)
    return positions, case.table[r].long()[positions // case.tokens] * case.tokens + positions % case.tokens


def reread(case):
    """Make the oracle see what the pages hold now."""
    for r in range(len(case.lens)):
        positions, slots = slots_of(case, r)
        k, v = read_rows_ref(case.view, slots)
        case.k[r][positions], case.v[r][positions] = k.double(), v.double()


def fill_unreadable(case, value=1):
    """Put numbers wherever no request may read: page tails, unlisted pages, rows before a start."""
    unreadable = torch.ones(case.view.num_pages, case.tokens, dtype=torch.bool)
    for r in range(len(case.lens)):
        positions = torch.tensor(case.readable(r), dtype=torch.int64)
        unreadable[case.table[r].long()[positions // case.tokens], positions % case.tokens] = False
    for codes, transposed in zip(case.view.codes, (False, case.view.v_layout != "row")):
        if transposed:
            codes = codes.permute(0, 3, 1, 2)[:, case.view.v_columns]  # a copy, in the order of tokens
            codes[unreadable] = value
            case.view.codes[1][:, :, :, case.view.v_columns] = codes.permute(0, 2, 3, 1)
        elif case.view.layout == "HND":
            codes.transpose(1, 2)[unreadable] = value
        else:
            codes[unreadable] = value


def pick(rng, *values):
    return values[int(rng.integers(len(values)))]


def random_shape(rng):
    """What a kernel may be compiled for: dtypes, layouts and sizes of a `Case`."""
    kv_heads, dtype = pick(rng, 1, 2, 3), pick(rng, *PAGE_DTYPES)
    tokens = pick(rng, 8, 16, 32)
    layout, v_layout = pick(rng, *(x for x in LAYOUTS if tokens > 8 or x[1] != "transposed16"))
    return dict(
        dtype=dtype, layout=layout, v_layout=v_layout, tokens=tokens, kv_heads=kv_heads,
        heads=kv_heads * pick(rng, 1, 2, 3, 4), num_query_rows=pick(rng, 1, 2, 5, 9), dim=pick(rng, 8, 16, 24),
        q_dtype=pick(rng, QUERY_DTYPE[dtype], *ROW_DTYPES),
    )


def random_case(rng, shape, max_len=40, max_reqs=3):
    """Lengths, starts, table widths and holes of any kind; and the options of a call."""
    tokens = shape["tokens"]
    lens = [
        int(pick(rng, 0, 1, tokens - 1, tokens, tokens + 1, rng.integers(max_len), rng.integers(max_len)))
        for _ in range(rng.integers(1, max_reqs + 1))
    ]
    starts = [int(pick(rng, 0, 0, 0, rng.integers(n + 3))) for n in lens]
    width = pick(rng, None, None, None, 1, 2, -(-max_len // tokens) + 70)
    blocks = [(r, b) for r, n in enumerate(lens) for b in range(-(-n // tokens))]
    holes = [block for block in blocks if rng.random() < 0.15] if rng.random() < 0.4 else ()
    case = make(lens, starts=starts, width=width, holes=holes, seed=int(rng.integers(2**31)), **shape)
    for r, block in holes:
        case.table[r, block : block + 1] = pick(rng, *BAD_PAGE_IDS, case.view.num_pages)
    far = max_len + case.q.shape[1] + 2
    window = pick(rng, None, None, int(rng.integers(1, far)), int(rng.integers(1, case.q.shape[1] + 2)))
    return case, dict(causal=bool(rng.integers(2)), window=window, sm_scale=pick(rng, None, None, 0.3))


# ------------------------------------------------------------------ the definition


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])  # 4 hides one pair of 5 rows
def test_draft_attention_is_its_definition(causal, window):
    """Pitfalls 23, 24 (vLLM PR 40898, TensorRT-LLM PR 17935): the window applies, two-sided unless causal.

    Empty context, page boundary -1, 0, +1; out and lse hold NaN before the call, canaries around them.
    """
    check(make([0, 1, 7, 8, 9], num_query_rows=5), causal=causal, window=window)


@pytest.mark.parametrize("dtype", PAGE_DTYPES)
@pytest.mark.parametrize("layout, v_layout", LAYOUTS)
def test_every_page_format(dtype, layout, v_layout):
    """Pitfall 28 (vLLM PR 45343). Scales differ by head: one applied to the wrong rows or heads would show."""
    case = make([0, 17, 40], dtype, layout=layout, v_layout=v_layout, tokens=16, num_query_rows=3)
    check(case, causal=layout == "HND", window=None if v_layout == "row" else 20)


@pytest.mark.parametrize("tokens, v_layout", [
    (8, "row"), (8, "transposed"), (16, "transposed16"), (32, "row"), (32, "transposed16"), (64, "transposed"),
    (128, "row"), (128, "transposed16"), (256, "row"), (256, "transposed"),
])
def test_pages_of_every_size(tokens, v_layout):
    """Pitfall 12 (TensorRT-LLM PR 18343 review): what a PageView takes, the kernel takes."""
    lens = [0, tokens - 1, tokens, tokens + 1]
    check(make(lens, FP8, tokens=tokens, v_layout=v_layout, num_query_rows=2, heads=2, kv_heads=1, layout="HND"))


@pytest.mark.parametrize("num_query_rows, heads, kv_heads, dim", [
    (1, 1, 1, 16), (1, 8, 1, 64), (1, 9, 3, 80), (2, 14, 2, 16), (5, 2, 2, 64), (5, 4, 1, 128), (16, 3, 1, 16),
    (16, 8, 2, 64), (16, 8, 1, 128), (64, 1, 1, 16), (64, 3, 1, 64), (64, 8, 1, 16),
    (3, 2, 1, 256), (7, 3, 3, 24), (6, 16, 1, 8), (2, 64, 1, 16),
])
def test_rows_heads_and_dimensions_of_any_number(num_query_rows, heads, kv_heads, dim):
    """GQA ratios 1, 3, 4, 8 and others, Q up to 64, powers of two or not."""
    dtype = pick(np.random.default_rng(num_query_rows + heads + dim), F32, BF16, FP8)
    v_layout = "row" if dtype == F32 else "transposed"
    case = make([0, 19, 32], dtype, num_query_rows=num_query_rows, heads=heads, kv_heads=kv_heads, dim=dim,
                tokens=16, v_layout=v_layout)
    check(case, causal=dtype == BF16, window=(None, 6)[num_query_rows % 2], definition=reference)


@pytest.mark.parametrize("window", [2, 16, 70])
@pytest.mark.parametrize("causal", [False, True])
def test_windows_below_and_above_a_long_suffix(window, causal):
    """Pitfalls 23, 24: with several tiles of query rows, of which some see no key of a tile at all."""
    case = make([9, 75], num_query_rows=64, heads=1, kv_heads=1, dim=16, tokens=32)
    check(case, causal=causal, window=window, definition=reference, config=some_config())


def test_a_window_cuts_both_sides_of_a_bidirectional_block():
    """Pitfall 24 (TensorRT-LLM PR 17935): row 0 doesn't see row w, nor row w row 0; causal sees what came before."""
    case = make([20], num_query_rows=16, heads=1, kv_heads=1, starts=[20])
    case.q.zero_()  # every visible key weighs the same
    case.v_noise[0, :, 0] = torch.eye(16)
    i, j = torch.arange(16)[:, None], torch.arange(16)[None]
    for window, causal in itertools.product((1, 2, 15, 16), (False, True)):
        out, _ = attend(case, sliding_window=window, causal=causal)
        visible = ((i - j).abs() < window) & ((j <= i) if causal else True)
        assert torch.equal(out[0, :, 0] > 0, visible)


def test_random_cases():
    """Any mixture of formats, shapes, lengths, starts, widths, holes and options."""
    rng = np.random.default_rng(5)
    for _ in range(20):
        case, options = random_case(rng, random_shape(rng))
        check(case, **options)


@pytest.mark.parametrize("q_dtype, dtype", [
    (F32, BF16), (F32, F16), (F32, FP8), (BF16, F32), (BF16, F16), (F16, BF16), (F16, FP8), (F16, F32),
])
def test_queries_of_another_dtype_than_the_pages(q_dtype, dtype):
    """fp32 queries lose nothing to half-precision pages: 1e-5; with fp8 pages products may be fp16: 3e-3."""
    check(make([0, 7, 20], dtype, q_dtype=q_dtype))


@pytest.mark.parametrize("dtype, noise", [(F32, BF16), (F32, F16), (BF16, F32), (FP8, F32), (FP8, F16)])
def test_noise_of_another_dtype_than_the_queries(dtype, noise):
    case = make([0, 7, 20], dtype)
    case.k_noise, case.v_noise = case.k_noise.to(noise), case.v_noise.to(noise)
    check(case, causal=True)


@pytest.mark.parametrize("sm_scale", [0.7, 3])
def test_sm_scale_replaces_the_default(sm_scale):
    """A positive number: the maximum is taken before it is multiplied in."""
    check(make([0, 9, 20], F32), sm_scale=sm_scale)


@pytest.mark.parametrize("sm_scale", [0, -0.4, math.inf, math.nan, "1", True, 10**400, 1e-31, 1e31])
def test_sm_scale_must_be_positive_and_no_extreme(sm_scale):
    """The kernel multiplies row maxima by it in fp32, so others are refused by name."""
    with pytest.raises(ValueError, match=r"^sm_scale: expected a number from 1e-30 to 1e30 or None, got "):
        draft_attention(**draft_arguments(), sm_scale=sm_scale)


def test_wide_pages_may_have_scales_too():
    """k_scale multiplies paged logits, v_scale the paged sum; the suffix is neither quantised nor scaled."""
    scales = (torch.tensor([0.5, 4.0]), torch.tensor([3.0, 0.25]))
    for dtype in (F32, BF16):
        case = make([0, 12, 20], dtype, scales=scales)
        check(case)
        check_prefill(case, [3, 0, 9])


@pytest.mark.parametrize("rows, tile, programs", [
    (16, 16, 1), (32, 64, 3), (64, 16, 5), (16, 128, 1000), (128, 32, 3),
])
def test_any_configuration(rows, tile, programs):
    """Tiles below and above a page and the suffix, of fewer and more rows than a request has."""
    config = some_config(rows, tile, programs)
    for tokens, v_layout in ((8, "row"), (32, "transposed16")):
        case = make([0, 9, 70], tokens=tokens, v_layout=v_layout, num_query_rows=9, heads=4, kv_heads=1)
        check(case, config=config, window=40, causal=tokens == 8)


def test_tensors_may_be_strided_slices_of_others():
    """Queries and noise out of one fused projection, tables and lengths out of larger ones, results into them."""
    for dtype in (F32, BF16):
        case = make([9, 20], dtype)
        fused = torch.randn(2, 4, 10, 16, generator=generator(3)).to(case.q.dtype)
        case.q, case.k_noise, case.v_noise = fused[:, :, :6], fused[:, :, 6:8], fused[:, :, 8:]
        by_head = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)  # noqa: E731
        for change in (lambda x: x, by_head):
            case.q, case.k_noise, case.v_noise = (change(x) for x in (case.q, case.k_noise, case.v_noise))
            arguments = list(case.arguments())
            wide = torch.full((4, case.table.shape[1] + 3), 2**30, dtype=torch.int32)
            wide[::2, : case.table.shape[1]] = case.table
            arguments[2] = wide[::2, : case.table.shape[1]]
            arguments[3:5] = (torch.cat([x + 999, x, x + 999])[2:4] for x in arguments[3:5])
            if DEVICE == "cuda":
                arguments = [on_kernel_device(x) for x in arguments]
            assert_within(*attend(case, arguments=arguments), *oracle(case), limit_of(case))


def test_outputs_are_made_where_none_are_given():
    case = make([9, 20], BF16)
    got, want = _launch_draft_attention(*arguments_of(case)), attend(case)[0]
    assert got.shape == case.q.shape and got.dtype == BF16 and same_bits([got.cpu()], [want])


def test_no_requests():
    q, view, table, starts, lens, k, v = arguments_of(make([3]))
    out = _launch_draft_attention(q[:0], view, table[:0], starts[:0], lens[:0], k[:0], v[:0])
    assert out.shape == (0, 4, 6, 16)


# ------------------------------------------------------------------ what can't be read


@pytest.mark.parametrize("entry", [*BAD_PAGE_IDS, "num_pages"])
def test_table_entries_that_name_no_page_are_masked(entry):
    """Pitfalls 4, 22 (TensorRT-LLM PR 19040): holes in the middle, at the start, at the end, everywhere."""
    for holes in ([(0, 9)], [(0, 0), (0, 18), (1, 0)], [(0, b) for b in range(19)]):
        case = make([150, 10], holes=holes, heads=3, kv_heads=1)
        for r, block in holes:
            case.table[r, block] = case.view.num_pages if entry == "num_pages" else entry
        check(case, window=130 if len(holes) == 3 else None, config=some_config())


def test_positions_past_the_table_are_masked():
    """Pitfall 5 (TensorRT-LLM PR 19040 review): a length beyond the table's width reads what the table holds."""
    for window, dtype in ((None, F32), (37, FP8), (4, F32)):
        check(make([50, 16, 17], dtype, width=2), window=window, causal=dtype == FP8)


@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_starts_hide_what_lies_before_them(dtype):
    """Pitfall 16 (TensorRT-LLM PR 18093): within a page, at its edges, at the end and past it."""
    options = dict(dtype=dtype, heads=3, kv_heads=1)
    case = make([30, 30, 30, 30, 9, 9], starts=[1, 7, 8, 17, 9, 12], **options)
    check(case, window=10)
    got = check(case)
    bare = make([0] * 6, **options, scales=(case.view.k_scale, case.view.v_scale) if dtype == FP8 else None)
    bare.q, bare.k_noise, bare.v_noise = case.q, case.k_noise, case.v_noise
    assert same_bits([x[4:] for x in got], [x[4:] for x in attend(bare)])


def test_negative_starts_and_lengths_count_as_zero():
    """As the reference takes them; with DFLASH_PAGED_DEBUG=1 they raise in the public calls."""
    case = make([0, 9, 20])
    q, view, table, _, _, k, v = arguments_of(case)
    starts, lens = (on_kernel_device(i32(x)) for x in ([0, -3, -(2**31)], [-1, 9, 20]))
    got = _launch_draft_attention(q, view, table, starts, lens, k, v)
    assert_within(got.cpu(), torch.zeros(1), oracle(case)[0], torch.zeros(1).double(), 1e-5)


def test_a_window_reads_only_its_pages():
    """Pitfalls 22, 23 (vLLM PR 40898): pages out of the window may be gone, and hold NaN where they are not."""
    for dtype, entry in itertools.product((F32, FP8), BAD_PAGE_IDS):
        case = make([40], dtype, num_query_rows=3)
        want = oracle(case, window=10)
        case.table[0, :3] = entry  # the first query, at 40, reads back to row 31
        page = case.table[0, 3].item()
        for codes in case.view.codes:
            nan_like(codes[page, : 31 - 24])
        assert_within(*attend(case, sliding_window=10), *want, limit_of(case))


@pytest.mark.parametrize("dtype", [F32, FP8])
@pytest.mark.parametrize("layout, v_layout", [("NHD", "row"), ("HND", "row"), ("HND", "transposed16")])
def test_unreadable_bytes_change_nothing(dtype, layout, v_layout):
    """Page tails, unlisted pages and padding hold NaN in every case here; numbers there give the same bits."""
    case = make([5, 39], dtype, starts=[2, 9], num_query_rows=3, tokens=16, layout=layout, v_layout=v_layout)
    first = attend(case)
    assert all(bool(torch.isfinite(x).all()) for x in first)
    fill_unreadable(case)
    assert not any(bool(codes.float().isnan().any()) for codes in (case.view.k, case.view.v))
    assert same_bits(attend(case), first)


def test_pages_and_inputs_are_left_as_they_were():
    """Pitfalls 6, 18 (TensorRT-LLM dflash.py, vLLM PR 42971): the suffix goes to no page, whatever the room."""
    for dtype in PAGE_DTYPES:
        case = make([5, 8, 0], dtype, heads=3, kv_heads=1)
        arguments = arguments_of(case)
        tensors = [*arguments[1].codes, *(x for x in arguments if isinstance(x, torch.Tensor))]
        before = [x.clone() for x in tensors]
        attend(case, arguments=arguments, causal=True, sliding_window=3)
        assert same_bits(tensors, before)


def test_a_nan_of_one_request_stays_with_it():
    """Of a query with its row, of noise with its request, in whichever program both were worked on."""
    case = make([9, 20, 0])
    clean, _ = attend(case, config=some_config(programs=1))
    case.q[1, 2], case.k_noise[2, 0] = NAN, NAN
    out, lse = attend(case, config=some_config(programs=1))
    assert same_bits([out[0], out[1, [0, 1, 3]]], [clean[0], clean[1, [0, 1, 3]]])
    assert out[1, 2].isnan().all() and out[2].isnan().all() and lse[2].isnan().all()


@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_a_readable_nan_is_not_hidden(dtype):
    """A NaN in K spoils the rows that see it, one in V its dimension, as in the definition."""
    for which, row in itertools.product((0, 1), (3, 12)):
        case = make([20], dtype, num_query_rows=2, starts=[1])
        page = case.table[0, row // 8].item()
        nan_like(case.view.codes[which][page, row % 8, 1, 5:6])
        reread(case)
        for window in (None, 12):  # row 3 is out of the window
            out, lse = attend(case, sliding_window=window)
            want, want_lse = oracle(case, window=window)
            assert torch.equal(out.isnan(), want.isnan()) and torch.equal(lse.isnan(), want_lse.isnan())
            assert window or bool(out.isnan().any())


# ------------------------------------------------------------------ numbers far from one


@pytest.mark.parametrize("dtype", [BF16, FP8])
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_queries_past_what_fp16_holds(dtype, mode):
    """A dimension of 1e5 in q meets one of nearly nothing in K: neither overflows nor drowns the rest."""
    if mode == "fast" and dtype != FP8:
        pytest.skip("fast is for fp8 pages")
    case = make([0, 9, 40], dtype, tokens=16, v_layout="transposed", dim=32)
    case.q[..., 0] = torch.tensor([1e5, -9e4, 7e4, 1e5])[:, None]
    if mode == "exact":
        case.k_noise[..., 0] = 1e-5
        codes = case.view.codes[0]
        codes[..., 0][~case.view.k[..., 0].float().isnan()] = 0
        reread(case)
        assert oracle(case)[1].abs().max() < 30
    check(case, mode=mode, limit=None if mode == "exact" else 1.0)  # fast drowns the small dimensions: finite is all


@pytest.mark.parametrize("factor", [1e2, 1e6])
def test_noise_values_past_the_pages_range(factor):
    """v_noise is no page: values far beyond 448 * v_scale (9 to 460 here) neither saturate nor overflow."""
    for mode, dtype in (("exact", FP8), ("exact", BF16), ("fast", FP8)):
        case = make([0, 3, 20], dtype, tokens=16, v_layout="transposed", dim=32)
        case.v_noise *= factor
        check(case, mode=mode)


@pytest.mark.parametrize("dtype", PAGE_DTYPES)
def test_large_logits_do_not_overflow(dtype):
    """Logits of some hundreds: the sum is taken relative to the maximum, wherever in the row it is."""
    case = make([0, 9, 40], dtype)
    case.q *= 64
    out, lse = attend(case, sm_scale=1.0)
    want, want_lse = oracle(case, sm_scale=1.0)
    assert want_lse.max() > 300
    # A logit of 500 is off by 500 * 2**-23 in fp32, by 500 * 2**-12 at most where queries become fp16.
    limit = 1e-4 if dtype == F32 else 2e-2
    assert_within(out, lse, want, want_lse, limit)


def test_subnormal_codes_and_tiny_scales():
    """fp8's smallest codes survive the products; scales of 2^-40 and 2^20 neither vanish nor overflow."""
    scales = (torch.tensor([2.0**-10, 2.0**-3]), torch.tensor([2.0**-40, 2.0**20]))
    case = make([9, 40], FP8, scales=scales)
    for codes in case.view.codes:
        numbers = codes & 0x7F < 0x7F
        codes[numbers] &= 0x8F  # sign and three lowest bits: 0 to 7 * 2^-9, and twice that
    reread(case)
    case.k_noise *= 0.01
    case.v_noise[:, :, 0] *= 2.0**-48
    case.v_noise[:, :, 1] *= 2.0**12
    got, (want, want_lse) = attend(case), oracle(case)
    for heads in (slice(0, 3), slice(3, 6)):
        assert_within(got[0][:, :, heads], got[1][:, :, heads], want[:, :, heads], want_lse[:, :, heads], 3e-3)


# ------------------------------------------------------------------ fp8


def all_codes_case(nan_codes):
    """One page that holds every fp8 code in K, and in V; NaN codes replaced by zeros unless asked for."""
    case = make([16, 11], FP8, tokens=16, heads=2, kv_heads=1, scales=(torch.full((1,), 1e-2),) * 2)
    codes = torch.arange(256, dtype=torch.uint8).view(16, 1, 16)
    if not nan_codes:
        codes = torch.where(codes % 128 == 127, 0, codes)
    page = case.table[0, 0].item()
    case.view.codes[0][page], case.view.codes[1][page] = codes, codes.flip(0).flip(2)
    reread(case)
    return case


@pytest.mark.parametrize("nan_codes", [False, True])
def test_all_fp8_codes_are_decoded_from_bytes_as_natively(nan_codes):
    """As on Ampere: the same bits; NaN codes are NaN, not 480."""
    case = all_codes_case(nan_codes)
    native, decoded = attend(case), attend(case, native_fp8=False)
    want = oracle(case)
    for got in (native, decoded):
        assert torch.equal(got[0].isnan(), want[0].isnan()) and torch.equal(got[1].isnan(), want[1].isnan())
    assert bool(native[0][0].isnan().all()) == nan_codes
    if nan_codes:  # request 1 has none
        native, decoded, want = ([x[1:] for x in got] for got in (native, decoded, want))
    assert same_bits(native, decoded)
    assert_within(*decoded, *want, 3e-3)


@pytest.mark.parametrize("layout, v_layout", LAYOUTS)
def test_fp8_decoded_from_bytes_gives_the_same_bits(layout, v_layout):
    case = make([0, 37], FP8, layout=layout, v_layout=v_layout, tokens=16)
    assert same_bits(attend(case, sliding_window=19), attend(case, sliding_window=19, native_fp8=False))


@pytest.mark.parametrize("tokens", [16, 256])
@pytest.mark.parametrize("layout, v_layout", FAST_LAYOUTS)
def test_fast_mode(layout, v_layout, tokens):
    """fp8 products: 5e-2 of the definition, and of the reference that rounds as they do."""
    case = make([0, 1, 16, 70], FP8, layout=layout, v_layout=v_layout, tokens=tokens, dim=64)
    window = 20 if tokens == 16 else None
    out, _ = check(case, mode="fast", window=window)
    want = draft_attention_ref(*case.arguments(), mode="fast", sliding_window=window).double()
    assert (out.double() - want).norm() <= 5e-2 * want.norm()


@pytest.mark.parametrize("num_query_rows, heads, kv_heads, dim", [
    (1, 1, 1, 64), (16, 8, 2, 128), (16, 3, 1, 32), (64, 4, 1, 64), (5, 8, 1, 80), (2, 2, 2, 256),
])
def test_fast_mode_with_any_rows_heads_and_dimensions(num_query_rows, heads, kv_heads, dim):
    case = make([0, 19, 50], FP8, num_query_rows=num_query_rows, heads=heads, kv_heads=kv_heads, dim=dim,
                tokens=32, layout="HND", v_layout="transposed16")
    check(case, mode="fast", definition=reference)


def test_fast_mode_masks_what_exact_masks():
    """Holes, starts, narrow tables and NaN around the readable rows."""
    for holes, width in (((0, 1), None), ((1, 0), 2)):
        case = make([70, 40, 0], FP8, starts=[5, 16, 0], holes=[holes], width=width, tokens=16, dim=32,
                    v_layout="transposed16")
        check(case, mode="fast", window=50)
        check(case, mode="fast", config=some_config())


# ------------------------------------------------------------------ splits and the workspace


WIDE_TILES = dict(rows=16, tile=128)  # a split has 512 tokens at least: the interpreter takes them at a stroke


@pytest.mark.parametrize("dtype, mode", [(F32, "exact"), (FP8, "fast")])
def test_splits_agree_with_the_whole(dtype, mode):
    """Requests of no, one and several splits, the last one short; lse is the whole row's."""
    case = make([0, 1, 513, 1300], dtype, tokens=128, heads=3, kv_heads=1, num_query_rows=2, dim=32,
                v_layout="row" if mode == "exact" else "transposed")
    config = some_config(**WIDE_TILES)
    results = [
        check(case, mode=mode, config=config, definition=reference,
              workspace=workspace_for(case, reqs=64, max_splits=n)) for n in (1, 2, 9)
    ]
    assert not same_bits(results[0], results[1])  # something was split
    for out, lse in results[1:]:
        limit = 1e-6 if mode == "exact" else 5e-2
        torch.testing.assert_close(lse, results[0][1], rtol=limit, atol=limit)
        assert (out - results[0][0]).double().norm() <= limit * results[0][0].double().norm()


@pytest.mark.parametrize("causal, window", [(False, None), (True, 900)])
def test_splits_with_every_mask(causal, window):
    """A split's keys may all be hidden: by the start, the window, holes, or a table that ends before it."""
    options = dict(tokens=32, heads=2, kv_heads=1, num_query_rows=5)
    some, most = [(0, b) for b in (0, 1, 2, 3, 9, 20)], [(1, b) for b in range(2, 34)]
    for case in (
        Case([1100, 1100, 40], holes=some + most, **options),
        Case([1100, 1800, 0], starts=[700, 10, 0], width=20, **options),
    ):
        workspace = workspace_for(case, reqs=64, max_splits=4)
        check(case, causal=causal, window=window, definition=reference, config=some_config(**WIDE_TILES),
              workspace=workspace)


def test_the_number_of_programs_changes_no_bit():
    """One program for everything, a few, and more than there is work."""
    case = make([1100, 0, 9], FP8, tokens=128, num_query_rows=7, heads=2, kv_heads=1)
    workspace = workspace_for(case, reqs=64, max_splits=3)
    results = [
        attend(case, workspace=workspace, config=some_config(**WIDE_TILES, programs=n)) for n in (1, 3, 64)
    ]
    assert all(same_bits(results[0], other) for other in results[1:])


def moved(case, order):
    """The case's arguments with its requests in another order, or a few of them."""
    order = torch.tensor(order, device=DEVICE)
    return [x if isinstance(x, PageView) else x[order] for x in arguments_of(case)]


@pytest.mark.parametrize("dtype, mode", [(F32, "exact"), (FP8, "fast")])
def test_a_requests_bits_depend_on_nothing_beside_it(dtype, mode):
    """Any batch size, place and neighbours, with one workspace for more requests than there are."""
    case = make([1030, 0, 64, 3, 600], dtype, tokens=64, num_query_rows=3, v_layout="transposed", heads=3,
                kv_heads=1, dim=32)
    workspace = workspace_for(case, reqs=64, max_splits=4)
    options = dict(mode=mode, workspace=workspace, config=some_config(**WIDE_TILES))
    whole = attend(case, **options)
    for order in ([3, 0, 4, 1, 2], [4], [2, 1], [4, 3, 4, 1, 2, 2]):
        part = copy.copy(case)
        part.q = case.q[order]
        assert same_bits(attend(part, arguments=moved(case, order), **options), [x[order] for x in whole]), order


def test_permuting_requests_changes_no_bit_without_a_workspace():
    case, order = make([37, 0, 64, 3, 1100], tokens=64, heads=2, kv_heads=1), [3, 0, 4, 1, 2]
    options = dict(workspace=None, config=some_config(tile=64))
    whole = attend(case, **options)
    assert same_bits(attend(case, arguments=moved(case, order), **options), [x[order] for x in whole])


def test_moving_pages_changes_no_bit():
    for dtype, (layout, v_layout) in zip((F32, FP8, BF16), LAYOUTS[::-2]):
        arguments = dict(lens=[37, 20], dtype=dtype, layout=layout, v_layout=v_layout, tokens=16)
        one, two = (make(**arguments, page_seed=s) for s in (0, 1))
        assert not torch.equal(one.table, two.table)
        options = dict(sliding_window=20) if layout == "NHD" else {}
        assert same_bits(attend(one, **options), attend(two, **options))


def test_a_workspace_is_left_ready_for_the_next_call():
    """Layers with other windows, batches of other sizes, a call again: each as with a workspace of its own."""
    options = dict(tokens=128, num_query_rows=2, heads=2, kv_heads=1)
    cases = [make(lens, **options) for lens in ([1030, 0, 90], [5], [64, 600, 1, 0])]
    new = lambda: workspace_for(cases[0], reqs=64, max_splits=3)
    shared = new()
    counters = [x for x in tensors_of(shared) if not x.is_floating_point()]
    start = [x.clone() for x in counters]
    for case, window in ((cases[0], None), (cases[1], None), (cases[2], 590), (cases[0], 700)):
        options = dict(sliding_window=window, config=some_config(**WIDE_TILES))
        own = attend(case, workspace=new(), **options)
        for _ in range(2):
            assert same_bits(attend(case, workspace=shared, **options), own)
            assert same_bits(counters, start)


def test_what_a_workspace_held_does_not_matter():
    """Partial results of an earlier call, NaN among them, are overwritten before they are read."""
    case = make([1100, 0, 600, 3], tokens=128, heads=2, kv_heads=1)
    options = dict(config=some_config(**WIDE_TILES))
    clean = attend(case, workspace=workspace_for(case, reqs=64, max_splits=5), **options)
    workspace = workspace_for(case, reqs=64, max_splits=5)
    for x in tensors_of(workspace):
        if x.is_floating_point():
            x.fill_(NAN)
    assert same_bits(attend(case, workspace=workspace, **options), clean)


def test_a_workspace_counts_its_bytes():
    """Pitfall 11 (TensorRT-LLM PR 18343): every byte is in num_bytes, and none of them grows with the context."""
    for reqs, splits in ((1, None), (64, None), (4, 1), (4, 7)):
        options = {} if splits is None else dict(max_splits=splits)
        workspace = AttentionWorkspace.allocate(reqs, 16, 8, 2, 128, device=DEVICE, **options)
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors_of(workspace)}
        assert workspace.num_bytes == sum(storages.values()) > 0
        assert workspace.bounds.max_splits >= 1 and splits in (None, workspace.bounds.max_splits)
        # A partial result is fp32 D values, its maximum and its sum, of every row and split; half more is slack.
        assert workspace.num_bytes <= 1.5 * reqs * workspace.bounds.max_splits * 16 * 8 * (128 + 2) * 4 + 2**16


# ------------------------------------------------------------------ prefill


def chunk_of(case, r, q, k, v):
    """A case of request r alone whose query rows are a chunk."""
    chunk = copy.copy(case)
    chunk.lens, chunk.starts, chunk.table = case.lens[r : r + 1], case.starts[r : r + 1], case.table[r : r + 1]
    chunk.k, chunk.v, chunk.q, chunk.k_noise, chunk.v_noise = [case.k[r]], [case.v[r]], q[None], k[None], v[None]
    chunk.holes = {(0, block) for s, block in case.holes if s == r}
    return chunk


def prefill_inputs(case, sizes, trailing=2, seed=0):
    """Packed q, k and v of chunks; rows of nobody are NaN."""
    rng, (heads, dim), total = generator(seed), case.q.shape[2:], sum(sizes)
    shapes = [(total + trailing, h, dim) for h in (heads, case.k_noise.shape[2], case.k_noise.shape[2])]
    rows = [torch.randn(shape, generator=rng).to(case.q.dtype) for shape in shapes]
    for x in rows:
        x[total:] = NAN
    return (*rows, i32(np.cumsum([0, *sizes])))


def check_prefill(case, sizes, *, trailing=2, window=None, sm_scale=None, launch=_launch_prefill_attention,
                  definition=oracle, inputs=None, **options):
    """Compare chunks of given sizes with the definition, a request at a time; returns out and lse."""
    q, k, v, bounds = inputs or prefill_inputs(case, sizes, trailing)
    out, lse = guarded(*q.shape, dtype=q.dtype), guarded(*q.shape[:-1], dtype=F32)
    on_gpu = [on_kernel_device(x) for x in (q, *case.arguments()[1:3], bounds, *case.arguments()[3:5], k, v)]
    assert launch(*on_gpu, sliding_window=window, sm_scale=sm_scale, out=out[0], lse=lse[0], **options) is out[0]
    out, lse = take(*out), take(*lse)
    for r, (a, b) in enumerate(itertools.pairwise(bounds.tolist())):
        if a < b:
            want = definition(chunk_of(case, r, q[a:b], k[a:b], v[a:b]), True, window, sm_scale)
            assert_within(out[None, a:b], lse[None, a:b], *want, limit_of(case))
    end = int(bounds[-1])
    assert bool((out[end:] == 0).all()) and bool((lse[end:] == -float("inf")).all())
    return out, lse


@pytest.mark.parametrize("dtype, window", [
    (F32, None), (F32, 1), (F32, 5), (F32, 40), (BF16, 5), (F16, None), (FP8, None), (FP8, 5),
])
def test_prefill_is_its_definition(dtype, window):
    """Pitfall 23: chunks of one and many rows, a padded request, starts, rows of nobody; any window."""
    case = make([0, 12, 30, 8, 5], dtype, starts=[0, 3, 0, 8, 0])
    check_prefill(case, [9, 1, 6, 4, 0], window=window)


@pytest.mark.parametrize("layout, v_layout", LAYOUTS)
def test_prefill_of_every_layout(layout, v_layout):
    for dtype, sizes in ((FP8, [5, 3, 2]), (BF16, [0, 0, 4])):
        check_prefill(make([17, 0, 40], dtype, tokens=16, layout=layout, v_layout=v_layout), sizes)


@pytest.mark.parametrize("window", [None, 30])
def test_prefill_of_more_rows_than_a_tile(window):
    case = make([70, 0, 9], tokens=32, heads=1, kv_heads=1)
    for config in (None, some_config(rows=32)):
        check_prefill(case, [150, 64, 33], window=window, definition=reference, config=config)


@pytest.mark.parametrize("dtype, heads, kv_heads, dim", [
    (F32, 1, 1, 64), (FP8, 8, 1, 16), (BF16, 9, 3, 80), (FP8, 4, 1, 128), (F32, 14, 2, 8), (BF16, 2, 2, 256),
])
def test_prefill_with_any_heads_and_dimensions(dtype, heads, kv_heads, dim):
    case = make([20, 3], dtype, heads=heads, kv_heads=kv_heads, dim=dim, tokens=16)
    check_prefill(case, [3, 21], sm_scale=0.2 if dim == 16 else None)


def test_prefill_masks_what_the_table_does_not_name():
    """Pitfalls 4, 5 (TensorRT-LLM PR 19040): holes, a table narrower than the length, pages out of range."""
    for entry in BAD_PAGE_IDS:
        case = make([30, 10, 50], holes=[(0, 1), (1, 0), (2, 1)], width=4)
        for r, block in case.holes:
            case.table[r, block] = entry
        check_prefill(case, [3, 2, 5], window=20 if entry == -1 else None)


@pytest.mark.parametrize("sizes, trailing", [
    ([0, 0, 0], 0), ([0, 0, 0], 5), ([0, 3, 0], 0), ([1, 1, 1], 0), ([0, 0, 7], 70),
])
def test_prefill_with_requests_of_no_rows(sizes, trailing):
    check_prefill(make([9, 0, 20]), sizes, trailing=trailing)


def test_a_prefilled_chunk_is_a_verify_pass():
    """The same rows through both entry points, and from slices of a fused projection."""
    case = make([0, 7, 20], FP8, num_query_rows=6)
    want = check(case, causal=True, window=11)
    q, k, v = (x.flatten(0, 1) for x in (case.q, case.k_noise, case.v_noise))
    fused = torch.cat([q, k, v], 1)
    for rows in ((q, k, v), (fused[:, :6], fused[:, 6:8], fused[:, 8:])):
        got = check_prefill(case, [6, 6, 6], window=11, inputs=(*rows, i32([0, 6, 12, 18])))
        assert (got[0].view_as(want[0]) - want[0]).double().norm() <= 4e-3 * want[0].double().norm()


def test_packed_chunks_do_not_see_each_other():
    """A chunk's bits are those it has alone, wherever it lies among others and whoever they are."""
    case = make([12, 5, 30], FP8, tokens=16)
    sizes = [9, 4, 20]
    q, k, v, bounds = prefill_inputs(case, sizes)
    out, lse = check_prefill(case, sizes, inputs=(q, k, v, bounds))
    view, table, starts, lens = case.arguments()[1:5]
    for r, (a, b) in enumerate(itertools.pairwise(bounds.tolist())):
        alone_lse = torch.empty(b - a, 6, device=DEVICE)
        alone = _launch_prefill_attention(*(on_kernel_device(x) for x in (
            q[a:b], view, table[r : r + 1], i32([0, b - a]), starts[r : r + 1], lens[r : r + 1], k[a:b], v[a:b],
        )), lse=alone_lse)
        assert same_bits([alone.cpu(), alone_lse.cpu()], [out[a:b], lse[a:b]])


def test_random_prefills():
    rng = np.random.default_rng(9)
    for _ in range(12):
        case, options = random_case(rng, random_shape(rng))
        del options["causal"]
        sizes = [int(pick(rng, 0, 1, rng.integers(20))) for _ in case.lens]
        check_prefill(case, sizes, trailing=int(rng.integers(3)), **options)


# ------------------------------------------------------------------ addresses


def relocated(case, pools, first, step):
    """The case with its pages moved to `first`, `first + step`, ... of a view of larger pools; bits unchanged."""
    view, far = case.view, copy.copy(case)
    ids = torch.arange(view.num_pages) * step + first
    for pool, codes in zip(pools, view.codes):
        pool[ids.to(pool.device)] = codes.to(pool.device)
    far.view = replace(view, k=pools[0].view(view.dtype), v=pools[1].view(view.dtype))
    far.table = torch.where(case.table >= 0, ids[case.table.clamp(min=0).long()].int(), case.table)
    return far


@pytest.mark.parametrize("layout, v_layout", [("NHD", "row"), ("HND", "transposed16")])
@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu has its own, with a pool in device memory")
def test_pages_past_two_to_the_31_elements(layout, v_layout):
    """Pitfall 39 (vLLM PR 47671): page id times stride is an int64 product.

    The pool is address space that nothing touches but its pages; a product that wrapped would land in the
    zeros before it.
    """
    case = make([37, 20, 0], FP8, tokens=16, layout=layout, v_layout=v_layout)
    stride, pages = 2**16, 2**15 + case.view.num_pages
    memory = torch.empty(2**31 + pages * stride, dtype=torch.uint8)
    k, v = case.view.codes
    pools = [
        memory.as_strided((pages, *x.shape[1:]), (stride, *x[0].contiguous().stride()), 2**31 + offset)
        for x, offset in ((k, 0), (v, stride // 2))
    ]
    far = relocated(case, pools, 2**15, 1)
    assert int(far.table.max()) * stride >= 2**31
    assert same_bits(attend(far), attend(case))
    assert same_bits(check_prefill(far, [3, 5, 0]), check_prefill(case, [3, 5, 0]))


# ------------------------------------------------------------------ compilation


class Recorder:
    """Stands for a kernel and keeps what it would be compiled with."""

    def __init__(self, name, constants):
        self.name, self.constants = name, constants

    def __getitem__(self, grid):
        def launch(*args, **named):
            compiled_in = {k: x for k, x in named.items() if k.isupper() or k in ("num_warps", "num_stages")}
            self.constants.append((self.name, compiled_in))

        return launch


@pytest.fixture
def compiled_in(monkeypatch):
    """Replaces the module's kernels; the list of what each launch would be compiled with."""
    constants = []
    for name in list(vars(attention)):
        if name.endswith("_kernel"):
            monkeypatch.setattr(attention, name, Recorder(name, constants))
    return constants


def test_nothing_that_is_compiled_in_depends_on_the_batch(compiled_in):
    """Pitfall 40 (vLLM PR 49903): requests, widths, lengths, pages and the window's size are run-time arguments."""
    workspace = workspace_for(make([0], BF16), reqs=33)
    for lens, width, window in (([0], 1, 5), ([1, 16], 16, 16), ([9] * 17, 2, 1), ([500] * 3, 100, 1000)):
        case = make(lens, BF16, width=width)
        _launch_draft_attention(*arguments_of(case), sliding_window=window, workspace=workspace)
    assert len(compiled_in) >= 4
    for name in {name for name, _ in compiled_in}:
        assert len({repr(sorted(c.items())) for n, c in compiled_in if n == name}) == 1, name
    compiled_in.clear()
    for sizes, lens, window in (
        ([1], [9], 5), ([16, 3], [1, 16], 16), ([300] * 3, [9] * 3, 1), ([1] * 40, [3] * 40, 17),
    ):
        case = make(lens, BF16)
        q, k, v, bounds = prefill_inputs(case, sizes)
        view, table, starts, lens = case.arguments()[1:5]
        arguments = (q, view, table, bounds, starts, lens, k, v)
        _launch_prefill_attention(*(on_kernel_device(x) for x in arguments), sliding_window=window)
    assert len(compiled_in) >= 4
    for name in {name for name, _ in compiled_in}:
        assert len({repr(sorted(c.items())) for n, c in compiled_in if n == name}) == 1, name


@pytest.mark.parametrize("max_num_reqs", [4, 300])
def test_requests_are_cut_into_as_many_splits_as_the_rule_says(max_num_reqs):
    """`num_splits_ref`, which the notebook draws, is what the kernel does: partials appear for so many splits."""
    lens = [400, 1300, 3000, 5000]
    case = make(lens, heads=1, kv_heads=1, num_query_rows=1, tokens=256)
    workspace = AttentionWorkspace.allocate(max_num_reqs, 1, 1, 1, 16, device=DEVICE, max_splits=8)
    workspace.partial_lse.fill_(math.nan)
    workspace.partial.fill_(math.nan)
    config = KernelConfig(rows=16, tile=128, stages=2, warps=4, programs=3)
    out = _launch_draft_attention(*arguments_of(case), workspace=workspace, config=config)
    want = draft_attention_ref(*case.arguments())
    assert float((out.cpu().double() - want.double()).norm() / want.double().norm()) < 1e-5  # nothing else was read
    written = ~workspace.partial_lse.view(max_num_reqs, 8, 16)[:4, :, 0].isnan()
    splits = [attention.num_splits_ref(n, workspace.bounds) for n in lens]
    assert splits == ([1, 3, 6, 8] if max_num_reqs == 4 else [1, 1, 1, 3])
    assert written.sum(1).tolist() == [n if n > 1 else 0 for n in splits]


@pytest.fixture
def touched(monkeypatch):
    """Every address that an interpreted kernel reads or writes, as (lowest, highest) of each access."""
    if DEVICE == "cuda":
        pytest.skip("addresses are watched in the interpreter")
    from triton.runtime import interpreter

    seen = []

    def watch(name):
        original = getattr(interpreter.InterpreterBuilder, name)

        def wrapped(self, ptrs, *args):
            mask = next(a for a in args if getattr(a, "data", None) is not None and a.data.dtype == bool)
            active = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]
            if active.size:
                seen.append((int(active.min()), int(active.max())))
            return original(self, ptrs, *args)

        monkeypatch.setattr(interpreter.InterpreterBuilder, name, wrapped)

    watch("create_masked_load")
    watch("create_masked_store")
    return seen


@pytest.mark.parametrize("lens, starts, width, window", [
    ([50, 5000], None, 2, 37), ([9, 20], [9, 205], None, None), ([16, 0], None, 2, 5), ([40, 9], [2**31 - 1, 0], None, 4),
], ids=["window past the table", "start past the length", "late tiles", "start of 2^31 - 1"])
def test_no_table_entry_past_a_requests_row_is_read(touched, lens, starts, width, window):
    """Pitfalls 4, 5: also where nothing is readable, no entry outside the table is looked at."""
    case = make(lens, starts=starts, width=width, tokens=8, heads=2, kv_heads=1)
    q, view, table, starts, lens, k, v = case.arguments()
    guarded = torch.full((2**13 + table.numel(),), 2**31 - 1, dtype=torch.int32)
    table = guarded[2**12 : -(2**12)].view(table.shape).copy_(table)
    begin, end = table.data_ptr(), table.data_ptr() + 4 * table.numel()
    _launch_draft_attention(q, view, table, starts, lens, k, v, sliding_window=window, config=SMALL)
    q, k, v, bounds = prefill_inputs(case, [150, 90])
    _launch_prefill_attention(q, view, table, bounds, starts, lens, k, v, sliding_window=window)
    first, last = guarded.data_ptr(), guarded.data_ptr() + 4 * guarded.numel()
    near = [a for a in touched if a[1] >= first and a[0] < last]
    assert near and all(begin <= a[0] and a[1] < end for a in near)


def test_products_of_strides_are_64_bit():
    """Pitfall 39 (vLLM PR 47671): heads of a page 2^30 elements apart; only a few pages of memory are touched."""
    if DEVICE == "cuda":
        pytest.skip("the GPU tests do it on real memory")
    memory = torch.empty(2**32, dtype=torch.uint8)  # address space, not memory
    tokens, dim, pages = 16, 16, 3
    far = (256, 2**30, dim, 1)
    k = memory.as_strided((pages, 4, tokens, dim), far).view(FP8)
    v = memory[2**20 :].as_strided((pages, 4, tokens, dim), far).view(FP8)
    one, rng = torch.ones(4), generator(5)
    view = PageView(k, v, "HND", "row", one, one, tokens)
    slots = torch.arange(40)
    store_kv(*(torch.randn(40, 4, dim, generator=rng) for _ in range(2)), slots, view)
    table, q = torch.arange(3, dtype=torch.int32)[None], torch.randn(1, 2, 4, dim, generator=rng).bfloat16()
    noise = [torch.randn(1, 2, 4, dim, generator=rng).bfloat16() for _ in range(2)]
    got = _launch_draft_attention(q, view, table, i32([0]), i32([40]), *noise, config=SMALL)
    want = draft_attention_ref(q.double(), view, table, i32([0]), i32([40]), *noise)
    assert float((got.double() - want).norm() / want.norm()) < 3e-3


@pytest.mark.parametrize("name", ["q", "out", "lse"])
def test_rows_too_far_apart_for_32_bits_are_refused(name):
    """Pitfall 39 at the other end: a request's rows are addressed in 32 bits, which the launcher checks."""
    q = torch.zeros(2, 17, 1, 16)
    tensors = {"q": q, "out": torch.zeros(2, 17, 1, 16), "lse": torch.zeros(2, 17, 1)}
    attention._check_kernel_call(tensors["q"], tensors["lse"], out=tensors["out"])
    tensor = tensors[name]
    tensors[name] = torch.zeros(1, device="meta").as_strided(tensor.shape, (16, 2**27, 16, 1)[: tensor.dim()])
    with pytest.raises(ValueError, match=f"^{name}: expected a request's rows within 2\\^31 elements"):
        attention._check_kernel_call(tensors["q"], tensors["lse"], out=tensors["out"])


@pytest.mark.parametrize("dtype", [FP8, F16])
def test_many_small_weights_beside_a_large_one_count(dtype):
    """An attention sink: 512 weights of e^-17.5 of the largest, whose V is 0, are all that the output has."""
    case = make([512], dtype, num_query_rows=1, heads=1, kv_heads=1, dim=16, tokens=16, q_dtype=F16)
    if dtype == FP8:
        case.view = replace(case.view, k_scale=torch.ones(1), v_scale=torch.ones(1))
    case.view.k.view(torch.uint8).zero_()
    case.view.v.copy_(torch.ones_like(case.view.v.float()).to(dtype))
    case.q.zero_()
    case.q[..., 0] = 1
    case.k_noise.zero_()
    case.k_noise[..., 0] = 17.5
    case.v_noise.zero_()
    arguments = [on_kernel_device(x) for x in case.arguments()]
    got = _launch_draft_attention(*arguments, sm_scale=1.0, config=SMALL)
    want = draft_attention_ref(*case.arguments(), sm_scale=1.0)
    assert float((got.cpu().double() - want.double()).norm() / want.double().norm()) < 5e-3


def test_a_failure_between_the_launches_leaves_the_workspace_usable(monkeypatch):
    """The counter goes back to zero, so the next call skips nothing."""
    case = make([9, 0, 20, 7, 3], BF16)
    workspace = workspace_for(case)
    want = _launch_draft_attention(*arguments_of(case), workspace=workspace, config=SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "_launch_combine", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            _launch_draft_attention(*arguments_of(case), workspace=workspace, config=SMALL)
    assert int(workspace.counter) == 0
    assert torch.equal(_launch_draft_attention(*arguments_of(case), workspace=workspace, config=SMALL), want)


def test_an_infinite_query_spoils_its_own_row_and_head_alone():
    """The scale of a tile's queries comes from its finite values."""
    case = make([20, 9], FP8, q_dtype=BF16)
    clean = _launch_draft_attention(*arguments_of(case), config=SMALL).cpu()
    case.q[1, 2, 0, 3] = math.inf
    spoilt = _launch_draft_attention(*arguments_of(case), config=SMALL).cpu()
    rest = torch.ones(clean.shape[:3], dtype=torch.bool)
    rest[1, 2, 0] = False
    assert torch.equal(spoilt[rest], clean[rest])


def test_tiny_scales_and_queries_of_zero_give_no_nan():
    """The factor of the logits may underflow in fp32; -inf * 0 would be NaN."""
    scales = (torch.full((2,), 2.0**-40), torch.ones(2))
    case = make([20, 9], FP8, q_dtype=BF16, scales=scales)
    case.q.zero_()
    check(case)


def test_long_chunks_fit_the_grid():
    """CUDA allows 65,535 programs in a grid's second dimension: chunks are counted in the first."""
    grids = []
    kernel = type("Kernel", (), {"__getitem__": lambda self, grid: lambda *a, **k: grids.append(grid)})()
    case = make([0], F32, heads=32, kv_heads=1, dim=16)  # one row a program
    q = torch.zeros(1, 32, 16).expand(131_072, 32, 16)
    k = torch.zeros(1, 1, 16).expand(131_072, 1, 16)
    view, table, starts, lens = case.arguments()[1:5]
    original, attention._prefill_attention_kernel = attention._prefill_attention_kernel, kernel
    try:
        _launch_prefill_attention(q, view, table, i32([0, 131_072]), starts, lens, k, k, out=torch.empty(1).expand(q.shape))
    finally:
        attention._prefill_attention_kernel = original
    assert grids[0][1] <= 65_535 < grids[0][0]


@pytest.mark.parametrize("name, value", [
    ("sliding_window", 2**31), ("causal", "no"), ("causal", 1),
    ("out", lambda q: torch.empty(1, *q.shape[1:]).expand(q.shape)),
    ("lse", lambda q: torch.empty(1, *q.shape[1:-1]).expand(q.shape[:-1])),
], ids=["a window past 32 bits", "a word", "a number", "one output for all", "one log-sum-exp for all"])
def test_what_a_kernel_could_not_do_right_is_refused(name, value):
    """Cells that several rows would write, numbers past 32 bits, and flags that are no flags."""
    arguments = draft_arguments()
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        draft_attention(**arguments, **{name: value(arguments["q"]) if callable(value) else value})


# ------------------------------------------------------------------ backends and errors


def prefill_arguments():
    case = draft_arguments()
    return dict(
        q=case["q"].flatten(0, 1), page_view=case["page_view"], block_table=case["block_table"],
        row_start_loc=i32([0, 4, 8]), ctx_starts=case["ctx_starts"], ctx_lens=case["ctx_lens"],
        k_new=case["k_noise"].flatten(0, 1), v_new=case["v_noise"].flatten(0, 1),
    )


CALLS = pytest.mark.parametrize("call, arguments, ref", [
    (draft_attention, draft_arguments, draft_attention_ref),
    (prefill_attention, prefill_arguments, prefill_attention_ref),
], ids=["draft", "prefill"])


@CALLS
def test_cpu_tensors_run_the_reference(monkeypatch, call, arguments, ref):
    """Unless a kernel is asked for by name: then it raises, since nothing falls back in silence."""
    arguments = arguments()

    def refuse(*args, **options):
        raise AssertionError("a kernel ran")

    for name in ("_launch_draft_attention", "_launch_prefill_attention"):
        monkeypatch.setattr(attention, name, refuse)
    want = ref(**arguments)
    for backend in (None, "reference"):
        assert same_bits([call(**arguments, backend=backend)], [want])
    assert explain_backend(arguments["page_view"]).name == "reference"
    out = torch.full_like(arguments["q"], 3.0)
    for backend in ("triton", "cuda", "", 1):
        with pytest.raises(ValueError, match=r"^backend: expected .* got "):
            call(**arguments, backend=backend, out=out)
    assert bool((out == 3.0).all())


def fast_case(**options):
    options = {"dtype": FP8, "v_layout": "transposed", "tokens": 16, **options}
    return make([5, 20], dim=32, **options)


def test_fast_mode_runs_in_the_reference_too():
    case = fast_case()
    got = draft_attention(*case.arguments(), mode="fast")
    want = oracle(case)[0]
    assert 1e-4 * want.norm() < (got.double() - want).norm() <= 5e-2 * want.norm()


@pytest.mark.parametrize("options, causal", [
    (dict(v_layout="row"), False), (dict(dtype=BF16), False), (dict(dtype=F32, v_layout="row"), False),
    (dict(tokens=8), False), (dict(), True),
], ids=["row V", "bf16", "fp32", "8 tokens", "causal"])
def test_fast_mode_says_what_it_needs(options, causal):
    """Pitfall 12 (TensorRT-LLM PR 18343 review): refused before anything runs, by name; not replaced by exact."""
    case = fast_case(**options)
    out = torch.full_like(case.q, 3.0)
    for call in (
        lambda: draft_attention(*case.arguments(), mode="fast", causal=causal, out=out),
        lambda: explain_backend(case.view, mode="fast", causal=causal, sliding_window=None),
    ):
        with pytest.raises(ValueError, match=r"^mode: expected .* got "):
            call()
    assert bool((out == 3.0).all())


@pytest.mark.parametrize("tokens", [4, 12, 512])
def test_page_sizes_are_refused_where_a_view_is_made(tokens):
    """Pitfall 12 (TensorRT-LLM PR 18343 review): not deep in a kernel; the message has the allowed values."""
    pages = torch.zeros(2, tokens, 2, 16)
    with pytest.raises(ValueError, match="tokens_per_block: expected a power of two from 8 to 256, got"):
        PageView(pages, pages, tokens_per_block=tokens)


ALLOCATION = dict(max_num_reqs=4, num_query_rows=4, num_q_heads=6, num_kv_heads=2, head_dim=16, device="cpu")


@pytest.mark.parametrize("name, value", [
    ("max_num_reqs", 0), ("max_num_reqs", 2.0), ("num_query_rows", 0), ("num_query_rows", 65), ("num_q_heads", 0),
    ("num_q_heads", 7), ("num_kv_heads", 0), ("head_dim", 0), ("max_splits", 0), ("max_splits", "4"),
])
def test_a_wrong_argument_of_a_workspace_is_named(name, value):
    with pytest.raises(ValueError, match=rf"^{name}: expected .* got "):
        AttentionWorkspace.allocate(**{**ALLOCATION, name: value})


@pytest.mark.parametrize("change", [
    dict(max_num_reqs=1), dict(num_query_rows=3), dict(num_q_heads=4), dict(num_q_heads=8),
    dict(num_q_heads=3, num_kv_heads=1), dict(head_dim=32), dict(device="meta"), None,
], ids=str)
def test_a_workspace_that_does_not_fit_is_refused(change):
    """Too few requests or rows, another geometry, another device, or no workspace at all."""
    workspace = "no workspace" if change is None else AttentionWorkspace.allocate(**{**ALLOCATION, **change})
    arguments = draft_arguments()
    out = torch.full_like(arguments["q"], 3.0)
    with pytest.raises(ValueError, match=r"^workspace: expected .* got "):
        draft_attention(**arguments, workspace=workspace, out=out)
    assert bool((out == 3.0).all())


def test_a_workspace_that_fits_is_accepted():
    for reqs in (2, 9):
        workspace = AttentionWorkspace.allocate(**{**ALLOCATION, "max_num_reqs": reqs})
        got = draft_attention(**draft_arguments(), workspace=workspace)
        assert same_bits([got], [draft_attention(**draft_arguments())])
