"""Block table: every output against a slow row-by-row oracle, and the rows that must go nowhere."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings, strategies as st

from dflash_paged.block_table import (
    DraftInputs,
    VerifyInputs,
    build_draft_inputs,
    build_draft_inputs_ref,
    build_verify_inputs,
    build_verify_inputs_ref,
    check_strided,
)

MASK = 99
i32 = lambda values: torch.tensor(values, dtype=torch.int32)
i64 = lambda values: torch.tensor(values, dtype=torch.int64)


# ------------------------------------------------------------------ oracles, written row by row


def oracle_slot(position, table_row, tokens_per_block, num_pages):
    block = position // tokens_per_block
    if position < 0 or block >= len(table_row):
        return -1
    page = table_row[block]
    if page < 0 or (num_pages is not None and page >= num_pages):
        return -1
    return page * tokens_per_block + position % tokens_per_block


def oracle_draft(next_ids, positions, starts, rejected, tables, tokens_per_block, k, num_pages):
    n, groups, out = len(positions), len(tables), {}
    out["context_positions"] = [0] * n
    out["context_slot_mapping"] = [[-1] * n for _ in range(groups)]
    for name in ("query_token_ids", "query_positions", "sample_indices", "ctx_lens"):
        out[name] = []
    for r, token in enumerate(next_ids):
        rows = list(range(starts[r], starts[r + 1]))
        kept = rows[: max(len(rows) - rejected[r], 0)]
        for row in kept:
            out["context_positions"][row] = positions[row]
            for g in range(groups):
                slot = oracle_slot(positions[row], tables[g][r], tokens_per_block, num_pages)
                out["context_slot_mapping"][g][row] = slot
        ctx_len = positions[kept[-1]] + 1 if kept else positions[rows[0]] if rows else 0
        drafts = bool(rows) and token != -1
        out["ctx_lens"].append(ctx_len)
        for j in range(k + 1):
            out["query_token_ids"].append(token if drafts and j == 0 else MASK)
            out["query_positions"].append(ctx_len + j)
            if j:
                out["sample_indices"].append(r * (k + 1) + j if drafts else -1)
    return out


def oracle_verify(bonus, drafts, ctx_lens, tables, tokens_per_block, num_pages):
    groups = len(tables)
    out = {"token_ids": [], "positions": [], "slot_mapping": [[] for _ in range(groups)], "ctx_lens": []}
    for r, token in enumerate(bonus):
        active = token != -1
        start = ctx_lens[r] if active else 0
        out["ctx_lens"].append(start)
        for j, t in enumerate([token, *drafts[r]]):
            out["token_ids"].append(t if active else 0)
            out["positions"].append(start + j)
            for g in range(groups):
                slot = oracle_slot(start + j, tables[g][r], tokens_per_block, num_pages) if active else -1
                out["slot_mapping"][g].append(slot)
    return out


def as_lists(result):
    return {f.name: getattr(result, f.name).tolist() for f in fields(result)}


@st.composite
def draft_cases(draw):
    tokens_per_block = draw(st.sampled_from([8, 16, 32]))
    reqs, groups, width = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    num_pages = draw(st.one_of(st.none(), st.integers(1, 12)))
    next_ids, positions, starts, rejected = [], [], [0], []
    for _ in range(reqs):
        count = draw(st.one_of(st.just(0), st.integers(1, 20)))
        first = draw(st.integers(-2, width * tokens_per_block + 3))
        positions += range(first, first + count)
        starts.append(starts[-1] + count)
        rejected.append(draw(st.integers(0, count)))
        next_ids.append(draw(st.sampled_from([-1, 5, 17])))
    pages = st.integers(-1, 13)
    tables = draw(
        st.lists(
            st.lists(st.lists(pages, min_size=width, max_size=width), min_size=reqs, max_size=reqs),
            min_size=groups, max_size=groups,
        )
    )
    trailing = draw(st.integers(0, 3))  # rows of a graph bucket that no request owns
    positions += draw(st.lists(st.integers(-5, 10**9), min_size=trailing, max_size=trailing))
    return next_ids, positions, starts, rejected, tables, tokens_per_block, draw(st.integers(0, 7)), num_pages


def run_draft(case, call=build_draft_inputs, out=None):
    next_ids, positions, starts, rejected, tables, tokens_per_block, k, num_pages = case
    return call(
        i64(next_ids), i64(positions), i32(starts), i32(rejected), i32(tables),
        tokens_per_block=tokens_per_block, mask_token_id=MASK, num_draft_tokens=k, num_pages=num_pages,
        out=out,
    )


# ------------------------------------------------------------------ draft inputs


def test_toy_by_hand():
    # two requests, 8 tokens a page, K = 2; request 0 stored 6..9 and lost the last two, request 1 starts
    result = build_draft_inputs_ref(
        i64([70, 71]), i64([6, 7, 8, 9, 0, 1]), i32([0, 4, 6]), i32([2, 0]), i32([[[5, 2], [9, -1]]]),
        tokens_per_block=8, mask_token_id=MASK, num_draft_tokens=2,
    )
    assert as_lists(result) == {
        "context_positions": [6, 7, 0, 0, 0, 1],
        "context_slot_mapping": [[46, 47, -1, -1, 72, 73]],
        "query_token_ids": [70, MASK, MASK, 71, MASK, MASK],
        "query_positions": [8, 9, 10, 2, 3, 4],
        "sample_indices": [1, 2, 4, 5],
        "ctx_lens": [8, 2],
    }


@settings(max_examples=150, deadline=None)
@given(draft_cases())
def test_draft_inputs_equal_the_row_by_row_oracle(case):
    assert as_lists(run_draft(case)) == oracle_draft(*case)


@settings(max_examples=60, deadline=None)
@given(draft_cases(), st.integers(0, 3), st.integers(0, 9))
def test_longer_outputs_end_in_padding_and_carry_nothing_over(case, more_reqs, more_rows):
    next_ids, positions, starts, rejected, tables, tokens_per_block, k, num_pages = case
    reqs, rows = len(next_ids), len(positions)
    out = DraftInputs.allocate(len(tables), rows + more_rows, reqs + more_reqs, k)
    for f in fields(out):
        getattr(out, f.name).fill_(123)  # what an earlier replay left
    assert run_draft(case, out=out) is out
    padded = (
        next_ids + [7] * more_reqs, positions + [0] * more_rows, starts + [starts[-1]] * more_reqs,
        rejected + [0] * more_reqs, [t + [[-1] * len(t[0])] * more_reqs for t in tables],
        tokens_per_block, k, num_pages,
    )
    assert as_lists(out) == oracle_draft(*padded)


def test_a_padded_request_writes_nothing_and_has_no_length():
    """Pitfalls 1, 3, 26: no default slot, no default index, no length that grows."""
    table = i32([[[3, 4], [0, 1]]])
    for _ in range(3):  # each replay
        result = build_draft_inputs(
            i64([7, 8]), i64([0, 1]), i32([0, 2, 2]), i32([0, 0]), table,
            tokens_per_block=8, mask_token_id=MASK, num_draft_tokens=1,
        )
        assert result.context_slot_mapping.tolist() == [[24, 25]]
        assert result.ctx_lens.tolist() == [2, 0]
        assert result.sample_indices.tolist() == [1, -1]
        assert result.query_token_ids.tolist() == [7, MASK, MASK, MASK]


@pytest.mark.parametrize("page", [-1, -7, 4, 2**31 - 1])
def test_a_bad_page_id_becomes_no_slot(page):
    """Pitfall 4: never page 0, never another request's slot."""
    result = build_draft_inputs(
        i64([7]), i64([7, 8]), i32([0, 2]), i32([0]), i32([[[2, page]]]),
        tokens_per_block=8, mask_token_id=MASK, num_draft_tokens=0, num_pages=4,
    )
    assert result.context_slot_mapping.tolist() == [[23, -1]]
    assert result.ctx_lens.tolist() == [9]


