"""Attention: against a fp64 row-by-row oracle and torch's SDPA; what isn't readable can't matter."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from dflash_paged.attention import (
    draft_attention,
    draft_attention_ref,
    explain_backend,
    prefill_attention,
    prefill_attention_ref,
    readable_rows_ref,
)
from dflash_paged.store import PAGE_DTYPES, PageView, read_rows_ref, store_kv

FP8 = torch.float8_e4m3fn
LAYOUTS = [
    (layout, v_layout) for layout in ("NHD", "HND") for v_layout in ("row", "transposed", "transposed16")
]
i32 = lambda values: torch.tensor(values, dtype=torch.int32)
NAN = float("nan")


# ------------------------------------------------------------------ cases


def generator(seed):
    return torch.Generator().manual_seed(seed)


class Case:
    """Requests over a shuffled, NaN-filled pool of which only readable rows hold numbers."""

    def __init__(
        self, lens, num_query_rows=4, heads=6, kv_heads=2, dim=16, tokens=8, starts=None, dtype=torch.float32,
        layout="NHD", v_layout="row", width=None, seed=0, q_dtype=torch.float32, scales=None, holes=(),
        page_seed=0,
    ):
        rng = generator(seed)
        self.lens, self.starts = list(lens), list(starts or [0] * len(lens))
        reqs = len(self.lens)
        blocks = [-(-n // tokens) for n in self.lens]
        width = width or max(max(blocks), 1) + 2
        num_pages = sum(blocks) + 3
        if scales is None and dtype == FP8:
            one, two = (torch.rand(kv_heads, generator=rng) for _ in range(2))
            scales = one * 0.02 + 0.005, two + 0.02
        self.view = nan_pages(num_pages, tokens, kv_heads, dim, dtype, layout, v_layout, scales)
        order = torch.randperm(num_pages, generator=generator(page_seed)).tolist()
        table = torch.full((reqs, width), -1, dtype=torch.int32)
        for r, n in enumerate(blocks):
            n = min(n, width)
            table[r, :n] = i32([order.pop() for _ in range(n)])
        self.k, self.v = [], []
        for r, n in enumerate(self.lens):
            k, v = (torch.randn(n, kv_heads, dim, generator=rng) for _ in range(2))
            stop = min(n, width * tokens)
            positions = torch.arange(min(self.starts[r], stop), stop)
            slots = table[r].long()[positions // tokens] * tokens + positions % tokens
            store_kv(k[positions], v[positions], slots, self.view)
            stored_k, stored_v = read_rows_ref(self.view, slots)
            k[positions], v[positions] = stored_k, stored_v
            self.k.append(k.double())
            self.v.append(v.double())
        for r, block in holes:
            table[r, block : block + 1] = -1  # nothing where the table is too narrow for the block
        self.holes, self.table, self.tokens = set(holes), table, tokens
        self.q = torch.randn(reqs, num_query_rows, heads, dim, generator=rng).to(q_dtype)
        self.k_noise = torch.randn(reqs, num_query_rows, kv_heads, dim, generator=rng).to(q_dtype)
        self.v_noise = torch.randn(reqs, num_query_rows, kv_heads, dim, generator=rng).to(q_dtype)

    def readable(self, r):
        stop = min(self.lens[r], self.table.shape[1] * self.tokens)
        return [p for p in range(self.starts[r], stop) if (r, p // self.tokens) not in self.holes]

    def arguments(self):
        return (
            self.q, self.view, self.table, i32(self.starts), i32(self.lens), self.k_noise, self.v_noise
        )

    def run(self, call=draft_attention, **options):
        return call(*self.arguments(), **options)


def nan_pages(num_pages, tokens, kv_heads, dim, dtype, layout, v_layout, scales=None):
    """One layer of a page-major pool in which every byte is part of a NaN."""
    row = (tokens, kv_heads, dim) if layout == "NHD" else (kv_heads, tokens, dim)
    pool = nan_like(torch.empty(num_pages, 3, 2, *row, dtype=dtype))
    k, v = pool[:, 1, 0], pool[:, 1, 1]
    if v_layout != "row":
        v = nan_like(torch.empty(num_pages, 3, kv_heads, dim, tokens, dtype=dtype))[:, 1]
    return PageView(k, v, layout, v_layout, *(scales or (None, None)), tokens_per_block=tokens, layer_idx=1)


def nan_like(tensor):
    tensor.view(torch.uint8).fill_(0xFF)  # NaN in every format
    return tensor


def oracle(case, causal=False, window=None, sm_scale=None):
    """The definition, one request and row at a time, in fp64 over what a reader sees."""
    reqs, num_rows, heads, dim = case.q.shape
    group = heads // case.k_noise.shape[2]
    scale = dim**-0.5 if sm_scale is None else sm_scale
    out = torch.empty(case.q.shape, dtype=torch.float64)
    lse = torch.empty(reqs, num_rows, heads, dtype=torch.float64)
    for r, j in itertools.product(range(reqs), range(num_rows)):
        position = case.lens[r] + j
        paged = [p for p in case.readable(r) if window is None or abs(position - p) < window]
        suffix = [i for i in range(j + 1 if causal else num_rows) if window is None or abs(i - j) < window]
        keys = torch.cat([case.k[r][paged], case.k_noise[r, suffix].double()]).repeat_interleave(group, 1)
        values = torch.cat([case.v[r][paged], case.v_noise[r, suffix].double()]).repeat_interleave(group, 1)
        logits = torch.einsum("hd,nhd->hn", case.q[r, j].double(), keys) * scale
        lse[r, j] = torch.logsumexp(logits, 1)
        out[r, j] = torch.einsum("hn,nhd->hd", torch.softmax(logits, 1), values)
    return out, lse


def assert_close(got, want, relative=1e-5):
    """||got - want|| / ||want||; 1e-5 is fp32 arithmetic over some hundred keys, as the issue allows."""
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error <= relative, float(error)


# ------------------------------------------------------------------ the definition


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 9, 100])  # 4 hides one pair of 5 rows
def test_draft_attention_is_its_definition(causal, window):
    """Pitfalls 23, 24: the window applies, two-sided unless causal. Empty context, page boundary +-1."""
    case = Case([0, 1, 7, 8, 9, 16, 31], num_query_rows=5)
    lse = torch.full(case.q.shape[:3], NAN)
    out = torch.full_like(case.q, NAN)
    got = case.run(causal=causal, sliding_window=window, out=out, lse=lse)
    want, want_lse = oracle(case, causal, window)
    assert got is out
    assert_close(got, want)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_draft_attention_is_its_definition_in_random_cases(data):
    draw = data.draw
    lens = draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    tokens = draw(st.sampled_from([8, 16, 32]))
    layout, v_layout = draw(st.sampled_from([x for x in LAYOUTS if tokens > 8 or x[1] != "transposed16"]))
    blocks = [(r, b) for r, n in enumerate(lens) for b in range(-(-n // tokens))]
    case = Case(
        lens, draw(st.integers(1, 6)), kv_heads * draw(st.sampled_from([1, 2, 3])), kv_heads,
        draw(st.sampled_from([4, 8])), tokens, [draw(st.integers(0, n + 2)) for n in lens],
        draw(st.sampled_from(PAGE_DTYPES)), layout, v_layout, seed=draw(st.integers(0, 99)),
        width=draw(st.sampled_from([None, 1, 2])),
        holes=draw(st.sets(st.sampled_from(blocks))) if blocks else (),
    )
    causal, window = draw(st.booleans()), draw(st.one_of(st.none(), st.integers(1, 50)))
    lse = torch.empty(case.q.shape[:3])
    got = case.run(causal=causal, sliding_window=window, lse=lse)
    want, want_lse = oracle(case, causal, window)
    assert_close(got, want)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (9, 3), (8, 1), (5, 5), (14, 2)])
@pytest.mark.parametrize("num_query_rows", [1, 16, 64])
def test_it_equals_sdpa_over_a_dense_copy(heads, kv_heads, num_query_rows):
    case = Case([13, 40], num_query_rows, heads, kv_heads, dim=32)
    for causal in (False, True):
        got = case.run(causal=causal)
        for r in range(2):
            k, v = (
                torch.cat([context[r].float(), noise[r]]).transpose(0, 1)[None]
                for context, noise in ((case.k, case.k_noise), (case.v, case.v_noise))
            )
            mask = torch.ones(num_query_rows, k.shape[2], dtype=torch.bool)
            if causal:
                mask = mask.tril(case.lens[r])
            want = F.scaled_dot_product_attention(
                case.q[r].transpose(0, 1)[None], k, v, attn_mask=mask, enable_gqa=True
            )
            assert_close(got[r], want[0].transpose(0, 1))


def test_fp64_queries_are_computed_in_fp64():
    case = Case([9, 30], q_dtype=torch.float64)
    got = case.run()
    assert got.dtype == torch.float64
    assert_close(got, oracle(case)[0], 1e-14)


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16])
def test_half_precision_queries_are_computed_in_fp32(q_dtype):
    case = Case([9, 30], q_dtype=q_dtype, dtype=torch.bfloat16)
    # the output alone is rounded: 2**-9 and 2**-12 relative at most
    assert_close(case.run(), oracle(case)[0], {torch.bfloat16: 2**-9, torch.float16: 2**-12}[q_dtype])


def test_sm_scale_replaces_the_default():
    case = Case([9])
    assert_close(case.run(sm_scale=0.7), oracle(case, sm_scale=0.7)[0])


def test_tensors_may_be_strided_slices_of_others():
    """Queries and noise out of one fused projection, results into wider ones."""
    case = Case([9, 20])
    fused = torch.randn(2, 4, 10, 16, generator=generator(3))
    case.q, case.k_noise, case.v_noise = fused[:, :, :6], fused[:, :, 6:8], fused[:, :, 8:]
    out, lse = torch.zeros(2, 4, 9, 20)[:, :, 1:7, :16], torch.zeros(2, 8, 6)[:, ::2]
    want, want_lse = oracle(case)
    assert_close(case.run(out=out, lse=lse), want)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------ page formats


@pytest.mark.parametrize("dtype", PAGE_DTYPES)
@pytest.mark.parametrize("layout, v_layout", LAYOUTS)
def test_every_page_format(dtype, layout, v_layout):
    """Pitfall 28. Scales differ by head, so one applied to the wrong rows or heads would show."""
    case = Case([0, 15, 16, 17, 45], dtype=dtype, layout=layout, v_layout=v_layout, tokens=16)
    lse = torch.empty(case.q.shape[:3])
    want, want_lse = oracle(case)
    assert_close(case.run(lse=lse), want)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def test_scales_touch_the_paged_rows_only():
    """k_scale multiplies paged logits, v_scale the sum; the suffix is neither quantised nor scaled."""
    scales = (torch.tensor([0.5, 4.0]), torch.tensor([3.0, 0.25]))
    case = Case([0, 12], dtype=torch.float32, scales=scales)
    assert_close(case.run(), oracle(case)[0])
    assert_close(case.run(call=prefill_by_requests), oracle(case, causal=True)[0])
    empty = Case([0, 0], dtype=FP8)
    same = Case([0, 0], dtype=torch.float32)
    same.q, same.k_noise, same.v_noise = empty.q, empty.k_noise, empty.v_noise
    torch.testing.assert_close(empty.run(), same.run(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tokens", [8, 16, 32, 64, 128, 256])
def test_every_page_size(tokens):
    case = Case([0, tokens - 1, tokens, tokens + 1], tokens=tokens, num_query_rows=2, heads=3, kv_heads=3)
    assert_close(case.run(), oracle(case)[0])


# ------------------------------------------------------------------ what can't matter


@pytest.mark.parametrize("dtype", PAGE_DTYPES)
def test_unreadable_bytes_are_never_read(dtype):
    """Page tails, unlisted pages and padding hold NaN in every case here; numbers there change nothing."""
    arguments = dict(lens=[5, 0, 19], starts=[2, 0, 9], dtype=dtype, num_query_rows=3)
    case = Case(**arguments)
    first = case.run()
    assert torch.isfinite(first).all()
    other = Case(**arguments)
    readable = torch.zeros(other.view.num_pages, other.tokens, dtype=torch.bool)
    for r in range(3):
        for p in other.readable(r):
            readable[other.table[r, p // other.tokens], p % other.tokens] = True
    for codes in other.view.codes:
        codes[~readable] = 1
    assert torch.equal(other.run(), first)


@pytest.mark.parametrize("entry", [-1, -9, 2**31 - 1])
def test_table_entries_that_name_no_page_are_masked(entry):
    """Pitfalls 4, 22: holes in the middle, at the end, and everywhere."""
    for holes in ([(0, 1)], [(0, 3)], [(0, 0), (1, 0)], [(0, b) for b in range(4)]):
        case = Case([30, 10], holes=holes)
        for r, block in holes:
            case.table[r, block] = entry
        for window in (None, 12):
            assert_close(case.run(sliding_window=window), oracle(case, window=window)[0])


def test_positions_past_the_table_are_masked():
    """Pitfall 5: a length beyond the table's width reads what the table holds."""
    case = Case([50, 16], width=2)
    for window in (None, 37):
        assert_close(case.run(sliding_window=window), oracle(case, window=window)[0])


