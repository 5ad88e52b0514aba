"""Block table kernels against the references, output by output, between canaries: interpreted on a CPU."""

import importlib.util
import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_block_table import (
    MASK, as_lists, draft_cases, i32, i64, oracle_draft, oracle_verify, run_draft, run_verify, verify_cases,
)

from dflash_paged.block_table import (
    DraftInputs,
    VerifyInputs,
    _launch_draft_inputs,
    _launch_verify_inputs,
    build_draft_inputs_ref,
    build_verify_inputs_ref,
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, which has no wheel for this platform"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CANARY = -77  # nothing that a kernel may write
GUARD = 7  # canaries around every output; odd, so that outputs aren't aligned either


# ------------------------------------------------------------------ outputs between canaries


def guarded(kind, *sizes, device=DEVICE, guard=GUARD):
    """An output whose tensors are cut from one buffer a dtype, all of it canaries; and the buffers."""
    shapes = kind.allocate(*sizes, device="meta")
    views, buffers = {}, []
    for dtype in (torch.int64, torch.int32):
        mine = {f.name: getattr(shapes, f.name) for f in fields(kind)}
        mine = {name: tuple(meta.shape) for name, meta in mine.items() if meta.dtype == dtype}
        length = sum(math.prod(shape) + guard for shape in mine.values()) + guard
        buffer, at = torch.full((length,), CANARY, dtype=dtype, device=device), guard
        for name, shape in mine.items():
            views[name] = buffer[at : at + math.prod(shape)].view(shape)
            at += math.prod(shape) + guard
        buffers.append(buffer)
    return kind(**views), buffers


def bucket_sizes(kind, case, more_reqs=0, more_rows=0):
    """The sizes of `kind.allocate` for a case, with room to spare."""
    groups, reqs = case["block_tables"].shape[:2]
    if kind is DraftInputs:
        rows = case["row_positions"].shape[0] + more_rows
        return groups, rows, reqs + more_reqs, case["num_draft_tokens"]
    return groups, reqs + more_reqs, case["draft_token_ids"].shape[1]


def run_both(kind, case, more_reqs=0, more_rows=0):
    """Run kernel and reference on outputs that are longer by `more_...`: all bytes equal, guards included.

    The inputs reach the kernel as they are (strides kept) and must come back unchanged.
    """
    launch = _launch_draft_inputs if kind is DraftInputs else _launch_verify_inputs
    reference = build_draft_inputs_ref if kind is DraftInputs else build_verify_inputs_ref
    sizes = bucket_sizes(kind, case, more_reqs, more_rows)
    want, want_buffers = guarded(kind, *sizes, device="cpu")
    reference(**case, out=want)
    inputs = {name: on_device(x) for name, x in case.items()}
    out, buffers = guarded(kind, *sizes)
    assert launch(**inputs, out=out) is out
    for got, expected in zip(buffers, want_buffers):
        if not torch.equal(got.cpu(), expected):  # say which output it is
            assert as_lists(out) == as_lists(want)
            raise AssertionError("a canary outside the outputs was overwritten")
    for name, x in case.items():
        assert not isinstance(x, torch.Tensor) or torch.equal(inputs[name].cpu(), x), name
    return want


def on_device(x):
    """A copy on the device; a tensor keeps its strides (`.to` packs slices) and what lies between its rows."""
    if not isinstance(x, torch.Tensor):
        return x
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return whole.clone().to(DEVICE).as_strided(x.shape, x.stride(), x.storage_offset())


# ------------------------------------------------------------------ cases


def random_draft_case(
    rng, *, reqs, groups=1, k=3, tokens_per_block=8, width=3, max_rows=6, num_pages=12, trailing=3, idle=0.2
):
    """A mixed batch: idle and prefilling requests, rejects out of range, page ids -2..13, rows past the table.

    `idle` is the share of requests without a row; up to `trailing` rows at the end are nobody's.
    """
    counts = rng.integers(1, max_rows + 1, reqs) * (rng.random(reqs) >= idle)
    starts = np.concatenate([[0], np.cumsum(counts)])
    rest = rng.integers(0, trailing + 1)
    first = rng.integers(-2, width * tokens_per_block + 4, reqs)
    positions = np.repeat(first - starts[:-1], counts) + np.arange(starts[-1])
    rejected = rng.integers(-3, counts + 3) * (rng.random(reqs) < 0.6)
    tables = rng.integers(-2, 14, (groups, reqs, width))
    tables[rng.random(tables.shape) < 0.05] = 2**31 - 2
    return dict(
        next_token_ids=torch.from_numpy(rng.choice([-1, 5, 17, 2**31 + 9], reqs)),
        row_positions=torch.from_numpy(np.concatenate([positions, rng.integers(-5, 10**9, rest)])),
        row_start_loc=torch.from_numpy(starts.astype(np.int32)),
        num_rejected=torch.from_numpy(rejected.astype(np.int32)),
        block_tables=torch.from_numpy(tables.astype(np.int32)),
        tokens_per_block=tokens_per_block, mask_token_id=MASK, num_draft_tokens=k, num_pages=num_pages,
    )


def random_verify_case(rng, *, reqs, groups=1, k=3, tokens_per_block=8, width=3, num_pages=12):
    """Active and inert requests of any length, page ids as in `random_draft_case`."""
    tables = rng.integers(-2, 14, (groups, reqs, width))
    tables[rng.random(tables.shape) < 0.05] = 2**31 - 2
    lens = rng.integers(-2, width * tokens_per_block + 4, reqs)
    return dict(
        bonus_token_ids=torch.from_numpy(rng.choice([-1, 5, 17, 2**31 + 9], reqs)),
        draft_token_ids=torch.from_numpy(rng.integers(0, 2**33, (reqs, k))),
        ctx_lens=torch.from_numpy(lens.astype(np.int32)),
        block_tables=torch.from_numpy(tables.astype(np.int32)),
        tokens_per_block=tokens_per_block, num_pages=num_pages,
    )


def random_case(kind, rng, **options):
    """A case of either kind."""
    return random_draft_case(rng, **options) if kind is DraftInputs else random_verify_case(rng, **options)


def decode_case(counts, first, tables, *, rejected=None, tokens=None, tokens_per_block=8, k=3, num_pages=None):
    """Requests of `counts` consecutive rows from `first` on, in order."""
    positions = [p for n, start in zip(counts, first) for p in range(start, start + n)]
    return dict(
        next_token_ids=i64(tokens or [7] * len(counts)), row_positions=i64(positions),
        row_start_loc=i32([0, *np.cumsum(counts).tolist()]), num_rejected=i32(rejected or [0] * len(counts)),
        block_tables=i32(tables), tokens_per_block=tokens_per_block, mask_token_id=MASK, num_draft_tokens=k,
        num_pages=num_pages,
    )


@pytest.fixture
def rng():
    return np.random.default_rng(11)


KINDS = pytest.mark.parametrize("kind", [DraftInputs, VerifyInputs], ids=["draft", "verify"])


# ------------------------------------------------------------------ both kernels


@KINDS
@pytest.mark.parametrize("k", [0, 1, 7, 15])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("tokens_per_block", [8, 32, 256])
def test_every_configuration_equals_the_reference(kind, k, groups, tokens_per_block, rng):
    case = random_case(kind, rng, reqs=9, groups=groups, k=k, tokens_per_block=tokens_per_block)
    run_both(kind, case)
    run_both(kind, {**case, "num_pages": None})


@KINDS
@pytest.mark.parametrize("tokens_per_block", [16, 64, 128])
def test_other_page_sizes_equal_the_reference(kind, tokens_per_block, rng):
    run_both(kind, random_case(kind, rng, reqs=5, tokens_per_block=tokens_per_block))


@KINDS
@pytest.mark.parametrize("reqs", [1, 3, 64, 300])
def test_any_number_of_requests_equals_the_reference(kind, reqs, rng):
    """One, few, a full batch, and more than any tile holds."""
    run_both(kind, random_case(kind, rng, reqs=reqs, groups=2, k=4, width=5), more_reqs=reqs % 5)


@KINDS
def test_random_small_cases_equal_the_reference(kind):
    rng = np.random.default_rng(2026)
    for _ in range(150):
        case = random_case(
            kind, rng, reqs=int(rng.integers(1, 6)), groups=int(rng.choice([1, 3])), k=int(rng.integers(0, 8)),
            width=int(rng.integers(1, 5)), tokens_per_block=int(rng.choice([8, 16, 32])),
            num_pages=rng.choice([None, 1, 12]),
        )
        extra = {"more_rows": int(rng.integers(0, 9))} if kind is DraftInputs else {}
        run_both(kind, case, more_reqs=int(rng.integers(0, 4)), **extra)


@KINDS
def test_longer_outputs_become_padding_to_their_end(kind, rng):
    """Pitfalls 2, 26 (vLLM PR 47066): a graph bucket's spare rows and requests, over what was left in them."""
    case = random_case(kind, rng, reqs=3, groups=3)
    extra = {"more_rows": 200} if kind is DraftInputs else {}
    want = run_both(kind, case, more_reqs=70, **extra)
    assert want.ctx_lens[3:].eq(0).all()
    slots = want.context_slot_mapping if kind is DraftInputs else want.slot_mapping
    assert slots[:, case["row_positions"].shape[0] if kind is DraftInputs else 12 :].eq(-1).all()


@KINDS
def test_tables_may_be_slices_of_larger_ones(kind, rng):
    """Pitfall 7 (TensorRT-LLM dflash.py): strides come from the tensor, nothing is guessed from its width."""
    case = random_case(kind, rng, reqs=6, groups=3, width=4)
    tables = torch.full((5, 13, 11), 3, dtype=torch.int32)
    sliced = tables[1:4, 1::2, 5:9]
    sliced.copy_(case["block_tables"])
    by_request = torch.full((6, 4, 9), 3, dtype=torch.int32).transpose(0, 1)[1:, :, 2:6]
    by_request.copy_(case["block_tables"])
    one_for_all = case["block_tables"][:1].expand(3, -1, -1)
    assert [x.stride() for x in (sliced, by_request, one_for_all)] == [(143, 22, 1), (9, 36, 1), (0, 4, 1)]
    for tables in (sliced, by_request, one_for_all):
        run_both(kind, {**case, "block_tables": tables})


@KINDS
def test_inputs_may_be_unaligned_slices(kind, rng):
    """A bucket's inputs are cut from larger buffers, wherever these happen to begin."""
    case = random_case(kind, rng, reqs=5)
    for name, x in case.items():
        if isinstance(x, torch.Tensor) and x.dim() == 1:
            case[name] = torch.cat([x.new_tensor([3]), x, x.new_tensor([3, 3])])[1:-2]
    if kind is VerifyInputs:
        drafts = torch.full((9, 8), 3)
        drafts[2:7, 3:6] = case["draft_token_ids"]
        case["draft_token_ids"] = drafts[2:7, 3:6]
    run_both(kind, case)


@KINDS
@pytest.mark.parametrize("page", [-1, -7, 4, 5, 2**31 - 1, -(2**31)])
def test_a_bad_page_id_becomes_no_slot(kind, page):
    """Pitfall 4 (TensorRT-LLM PR 19040): never page 0, never another request's slot."""
    if kind is DraftInputs:
        want = run_both(kind, decode_case([2, 1], [7, 0], [[[2, page], [0, 1]]], k=0, num_pages=4))
        assert want.context_slot_mapping.tolist() == [[23, -1, 0]]
        return
    want = run_both(kind, dict(
        bonus_token_ids=i64([7, 8]), draft_token_ids=i64([[1], [2]]), ctx_lens=i32([7, 0]),
        block_tables=i32([[[2, page], [0, 1]]]), tokens_per_block=8, num_pages=4,
    ))
    assert want.slot_mapping.tolist() == [[23, -1, 0, 1]]


@KINDS
def test_a_slot_past_two_to_the_31_is_exact(kind):
    """Pitfall 39 (vLLM PR 47671): page times tokens is an int64 product, whatever the pages' number."""
    page = 2**31 - 2
    for num_pages in (None, 2**31 - 1):
        if kind is DraftInputs:
            case = decode_case([1], [255], [[[page]]], tokens_per_block=256, k=0, num_pages=num_pages)
            want = run_both(kind, case).context_slot_mapping
        else:
            want = run_both(kind, dict(
                bonus_token_ids=i64([7]), draft_token_ids=i64([[]]).view(1, 0), ctx_lens=i32([255]),
                block_tables=i32([[[page]]]), tokens_per_block=256, num_pages=num_pages,
            )).slot_mapping
        assert want.item() == page * 256 + 255


@KINDS
def test_no_slot_is_handed_out_twice(kind):
    """Pitfall 4 (TensorRT-LLM PR 19040): distinct rows share no slot where the pages are distinct."""
    pages = torch.randperm(60, generator=torch.Generator().manual_seed(0)).int().view(1, 12, 5)
    if kind is DraftInputs:
        case = decode_case([37] * 12, [0] * 12, pages.tolist(), num_pages=60)
        slots = run_both(kind, case).context_slot_mapping[0]
    else:
        slots = run_both(kind, dict(
            bonus_token_ids=torch.arange(12), draft_token_ids=torch.ones(12, 7).long(), block_tables=pages,
            ctx_lens=torch.arange(12, dtype=torch.int32) * 2, tokens_per_block=8, num_pages=60,
        )).slot_mapping[0]
    assert slots.min() >= 0 and slots.unique().numel() == slots.numel()


# ------------------------------------------------------------------ draft inputs


def launch_draft(next_token_ids, row_positions, row_start_loc, num_rejected, block_tables, *, out, **options):
    """The kernel in place of `build_draft_inputs`, as test_block_table calls it."""
    inputs = [x.to(DEVICE) for x in (next_token_ids, row_positions, row_start_loc, num_rejected, block_tables)]
    sizes = block_tables.shape[0], row_positions.shape[0], next_token_ids.shape[0], options["num_draft_tokens"]
    return _launch_draft_inputs(*inputs, **options, out=out or guarded(DraftInputs, *sizes)[0])


@settings(max_examples=60, deadline=None)
@given(draft_cases())
def test_the_draft_kernel_equals_the_row_by_row_oracle(case):
    assert as_lists(run_draft(case, call=launch_draft)) == oracle_draft(*case)


def test_a_toy_by_hand():
    """Two requests, 8 tokens a page, K = 2; request 0 stored 6..9 and lost the last two, request 1 starts."""
    want = run_both(
        DraftInputs, decode_case([4, 2], [6, 0], [[[5, 2], [9, -1]]], rejected=[2, 0], tokens=[70, 71], k=2)
    )
    assert as_lists(want) == {
        "context_positions": [6, 7, 0, 0, 0, 1],
        "context_slot_mapping": [[46, 47, -1, -1, 72, 73]],
        "query_token_ids": [70, MASK, MASK, 71, MASK, MASK],
        "query_positions": [8, 9, 10, 2, 3, 4],
        "sample_indices": [1, 2, 4, 5],
        "ctx_lens": [8, 2],
    }


def test_decode_rows_of_a_full_batch(rng):
    """64 requests of K + 1 rows each, some rejected, over shuffled pages."""
    reqs, k = 64, 7
    tables = rng.permutation(reqs * 6).reshape(1, reqs, 6).tolist()
    first = rng.integers(0, 40, reqs).tolist()
    rejected = rng.integers(0, k + 2, reqs).tolist()
    case = decode_case([k + 1] * reqs, first, tables, rejected=rejected, k=k, num_pages=reqs * 6)
    want = run_both(DraftInputs, case)
    assert want.ctx_lens.tolist() == [a + k + 1 - n for a, n in zip(first, rejected)]
    assert (want.context_slot_mapping >= 0).sum() == sum(k + 1 - n for n in rejected)


@pytest.mark.parametrize("first", [0, 5, 64])
def test_a_prefill_chunk_longer_than_a_tile(first, rng):
    """A cold chunk, one after a prefix hit inside a page, one on a page boundary; nothing drafts."""
    tables = rng.permutation(120).reshape(1, 1, 120).tolist()
    case = decode_case([700], [first], tables, tokens=[-1], num_pages=120)
    want = run_both(DraftInputs, case)
    assert want.ctx_lens.tolist() == [first + 700] and want.sample_indices.tolist() == [-1] * 3


def test_prefill_decode_and_padded_requests_in_one_batch(rng):
    """Each phase beside the others: a long chunk, decode rows, padded requests in the middle and at the end."""
    counts = [300, 4, 0, 4, 1, 0, 40, 0, 0]
    first = [13, 60, 0, 7, 0, 0, 0, 0, 0]
    tables = rng.permutation(9 * 40).reshape(1, 9, 40).tolist()
    case = decode_case(
        counts, first, tables, tokens=[-1, 5, 6, 7, 8, 9, -1, 3, 4], rejected=[0, 3, 0, 0, 0, 1, 0, 0, 2]
    )
    want = run_both(DraftInputs, case, more_reqs=3, more_rows=35)
    assert want.ctx_lens.tolist() == [313, 61, 0, 11, 1, 0, 40, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "rejected, kept", [(0, 4), (1, 3), (4, 0), (9, 0), (-1, 4), (-(2**31), 4), (2**31 - 1, 0)]
)
def test_rejected_rows_are_clamped_to_the_requests_own(rejected, kept):
    """Pitfall 4 (TensorRT-LLM PR 19040): too many or a negative number reaches no other request's rows."""
    case = decode_case([4, 4, 4], [9, 2, 14], [[[0, 1, 2], [3, 4, 5], [6, 7, 8]]], rejected=[0, rejected, 0])
    want = run_both(DraftInputs, case)
    slots = want.context_slot_mapping[0].tolist()
    assert slots[:4] == [9, 10, 11, 12] and slots[8:] == [62, 63, 64, 65]
    assert sum(slot >= 0 for slot in slots[4:8]) == kept and want.ctx_lens[1] == 2 + kept


def test_a_padded_request_writes_nothing_and_has_no_length_on_every_replay():
    """Pitfalls 1, 3, 26 (TensorRT-LLM PR 16548, test_dflash_dummy_slot; vLLM PR 47066): no default slot 0."""
    case = decode_case([2, 0, 0], [0, 0, 0], [[[3, 4], [0, 1], [0, 0]]], tokens=[7, 8, 0], k=1)
    inputs = {name: on_device(x) for name, x in case.items()}
    out, _ = guarded(DraftInputs, 1, 4, 4, 1)
    for _ in range(3):
        _launch_draft_inputs(**inputs, out=out)
        assert out.context_slot_mapping.tolist() == [[24, 25, -1, -1]]
        assert out.ctx_lens.tolist() == [2, 0, 0, 0]
        assert out.sample_indices.tolist() == [1, -1, -1, -1]
        assert out.query_token_ids.tolist() == [7] + [MASK] * 7


def test_a_batch_of_padded_requests_alone():
    """Pitfalls 1, 3 (TensorRT-LLM PR 16548): the warm-up of a graph, whose rows are nobody's."""
    case = decode_case([0, 0], [0, 0], [[[0], [0]]])
    case["row_positions"] = i64([0, 0, 5, 10**12])
    want = run_both(DraftInputs, case)
    assert want.context_slot_mapping.eq(-1).all() and want.ctx_lens.eq(0).all()
    assert want.context_positions.eq(0).all() and want.sample_indices.eq(-1).all()


@pytest.mark.parametrize("more_rows", [0, 1, 40])
def test_no_rows_at_all(more_rows):
    """N = 0 is legal: no row is read, the query rows are inert."""
    want = run_both(DraftInputs, decode_case([0, 0, 0], [0, 0, 0], [[[1], [2], [3]]] * 3), more_rows=more_rows)
    assert want.ctx_lens.tolist() == [0, 0, 0]


@pytest.mark.parametrize("token", [-1, 7])
def test_rows_at_and_past_the_tables_end_have_no_slot(token):
    """Pitfall 5 (TensorRT-LLM PR 19040 review): in prefill and in decode, and the next request's row stands."""
    case = decode_case([4, 1, 2], [14, 0, 10**9], [[[1, 2], [3, 0], [4, 5]]], tokens=[token, 7, token])
    want = run_both(DraftInputs, case)
    assert want.context_slot_mapping.tolist() == [[22, 23, -1, -1, 24, -1, -1]]
    assert want.ctx_lens.tolist() == [18, 1, 10**9 + 2]


def test_a_position_past_two_to_the_31_has_no_slot_and_isnt_wrapped():
    """Pitfall 39 (vLLM PR 47671): garbage in a padded row may be any int64."""
    case = decode_case([0, 1], [0, 3], [[[0, 1], [2, 3]]])
    case["row_positions"] = i64([3, 2**32, 2**32 + 8, 2**63 - 1, -(2**63)])
    case["row_start_loc"] = i32([0, 0, 1])
    run_both(DraftInputs, case)
    for position in (2**32, 2**35 + 8, -(2**32), -(2**31) - 1):
        case["row_positions"] = i64([position])
        want = run_both(DraftInputs, case)
        assert want.context_slot_mapping.tolist() == [[-1]]


def test_pages_out_of_the_window_have_no_slot_in_their_group_only():
    """Pitfall 22 (a fork of vLLM, PR 24): an evicted page is -1 in its group's table, never block 0."""
    want = run_both(DraftInputs, decode_case([2], [7], [[[5, 6]], [[-1, 3]], [[-1, -1]]], num_pages=7))
    assert want.context_slot_mapping.tolist() == [[47, 48], [-1, 24], [-1, -1]]
    assert want.context_positions.tolist() == [7, 8]


@pytest.mark.parametrize(
    "reqs, counts, k",
    [(64, 1, 15), (1, 600, 0), (40, 0, 15), (3, 150, 1)],
    ids=["more query rows than rows", "more rows than query rows", "query rows alone", "few long requests"],
)
def test_rows_and_query_rows_may_each_be_the_larger(reqs, counts, k, rng):
    """Pitfall 27 (vLLM PR 53970): neither buffer is sized or bounded by the other's length."""
    tables = rng.permutation(reqs * 80).reshape(1, reqs, 80).tolist()
    case = decode_case([counts] * reqs, rng.integers(0, 30, reqs).tolist(), tables, k=k)
    want = run_both(DraftInputs, case)
    assert want.context_positions.numel() == reqs * counts and want.query_positions.numel() == reqs * (k + 1)


def test_a_token_id_and_a_mask_id_of_any_size(rng):
    """Ids are int64 throughout; a vocabulary's last id and the one after it."""
    for mask in (0, 1, 151_669, 2**31 - 1, 2**40):
        case = decode_case([1, 1], [0, 3], [[[0], [1]]], tokens=[2**40 + 3, 0], k=2)
        want = run_both(DraftInputs, {**case, "mask_token_id": mask})
        assert want.query_token_ids.tolist() == [2**40 + 3, mask, mask, 0, mask, mask]


# ------------------------------------------------------------------ verify inputs


def launch_verify(bonus_token_ids, draft_token_ids, ctx_lens, block_tables, *, out, **options):
    """The kernel in place of `build_verify_inputs`, as test_block_table calls it."""
    inputs = [x.to(DEVICE) for x in (bonus_token_ids, draft_token_ids, ctx_lens, block_tables)]
    sizes = block_tables.shape[0], *draft_token_ids.shape
    return _launch_verify_inputs(*inputs, **options, out=out or guarded(VerifyInputs, *sizes)[0])


@settings(max_examples=60, deadline=None)
@given(verify_cases())
def test_the_verify_kernel_equals_the_row_by_row_oracle(case):
    assert as_lists(run_verify(case, call=launch_verify)) == oracle_verify(*case)


@settings(max_examples=20, deadline=None)
@given(draft_cases(), verify_cases(), st.integers(0, 3), st.integers(0, 9))
def test_longer_outputs_of_both_kernels_equal_the_references(draft, verify, more_reqs, more_rows):
    """Whatever was in them before."""
    groups, k = len(draft[4]), draft[6]
    outs = [guarded(DraftInputs, groups, len(draft[1]) + more_rows, len(draft[0]) + more_reqs, k, device=d)[0]
            for d in (DEVICE, "cpu")]
    got = run_draft(draft, call=launch_draft, out=outs[0])
    assert as_lists(got) == as_lists(run_draft(draft, call=build_draft_inputs_ref, out=outs[1]))
    outs = [guarded(VerifyInputs, len(verify[3]), len(verify[0]) + more_reqs, len(verify[1][0]), device=d)[0]
            for d in (DEVICE, "cpu")]
    got = run_verify(verify, call=launch_verify, out=outs[0])
    assert as_lists(got) == as_lists(run_verify(verify, call=build_verify_inputs_ref, out=outs[1]))


def test_an_inert_request_of_a_verify_pass_writes_nothing():
    """Pitfalls 1, 3, 26 (TensorRT-LLM PR 16548; vLLM PR 47066): whatever its ids and length."""
    want = run_both(VerifyInputs, dict(
        bonus_token_ids=i64([-1, 7, -1]), draft_token_ids=i64([[5, 5], [6, 6], [0, 0]]),
        ctx_lens=i32([9, 0, 10**9]), block_tables=i32([[[0, 1], [2, 3], [0, 0]]]), tokens_per_block=8,
        num_pages=None,
    ))
    assert want.slot_mapping.tolist() == [[-1] * 3 + [16, 17, 18] + [-1] * 3]
    assert want.ctx_lens.tolist() == [0, 0, 0] and want.token_ids.tolist() == [0, 0, 0, 7, 6, 6, 0, 0, 0]


def test_verify_rows_cross_pages_and_stop_at_the_tables_end():
    """Pitfalls 5, 19 (TensorRT-LLM PR 19040 review; vLLM PR 43733): K + 1 rows, none of them past the table."""
    want = run_both(VerifyInputs, dict(
        bonus_token_ids=i64([9, 9]), draft_token_ids=i64([[1, 2, 3], [4, 5, 6]]), ctx_lens=i32([6, 14]),
        block_tables=i32([[[4, 1], [0, 2]]]), tokens_per_block=8, num_pages=5,
    ))
    assert want.slot_mapping.tolist() == [[38, 39, 8, 9, 22, 23, -1, -1]]


def test_a_negative_length_has_no_slot():
    """Pitfall 4 (TensorRT-LLM PR 19040): it isn't wrapped to the end of a page."""
    want = run_both(VerifyInputs, dict(
        bonus_token_ids=i64([7]), draft_token_ids=i64([[1, 1]]), ctx_lens=i32([-2]), block_tables=i32([[[2]]]),
        tokens_per_block=8, num_pages=None,
    ))
    assert want.slot_mapping.tolist() == [[-1, -1, 16]]


def test_rows_before_the_first_request_belong_to_nobody():
    """Where row_start_loc begins after 0, the rows before it get no slot, in the kernel as in the reference."""
    i32 = lambda values: on_device(torch.tensor(values, dtype=torch.int32))
    step = dict(
        next_token_ids=on_device(torch.tensor([7, 8])), row_positions=on_device(torch.arange(7)),
        row_start_loc=i32([2, 4, 6]), num_rejected=i32([0, 1]), block_tables=i32([[[0], [3]]]),
    )
    options = dict(tokens_per_block=8, mask_token_id=9, num_draft_tokens=1, num_pages=None)
    out = DraftInputs.allocate(1, 7, 2, 1, step["row_positions"].device)
    got = _launch_draft_inputs(**step, **options, out=out)
    assert got.context_slot_mapping.tolist() == [[-1, -1, 2, 3, 28, -1, -1]]