def test_a_negative_position_has_no_slot():
    """Pitfall 4: it isn't wrapped to the end of a page."""
    result = build_draft_inputs(
        i64([7]), i64([-2, -1, 0]), i32([0, 3]), i32([0]), i32([[[2]]]),
        tokens_per_block=8, mask_token_id=MASK, num_draft_tokens=0,
    )
    assert result.context_slot_mapping.tolist() == [[-1, -1, 16]]
    verify = build_verify_inputs(i64([7]), i64([[1, 1]]), i32([-2]), i32([[[2]]]), tokens_per_block=8)
    assert verify.slot_mapping.tolist() == [[-1, -1, 16]]


def test_rows_past_the_table_have_no_slot_in_prefill_and_decode():
    """Pitfall 5: both phases are bounded by the row's own table width."""
    for token in (-1, 7):
        result = build_draft_inputs(
            i64([token, 7]), i64([14, 15, 16, 17, 0]), i32([0, 4, 5]), i32([0, 0]), i32([[[1, 2], [3, 0]]]),
            tokens_per_block=8, mask_token_id=MASK, num_draft_tokens=0,
        )
        assert result.context_slot_mapping.tolist() == [[22, 23, -1, -1, 24]]


def test_pages_out_of_the_window_have_no_slot_in_their_group_only():
    """Pitfall 22: an evicted page is -1 in its group's table, and a row there is skipped in that group."""
    result = build_draft_inputs(
        i64([7]), i64([7, 8]), i32([0, 2]), i32([0]), i32([[[5, 6]], [[-1, 3]]]),
        tokens_per_block=8, mask_token_id=MASK, num_draft_tokens=0, num_pages=7,
    )
    assert result.context_slot_mapping.tolist() == [[47, 48], [-1, 24]]
    assert result.context_positions.tolist() == [7, 8]