def test_a_start_past_the_end_leaves_the_suffix_alone():
    """Pitfall 16: rows that a prefix hit didn't bring back are not read."""
    case = Case([9, 9, 9], starts=[9, 12, 8])
    got = case.run()
    assert_close(got, oracle(case)[0])
    bare = Case([0, 0, 0])
    bare.q, bare.k_noise, bare.v_noise = case.q, case.k_noise, case.v_noise
    assert torch.equal(got[:2], bare.run()[:2])


def test_a_nan_of_one_request_stays_with_it():
    case = Case([9, 20, 0])
    clean = case.run()
    case.q[1, 2], case.k_noise[2, 0] = NAN, NAN
    got = case.run()
    assert torch.equal(got[0], clean[0])
    assert got[1, 2].isnan().all() and torch.equal(got[1, [0, 1, 3]], clean[1, [0, 1, 3]])
    assert got[2].isnan().all()


def test_pages_and_noise_are_left_as_they_were():
    """Pitfalls 6, 18: the suffix goes to no page, whatever the room behind the context."""
    for dtype in PAGE_DTYPES:
        case = Case([5, 8, 0], dtype=dtype)
        before = [x.clone() for x in (*case.view.codes, case.table, case.q, case.k_noise, case.v_noise)]
        case.run()
        case.run(causal=True, sliding_window=3)
        case.run(call=prefill_by_requests)
        after = (*case.view.codes, case.table, case.q, case.k_noise, case.v_noise)
        for a, b in zip(before, after):
            assert torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8))


