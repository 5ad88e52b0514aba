"""The dense buffer: its bytes, its rows, and drafts that equal the pages' as long as nothing was reused."""

from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from conftest import DraftRollout, make_tiny_drafter
from test_drafter import FIRST, LATER, SLIDING, rows_of

from dflash_paged.block_table import build_draft_inputs
from dflash_paged.dense import DenseBuffer, DenseContext, dense_attention
from dflash_paged.drafter import DraftModel, DraftStep, draft_tokens, read_draft_config

TOL = dict(rtol=1e-5, atol=1e-5)  # fp32 sums in another order


def dense_beside(rollout, max_ctx=96, **options) -> DenseContext:
    """A dense context with a slot begun for each of the rollout's requests."""
    dense = DenseContext(rollout.model, len(rollout.ids), max_ctx, **options)
    for i, start in zip(rollout.ids, rollout.starts):
        dense.begin(i, start, i)
    return dense


def both(rollout, dense, step, features):
    """Hidden states of the step's block under both contexts."""
    block = rollout.config.draft_block_size
    noise = rollout.randn(len(step.rows), block, rollout.config.hidden_size)
    out = []
    for context in (rollout.paged, dense):
        context.store(step, features)
        out.append(rollout.model(noise, step.inputs.query_positions.view(-1, block), context.attend))
    return out


# Bytes


def test_reserved_bytes_are_those_of_the_issue_that_started_this():
    """64 slots x (131,083 + 8) rows x 10,240 B = 80.01 GiB = 85.91 GB, by the design page's numbers."""
    config = read_draft_config(dict(
        vocab_size=100, hidden_size=16, intermediate_size=16, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=4, head_dim=128, block_size=8, num_target_layers=62, dflash_config={"mask_token_id": 3},
    ))
    buffer = DenseBuffer(DraftModel(config), 64, 131_072 + 11, torch.bfloat16, "meta")
    assert tuple(buffer.k_buf.shape) == tuple(buffer.v_buf.shape) == (64, 5, 131_091, 4, 128)
    assert buffer.reserved_bytes == 8_389_824 * 10_240
    assert (round(buffer.reserved_bytes / 2**30, 2), round(buffer.reserved_bytes / 1e9, 2)) == (80.01, 85.91)


@pytest.mark.parametrize("dtype,size", [(torch.float32, 4), (torch.bfloat16, 2)])
def test_bytes_are_reserved_for_every_slot_and_used_by_valid_rows(dtype, size):
    rollout = DraftRollout(make_tiny_drafter())
    dense = DenseContext(rollout.model, 5, 96, dtype)
    row = 2 * 2 * 2 * 16 * size  # K and V, layers, heads, head_dim
    assert dense.reserved_bytes == 5 * (96 + 5) * row and dense.used_bytes == 0
    for i in rollout.ids:
        dense.begin(i, 0, i)
    total = 0
    for step, features in rollout.steps(FIRST, LATER):
        dense.store(step, features)
        total += sum(rollout.kept)
        assert dense.used_bytes == total * row
    for i in rollout.ids:
        dense.end(i)
    assert dense.used_bytes == 0 and dense.reserved_bytes == 5 * 101 * row


@pytest.mark.parametrize("slots,max_ctx,words", [(0, 96, "max_batch_size"), (2, 0, "max_ctx"), (2, 9.5, "max_ctx")])
def test_sizes_are_checked_by_name(slots, max_ctx, words):
    with pytest.raises(ValueError, match=words):
        DenseBuffer(make_tiny_drafter(), slots, max_ctx)


def test_kernels_are_checked_by_name():
    with pytest.raises(ValueError, match="kernel: expected .*loop.*sdpa.*got 'flash'"):
        DenseContext(make_tiny_drafter(), 2, 96, kernel="flash")
    assert DenseContext(make_tiny_drafter(), 2, 96).kernel == "loop"


# Drafts