def test_a_request_in_prefill_advances_and_does_not_draft():
    result = build_draft_inputs(
        i64([-1]), i64([8, 9, 10]), i32([0, 3]), i32([0]), i32([[[1, 2]]]),
        tokens_per_block=8, mask_token_id=MASK, num_draft_tokens=2,
    )
    assert result.ctx_lens.tolist() == [11]
    assert result.query_token_ids.tolist() == [MASK] * 3
    assert result.query_positions.tolist() == [11, 12, 13]
    assert result.sample_indices.tolist() == [-1, -1]


def test_no_slot_is_handed_out_twice():
    """Pitfall 4: distinct rows of distinct requests never share a slot where their pages are distinct."""
    pages = torch.randperm(60, generator=torch.Generator().manual_seed(0)).int().view(1, 12, 5)
    positions = torch.cat([torch.arange(37)] * 12)
    result = build_draft_inputs(
        torch.full((12,), 5), positions, torch.arange(13, dtype=torch.int32) * 37, torch.zeros(12).int(),
        pages,
        tokens_per_block=8, mask_token_id=MASK, num_draft_tokens=3, num_pages=60,
    )
    slots = result.context_slot_mapping[0]
    assert slots.min() >= 0 and slots.unique().numel() == slots.numel() == 12 * 37


def test_no_draft_tokens_is_legal():
    result = build_draft_inputs(
        i64([7]), i64([0]), i32([0, 1]), i32([0]), i32([[[1]]]),
        tokens_per_block=8, mask_token_id=MASK, num_draft_tokens=0,
    )
    assert result.query_token_ids.tolist() == [7]
    assert result.sample_indices.tolist() == []


def test_a_slot_past_two_to_the_31_is_exact():
    """Pitfall 39: page times tokens is an int64 product."""
    page = 2**27 + 1
    result = build_draft_inputs(
        i64([7]), i64([31]), i32([0, 1]), i32([0]), i32([[[page]]]),
        tokens_per_block=32, mask_token_id=MASK, num_draft_tokens=0,
    )
    assert result.context_slot_mapping.item() == page * 32 + 31 > 2**31


# ------------------------------------------------------------------ verify inputs


@st.composite
def verify_cases(draw):
    tokens_per_block = draw(st.sampled_from([8, 16, 32]))
    reqs, groups, width = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    k = draw(st.integers(0, 6))
    lists = lambda values, *sizes: (
        st.lists(lists(values, *sizes[1:]), min_size=sizes[0], max_size=sizes[0]) if sizes else values
    )
    return (
        draw(lists(st.sampled_from([-1, 3, 44]), reqs)),
        draw(lists(st.integers(0, 50), reqs, k)),
        draw(lists(st.integers(0, width * tokens_per_block + 2), reqs)),
        draw(lists(st.integers(-1, 9), groups, reqs, width)),
        tokens_per_block,
        draw(st.one_of(st.none(), st.integers(1, 9))),
    )


def run_verify(case, call=build_verify_inputs, out=None):
    bonus, drafts, ctx_lens, tables, tokens_per_block, num_pages = case
    drafts = i64(drafts).view(len(bonus), -1)
    return call(
        i64(bonus), drafts, i32(ctx_lens), i32(tables),
        tokens_per_block=tokens_per_block, num_pages=num_pages, out=out,
    )