def test_moving_pages_changes_no_bit():
    for dtype, (layout, v_layout) in itertools.product((torch.float32, FP8), LAYOUTS):
        arguments = dict(lens=[37, 64, 3], dtype=dtype, layout=layout, v_layout=v_layout, tokens=16, dim=64)
        one, two = (Case(**arguments, page_seed=s) for s in (0, 1))
        assert not torch.equal(one.table, two.table)
        for options in ({}, dict(causal=True), dict(sliding_window=20)):
            assert torch.equal(one.run(**options), two.run(**options))


@pytest.mark.parametrize("dim, heads, kv_heads", [(64, 9, 3), (128, 8, 2), (20, 3, 1)])
def test_moving_requests_changes_no_bit(dim, heads, kv_heads):
    case = Case([37, 0, 64, 3, 130], 8, heads, kv_heads, dim)
    whole, order = case.run(), torch.tensor([3, 0, 4, 1, 2])
    lse, moved_lse = torch.empty(case.q.shape[:3]), torch.empty(case.q.shape[:3])
    case.run(lse=lse)
    q, view, table, starts, lens, k_noise, v_noise = case.arguments()
    moved = draft_attention(
        q[order], view, table[order], starts[order], lens[order], k_noise[order], v_noise[order],
        lse=moved_lse,
    )
    assert torch.equal(moved, whole[order]) and torch.equal(moved_lse, lse[order])
    alone = draft_attention(q[2:3], view, table[2:3], starts[2:3], lens[2:3], k_noise[2:3], v_noise[2:3])
    assert torch.equal(alone[0], whole[2])


