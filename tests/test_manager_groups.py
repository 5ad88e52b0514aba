"""The manager with several groups, ranks and geometries: budget, windows, copies, forks, preemption, policies, events."""

import re
import time
from dataclasses import replace

import pytest
import torch
from test_manager import TPB, assert_refused, make_manager, run

from dflash_paged.manager import (
    CacheEvent,
    KVCacheManager,
    Mapping,
    OutOfBlocks,
    RequestError,
    SequenceLimits,
    build_per_layer_num_kv_heads,
    describe_group,
    group_layers,
    resolve_layers,
    split_budget,
)
from dflash_paged.memory import (
    CATALOGUE,
    GB,
    LayerSpec,
    Lengths,
    Machine,
    ModelPair,
    Serving,
    bytes_per_token,
    paged_cost,
    pages_needed,
    plan_capacity,
    stack,
)
from dflash_paged.pools import LayerPages

TARGET, DRAFT = LayerSpec(2, 16, "float32"), LayerSpec(1, 8, "float32")
WINDOWED = replace(DRAFT, sliding_window=20)
PROMPT = list(range(30))


def two_groups(**changes) -> KVCacheManager:
    """A full group of target and draft, and a windowed draft's own."""
    return make_manager(**{**dict(draft_layers=[DRAFT, WINDOWED], num_blocks=[14, 10], enable_partial_reuse=True), **changes})


# Registration and ranks


def test_layers_are_grouped_by_window_the_full_ones_first():
    """Pitfall 21: a mixed drafter has a table a group."""
    m = make_manager(
        target_layers=[TARGET, replace(TARGET, sliding_window=64)], num_blocks=9,
        draft_layers=[WINDOWED, DRAFT, replace(DRAFT, sliding_window=64)],
    )
    assert [(g.window, g.layers, g.has_target, g.has_draft) for g in m.groups] == [
        (None, (0, 3), True, True), (64, (1, 4), True, True), (20, (2,), False, True),
    ]
    assert m.layer_to_group == [0, 1, 2, 0, 1]
    m.add_sequence(0, PROMPT)
    m.prepare_resources([(0, 30)])
    assert m.block_tables([0]).shape == (3, 1, 8)
    assert_refused(m, ValueError, "^layer_idx: expected a layer, the 3 groups", lambda: m.get_batch_cache_indices([0]))