@pytest.mark.parametrize("changes", [
    pytest.param({}, id="full"),
    pytest.param(dict(is_causal=True, num_attention_heads=6), id="causal"),
    pytest.param(dict(layer_types=["sliding_attention", "full_attention"], **SLIDING), id="sliding-causal"),
    pytest.param(dict(layer_types=["sliding_attention"] * 2, is_causal=False, **SLIDING), id="two-sided"),
    pytest.param(dict(attention_bias=True, num_key_value_heads=4), id="bias-no-gqa"),
])
def test_drafts_equal_the_pages_when_nothing_was_reused(changes, tiny_target):
    """Over rejections and full blocks; rejected rows are written to the buffer and then overwritten."""
    rollout = DraftRollout(make_tiny_drafter(**changes))
    dense = dense_beside(rollout)
    embed, head = tiny_target.get_input_embeddings(), tiny_target.get_output_embeddings()
    for step, features in rollout.steps(FIRST, LATER):
        want, got = both(rollout, dense, step, features)
        torch.testing.assert_close(got[:3], want[:3], **TOL)
        drafts = [draft_tokens(rollout.model, c.attend, step.inputs, 4, embed, head)[:3].tolist()
                  for c in (rollout.paged, dense)]
        assert drafts[0] == drafts[1]


@pytest.mark.parametrize("changes", [
    {}, dict(is_causal=True), dict(layer_types=["sliding_attention", "full_attention"], is_causal=False, **SLIDING),
])
@pytest.mark.parametrize("kernel", ["sdpa", "own"])
def test_a_batch_without_a_loop_gives_the_same(changes, kernel):
    """What a CUDA device runs: whole slots behind a mask, or a kernel that takes slots and lengths; padded rows are 0."""
    def own(q, k, v, slots, lengths, causal, window):
        assert slots.dtype == lengths.dtype == torch.int32 and k.shape == (3, 101, 2, 16)
        return torch.stack([
            dense_attention(q[r], k[s, :n], v[s, :n], n - 5, causal, window) if n else torch.full_like(q[r], torch.nan)
            for r, (s, n) in enumerate(zip(slots.tolist(), lengths.tolist()))
        ])

    rollout = DraftRollout(make_tiny_drafter(**changes), (0, 16, 13))
    loop, batch = dense_beside(rollout), dense_beside(rollout, kernel=own if kernel == "own" else kernel)
    addresses = [t.data_ptr() for t in (batch.k_buf, batch.v_buf, batch.ctx_len, batch.ctx_base, batch.slot_of_row)]
    for step, features in rollout.steps(FIRST, LATER):
        noise = rollout.randn(len(step.rows), 5, rollout.config.hidden_size)
        out = []
        for context in (loop, batch):
            context.store(step, features)
            out.append(rollout.model(noise, step.inputs.query_positions.view(-1, 5), context.attend))
        torch.testing.assert_close(out[0], out[1], **TOL)
        assert torch.equal(loop.ctx_len, batch.ctx_len)
        torch.testing.assert_close(loop.k_buf, batch.k_buf, **TOL)
    assert addresses == [t.data_ptr() for t in (batch.k_buf, batch.v_buf, batch.ctx_len, batch.ctx_base, batch.slot_of_row)]


def test_drafts_follow_the_slot_not_the_order_of_the_batch():
    rollout = DraftRollout(make_tiny_drafter())
    dense = DenseContext(rollout.model, 7, 96)
    for i in (2, 0, 1):  # slots in another order than the batch's
        dense.begin(i, 0, i)
    for step, features in rollout.steps(FIRST, LATER):
        want, got = both(rollout, dense, step, features)
        torch.testing.assert_close(got[:3], want[:3], **TOL)


@pytest.mark.parametrize("changes", [
    {}, dict(layer_types=["sliding_attention", "full_attention"], is_causal=False, **SLIDING)
])
def test_after_a_hit_rows_lie_at_position_minus_base(changes):
    """Pitfall 17: the row is not the position; attention equals the pages' with `ctx_starts` at the hit."""
    rollout = DraftRollout(make_tiny_drafter(**changes), (0, 16, 13))
    dense = dense_beside(rollout)
    assert dense.ctx_base.tolist() == [0, 16, 13]
    for step, features in rollout.steps(FIRST, LATER):
        want, got = both(rollout, dense, step, features)
        torch.testing.assert_close(got[:3], want[:3], **TOL)
        for r, start in enumerate(rollout.starts):
            end = rollout.manager.num_tokens(r) + rollout.kept[r]
            assert dense.ctx_len[r] == end - start
            for layer in range(2):
                window = rollout.config.layer_window(layer)
                first = start if window is None else max(start, end - window + 1)  # pages keep the window only
                k, v = rows_of(rollout, layer, r, first, end)
                torch.testing.assert_close(dense.k_buf[r, layer, first - start : end - start], k, **TOL)
                torch.testing.assert_close(dense.v_buf[r, layer, first - start : end - start], v, **TOL)