@settings(max_examples=150, deadline=None)
@given(verify_cases())
def test_verify_inputs_equal_the_row_by_row_oracle(case):
    assert as_lists(run_verify(case)) == oracle_verify(*case)


@settings(max_examples=60, deadline=None)
@given(verify_cases(), st.integers(0, 3))
def test_longer_verify_outputs_end_in_padding(case, more):
    bonus, drafts, ctx_lens, tables, tokens_per_block, num_pages = case
    k = len(drafts[0])
    out = VerifyInputs.allocate(len(tables), len(bonus) + more, k)
    for f in fields(out):
        getattr(out, f.name).fill_(123)
    assert run_verify(case, out=out) is out
    padded = (
        bonus + [-1] * more, drafts + [[0] * k] * more, ctx_lens + [0] * more,
        [t + [[-1] * len(t[0])] * more for t in tables], tokens_per_block, num_pages,
    )
    assert as_lists(out) == oracle_verify(*padded)


def test_verify_reserves_a_slot_for_every_row():
    """Pitfall 19: K + 1 rows, across a page boundary."""
    result = build_verify_inputs_ref(
        i64([9]), i64([[1, 2, 3]]), i32([6]), i32([[[4, 1]]]), tokens_per_block=8
    )
    assert result.token_ids.tolist() == [9, 1, 2, 3]
    assert result.positions.tolist() == [6, 7, 8, 9]
    assert result.slot_mapping.tolist() == [[38, 39, 8, 9]]
    assert result.ctx_lens.tolist() == [6]


def test_an_inert_request_of_a_verify_pass_writes_nothing():
    """Pitfalls 1, 3, 26: whatever its draft ids, length and table say."""
    result = build_verify_inputs(
        i64([-1]), i64([[5, 5]]), i32([9]), i32([[[0, 1]]]), tokens_per_block=8
    )
    assert as_lists(result) == {
        "token_ids": [0, 0, 0], "positions": [0, 1, 2], "slot_mapping": [[-1, -1, -1]], "ctx_lens": [0]
    }


# ------------------------------------------------------------------ errors


def draft_arguments():
    return dict(
        next_token_ids=i64([7, 8]), row_positions=i64([0, 1, 5]), row_start_loc=i32([0, 2, 3]),
        num_rejected=i32([0, 0]), block_tables=i32([[[0], [1]]]),
        tokens_per_block=8, mask_token_id=MASK, num_draft_tokens=1, num_pages=4,
    )


DRAFT_ERRORS = {
    "next_token_ids": i32([7, 8]),
    "row_positions": i32([0, 1, 5]),
    "row_start_loc": i32([0, 2]),
    "num_rejected": i32([0]),
    "block_tables": i32([[[0]]]),
    "tokens_per_block": 12,
    "mask_token_id": -1,
    "num_draft_tokens": -1,
    "num_pages": 0,
    "out": object(),
}


@pytest.mark.parametrize("name", DRAFT_ERRORS)
def test_a_wrong_draft_argument_is_named(name):
    with pytest.raises(ValueError, match=rf"^{name}: expected .* got "):
        build_draft_inputs(**{**draft_arguments(), name: DRAFT_ERRORS[name]})


@pytest.mark.parametrize("name", [f.name for f in fields(DraftInputs)])
def test_a_short_output_is_named_and_nothing_is_written(name):
    out = DraftInputs.allocate(1, 3, 2, 1)
    setattr(out, name, getattr(out, name)[..., :-1].contiguous())
    before = as_lists(out)
    with pytest.raises(ValueError, match="^out"):
        build_draft_inputs(**draft_arguments(), out=out)
    assert as_lists(out) == before


def test_outputs_of_another_number_of_draft_tokens_are_refused():
    with pytest.raises(ValueError, match="query_token_ids: expected 4 for the 2 requests"):
        build_draft_inputs(**draft_arguments(), out=DraftInputs.allocate(1, 3, 2, 2))


def test_an_empty_table_is_refused():
    arguments = {**draft_arguments(), "block_tables": torch.empty(1, 2, 0, dtype=torch.int32)}
    with pytest.raises(ValueError, match="block_tables: expected at least one group"):
        build_draft_inputs(**arguments)