# ------------------------------------------------------------------ verify and prefill


def prefill_by_requests(q, view, table, starts, lens, k_noise, v_noise, **options):
    """A verify pass through the other entry point: every request's rows as a chunk."""
    reqs, num_rows = q.shape[:2]
    bounds = torch.arange(reqs + 1, dtype=torch.int32) * num_rows
    out = prefill_attention(
        q.flatten(0, 1), view, table, bounds, starts, lens, k_noise.flatten(0, 1), v_noise.flatten(0, 1),
        **options,
    )
    return out.view_as(q)


@pytest.mark.parametrize("window", [None, 2, 11])
def test_a_causal_suffix_is_one_by_one_decoding(window):
    """Each verify row equals a step of one row over pages that hold all rows before it."""
    case = Case([0, 7, 8, 20], num_query_rows=6)
    block = case.run(causal=True, sliding_window=window)
    for j in range(6):
        long = Case([n + j for n in case.lens], num_query_rows=1)
        for r, n in enumerate(case.lens):
            positions = torch.arange(n + j)
            slots = long.table[r].long()[positions // 8] * 8 + positions % 8
            k = torch.cat([case.k[r].float(), case.k_noise[r, :j]])
            store_kv(k, torch.cat([case.v[r].float(), case.v_noise[r, :j]]), slots, long.view)
        long.q, long.k_noise, long.v_noise = (x[:, j : j + 1] for x in (case.q, case.k_noise, case.v_noise))
        assert_close(long.run(sliding_window=window), block[:, j : j + 1])


@pytest.mark.parametrize("window", [None, 1, 4, 30])
@pytest.mark.parametrize("dtype", PAGE_DTYPES)
def test_prefill_of_equal_chunks_is_the_verify_pass(dtype, window):
    case = Case([0, 7, 8, 20], num_query_rows=6, dtype=dtype, starts=[0, 3, 8, 0])
    lse, want_lse = torch.empty(4 * 6, 6), torch.empty(4, 6, 6)
    want = case.run(causal=True, sliding_window=window, lse=want_lse)
    assert_close(case.run(call=prefill_by_requests, sliding_window=window, lse=lse), want, 1e-6)
    torch.testing.assert_close(lse.view(4, 6, 6), want_lse)


@pytest.mark.parametrize("window", [None, 50, 200])
def test_chunks_of_any_length_add_up_to_one_prefill(window):
    """300 rows at once (more than one tile) equal chunks of 1, 130, 127 and 42 rows over their pages."""
    n, tokens, heads, kv_heads, dim = 300, 32, 6, 2, 16
    rng = generator(5)
    q, k, v = (torch.randn(n, h, dim, generator=rng) for h in (heads, kv_heads, kv_heads))
    view = nan_pages(11, tokens, kv_heads, dim, torch.float32, "NHD", "row")
    table = torch.randperm(11, generator=rng)[:10].int()[None]
    zero = i32([0])
    whole = prefill_attention(q, view, table, i32([0, n]), zero, zero, k, v, sliding_window=window)
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    if window:
        mask &= ~torch.ones(n, n, dtype=torch.bool).tril(-window)
    want = F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask, enable_gqa=True
    )[0].transpose(0, 1)
    assert_close(whole, want)
    done = 0
    for size in (1, 130, 127, 42):
        rows = slice(done, done + size)
        got = prefill_attention(
            q[rows], view, table, i32([0, size]), zero, i32([done]), k[rows], v[rows], sliding_window=window
        )
        assert_close(got, want[rows])
        positions = torch.arange(rows.start, rows.stop)
        store_kv(k[rows], v[rows], table[0].long()[positions // tokens] * tokens + positions % tokens, view)
        done += size


def test_packed_chunks_do_not_see_each_other():
    """Mixed batch: a long chunk, a padded request, a single row, and rows that are nobody's."""
    case = Case([12, 5, 30], num_query_rows=1)
    sizes, rng = [9, 0, 1], generator(8)
    n = sum(sizes) + 2
    q, k, v = (torch.randn(n, h, 16, generator=rng) for h in (6, 2, 2))
    k[-2:], v[-2:], q[-2:] = NAN, NAN, NAN
    out, lse = torch.full_like(q, NAN), torch.full((n, 6), NAN)
    view, table, starts, lens = case.arguments()[1:5]
    prefill_attention(q, view, table, i32([0, 9, 9, 10]), starts, lens, k, v, out=out, lse=lse)
    for r, rows in ((0, slice(0, 9)), (2, slice(9, 10))):
        alone = draft_attention(
            q[None, rows], view, table[r : r + 1], starts[r : r + 1], lens[r : r + 1], k[None, rows],
            v[None, rows], causal=True,
        )
        assert torch.equal(alone[0], out[rows])
    assert (out[10:] == 0).all() and (lse[10:] == -math.inf).all() and torch.isfinite(lse[:10]).all()


def test_every_request_padded():
    case = Case([0, 0])
    q, k = torch.zeros(0, 6, 16), torch.zeros(0, 2, 16)
    got = prefill_attention(q, case.view, case.table, i32([0, 0, 0]), i32([0, 0]), i32([0, 0]), k, k)
    assert got.shape == (0, 6, 16)


# ------------------------------------------------------------------ windows


def test_a_window_cuts_both_sides_of_a_bidirectional_block():
    """Pitfall 24: row 0 doesn't see row w, nor row w row 0; causal sees only what comes before."""
    case = Case([20], num_query_rows=5, heads=1, kv_heads=1, dim=5)
    case.q.zero_()  # every visible key weighs the same
    case.v_noise[0, :, 0] = torch.eye(5)
    seen = lambda **options: case.run(**options)[0, :, 0] > 0
    case.starts = [20]
    i, j = torch.arange(5)[:, None], torch.arange(5)[None]
    for window in (1, 2, 3, 5):
        assert torch.equal(seen(sliding_window=window), (i - j).abs() < window)
        assert torch.equal(seen(sliding_window=window, causal=True), ((i - j).abs() < window) & (j <= i))


def test_a_window_reads_only_its_pages():
    """Pitfalls 22, 23: pages wholly out of the window may be gone, and hold NaN where they are not."""
    case = Case([40], num_query_rows=3)
    want = oracle(case, window=10)[0]
    case.table[0, :3] = -1  # the first query, at 40, reads back to row 31
    page = case.table[0, 3].item()
    for codes in case.view.codes:
        codes[page, : 31 - 24] = NAN
    assert_close(case.run(sliding_window=10), want)
    want = oracle(case, causal=True, window=10)[0]
    assert_close(case.run(call=prefill_by_requests, sliding_window=10), want)
    k, v, positions = readable_rows_ref(case.view, case.table[0], 31, 40)
    assert k.shape[0] == v.shape[0] == 9 and positions is None


# ------------------------------------------------------------------ errors


def draft_arguments():
    case = Case([5, 9])
    names = ("q", "page_view", "block_table", "ctx_starts", "ctx_lens", "k_noise", "v_noise")
    return dict(zip(names, case.arguments()))


DRAFT_ERRORS = [
    ("q", torch.zeros(2, 4, 6)),
    ("q", torch.zeros(2, 0, 6, 16)),
    ("q", torch.zeros(2, 65, 6, 16)),
    ("q", torch.zeros(2, 4, 5, 16)),
    ("q", torch.zeros(2, 4, 6, 32)),
    ("q", torch.zeros(2, 4, 6, 16, dtype=torch.int32)),
    ("q", torch.zeros(2, 4, 6, 32)[..., ::2]),
    ("q", None),
    ("page_view", torch.zeros(1)),
    ("block_table", torch.zeros(3, 2, dtype=torch.int32)),
    ("block_table", torch.zeros(2, 2, dtype=torch.int64)),
    ("ctx_starts", torch.zeros(3, dtype=torch.int32)),
    ("ctx_lens", torch.zeros(2, dtype=torch.int64)),
    ("k_noise", torch.zeros(2, 3, 2, 16)),
    ("v_noise", torch.zeros(2, 4, 2, 16, dtype=torch.bfloat16)),
    ("sliding_window", 0),
    ("mode", "quick"),
    ("mode", "fast"),
    ("sm_scale", "1"),
    ("out", torch.zeros(2, 4, 6, 16, dtype=torch.bfloat16)),
    ("lse", torch.zeros(2, 4, 6, dtype=torch.float64)),
]


@pytest.mark.parametrize("name, value", DRAFT_ERRORS, ids=[n for n, _ in DRAFT_ERRORS])
def test_a_wrong_argument_of_draft_attention_is_named(name, value):
    arguments = draft_arguments()
    out = torch.full_like(arguments["q"], 3.0)
    with pytest.raises(ValueError, match=rf"^{name}: expected .* got "):
        draft_attention(**{"out": out, **arguments, name: value})
    assert (out == 3.0).all()


PREFILL_ERRORS = [
    ("q", torch.zeros(2, 4, 6, 16)),
    ("row_start_loc", i32([0, 8])),
    ("row_start_loc", torch.zeros(3, dtype=torch.int64)),
    ("k_new", torch.zeros(7, 2, 16)),
    ("v_new", torch.zeros(8, 3, 16)),
    ("ctx_lens", i32([0])),
    ("out", torch.zeros(8, 6, 8)),
    ("lse", torch.zeros(8)),
]


@pytest.mark.parametrize("name, value", PREFILL_ERRORS, ids=[n for n, _ in PREFILL_ERRORS])
def test_a_wrong_argument_of_prefill_attention_is_named(name, value):
    case = draft_arguments()
    arguments = dict(
        q=case["q"].flatten(0, 1), page_view=case["page_view"], block_table=case["block_table"],
        row_start_loc=i32([0, 4, 8]), ctx_starts=case["ctx_starts"], ctx_lens=case["ctx_lens"],
        k_new=case["k_noise"].flatten(0, 1), v_new=case["v_noise"].flatten(0, 1),
    )
    prefill_attention(**arguments)
    with pytest.raises(ValueError, match=rf"^{name}: expected .* got "):
        prefill_attention(**{**arguments, name: value})


def test_values_are_checked_in_debug_mode_only(monkeypatch):
    arguments = {**draft_arguments(), "ctx_lens": i32([5, -1])}
    monkeypatch.delenv("DFLASH_PAGED_DEBUG", raising=False)
    assert torch.isfinite(draft_attention(**arguments)).all()
    before_zero = draft_attention(**{**draft_arguments(), "ctx_starts": i32([-3, -40])})
    assert torch.equal(before_zero, draft_attention(**draft_arguments()))
    monkeypatch.setenv("DFLASH_PAGED_DEBUG", "1")
    with pytest.raises(ValueError, match="ctx_lens: expected values >= 0"):
        draft_attention(**arguments)
    case = Case([5])
    with pytest.raises(ValueError, match="row_start_loc: expected 0 <= "):
        prefill_attention(
            case.q[0], case.view, case.table, i32([1, 4]), i32([0]), i32([5]), case.k_noise[0],
            case.v_noise[0],
        )


def test_the_backend_is_explained_and_what_cannot_run_raises():
    """No silent fallback: the answer names the implementation, and 'fast' is refused, not replaced."""
    view = Case([5], dtype=FP8).view
    backend = explain_backend(view, causal=True, sliding_window=7)
    assert backend.name == "reference"
    assert "cpu" in backend.reason and "float8_e4m3fn" in backend.reason and "window 7" in backend.reason
    for call in (
        lambda: explain_backend(view, mode="fast"),
        lambda: draft_attention(**draft_arguments(), mode="fast"),
        lambda: draft_attention_ref(*draft_arguments().values(), mode="fast"),
    ):
        with pytest.raises(ValueError, match="mode: expected 'exact'.* got 'fast'"):
            call()


def test_launcher_and_reference_agree():
    case = Case([5, 40])
    assert torch.equal(case.run(), case.run(call=draft_attention_ref))
    q, view, table, starts, lens, k, v = case.arguments()
    arguments = (q.flatten(0, 1), view, table, i32([0, 4, 8]), starts, lens, k.flatten(0, 1), v.flatten(0, 1))
    assert torch.equal(prefill_attention(*arguments), prefill_attention_ref(*arguments))