def test_all_rows_of_a_pass_are_written_at_their_own_positions_rejected_ones_too():
    """As TensorRT-LLM's worker does: rejection moves no data, `ctx_len` alone says what counts."""
    rollout = DraftRollout(make_tiny_drafter(), (0, 16, 13))
    dense = dense_beside(rollout)
    for step, features in rollout.steps(FIRST, LATER):
        dense.store(step, features)
        k, v = rollout.model.context_kv(features, step.row_positions)
        ends = step.row_start_loc.tolist()
        for r, start in enumerate(rollout.starts):
            first, n = rollout.manager.num_tokens(r) - start, ends[r + 1] - ends[r]
            for buffer, rows in ((dense.k_buf, k), (dense.v_buf, v)):
                got = buffer[r, :, first : first + n].transpose(0, 1)
                torch.testing.assert_close(got, rows[ends[r] : ends[r + 1]], **TOL)


def test_rows_of_a_slot_never_reach_another():
    rollout = DraftRollout(make_tiny_drafter())
    dense = DenseContext(rollout.model, 5, 96)
    for i in rollout.ids:
        dense.begin(i, 0, i)
    for step, features in rollout.steps(FIRST, LATER):
        both(rollout, dense, step, features)
        assert not dense.k_buf[3:].any() and not dense.v_buf[3:].any()
        for r in range(3):
            end = rollout.manager.num_tokens(r) + rollout.kept[r]
            assert not dense.k_buf[r, :, end + 5 :].any(), "rows past the step's own and the block's"


def test_a_padded_request_changes_nothing():
    """Pitfalls 1 and 3: nothing is written for it, in no slot, and its output is zero."""
    rollout = DraftRollout(make_tiny_drafter())
    dense = dense_beside(rollout)
    step, features = rollout.step(FIRST, FIRST, prefill=True)
    dense.store(step, features)
    before = dense.k_buf.clone(), dense.ctx_len.tolist()
    n = torch.zeros(0, dtype=torch.int64)
    tables = torch.full((1, 2, 12), -1, dtype=torch.int32)
    starts = torch.zeros(3, dtype=torch.int32)
    inputs = build_draft_inputs(
        torch.tensor([-1, -1]), n, starts, starts[:2], tables, tokens_per_block=8, mask_token_id=3, num_draft_tokens=4
    )
    dense.store(DraftStep(torch.tensor([3, 3]), starts, n, inputs, tables, starts[:2]), torch.zeros(0, 144))
    out = dense.attend(0, torch.ones(2, 5, 4, 16), torch.ones(2, 5, 2, 16), torch.ones(2, 5, 2, 16))
    assert not out.any()
    assert torch.equal(dense.k_buf, before[0]) and dense.ctx_len.tolist() == before[1]


def with_padding(rollout, step, features, before):
    """The step with Q rows of a padded request in front of every request in `before`, whose rows are nonsense."""
    q, order, places = rollout.config.draft_block_size, [], []
    for r in range(len(rollout.ids)):
        order += [None] * before.count(r) + [r]
    order += [None] * before.count(len(rollout.ids))
    ends, pad = step.row_start_loc.tolist(), len(rollout.ids)
    parts, rows, sizes = [], [], []
    for r in order:
        span = slice(0, 0) if r is None else slice(ends[r], ends[r + 1])
        parts.append(features[span] if r is not None else torch.full((q, features.shape[1]), torch.nan))
        rows.append(step.row_positions[span] if r is not None else torch.full((q,), 10**6))
        sizes.append(len(rows[-1]))
        places.append(pad if r is None else r)
    index = torch.tensor(places)
    inputs = replace(
        step.inputs, ctx_lens=step.inputs.ctx_lens[index],
        query_positions=step.inputs.query_positions.view(-1, q)[index].flatten(),
    )
    starts = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
    padded = replace(
        step, rows=step.rows[index], row_start_loc=starts, row_positions=torch.cat(rows), inputs=inputs,
        block_tables=step.block_tables[:, index], ctx_starts=step.ctx_starts[index],
    )
    return padded, torch.cat(parts), [i for i, r in enumerate(order) if r is not None], index