@pytest.mark.parametrize("tp_size, heads", [(1, [8, 8, 4]), (2, [4, 4, 2]), (4, [2, 2, 1]), (8, 1), (16, 1)])
def test_ranks_share_out_kv_heads_and_replicate_when_there_are_more_ranks(tp_size, heads):
    layers = resolve_layers(stack(2, 8, 64), stack(1, 4, 64), tp_size=tp_size)
    assert build_per_layer_num_kv_heads(layers) == heads
    m = make_manager(target_layers=stack(2, 8, 64), draft_layers=stack(1, 4, 64), mapping=Mapping(tp_size=tp_size))
    assert [s.num_kv_heads for s in m.layers.values()] == [max(1, 8 // tp_size)] * 2 + [max(1, 4 // tp_size)]
    assert m.get_buffers(2).shape[3] == max(1, 4 // tp_size)
    assert m.get_cache_size_per_token() == bytes_per_token(layers)


def test_a_latent_is_the_same_on_every_tensor_parallel_rank():
    latent = LayerSpec(1, 24, kv_factor=1)
    assert resolve_layers([latent], [LayerSpec(4, 8)], tp_size=4)[0] == latent


def test_heads_that_do_not_divide_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match="^tp_size: expected a divisor or a multiple of num_kv_heads 8, got 3"):
        make_manager(target_layers=stack(2, 8, 64), mapping=Mapping(tp_size=3))


@pytest.mark.parametrize("fields, words", [(dict(tp_size=0), "tp_size"), (dict(pp_size=2, pp_rank=2), "pp_rank"), (dict(pp_size=True), "pp_size")])
def test_impossible_mappings_are_refused(fields, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        Mapping(**fields)


def test_each_pipeline_rank_has_its_layers_and_the_last_one_the_spec_layers():
    ranks = [make_manager(target_layers=[TARGET] * 5, mapping=Mapping(pp_size=2, pp_rank=r)) for r in range(2)]
    assert [list(m.layers) for m in ranks] == [[0, 1, 2], [3, 4, 5, 6, 7]]
    assert [m.get_cache_size_per_token("draft") for m in ranks] == [0, 3 * DRAFT.bytes_per_token]
    whole = make_manager(target_layers=[TARGET] * 5)
    assert sum(m.get_cache_size_per_token() for m in ranks) == whole.get_cache_size_per_token()
    for m, other, owner in ((ranks[0], 7, 1), (ranks[1], 2, 0)):
        for call in (m.page_view, m.get_buffers, lambda i, m=m: m.set_scales(i, 1.0, 1.0)):
            assert_refused(m, ValueError, f"^layer_idx: layer {other} is on pipeline rank {owner}", lambda: call(other))  # noqa: B023
    assert ranks[1].page_view(7).layer_idx == 7 and ranks[0].layer_to_group == [0, 0, 0, -1, -1, -1, -1, -1]


def test_with_a_layer_mask_only_these_target_layers_are_registered():
    m = make_manager(target_layers=[TARGET] * 4, layer_mask=[True, False, True, False])
    assert list(m.layers) == [0, 2] and m.get_cache_size_per_token("draft") == 0
    assert_refused(m, ValueError, "^layer_idx: layer 1 is masked out", lambda: m.page_view(1))
    with pytest.raises(ValueError, match="^layer_mask: expected a layer on pipeline rank 0, got none"):
        make_manager(target_layers=[TARGET] * 4, layer_mask=[False] * 4)


def test_geometries_may_differ_in_everything_within_a_group():
    """Pitfall 25: pages of different bytes share block ids, a pool each."""
    target = [LayerSpec(2, 16, "bfloat16"), LayerSpec(1, 24, "bfloat16", kv_factor=1)]
    draft = [LayerSpec(3, 8), LayerSpec(1, 32)]
    m = make_manager(target_layers=target, draft_layers=draft, draft_kv_dtype="float32", num_blocks=7)
    assert m.num_groups == 1 and [tuple(t.shape) for t in m.pools.tensors] == [
        (7, 1, 2, 8, 2, 16), (7, 1, 1, 8, 1, 24), (7, 1, 2, 8, 3, 8), (7, 1, 2, 8, 1, 32),
    ]
    assert m.pools.num_bytes == 7 * 8 * m.get_cache_size_per_token()


# The budget


@pytest.mark.parametrize("name", ["Qwen3.8-27B", "gpt-oss-20b", "MiniMax-M2.5-NVFP4", "Kimi-K2.5"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_split_holds_as_many_requests_as_the_planner_says(name, tp_size):
    """Pitfall 15: one budget for target and draft; bytes to the byte, groups full at the same time."""
    pair, lengths = CATALOGUE[name], Lengths.lognormal(4_000, 1.0, 131_072)
    serving = Serving(131_072, 10**6, pair.draft.draft_block_size - 1)
    budget = 30 * GB
    unweighted = ModelPair(replace(pair.target, weights_bytes=0), pair.draft)
    plan = plan_capacity(Machine(budget, tp_size=tp_size), unweighted, lengths, serving)
    layers = resolve_layers(pair.target.layers, pair.draft.layers, tp_size=tp_size)
    groups = group_layers(dict(enumerate(layers)), len(pair.target.layers))
    limits = SequenceLimits(32, 131_072, pair.draft.draft_block_size)
    blocks = split_budget(groups, budget, lengths.values, limits)
    sizes = [g.bytes_per_token * 32 for g in groups]
    assert sum(sizes) == 32 * plan.bytes_per_token
    assert budget - min(sizes) < sum(n * s for n, s in zip(blocks, sizes)) <= budget
    pages = [sum(limits.blocks(n, g.window) for n in lengths.values) for g in groups]
    enough = lambda r: all(pages_needed(r, p, len(lengths.values)) <= n for p, n in zip(pages, blocks))
    assert enough(plan.requests) and not enough(plan.requests + 1)


def test_the_manager_takes_the_split_and_says_so():
    m = two_groups(kv_cache_bytes=200_000, expected_lengths=[10, 60], num_blocks=None)
    assert m.pools.num_bytes <= 200_000 < m.pools.num_bytes + TPB * min(g.bytes_per_token for g in m.groups)
    text = m.explain_budget()
    for group, n in zip(m.groups, m.blocks_per_group):
        assert describe_group(group) in text and f"{n:,} blocks" in text
    assert "10 to 60 tokens" in text and "as num_blocks says" in two_groups().explain_budget()
    short, long = (two_groups(kv_cache_bytes=10**7, expected_lengths=[n], num_blocks=None).blocks_per_group for n in (10, 60))
    assert long[1] < short[1] and long[0] > short[0], "longer requests need relatively less of a window"


@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize("num_blocks", [[5, 9], [9, 5], [20, 20]])
def test_the_longest_request_that_fits_is_told_and_fits(chunk, num_blocks):
    """Whichever group is the smaller one, with the prompt at once or in chunks; one token more doesn't fit."""
    m = two_groups(num_blocks=num_blocks, max_chunk_tokens=chunk)
    told = int(re.search(r"longest request that fits.*: (\d+) of 64", m.explain_budget())[1])
    m.add_sequence(0, [1] * told)
    while m.num_tokens(0) < told:
        new = min(chunk or told, told - m.num_tokens(0))
        m.prepare_resources([(0, new)])
        m.update_resources([(0, [1] * new)])
    m.prepare_resources([(0, 0)])
    m.check_invariants()
    assert told == 64 or any(
        m.limits.most_blocks(told + 1, g.window, chunk) > g.num_blocks for g in m.groups
    )


def test_a_budget_below_one_block_a_group_is_refused_with_the_numbers():
    full, window = (g.bytes_per_token * TPB for g in two_groups().groups)
    with pytest.raises(ValueError, match=f"^kv_cache_bytes: one request needs 1 blocks of {full} bytes .* and 1 blocks of {window} bytes .*got {full}"):
        two_groups(kv_cache_bytes=full, num_blocks=None)
    m = two_groups(kv_cache_bytes=full + window, num_blocks=None)
    assert m.blocks_per_group == (1, 1)
    run(m, 0, [1, 2, 3])
    for num_blocks, words in (([0, 5], "one request needs"), ([5], "an int or 2 of them"), ([5, 5.0], "num_blocks"), (True, "num_blocks")):
        with pytest.raises(ValueError, match=words):
            two_groups(num_blocks=num_blocks)


@pytest.mark.parametrize("lengths", [[], [0], [65], [1.5]])
def test_expected_lengths_are_checked(lengths):
    with pytest.raises(ValueError, match="lengths"):
        two_groups(kv_cache_bytes=10**6, num_blocks=None, expected_lengths=lengths)


def test_used_bytes_of_lognormal_requests_are_their_rows_and_a_partial_block_each():
    """The issue's rank: 64 requests, within 0.5 % of tokens x bytes + one partial block each; in a step, the planner's."""
    lengths = Lengths.lognormal(8_000, 1.0, 131_072).values
    m = KVCacheManager(
        target_layers=stack(62, 4, 128), draft_layers=stack(5, 4, 128), num_blocks=40_000, max_seq_len=131_072,
        max_batch_size=64, num_lookahead_tokens=5, device="meta",
    )
    for i, length in enumerate(lengths):
        run_on_meta(m, i, [i] * length)
    row = m.get_cache_size_per_token()
    assert m.get_cache_size_per_token("draft") == 10_240
    stats = m.stats()
    assert sum(lengths) * row <= stats.used_bytes <= sum(lengths) * row + 64 * 32 * row
    assert stats.used_bytes <= 1.005 * sum(lengths) * row
    m.prepare_resources([(i, 0) for i in range(64)])
    cost = paged_cost(list(m.layers.values()), lengths, max_seq_len=131_072, num_draft_tokens=4)
    assert m.stats().used_bytes == cost.held_bytes


def run_on_meta(m, request_id, tokens):
    m.add_sequence(request_id, tokens)
    m.prepare_resources([(request_id, len(tokens))])
    m.update_resources([(request_id, tokens)])


@pytest.mark.parametrize("window", [1, 2, 8, 9, 20, 64])
@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
def test_the_most_that_a_request_ever_holds_is_bounded(window, chunk):
    """Prefilled in chunks, then decoded: no more than `most_blocks`; with a window, no more than the planner at the end."""
    m = make_manager(draft_layers=[DRAFT, replace(DRAFT, sliding_window=window)], num_blocks=40, max_seq_len=120)
    m.add_sequence(0, [1] * 80)
    held, most = 0, m.limits.most_blocks(110, window, chunk)
    while m.num_tokens(0) < 110:
        n = m.num_tokens(0)
        new = min(chunk, 80 - n) if n < 80 else 0
        m.prepare_resources([(0, new)])
        held = max(held, m.num_held_blocks(0, 1))
        if not new:
            assert m.num_held_blocks(0, 1) == m.limits.blocks(n, window)
        m.update_resources([(0, [1] * (new or min(3, 110 - n)))])
        m.check_invariants()
    assert held <= most <= m.limits.most_blocks(110)


def test_a_prompt_is_held_chunk_by_chunk():
    """Pitfall 35: nothing is sized to the whole prompt on its first chunk."""
    m = two_groups(num_blocks=[20, 6], max_seq_len=160)
    m.add_sequence(0, list(range(100)))
    for first in range(0, 100, 10):
        m.prepare_resources([(0, 10)])
        assert m.num_held_blocks(0) == -(-(first + 14) // TPB)
        assert m.num_held_blocks(0, 1) <= 6, "a window's group is smaller than the prompt"
        m.update_resources([(0, list(range(first, first + 10)))])
        m.check_invariants()
    assert_refused(m, OutOfBlocks, "of group 1 are needed", lambda: m.prepare_resources([(0, 40)]))


def test_a_batch_for_which_one_group_has_room_and_another_not_changes_nothing():
    """Pitfall 38: tables, counts and the order of eviction stay; afterwards the same blocks go out as without it."""
    m, twin = (two_groups(num_blocks=[20, 5], max_seq_len=64) for _ in range(2))
    for each in (m, twin):
        run(each, 0, list(range(24)))
        run(each, 1, [5] * 9)
        each.free_resources(0)
        each.add_sequence(2, [7] * 40)
    assert m.num_available_blocks(0) == 18 and m.num_available_blocks(1) == 3
    words = "6 more blocks of group 1 are needed; 0 are free and 3 can be evicted, of 5"
    assert_refused(m, OutOfBlocks, words, lambda: m.prepare_resources([(1, 0), (2, 40)]))
    for each in (m, twin):
        each.prepare_resources([(1, 0), (2, 8)])
    assert m.dump() == twin.dump()


# Windows


def test_a_window_gives_its_blocks_back_and_a_hit_finds_them_again():
    m = two_groups()
    run(m, 0, list(range(48)))
    assert m.num_held_blocks(0) == 6 and m.num_held_blocks(0, 1) == 3  # rows 29 to 47: blocks 3 to 5
    assert m.get_batch_cache_indices([0], layer_idx=3)[0][:3] == [-1, -1, -1]
    assert m.stats().groups[1].num_cached == 3
    start = m.add_sequence(1, [*range(48), 99])
    assert (start.num_reused_tokens, start.ctx_start) == (48, 0)
    assert m.get_batch_cache_indices([1], 3) == m.get_batch_cache_indices([0], 3)


def test_a_missing_draft_block_of_a_window_raises_ctx_start_and_never_shortens_the_hit():
    """Pitfall 16: what the table spans and what exists are told apart."""
    m = two_groups(enable_partial_reuse=False)
    run(m, 0, list(range(48)))
    m.free_resources(0)
    m._ledger.evict(1)  # of blocks 0 to 2, which the window had passed
    assert m.add_sequence(1, [*range(48), 99]).ctx_start == 0
    m.free_resources(1)
    for _ in range(5):
        m._ledger.evict(1)
    start = m.add_sequence(2, [*range(48), 99])
    assert (start.num_reused_tokens, start.ctx_start) == (48, 48)
    assert m.num_held_blocks(2, 1) == 0 and m.num_held_blocks(2) == 6
    m.prepare_resources([(2, 1)])
    m.check_invariants()
    m.update_resources([(2, [99])])
    m.check_invariants()


def test_a_window_limits_how_far_a_request_may_be_rewound():
    m = two_groups(enable_prefix_reuse=False)
    run(m, 0, list(range(50)))
    # rows 31 to 49 are in the window: blocks 3 to 6; at 43 rows the window begins at row 24, block 3
    assert m.max_rewind(0) == 50 - (3 * TPB + 20 - 1) == 7
    assert_refused(m, ValueError, "8 of 50 rows can't be dropped.*at most 7", lambda: m.rewind(0, 8))
    m.rewind(0, 7)
    m.check_invariants()
    assert m.num_tokens(0) == 43


# Copies


def fill(m: KVCacheManager, request_id: int, first: int, last: int, seed: int) -> None:
    """Write numbers that only this (seed, position, layer) has."""
    for layer_idx in m.layers:
        table = m.get_batch_cache_indices([request_id], layer_idx)[0]
        k, v = m.page_view(layer_idx).k, m.page_view(layer_idx).v
        for p in range(first, last):
            k[table[p // TPB], p % TPB] = 1000 * seed + p + layer_idx / 8
            v[table[p // TPB], p % TPB] = -1000 * seed - p - layer_idx / 8


def read(m: KVCacheManager, request_id: int, layer_idx: int, first: int, last: int) -> list[float]:
    table = m.get_batch_cache_indices([request_id], layer_idx)[0]
    k, v = m.page_view(layer_idx).k, m.page_view(layer_idx).v
    rows = [(k[table[p // TPB], p % TPB], v[table[p // TPB], p % TPB]) for p in range(first, last)]
    assert all((a == a.flatten()[0]).all() and (b == -a.flatten()[0]).all() for a, b in rows)
    return [a.flatten()[0].item() for a, _ in rows]


def test_the_rest_of_a_prompt_is_copied_from_a_block_that_begins_alike():
    m = two_groups()
    m.add_sequence(0, PROMPT)
    m.prepare_resources([(0, 30)])
    fill(m, 0, 0, 30, 1)
    m.update_resources([(0, PROMPT)])
    start = m.add_sequence(1, [*range(19), 90, 91])
    assert (start.num_reused_tokens, start.num_reused_blocks, start.num_copied_tokens) == (19, 2, 3)
    m.prepare_resources([(1, 2)])
    assert len({m.get_batch_cache_indices([i], 0)[0][2] for i in (0, 1)}) == 2
    fill(m, 1, 19, 21, 2)
    for layer_idx in range(4):
        assert read(m, 1, layer_idx, 16, 21) == [1000 + p + layer_idx / 8 for p in (16, 17, 18)] + [2000 + p + layer_idx / 8 for p in (19, 20)]
        assert read(m, 0, layer_idx, 16, 24) == [1000 + p + layer_idx / 8 for p in range(16, 24)]
    m.check_invariants()


def test_without_a_block_to_spare_a_prompt_starts_at_the_last_full_block():
    m = two_groups(num_blocks=[6, 6])
    run(m, 0, list(range(24)))
    m.free_resources(0)
    m.add_sequence(1, [70] * 20)
    m.prepare_resources([(1, 20)])
    assert m.stats().groups[0].num_free == 0
    start = m.add_sequence(2, [*range(20), 90])
    assert (start.num_reused_tokens, start.num_copied_tokens) == (16, 0)
    m.check_invariants()


def test_a_copy_that_fails_leaves_nothing_behind():
    """A device error between allocation and store: the request doesn't exist, or its block is still shared."""
    m = two_groups()
    run(m, 0, PROMPT)
    free = [g.num_free for g in m.stats().groups]
    copy_pages = m.pools.copy_pages

    def fails(*args):
        raise RuntimeError("device")

    m.pools.copy_pages = fails
    with pytest.raises(RuntimeError, match="device"):
        m.add_sequence(1, [*range(19), 90])
    m.check_invariants()
    assert m.live_requests() == [0] and [g.num_free for g in m.stats().groups] == free
    m.fork_sequence(0, 2)
    with pytest.raises(RuntimeError, match="device"):
        m.prepare_resources([(0, 0), (2, 0)])
    m.check_invariants()
    m.pools.copy_pages = copy_pages
    m.prepare_resources([(0, 0), (2, 0)])
    m.check_invariants()
    assert m.add_sequence(1, [*range(19), 90]).num_copied_tokens == 3


def test_a_copy_that_fails_between_a_shrink_and_a_growth_leaves_every_request_whole():
    """Three requests in one batch: one gives blocks back, one must copy, one grows. A retry finds its way."""
    m = two_groups(num_blocks=[20, 16])
    run(m, 0, PROMPT)
    m.fork_sequence(0, 1)
    m.add_sequence(2, [60] * 40)
    m.prepare_resources([(2, 40)])
    copy_pages, calls = m.pools.copy_pages, iter([True, False])

    def fails(*args):
        if next(calls):
            raise RuntimeError("device")
        copy_pages(*args)

    m.pools.copy_pages = fails
    with pytest.raises(RuntimeError, match="device"):
        m.prepare_resources([(2, 4), (0, 0), (1, 0)])
    m.check_invariants()
    assert_refused(m, ValueError, "reserved up to 8", lambda: m.update_resources([(2, [60] * 20)]))
    m.pools.copy_pages = copy_pages
    m.prepare_resources([(2, 20), (0, 0), (1, 0)])
    m.update_resources([(2, [60] * 20), (0, [1]), (1, [2])])
    m.check_invariants()


class Mark:
    """A mark that a test lets pass; a real one is tested on a GPU."""

    def __init__(self):
        self.passed, self.waited = False, 0

    def query(self):
        return self.passed


@pytest.fixture
def marks(monkeypatch):
    """Managers on the CPU behave as if their stream ran behind; `marks` are those recorded so far."""
    from dflash_paged import manager as module

    found = []

    def wait(mark, device):
        if mark is not None:
            mark.waited += 1

    monkeypatch.setattr(module, "record_mark", lambda device: found.append(Mark()) or found[-1])
    monkeypatch.setattr(module, "wait_for", wait)
    return found


def test_a_hit_waits_for_its_rows_mark_until_that_has_passed(marks):
    m = two_groups(enable_partial_reuse=False)
    run(m, 0, PROMPT)
    (mark,) = marks
    m.add_sequence(1, PROMPT)
    assert mark.waited == 1
    m.add_sequence(2, PROMPT, salt="other")
    assert mark.waited == 1, "nothing of it is read"
    mark.passed = True
    run(m, 3, [7] * 9)
    m.add_sequence(4, PROMPT)
    assert mark.waited == 1, "it has passed and is forgotten"


def test_a_copys_source_is_referenced_until_the_next_allocation_waits_for_the_copy(marks):
    m = two_groups()
    run(m, 0, PROMPT)
    source = m.get_batch_cache_indices([0], 0)[0][2]
    m.free_resources(0)
    assert m.add_sequence(1, [*range(19), 90, 91]).num_copied_tokens == 3
    assert m._ledger.pools[0].ref_counts[source] == 1 and marks[-1].waited == 0
    m.check_invariants()
    available = m.num_available_blocks()
    assert marks[-1].waited == 1 and m._ledger.pools[0].ref_counts[source] == 0
    assert m.num_available_blocks() == available
    m.check_invariants()


def test_a_wait_that_fails_leaves_everything_as_it_was(marks, monkeypatch):
    from dflash_paged import manager as module

    m = two_groups()
    run(m, 0, PROMPT)
    before = m.dump()

    def fails(mark, device):
        raise RuntimeError("device")

    monkeypatch.setattr(module, "wait_for", fails)
    with pytest.raises(RuntimeError, match="device"):
        m.add_sequence(1, PROMPT)
    assert m.dump() == before and m.live_requests() == [0]


def test_forks_share_every_block_until_one_of_them_writes():
    """Pitfall 18: a shared block is never written, copy on write."""
    m = two_groups()
    m.add_sequence(0, PROMPT)
    m.prepare_resources([(0, 30)])
    fill(m, 0, 0, 30, 1)
    m.update_resources([(0, PROMPT)])
    m.fork_sequence(0, 1)
    m.fork_sequence(1, 2)
    m.check_invariants()
    assert m.stats().groups[0].num_shared == 4 and m.block_owners()[0] == (0, 1, 2)
    assert m.blocks_needed(0) == [2, 2], "a copy, and a block for the lookahead"
    shared = m.get_batch_cache_indices([0], 0)[0][3]
    m.prepare_resources([(0, 0), (1, 0), (2, 0)])
    m.check_invariants()
    last = [m.get_batch_cache_indices([i], 0)[0][3] for i in range(3)]
    assert len(set(last)) == 3 and last[2] == shared, "two copies: the third has the block to itself by then"
    for i in range(3):
        fill(m, i, 30, 32, 5 + i)
    m.update_resources([(i, [100 + i, 1]) for i in range(3)])
    for i in range(3):
        for layer_idx in range(4):
            first = 0 if layer_idx < 3 else 13
            want = [1000 + p + layer_idx / 8 for p in range(first, 30)] + [1000 * (5 + i) + p + layer_idx / 8 for p in (30, 31)]
            assert read(m, i, layer_idx, first, 32) == want
    m.check_invariants()


def test_the_last_of_the_forks_writes_in_place():
    m = two_groups()
    run(m, 0, PROMPT)
    m.fork_sequence(0, 1)
    m.free_resources(0)
    before = m.get_batch_cache_indices([1], 0)[0]
    m.prepare_resources([(1, 0)])
    assert m.get_batch_cache_indices([1], 0)[0][:4] == before, "nobody else holds it: no copy"
    m.check_invariants()


def test_a_fork_into_a_full_pool_waits_for_a_block():
    m = two_groups(num_blocks=[5, 6], max_num_seqs=6)
    run(m, 0, PROMPT)
    m.fork_sequence(0, 1)
    assert m.can_prepare([(0, 0)]) is False and m.blocks_needed(0)[0] == 2
    assert_refused(m, OutOfBlocks, "2 more blocks of group 0 are needed; 1 are free", lambda: m.prepare_resources([(0, 0)]))
    m.free_resources(1)
    m.prepare_resources([(0, 0)])


# Preemption


def test_a_preempted_request_comes_back_with_target_and_draft_rows_or_neither():
    """Pitfall 36: rows of one kind only would shift the other's."""
    m = two_groups(num_blocks=[8, 8])
    run(m, 0, PROMPT)
    assert m.preempt(0) == 30 and m.stats().num_referenced == 0
    for call in (lambda: m.prepare_resources([(0, 0)]), lambda: m.update_resources([(0, [])]), lambda: m.rewind(0, 0),
                 lambda: m.num_tokens(0), lambda: m.block_tables([0]), lambda: m.fork_sequence(0, 9), lambda: m.preempt(0)):
        assert_refused(m, RequestError, "request 0 is preempted", call)
    start = m.resume(0, [*PROMPT, 50])
    assert (start.num_reused_tokens, start.ctx_start) == (24, 0)
    assert_refused(m, RequestError, "request 0 is running", lambda: m.resume(0, PROMPT))
    m.preempt(0)
    run(m, 1, [9] * 60)  # evicts all of it
    m.free_resources(1)
    start = m.resume(0, [*PROMPT, 50])
    assert (start.num_reused_tokens, start.ctx_start) == (0, 0), "computed again: both kinds"
    m.prepare_resources([(0, 30)])
    m.update_resources([(0, PROMPT)])
    m.check_invariants()
    m.preempt(0)
    m.free_resources(0)
    m.free_resources(0)
    m.check_invariants()


def test_live_requests_are_bounded_and_preempted_ones_do_not_count():
    m = two_groups(max_num_seqs=4)
    for i in range(4):
        m.add_sequence(i, [i])
    words = r"request \d: 4 requests \(max_num_seqs\) hold blocks already"
    assert_refused(m, ValueError, words, lambda: m.add_sequence(4, [4]))
    assert_refused(m, ValueError, words, lambda: m.fork_sequence(0, 4))
    m.preempt(0)
    m.add_sequence(4, [4])
    assert_refused(m, ValueError, words, lambda: m.resume(0, [0]))
    assert m.live_requests() == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="^max_num_seqs"):
        two_groups(max_num_seqs=3)


# Draft rows that are missing


def test_rows_restored_from_elsewhere_have_no_draft_rows_and_say_so():
    """Pitfall 30: a disaggregated request's prefill ran elsewhere; nothing is keyed by a request row that only a
    prefill assigns, so its later draft rows lie where any other request's do."""
    m = two_groups(enable_partial_reuse=False)
    m.add_sequence(0, PROMPT)
    m.prepare_resources([(0, 24)])
    m.update_resources([(0, PROMPT[:24])], draft_rows=False)
    assert m.ctx_starts([0, None]).tolist() == [24, 0]
    m.prepare_resources([(0, 6)])
    fill(m, 0, 24, 30, 1)
    m.update_resources([(0, PROMPT[24:])])
    assert m.ctx_starts([0]).tolist() == [24] and read(m, 0, 2, 24, 30) == [1000 + p + 2 / 8 for p in range(24, 30)]
    m.prepare_resources([(0, 0)])
    m.update_resources([(0, [30, 31])])
    m.free_resources(0)
    start = m.add_sequence(1, [*range(32), 7])
    assert (start.num_reused_tokens, start.ctx_start) == (32, 24), "the fourth block has its draft rows"


@pytest.mark.parametrize("policy, tail, expected", [
    ("mask", 1, (48, 32)), ("recompute_tail", 16, (48, 32)), ("recompute_tail", 17, (24, 24)), ("recompute_tail", 100, (0, 0)), ("truncate", 1, (0, 0)),
])
def test_policies_decide_what_missing_rows_cost(policy, tail, expected):
    """One group; blocks 0 to 3 of six lack their draft rows."""
    m = make_manager(missing_draft_policy=policy, recompute_tail_tokens=tail)
    m.add_sequence(0, list(range(49)))
    m.prepare_resources([(0, 32)])
    m.update_resources([(0, list(range(32)))], draft_rows=False)
    m.prepare_resources([(0, 17)])
    m.update_resources([(0, list(range(32, 49)))])
    m.free_resources(0)
    start = m.add_sequence(1, list(range(49)))
    assert (start.num_reused_tokens, start.ctx_start) == expected
    m.check_invariants()


def test_restored_rows_never_replace_a_cached_block_that_has_its_draft_rows():
    """The request goes on with the cached block, whose draft rows a later hit still finds."""
    m = make_manager()
    run(m, 0, list(range(20)))
    m.free_resources(0)
    m.add_sequence(1, list(range(20)), reuse_prefix=False)
    m.prepare_resources([(1, 20)])
    m.update_resources([(1, list(range(20)))], draft_rows=False)
    m.check_invariants()
    assert m.find_prefix(list(range(20))).ctx_start == 0 and m.ctx_starts([1]).tolist() == [20]
    assert m.stats().num_cached == 0, "it holds what the index names; its own copies are free"
    assert m.block_tables([1])[0, 0, :3].tolist() == m.get_batch_cache_indices([1], 0)[0]


def test_a_recomputed_tail_heals_the_index():
    m = make_manager(missing_draft_policy="recompute_tail", recompute_tail_tokens=16)
    run(m, 0, list(range(33)))
    m.free_resources(0)
    m.withhold_draft_rows()
    start = run(m, 1, list(range(33)))
    assert (start.num_reused_tokens, start.ctx_start) == (16, 16)
    m.free_resources(1)
    start = m.add_sequence(2, list(range(33)))
    assert (start.num_reused_tokens, start.ctx_start) == (32, 16), "its tail is there now"


def test_part_of_a_block_without_draft_rows_is_computed_not_copied():
    m = two_groups()
    run(m, 0, PROMPT)
    m.free_resources(0)
    m.withhold_draft_rows()
    start = m.add_sequence(1, [*range(20), 90])
    assert (start.num_reused_tokens, start.num_copied_tokens, start.ctx_start) == (16, 0, 16)


# Prompts that are asked for again


def test_a_hashed_prompt_stands_for_its_tokens():
    m = two_groups()
    run(m, 0, PROMPT, salt="a")
    prompt = m.hash_prompt([*PROMPT, 5], "a")
    assert m.find_prefix(prompt) == m.find_prefix([*PROMPT, 5], salt="a")
    assert m.find_prefix(prompt).num_reused_tokens == 24 and m.find_prefix([*PROMPT, 5]).num_reused_tokens == 0
    assert m.blocks_to_admit(prompt, 31) == m.blocks_to_admit([*PROMPT, 5], 31, salt="a")
    before = m.dump()
    assert m.find_prefix(prompt) and m.dump() == before
    for words, call in (("hashed for", lambda: m.add_sequence(1, prompt, salt="b")),
                        ("hashed for", lambda: two_groups(tokens_per_block=16).add_sequence(1, prompt))):
        with pytest.raises(ValueError, match=words):
            call()
    assert m.add_sequence(1, prompt).num_reused_tokens == 24
    m.preempt(1)
    assert_refused(m, ValueError, "hashed for .* salt 'b'", lambda: m.resume(1, m.hash_prompt([1, 2], "b")))


def test_finished_ids_take_no_room_and_stay_finished():
    m = two_groups()
    for i in range(300):
        m.add_sequence(i, [1])
        m.free_resources(i)
    m.add_sequence(1000, [1])
    m.free_resources(1000)
    assert m._finished.dump() == (300, [1000])
    for i in (0, 299, 1000):
        m.free_resources(i)
        assert_refused(m, RequestError, "has finished", lambda: m.rewind(i, 0))  # noqa: B023
    for i in (300, 999, 1001):
        assert_refused(m, RequestError, "is unknown", lambda: m.free_resources(i))  # noqa: B023
    assert_refused(m, ValueError, "7 has finished", lambda: m.add_sequence(7, [1]))


def test_a_resumed_request_publishes_again_after_the_index_was_cleared():
    m = two_groups()
    run(m, 0, PROMPT)
    m.clear_prefix_index()
    m.preempt(0)
    m.resume(0, PROMPT)
    m.prepare_resources([(0, 30)])
    m.update_resources([(0, PROMPT)])
    assert m.stats().num_published == 3


@pytest.mark.parametrize("changes, words", [
    (dict(mapping=None), "^mapping"), (dict(draft_layers=None), "^draft_layers"), (dict(device="foo"), "^device"), (dict(layer_mask="ab"), "^layer_mask"), (dict(layer_mask=[1, 0]), "^layer_mask"),
    (dict(expected_lengths=[]), "^expected_lengths"), (dict(expected_lengths=["a"]), "^expected_lengths"),
    (dict(expected_lengths=5), "^expected_lengths"), (dict(enable_prefix_reuse="False"), "^enable_prefix_reuse"),
    (dict(max_chunk_tokens=0), "^max_chunk_tokens"), (dict(max_num_seqs=0), "^max_num_seqs"),
])
def test_more_bad_settings_are_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=words):
        two_groups(**changes)


def test_integers_of_numpy_are_taken_for_what_they_are():
    import numpy as np

    m = two_groups(max_seq_len=np.uint8(200), tokens_per_block=np.uint8(8), max_batch_size=np.int32(4), num_blocks=np.array([30, 20]))
    assert m.max_blocks_per_seq == 25 and m.blocks_per_group == (30, 20)


def test_more_bad_calls_are_refused_by_name():
    m = two_groups()
    run(m, 0, PROMPT)
    for error, words, call in (
        (ValueError, "^batch: expected pairs", lambda: m.prepare_resources(None)),
        (ValueError, "^batch: expected pairs", lambda: m.prepare_resources([0])),
        (ValueError, "^draft_rows", lambda: m.update_resources([(0, [])], draft_rows="no")),
        (ValueError, "^reuse_prefix", lambda: m.add_sequence(1, [1], reuse_prefix="no")),
        (ValueError, "^tokens: expected token ids in order", lambda: m.add_sequence(1, {1, 2})),
        (ValueError, "^tokens: expected token ids in order", lambda: m.add_sequence(1, None)),
        (ValueError, "^chunk_tokens", lambda: m.blocks_to_admit([1], 1, chunk_tokens=-50)),
        (RequestError, "True is unknown", lambda: m.preempt(True)),
        (ValueError, "^request_id", lambda: m.free_resources(False)),
        (ValueError, "^request_id", lambda: m.free_resources([0])),
        (ValueError, "^out: expected shape", lambda: m.block_tables([0], out=torch.zeros(1, 1, 8, dtype=torch.int32))),
    ):
        assert_refused(m, error, words, call)


# Buffers that change


def test_the_probes_buffers_are_replaced_by_the_real_ones():
    """Pitfalls 9 and 11: one manager, one budget; who holds `LayerPages` writes into the present buffers."""
    m = two_groups(draft_kv_dtype="float8_e4m3fn", num_blocks=[2, 2])
    for layer_idx in (2, 3):
        m.set_scales(layer_idx, 0.5, 0.5)
    pages, version = LayerPages(m, [2, 3]), m.buffers_version
    m.add_sequence(0, [1])
    assert_refused(m, ValueError, r"^reallocate: expected no live request, got \[0\]", lambda: m.reallocate(num_blocks=9))
    m.free_resources(0)
    assert_refused(m, ValueError, "exactly one", lambda: m.reallocate())
    words = m.explain_budget()
    assert_refused(m, ValueError, "num_blocks", lambda: m.reallocate(num_blocks=[0, 4]))
    assert_refused(m, ValueError, "kv_cache_bytes", lambda: m.reallocate(kv_cache_bytes=4))
    assert m.explain_budget() == words
    m.reallocate(kv_cache_bytes=100_000)
    assert m.buffers_version > version and m.pools.num_bytes <= 100_000
    m.set_scales(2, 0.25, 0.25)
    m.set_scales(3, 0.25, 0.25)
    assert pages[0].num_pages == m.blocks_per_group[0] and pages[0].k_scale.tolist() == [0.25]
    run(m, 1, PROMPT)


# What can be seen


def test_events_tell_what_happened_once_it_has():
    seen = []
    m = two_groups(events=seen.append)
    run(m, 0, PROMPT)
    m.fork_sequence(0, 1)
    m.prepare_resources([(0, 0), (1, 0)])
    m.update_resources([(0, [30, 31]), (1, [40])])
    m.rewind(1, 1)
    m.preempt(1)
    m.resume(1, PROMPT)
    m.free_resources(0)
    kinds = [e.kind for e in seen]
    for kind in ("added", "reserved", "committed", "published", "released", "forked", "copied", "rewound", "preempted", "resumed", "freed"):
        assert kind in kinds, kind
    assert CacheEvent("published", 0, None, (), 24) in seen
    assert kinds.index("forked") < kinds.index("copied")
    seen.clear()
    for i in range(2, 6):
        run(m, i, [i] * 24)
        m.free_resources(i)
    evicted = [e for e in seen if e.kind == "evicted"]
    assert len(evicted) == m.stats().num_evicted > 0 and all(e.group in (0, 1) and len(e.blocks) == 1 for e in evicted)


def test_a_hook_that_raises_finds_and_leaves_the_call_done():
    def hook(event):
        m.check_invariants()
        if event.kind in failing:
            raise RuntimeError("hook")

    failing, m = {"added", "committed", "freed"}, two_groups(events=hook)
    with pytest.raises(RuntimeError, match="hook"):
        m.add_sequence(0, PROMPT)
    assert m.live_requests() == [0]
    m.prepare_resources([(0, 30)])
    with pytest.raises(RuntimeError, match="hook"):
        m.update_resources([(0, PROMPT)])
    assert m.num_tokens(0) == 30 and m.stats().num_published == 3
    with pytest.raises(RuntimeError, match="hook"):
        m.free_resources(0)
    assert m.live_requests() == []
    m.check_invariants()
    with pytest.raises(ValueError, match="^events: expected a callable"):
        two_groups(events="print")


def test_stats_are_sums_over_groups():
    m = two_groups()
    run(m, 0, list(range(48)))
    m.fork_sequence(0, 1)
    stats = m.stats()
    for name in ("num_free", "num_cached", "num_evictable", "num_referenced", "num_shared", "used_bytes", "used_draft_bytes"):
        assert getattr(stats, name) == sum(getattr(g, name) for g in stats.groups)
    full, window = m.groups
    assert (stats.groups[0].num_shared, stats.groups[1].num_shared) == (6, 3)
    assert stats.used_bytes == TPB * (6 * full.bytes_per_token + 3 * window.bytes_per_token)
    assert stats.used_draft_bytes == TPB * (6 * full.draft_bytes_per_token + 3 * window.bytes_per_token)
    assert stats.fragmentation_bytes == 5 * window.bytes_per_token, "rows 24 to 28 are out of the window, counted once"


def test_show_draws_every_block_once():
    pytest.importorskip("matplotlib")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    m = two_groups()
    run(m, 0, PROMPT)
    m.fork_sequence(0, 1)
    figure = m.show("two requests", label=lambda i: "AB"[i])
    (ax,) = figure.axes
    assert sum(isinstance(p, Rectangle) for p in ax.patches) == 14 + 10
    assert sum(t.get_text() == "A+B" for t in ax.texts) == 4 + 3
    plt.close(figure)
    with pytest.raises(ValueError, match="^show: expected at most 256 blocks"):
        make_manager(num_blocks=257).show()


# Tables on the device


def test_a_step_sends_its_changes_in_one_copy():
    m = two_groups(num_blocks=[40, 40])
    for i in range(4):
        run(m, i, [i] * 9)
    copies, entries = m.tables.num_copies, m.tables.num_entries_sent
    for step in range(20):
        m.prepare_resources([(i, 0) for i in range(4)])
        m.update_resources([(i, [step]) for i in range(4)])
    assert m.tables.num_copies - copies <= 20
    assert m.tables.num_entries_sent - entries < 20 * 2 * 4, "less than one entry a request, group and step"
    m.check_invariants()


def test_rows_of_ended_requests_are_empty_before_others_get_them():
    m = two_groups()
    run(m, 0, PROMPT)
    row = m.table_rows([0])[0]
    m.free_resources(0)
    m.add_sequence(1, [5])
    assert m.table_rows([1, None]) == [row, m.tables.padded_row]
    assert (m.block_tables([1, None]) == -1).all()
    out = torch.zeros(2, 2, 8, dtype=torch.int32)
    assert m.block_tables([1, None], out=out) is out and (out == -1).all()


# Cost


@pytest.mark.parametrize("windows", [(), (2048,)])
def test_a_step_of_256_requests_costs_little_whatever_the_pools_size(windows):
    """Not much more for 16 times the blocks. A guard with room for a busy machine: that a step takes less than 1.5 ms
    is recorded in figures/data/host_manager.csv and asserted in test_package."""
    from dflash_paged.host_costs import filled_manager

    best = {}
    for num_blocks in (8_192, 131_072):
        m = filled_manager(num_blocks, 256, True, windows)
        times = []
        for step in range(40):
            plan, kept = [(i, 0) for i in m.live_requests()], [(i, [7] * (1 + (i + step) % 8)) for i in m.live_requests()]
            start = time.thread_time()
            m.prepare_resources(plan)
            m.update_resources(kept)
            times.append(time.thread_time() - start)
        best[num_blocks] = sorted(times)[2]
    assert max(best.values()) < 4e-3
    assert best[131_072] < 3 * best[8_192]


def test_matching_a_long_prompt_costs_little():
    """131,072 tokens, the quickest of 25, with room for a busy machine; 15 and 1 ms are asserted of the recorded ones."""
    from dflash_paged.host_costs import match_times

    times = {r["call"]: r["best_ms"] for r in match_times()}
    assert times["find_prefix of tokens"] < 40 and times["find_prefix, hashes kept"] < 3