def test_a_strided_last_dimension_is_refused():
    with pytest.raises(ValueError, match="block_tables: expected a last dimension of stride 1, got stride 2"):
        build_draft_inputs(
            **{**draft_arguments(), "block_tables": torch.zeros(1, 2, 4, dtype=torch.int32)[..., ::2]}
        )
    check_strided("x", torch.zeros(4, 1)[:, :1], (4, 1))  # one column has no stride to speak of


def verify_arguments():
    return dict(
        bonus_token_ids=i64([7, 8]), draft_token_ids=i64([[1], [2]]), ctx_lens=i32([0, 3]),
        block_tables=i32([[[0], [1]]]), tokens_per_block=8, num_pages=4,
    )


VERIFY_ERRORS = {
    "bonus_token_ids": i32([7, 8]),
    "draft_token_ids": i64([1, 2]),
    "ctx_lens": i64([0, 3]),
    "block_tables": i64([[[0], [1]]]),
    "tokens_per_block": 4,
    "num_pages": True,
    "out": DraftInputs.allocate(1, 3, 2, 1),
}


@pytest.mark.parametrize("name", VERIFY_ERRORS)
def test_a_wrong_verify_argument_is_named(name):
    with pytest.raises(ValueError, match=rf"^{name}: expected .* got "):
        build_verify_inputs(**{**verify_arguments(), name: VERIFY_ERRORS[name]})


def test_verify_outputs_of_another_number_of_draft_tokens_are_refused():
    with pytest.raises(ValueError, match=r"out.token_ids: expected 4 for the 2 requests"):
        build_verify_inputs(**verify_arguments(), out=VerifyInputs.allocate(1, 2, 3))


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("row_start_loc", i32([0, 3, 2]), "row_start_loc: expected 0 <= "),
        ("num_rejected", i32([3, 0]), "num_rejected: expected 0..2 for request 0, got 3"),
        ("row_positions", i64([1, 0, 5]), "row_positions: expected consecutive rows for request 0"),
    ],
)
def test_values_are_checked_in_debug_mode_only(monkeypatch, name, value, message):
    arguments = {**draft_arguments(), name: value}
    monkeypatch.delenv("DFLASH_PAGED_DEBUG", raising=False)
    build_draft_inputs(**arguments)
    monkeypatch.setenv("DFLASH_PAGED_DEBUG", "1")
    with pytest.raises(ValueError, match=message):
        build_draft_inputs(**arguments)


@pytest.mark.parametrize("name, value", [("ctx_lens", i32([0, -3])), ("draft_token_ids", i64([[1], [-2]]))])
def test_verify_values_are_checked_in_debug_mode_only(monkeypatch, name, value):
    arguments = {**verify_arguments(), name: value}
    monkeypatch.delenv("DFLASH_PAGED_DEBUG", raising=False)
    build_verify_inputs(**arguments)
    monkeypatch.setenv("DFLASH_PAGED_DEBUG", "1")
    with pytest.raises(ValueError, match=f"^{name}: expected values >= 0"):
        build_verify_inputs(**arguments)


def test_rows_before_the_first_request_belong_to_nobody():
    """Where row_start_loc begins after 0, the rows before it get no slot."""
    step = dict(
        next_token_ids=torch.tensor([7]), row_positions=torch.arange(4),
        row_start_loc=torch.tensor([2, 4], dtype=torch.int32), num_rejected=torch.tensor([0], dtype=torch.int32),
        block_tables=torch.tensor([[[0]]], dtype=torch.int32),
    )
    got = build_draft_inputs(**step, tokens_per_block=8, mask_token_id=9, num_draft_tokens=1)
    assert got.context_slot_mapping.tolist() == [[-1, -1, 2, 3]]


@pytest.mark.parametrize("name, value", [("num_draft_tokens", 64), ("mask_token_id", 2**31)])
def test_numbers_that_no_kernel_takes_are_refused(name, value):
    """K is at most 63, since attention takes 64 query rows; a token id fits 32 bits."""
    options = {"tokens_per_block": 8, "mask_token_id": 9, "num_draft_tokens": 1, name: value}
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        build_draft_inputs(
            torch.tensor([7]), torch.arange(1), torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([0], dtype=torch.int32), torch.tensor([[[0]]], dtype=torch.int32), **options,
        )