@pytest.mark.parametrize("kernel", ["loop", "sdpa"])
@pytest.mark.parametrize("before", [(0,), (1,), (3,), (0, 1, 1, 3, 3)], ids=str)
def test_padded_requests_among_real_ones_write_nothing(kernel, before):
    """Pitfalls 1 and 3: first, in the middle, last; their rows have NaN features and positions of no table."""
    rollout = DraftRollout(make_tiny_drafter(), (0, 16, 13))
    plain, padded = dense_beside(rollout, kernel=kernel), dense_beside(rollout, kernel=kernel)
    for step, features in rollout.steps(FIRST, LATER):
        other, other_features, real, index = with_padding(rollout, step, features, before)
        noise = rollout.randn(len(step.rows), 5, rollout.config.hidden_size)
        outs = []
        for context, s, f, x in ((plain, step, features, noise), (padded, other, other_features, noise[index])):
            context.store(s, f)
            outs.append(rollout.model(x, s.inputs.query_positions.view(-1, 5), context.attend))
        torch.testing.assert_close(outs[1][real], outs[0][:3], **TOL)
        assert outs[1].isfinite().all()
        assert torch.equal(plain.ctx_len, padded.ctx_len)
        for name in ("k_buf", "v_buf"):
            torch.testing.assert_close(getattr(padded, name), getattr(plain, name), **TOL)


def test_a_request_that_keeps_no_row_stays_as_it_was():
    """In its first pass and in later ones, beside one that keeps all."""
    rollout = DraftRollout(make_tiny_drafter(), (0, 16, 13))
    dense = dense_beside(rollout)
    for rows, kept in (((4, 6, 1), (0, 6, 1)), ((3, 1, 2), (3, 0, 0)), ((5, 5, 5), (0, 0, 5))):
        step, features = rollout.step(rows, kept, prefill=True)
        want, got = both(rollout, dense, step, features)
        torch.testing.assert_close(got[:3], want[:3], **TOL)
        ends = [rollout.manager.num_tokens(r) + k for r, k in zip(rollout.ids, kept)]
        assert dense.ctx_len.tolist() == [end - start for end, start in zip(ends, rollout.starts)]
        rollout.commit()


def on_meta(value):
    """The same with tensors that have no values: what needs one raises."""
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return replace(value, **{f.name: on_meta(getattr(value, f.name)) for f in fields(value)}) if is_dataclass(value) else value


@pytest.mark.parametrize("changes", [
    {}, dict(is_causal=True), dict(layer_types=["sliding_attention", "full_attention"], is_causal=False, **SLIDING),
])
def test_a_step_asks_for_no_value_on_the_host(changes):
    """Pitfall 34: lengths live on the device. `meta` tensors refuse `.item()`, `.tolist()`, `nonzero` and masks as indices."""
    rollout = DraftRollout(make_tiny_drafter(**changes), (0, 16, 13))
    [(step, features), *_] = rollout.steps(FIRST, LATER)
    step, features = on_meta(step), on_meta(features)
    model = make_tiny_drafter(**changes)
    model.ensure_positions(101)
    model.to("meta")
    noise = torch.empty(4, 5, 48, device="meta")
    batch = DenseContext(model, 3, 96, device="meta", kernel="sdpa")
    batch.store(step, features)
    out = model(noise, step.inputs.query_positions.view(-1, 5), batch.attend)
    assert out.is_meta and out.shape == noise.shape
    loop = DenseContext(model, 3, 96, device="meta", kernel="loop")
    loop.store(step, features)
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        model(noise, step.inputs.query_positions.view(-1, 5), loop.attend)


def test_addresses_stay_while_sequences_come_and_go():
    """Pitfall 33: a captured step reads the same tensors for ever."""
    tensors = lambda c: (c.k_buf, c.v_buf, c._k, c._v, c.ctx_len, c.ctx_base, c.slot_of_row)
    first, second = DraftRollout(make_tiny_drafter(), seed=0), DraftRollout(make_tiny_drafter(), seed=1)
    dense = dense_beside(first, kernel="sdpa")
    before = [t.data_ptr() for t in tensors(dense)]
    for rollout in (first, second):
        for step, features in rollout.steps(FIRST, LATER):
            both(rollout, dense, step, features)
        for i in rollout.ids:
            dense.end(i)
        for i in rollout.ids:
            dense.begin(i, 8 * i, i)
    assert before == [t.data_ptr() for t in tensors(dense)]


# Slots


def test_a_row_that_nobody_has_leads_nowhere():
    """A sequence that left takes its row along, unless another one came into it in between."""
    dense = DenseContext(make_tiny_drafter(), 3, 96)
    dense.begin(10, 0, 2)
    dense.begin(11, 8, 0)
    assert dense.slot_of_row.tolist() == [1, -1, 0, -1]
    dense.end(10)
    assert dense.slot_of_row.tolist() == [1, -1, -1, -1]
    dense.begin(12, 0, 0)
    dense.end(11)
    assert dense.slot_of_row.tolist() == [2, -1, -1, -1] and dense.slot_of == {12: 2}


@pytest.mark.parametrize("row", [-1, 3, 1.0, None])
def test_the_padded_requests_row_is_nobodys(row):
    dense = DenseContext(make_tiny_drafter(), 3, 96)
    with pytest.raises(ValueError, match="row: expected an int in 0..2"):
        dense.begin(0, 0, row)
    assert len(dense.free_slots) == 3 and not dense.slot_of


def test_slots_are_taken_given_back_and_reused_from_empty():
    model = make_tiny_drafter()
    dense = DenseContext(model, 2, 96)
    dense.begin(10, 0, 0)
    dense.begin(11, 24, 1)
    assert dense.ctx_base.tolist() == [0, 24] and dense.slot_of == {10: 0, 11: 1}
    with pytest.raises(RuntimeError, match="all 2 slots are taken"):
        dense.begin(12, 0, 1)
    assert dense.slot_of == {10: 0, 11: 1}
    dense.ctx_len[1] = 40
    dense.end(11)
    dense.begin(12, 8, 1)
    assert dense.slot_of == {10: 0, 12: 1} and dense.ctx_len[1] == 0 and dense.ctx_base.tolist() == [0, 8]
    with pytest.raises(KeyError):
        dense.end(11)


def test_a_reused_slot_shows_nothing_of_the_sequence_before():
    first, second = DraftRollout(make_tiny_drafter(), seed=0), DraftRollout(make_tiny_drafter(), seed=1)
    dense = dense_beside(first)
    for step, features in first.steps((40, 40, 40), [(5, 5, 5)]):
        both(first, dense, step, features)
    for i in (1, 0, 2):
        dense.end(i)
    for i in second.ids:
        dense.begin(i, 0, i)
    assert [dense.slot_of[i] for i in second.ids] == [1, 0, 2]
    for step, features in second.steps(FIRST, LATER):
        want, got = both(second, dense, step, features)
        torch.testing.assert_close(got[:3], want[:3], **TOL)


def test_nothing_is_written_past_the_capacity():
    """Rows past the buffer are dropped, `ctx_len` leaves room for the block, neighbours stay untouched."""
    rollout = DraftRollout(make_tiny_drafter(), (0, 0, 80))
    dense = dense_beside(rollout, max_ctx=20)
    assert dense.capacity == 25
    for step, features in rollout.steps((14, 2, 3), [(5, 5, 5), (5, 1, 2), (5, 1, 1), (5, 1, 1)]):
        want, got = both(rollout, dense, step, features)
        ends = [rollout.manager.num_tokens(r) + k - s for r, k, s in zip(rollout.ids, rollout.kept, rollout.starts)]
        assert dense.ctx_len.tolist() == [min(end, 20) for end in ends]
        assert got.isfinite().all()
        for r in (1, 2):
            torch.testing.assert_close(got[r], want[r], **TOL)
    assert ends[0] == 34


# Attention


@pytest.mark.parametrize("causal,window", [(False, None), (True, None), (False, 4), (True, 4), (False, 1), (True, 1)])
def test_dense_attention_equals_a_loop_over_rows_and_keys(causal, window):
    """Pitfall 24: a window is two-sided unless causal."""
    torch.manual_seed(0)
    q, k, v, start = torch.randn(5, 6, 8), torch.randn(14, 2, 8), torch.randn(14, 2, 8), 9
    got = dense_attention(q, k, v, start, causal, window)
    for i in range(5):
        for h in range(6):
            keys = [j for j in range(14)
                    if (not causal or j <= start + i) and (window is None or abs(start + i - j) < window)]
            weights = torch.softmax(k[keys, h // 3] @ q[i, h] * 8**-0.5, 0)
            torch.testing.assert_close(got[i, h], weights @ v[keys, h // 3], **TOL)


def test_a_narrow_buffer_holds_rounded_rows():
    rollout = DraftRollout(make_tiny_drafter())
    dense = dense_beside(rollout, dtype=torch.bfloat16)
    for step, features in rollout.steps(FIRST, LATER[:1]):
        want, got = both(rollout, dense, step, features)
        end = rollout.manager.num_tokens(0) + rollout.kept[0]
        k, v = rows_of(rollout, 1, 0, 0, end)
        torch.testing.assert_close(dense.k_buf[0, 1, :end].float(), k, rtol=2**-8, atol=1e-5)
        assert not torch.equal(got, want) and got.dtype == torch.float32
        torch.testing.assert_close(got[:3], want[:3], rtol=0.1, atol=0.1)
