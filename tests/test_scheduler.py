"""The scheduler's promises, one by one, over small managers and without a model."""

import re

import pytest

from dflash_paged.manager import KVCacheManager, RequestError
from dflash_paged.memory import LayerSpec
from dflash_paged.scheduler import (
    ADMISSION_POLICIES, MAX_PRIORITY, DraftPoolExhausted, RefusedRequest, ScheduledRequest, Scheduler, StepPlan,
    Waiting, lookahead_rows, lookahead_tokens,
)

SIZE = 8
CORRECT = ["guaranteed_no_evict", "max_utilization"]
GEOMETRIES = {  # windows of the target's and the draft's layers, whether the draft has a pool of its own
    "one group": ([None], [None], False),
    "draft window": ([None], [9], False),
    "target window": ([None, 12], [None], False),
    "three groups": ([None, 12], [9], False),
    "draft pool": ([None], [None], True),
    "draft pool with a window": ([None], [9], True),
}


def make_manager(target=(None,), draft=(None,), **options) -> KVCacheManager:
    layers = dict(
        target_layers=[LayerSpec(1, 1, "float32", sliding_window=w) for w in target],
        draft_layers=[LayerSpec(1, 1, "float32", sliding_window=w) for w in draft],
    )
    defaults = dict(
        tokens_per_block=SIZE, num_blocks=40, max_seq_len=64, max_batch_size=4, num_lookahead_tokens=3, device="meta",
    )
    return KVCacheManager(**{**layers, **defaults, **options})


def make_scheduler(manager: KVCacheManager | None = None, **options) -> Scheduler:
    """K = 2, 24 rows a step."""
    return Scheduler(manager or make_manager(), **{**dict(num_draft_tokens=2, max_step_tokens=24), **options})


def make_managers(geometry: str, blocks: int, windowed: int = 9, **options) -> tuple:
    """A manager, and the draft's own where the geometry has one, with the blocks of a full and of a windowed group."""
    target, draft, is_apart = GEOMETRIES[geometry]
    sizes = lambda windows: [blocks if w is None else windowed for w in sorted(set(windows), key=lambda w: w or 0)]
    if not is_apart:
        return make_manager(target, draft, num_blocks=sizes([*target, *draft]), **options), None
    own = make_manager(draft, (), num_blocks=sizes(draft), **{**options, "enable_prefix_reuse": False})
    return make_manager(target, (), num_blocks=sizes(target), **options), own


def request(number: int, length: int = 8, new: int = 8, *, tokens=None, **options) -> ScheduledRequest:
    """A request whose prompt is nobody else's, unless given."""
    tokens = [1000 * number + i for i in range(length)] if tokens is None else list(tokens)
    return ScheduledRequest(number, tokens, len(tokens), new, **options)


def finish_step(s: Scheduler, plan: StepPlan, take=None) -> list[ScheduledRequest]:
    """The work of a prepared step: each decoding request keeps `take[id]` rows, else one."""
    kept = []
    for r, chunk in plan.rows:
        count = (take or {}).get(r.request_id, 1) if chunk == 0 else int(r.num_rows + chunk == r.prefill_len)
        before = len(r.tokens)
        while len(r.tokens) < before + count and not r.finish_reason:
            r.tokens.append(len(r.tokens))
            if r.num_new_tokens == r.max_new_tokens or len(r.tokens) == s.max_seq_len:
                r.finish_reason = "length"
        kept.append(chunk or len(r.tokens) - before)
    return s.settle(plan, kept)


def run_step(s: Scheduler, take=None) -> StepPlan:
    plan = s.schedule()
    s.prepare(plan)
    finish_step(s, plan, take)
    return plan


def run(s: Scheduler, take=None, most: int = 300) -> list[StepPlan]:
    """Steps until every request has ended."""
    plans = []
    while s.waiting or s.running:
        assert len(plans) < most, f"deadlock: {s.why_waiting()}"
        plans.append(run_step(s, take))
    return plans


def run_until(s: Scheduler, holds) -> None:
    """Steps until something holds."""
    for _ in range(100):
        if holds():
            return
        run_step(s)
    raise AssertionError("it never came to that")


def ids(requests) -> list[int]:
    return [r.request_id for r in requests]


def dumps(s: Scheduler) -> list:
    """All that the managers know, as plain data."""
    return [m.dump() for m in s.managers]


def blocks_of(manager: KVCacheManager, cache_id: int) -> list[int]:
    """Blocks that a request holds, a group."""
    return [manager.num_held_blocks(cache_id, group) for group in range(manager.num_groups)]


def held(s: Scheduler) -> list:
    """Referenced blocks of each manager, rows and blocks of each running request."""
    return [
        (m.stats().num_referenced, [(m.num_tokens(i), *blocks_of(m, i)) for i in m.live_requests()]) for m in s.managers
    ]


def is_clean(s: Scheduler) -> bool:
    """Whether no block is referenced in any manager."""
    for m in s.managers:
        m.check_invariants()
    return not s.waiting and not s.running and held(s) == [(0, [])] * len(s.managers)


def reasons(s: Scheduler) -> list[tuple[int, str]]:
    return [(w.request_id, w.reason) for w in s.why_waiting()]


def crowd(s: Scheduler, number: int = 8) -> list[ScheduledRequest]:
    """Requests that share half of their prompts and grow to more than the pools hold together."""
    requests = [
        request(i, new=20 + i, tokens=[*range(12), *(100 * i + j for j in range(i))]) for i in range(1, number + 1)
    ]
    for r in requests:
        s.add(r)
    return requests


# 1: no step is refused


@pytest.mark.parametrize("k", [0, 2, 4])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("admission", CORRECT)
def test_no_step_is_refused_and_every_request_ends(admission, geometry, k):
    """Pitfall 14: joint admission, whatever the groups; afterwards no block is referenced."""
    manager, own = make_managers(geometry, 9, num_lookahead_tokens=k + 1)
    s = make_scheduler(manager, draft_manager=own, admission=admission, num_draft_tokens=k, max_batch_size=3)
    requests = crowd(s)
    for plan in run(s, {r.request_id: 1 + r.request_id % (k + 1) for r in requests}):
        assert len(plan.decode) * (k + 1) + sum(n for _, n in plan.prefill) <= 24
        assert 0 < len(plan.requests) <= 3
    assert all(r.finish_reason == "length" and r.num_new_tokens == r.max_new_tokens for r in requests)
    assert is_clean(s)


@pytest.mark.parametrize("admission", CORRECT)
def test_a_draft_pool_with_a_window_can_take_the_rows_of_a_prefix_hit(admission):
    """Pitfalls 14 and 16: a pool of the draft's own lacks them; all come at once, whatever the window and the chunks.

    Its request may be refused, but once it is let in every step of it finds its blocks.
    """
    manager, own = make_manager(draft=()), make_manager([1], (), num_blocks=4, enable_prefix_reuse=False)
    s = make_scheduler(manager, draft_manager=own, admission=admission, max_step_tokens=12)
    for number in (1, 2):
        try:
            s.add(request(number, tokens=range(40), new=2))
        except RefusedRequest:
            continue
        run(s)
    assert is_clean(s)


@pytest.mark.parametrize("geometry", ["three groups", "draft pool"])
def test_a_step_rolled_back_leaves_nothing_and_can_be_tried_again(geometry):
    manager, own = make_managers(geometry, 20)
    s = make_scheduler(manager, draft_manager=own)
    crowd(s, 3)
    for _ in range(6):
        plan = s.schedule()
        before = held(s)
        for _ in range(2):
            s.prepare(plan)
            s.rollback(plan)
            assert held(s) == before
        s.prepare(plan)
        finish_step(s, plan)
    run(s)
    assert is_clean(s)


def test_a_failure_of_the_second_manager_leaves_the_first_as_it_was(monkeypatch):
    """Nothing is half reserved."""
    manager, own = make_managers("draft pool", 20)
    s = make_scheduler(manager, draft_manager=own)
    crowd(s, 2)
    plan, before = s.schedule(), held(s)
    with monkeypatch.context() as patch:
        patch.setattr(own, "prepare_resources", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            s.prepare(plan)
    assert held(s) == before
    s.prepare(plan)
    finish_step(s, plan)
    run(s)
    assert is_clean(s)


def test_a_step_is_shared_out_decode_first_then_prompts_by_rank():
    """Decoding requests take K + 1 rows each, prompts what is left."""
    s = make_scheduler(max_step_tokens=12)
    s.add(request(1, 4))
    run_step(s)
    s.add(request(2, 20))
    s.add(request(3, 5))
    s.add(request(4, 6, priority=1))
    plan = run_step(s)
    assert ids(plan.decode) == [1] and [(r.request_id, n) for r, n in plan.prefill] == [(4, 6), (2, 3)]
    assert plan.rows == [(plan.decode[0], 0), *plan.prefill] and ids(plan.requests) == [1, 4, 2]
    assert ids(plan.admitted) == [4, 2, 3]


def test_a_better_rank_takes_prompt_rows_first_though_it_came_later():
    s = make_scheduler(max_step_tokens=12)
    s.add(request(1, 40))
    run_step(s)
    s.add(request(2, 8, priority=1))
    assert [(r.request_id, n) for r, n in run_step(s).prefill] == [(2, 8), (1, 4)]


# 2 and 3: who gives way


def test_guaranteed_no_evict_never_preempts_or_pauses():
    s = make_scheduler(make_manager(num_blocks=9))
    crowd(s)
    assert not any(p.preempted or p.paused for p in run(s))
    assert s.num_preemptions == s.num_paused == 0


def test_guaranteed_no_evict_admits_what_fits_to_its_end_and_no_more():
    """8 prompt + 13 new + 3 lookahead rows are 3 blocks: 3 requests in 9 blocks, not in 8."""
    for blocks, number in ((9, 3), (8, 2)):
        s = make_scheduler(make_manager(num_blocks=blocks))
        for i in range(4):
            s.add(request(i, 8, 13))
        assert ids(s.schedule().admitted) == list(range(number))


def grown(num_blocks: int, number: int, **options) -> Scheduler:
    """Requests of 4 prompt tokens that all run under "max_utilization"; each is about to need its second block."""
    s = make_scheduler(make_manager(num_blocks=num_blocks), admission="max_utilization", **options)
    for i in range(number):
        s.add(request(i, 4, 20))
    run_step(s)
    run_until(s, lambda: s.running[0].num_rows + 3 > SIZE)
    assert len(s.running) == number
    return s


def test_max_utilization_preempts_the_worst_rank_for_better_ones():
    """Three need a second block each, of 4: the last gives its own, nobody is admitted, the first two go on."""
    s = grown(4, 3)
    late = request(9, 1, 1)
    s.add(late)
    plan = s.schedule()
    assert ids(plan.preempted) == [2] and not plan.admitted and not plan.paused and ids(plan.decode) == [0, 1]
    assert ids(s.waiting) == [2, 9] and reasons(s) == [(2, "preemption"), (9, "behind")]
    assert s.waiting[0].num_preemptions == 1 and s.waiting[0].num_rows == 0 and len(s.waiting[0].tokens) > 4
    s.prepare(plan)
    finish_step(s, plan)
    run(s)
    assert is_clean(s) and late.finish_reason == "length"


def test_nobody_is_admitted_in_a_step_that_preempted():
    """The last gives three blocks where two are lacking; the first in the queue has a slot and a block, and waits."""
    s = make_scheduler(make_manager(num_blocks=6), admission="max_utilization", max_batch_size=3)
    for i, length in enumerate((4, 4, 21)):
        s.add(request(i, length, 20))
    run_step(s)
    s.add(request(9, 1, 1, priority=1))
    plan = run_step(s)
    while not plan.preempted and s.num_steps < 20:
        plan = run_step(s)
    assert ids(plan.preempted) == [2] and not plan.admitted and ids(plan.decode) == [0, 1]
    assert reasons(s) == [(9, "preemption"), (2, "behind")]
    assert ids(run_step(s).admitted) == [9]


def test_max_utilization_preempts_by_rank_not_by_arrival():
    s = make_scheduler(make_manager(num_blocks=4), admission="max_utilization")
    for i, priority in enumerate((0, 2, 1)):
        s.add(request(i, 4, 20, priority=priority))
    run_until(s, lambda: s.num_preemptions)
    assert ids(s.running) == [1, 2] and ids(s.waiting) == [0]


def test_a_request_that_lacks_blocks_itself_pauses_with_its_rows():
    """Three need a second block each, of 5: the last sits the step out, and goes on when there is one."""
    s = grown(5, 3)
    last = s.running[-1]
    rows, held = last.num_rows, s.manager.num_held_blocks(last.cache_id)
    plan = run_step(s)
    assert ids(plan.paused) == [2] and not plan.preempted and ids(plan.decode) == [0, 1]
    assert reasons(s) == [(2, "paused")] and last in s.running
    assert (last.num_rows, s.manager.num_held_blocks(last.cache_id)) == (rows, held)
    s.abort(0)
    assert ids(run_step(s).decode) == [1, 2] and not s.why_waiting()


def test_a_request_alone_takes_part_in_every_step_though_its_twin_left_a_block_in_the_index():
    """Two compute the same prompt at once; the one whose block is in the index ends, the other needs the whole pool.

    Its own blocks follow the one that nobody holds any more, so that one can't be evicted.
    """
    manager = make_manager(num_blocks=4, max_seq_len=32, num_lookahead_tokens=2)
    s = make_scheduler(manager, admission="max_utilization", num_draft_tokens=1)
    s.add(request(1, new=5, tokens=range(8)))
    s.add(request(2, new=24, tokens=range(8)))
    assert all(plan.requests for plan in run(s, {2: 2}, most=40))
    assert is_clean(s)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_best_of_those_that_run_takes_part_in_every_step(geometry):
    manager, own = make_managers(geometry, 9)
    s = make_scheduler(manager, draft_manager=own, admission="max_utilization")
    crowd(s)
    num_given_way = 0
    for _ in range(300):
        if not s.waiting and not s.running:
            break
        plan = run_step(s)
        num_given_way += len(plan.preempted) + len(plan.paused)
        others = [r for r in s.running if r not in plan.requests]
        assert plan.requests and not any(s.rank(r) < min(map(s.rank, plan.requests)) for r in others)
    assert is_clean(s) and (num_given_way or "window" in geometry or geometry == "three groups")


# 4 and 5: order, and how long one waits


def test_a_priority_passes_as_many_earlier_ones_as_it_says():
    s = make_scheduler(max_batch_size=1, priority_places=2)
    for i in range(6):
        s.add(request(i))
    s.add(request(6, priority=1))
    s.add(request(7, priority=MAX_PRIORITY))
    assert [s.rank(r) for r in s.waiting] == [(r.place - 2 * r.priority, r.place) for r in s.waiting]
    assert ids(s.waiting) == [7, 0, 1, 2, 3, 4, 6, 5]
    assert ids(plan.admitted[0] for plan in run(s) if plan.admitted) == [7, 0, 1, 2, 3, 4, 6, 5]


@pytest.mark.parametrize("admission", CORRECT)
def test_nobody_passes_one_that_does_not_fit(admission):
    """The first in the queue lacks blocks; a smaller one behind it would fit and waits."""
    s = make_scheduler(make_manager(num_blocks=8), admission=admission)
    s.add(request(1, 20, 20))
    run_step(s)
    s.add(request(2, 40, 10))
    s.add(request(3, 1, 1))
    assert not run_step(s).admitted and reasons(s) == [(2, "blocks"), (3, "behind")]
    order = [i for plan in run(s) for i in ids(plan.admitted)]
    assert order == [2, 3]


@pytest.mark.parametrize("admission", CORRECT)
def test_a_stream_of_better_ranked_requests_is_passed_in_time(admission):
    """At 3 places a priority at most 3 later ones pass: 4 requests, its own among them, of 4 steps and a prefill."""
    s = make_scheduler(max_batch_size=1, priority_places=3, admission=admission)
    low = request(100, 8, 4)
    s.add(low)
    for number in range(1, 60):
        s.add(request(number, 8, 4, priority=1))
        if s.schedule() and low.finish_reason:
            break
        run_step(s)
    assert low.finish_reason and s.num_steps <= 4 * (4 + 1) and [r for r in s.waiting]


# 6: see test_no_step_is_refused_and_every_request_ends


# 7: one that never fits


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_request_that_never_fits_is_refused_alone(geometry):
    """Pitfall 32: the numbers are in the message, the others go on."""
    manager, own = make_managers(geometry, 5)
    s = make_scheduler(manager, draft_manager=own)
    fits, large = request(1, 20, 17), request(2, 20, 18)  # 20 + 17 + 3 rows are 5 blocks
    s.add(fits)
    run_step(s)
    before = dumps(s), list(s.waiting), list(s.running)
    for call in (s.check, s.add):
        with pytest.raises(RefusedRequest, match=r"20 prompt \+ 18 new .*6 blocks.* 5\b"):
            call(large)
    assert (dumps(s), s.waiting, s.running) == before and large.place == -1
    run(s)
    assert fits.finish_reason == "length" and is_clean(s)


@pytest.mark.parametrize("blocks", [[40, 2], [2, 40]])
@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("admission", ADMISSION_POLICIES)
def test_each_pool_can_refuse_a_request(admission, is_apart, blocks):
    """Pitfall 32: the draft's group and its own pool too, whatever admission counts."""
    if is_apart:
        own = make_manager(draft=(), num_blocks=blocks[1], enable_prefix_reuse=False)
        s = make_scheduler(make_manager(draft=(), num_blocks=blocks[0]), draft_manager=own, admission=admission)
    else:
        s = make_scheduler(make_manager(draft=[30], num_blocks=blocks), admission=admission)
    with pytest.raises(RefusedRequest, match="has 2 "):
        s.add(request(1, 20, 20))
    s.add(request(2, 8, 5))
    run(s)
    assert is_clean(s)


# 8: the fault that joint admission mends


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("admission", ADMISSION_POLICIES)
def test_only_target_only_runs_out_of_draft_blocks_in_mid_flight(admission, is_apart):
    """Pitfall 14: four requests fit the target's group; their draft rows don't fit together, though each alone does."""
    if is_apart:
        own = make_manager(draft=(), num_blocks=8, enable_prefix_reuse=False)
        s = make_scheduler(make_manager(draft=()), draft_manager=own, admission=admission)
    else:
        s = make_scheduler(make_manager(draft=[30], num_blocks=[40, 8]), admission=admission)
    for i in range(4):
        s.add(request(i, 4, 30))
    if admission != "target_only":
        run(s)
        assert is_clean(s)
        return
    with pytest.raises(DraftPoolExhausted, match="target_only.*4 requests"):
        for _ in range(40):
            plan = s.schedule()
            before, held_before, queue = dumps(s), held(s), list(s.running)
            s.prepare(plan)
            finish_step(s, plan)
    assert s.num_steps > 0 and len(plan.decode) == 4, "in mid-flight, not at the start"
    assert held_before == held(s) and dumps(s) == before and s.running == queue
    for i in range(3):
        s.abort(i)
    run(s)
    assert is_clean(s)


def test_a_step_without_draft_blocks_evicts_nothing_of_the_target():
    """Pitfalls 14 and 38: a refused step leaves the prefix index as it was."""
    own = make_manager(draft=(), num_blocks=8, enable_prefix_reuse=False)
    s = make_scheduler(make_manager(draft=(), num_blocks=20), draft_manager=own, admission="target_only")
    for i in range(4, 10):
        s.add(request(i, 40, 1))
        run(s)
    for i in range(4):
        s.add(request(i, 4, 30))
    with pytest.raises(DraftPoolExhausted):
        for _ in range(40):
            plan = s.schedule()
            before = s.manager.stats()
            s.prepare(plan)
            finish_step(s, plan)
    assert s.manager.stats() == before


def test_target_only_counts_windowed_target_groups():
    """A group with a target layer is counted, whatever else is in it."""
    s = make_scheduler(make_manager([None, 30], [None], num_blocks=[40, 8]), admission="target_only")
    for i in range(4):
        s.add(request(i, 4, 30))
    run(s)
    assert is_clean(s)


# 9: lookahead


def test_too_few_lookahead_rows_are_refused():
    """Pitfall 19: K rows are too few, K + 1 are enough; a step ahead needs as many again."""
    for ahead in (0, 1):
        for k in (0, 1, 4):
            need = (k + 1) * (ahead + 1)
            assert lookahead_tokens(k, ahead) == need
            options = dict(num_draft_tokens=k, steps_ahead=ahead)
            make_scheduler(make_manager(num_lookahead_tokens=need), **options)
            make_scheduler(make_manager(num_lookahead_tokens=need + 1), **options)
            if need > 1:
                with pytest.raises(ValueError, match=f"^manager: .*{need} num_lookahead_tokens.* got {need - 1}"):
                    make_scheduler(make_manager(num_lookahead_tokens=need - 1), **options)


def test_a_draft_manager_needs_the_lookahead_rows_too():
    """Pitfall 19."""
    own = make_manager(draft=(), num_lookahead_tokens=2, enable_prefix_reuse=False)
    with pytest.raises(ValueError, match="^draft_manager: .*3 num_lookahead_tokens.* got 2"):
        make_scheduler(make_manager(draft=()), draft_manager=own)


def test_three_systems_reserve_these_rows():
    rows = lookahead_rows(4)
    assert [r["rows"] for r in rows][:4] == [5, 10, 5, 5]
    assert all({"system", "name", "rows", "when"} == r.keys() for r in rows)


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("length", range(1, 18))
@pytest.mark.parametrize("k", [0, 2, 4])
def test_each_row_of_a_verify_pass_has_a_block(k, length, is_apart):
    """Pitfall 19: K + 1 rows behind the verified ones, right after prefill's last chunk too, cut at max_seq_len."""
    options = dict(num_lookahead_tokens=k + 1, max_seq_len=31)
    own = make_manager(draft=(), enable_prefix_reuse=False, **options) if is_apart else None
    manager = make_manager(draft=() if is_apart else [None], **options)
    s = make_scheduler(manager, num_draft_tokens=k, draft_manager=own, max_step_tokens=20)
    r = request(1, length, 31 - length)
    s.add(r)
    for _ in range(40):
        if r.finish_reason:
            break
        plan = s.schedule()
        s.prepare(plan)
        end = r.num_rows + plan.rows[0][1]
        for manager in s.managers:
            pages = manager.get_batch_cache_indices([r.cache_id])[0]
            assert len(pages) == -(-min(end + k + 1, 31) // SIZE) and min(pages) >= 0
        finish_step(s, plan, {1: 1 + len(r.tokens) % (k + 1)})
    assert len(r.tokens) == 31


# 10: chunks


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("admission", CORRECT)
def test_a_chunk_reserves_its_own_rows_and_the_lookahead(admission, is_apart):
    """Pitfall 35: not the whole prompt."""
    own = make_manager(draft=(), enable_prefix_reuse=False) if is_apart else None
    manager = make_manager(draft=() if is_apart else [None])
    s = make_scheduler(manager, draft_manager=own, admission=admission, max_step_tokens=13)
    r = request(1, 50, 2)
    s.add(r)
    for end in (13, 26, 39, 50):
        plan = s.schedule()
        s.prepare(plan)
        assert r.num_rows + plan.prefill[0][1] == end
        assert all(m.num_held_blocks(r.cache_id) == -(-(end + 3) // SIZE) for m in s.managers)
        assert (len(r.tokens), r.is_decoding) == (50, False)
        finish_step(s, plan)
    assert r.is_decoding and r.num_new_tokens == 1 and r.next_rows == 0


# 11: why


def test_a_waiting_request_is_told_which_blocks_it_lacks():
    """The running one takes 5 of 8 in the end and holds 3; the next needs 4 of 5, of which 2 are promised."""
    s = make_scheduler(make_manager(num_blocks=8))
    s.add(request(1, 20, 17))
    run_step(s)
    s.add(request(2, 20, 9))
    s.add(request(3, 1, 1))
    assert [(w.request_id, w.reason) for w in s.why_waiting()] == [(2, "new"), (3, "behind")]
    s.schedule()
    first, second = s.why_waiting()
    assert isinstance(first, Waiting) and (first.request_id, first.reason) == (2, "blocks")
    assert re.search(r"needs 4 blocks \(.*full attention.*\); 5 of 8 are available, 2 of them promised", first.words)
    assert (second.request_id, second.reason) == (3, "behind") and "request 2" in second.words


def test_reasons_name_slots_and_the_draft_pool():
    s = make_scheduler(max_batch_size=1)
    s.add(request(1))
    s.add(request(2))
    s.schedule()
    assert reasons(s) == [(2, "slots")] and "1 slots" in s.why_waiting()[0].words
    own = make_manager(draft=(), num_blocks=5, enable_prefix_reuse=False)
    s = make_scheduler(make_manager(draft=()), draft_manager=own)
    s.add(request(1, 20, 17))
    s.add(request(2, 20, 17))
    s.schedule()
    assert reasons(s) == [(2, "blocks")]
    assert re.search("needs 5 blocks .*draft.*; 5 of 5 are available, 5 of them promised", s.why_waiting()[0].words)


def test_nobody_waits_where_all_run():
    s = make_scheduler()
    assert s.why_waiting() == [] and s.schedule().requests == []
    s.add(request(1))
    s.schedule()
    assert s.why_waiting() == []


# 12: abort


@pytest.mark.parametrize("moment", ["waiting", "preempted", "admitted", "prefilling", "decoding", "paused"])
@pytest.mark.parametrize("is_apart", [False, True])
def test_abort_gives_all_back_at_any_moment(moment, is_apart):
    ended = []
    own = make_manager(draft=(), num_blocks=5, enable_prefix_reuse=False) if is_apart else None
    s = make_scheduler(
        make_manager(draft=() if is_apart else [None], num_blocks=5), draft_manager=own, max_step_tokens=12,
        admission=CORRECT[moment == "paused"], on_end=lambda r: ended.append(r.request_id),
    )
    r = request(1, 20, 10)
    if moment == "paused":
        s.add(request(0, 4, 20))
        r = request(1, 4, 20)
    s.add(r)
    if moment == "admitted":
        s.schedule()
    elif moment != "waiting":
        run_step(s)
    if moment == "preempted":
        s.preempt(1)
        ended.clear()
    if moment == "decoding":
        run_until(s, lambda: r.is_decoding)
    elif moment == "paused":
        run_until(s, lambda: (1, "paused") in reasons(s))
    where = s.waiting if moment in ("waiting", "preempted") else s.running
    assert r in where and s.find(1) is r
    assert s.abort(1) is r and r.finish_reason == "aborted"
    assert r not in s.waiting and r not in s.running and ended == ([] if where is s.waiting else [1])
    assert all(w.request_id != 1 for w in s.why_waiting())
    for call in (s.abort, s.find, s.preempt):
        with pytest.raises(KeyError, match="1"):
            call(1)
    run(s)
    assert is_clean(s)


def test_abort_between_prepare_and_rollback_gives_its_reservation_back():
    s = make_scheduler()
    s.add(request(1))
    s.add(request(2))
    plan = s.schedule()
    s.prepare(plan)
    s.abort(1)
    s.rollback(plan)
    run(s)
    assert is_clean(s)


def test_calls_for_unknown_requests_change_nothing():
    s = make_scheduler(max_batch_size=1)
    s.add(request(1))
    s.add(request(2))
    run_step(s)
    before = dumps(s), list(s.waiting), list(s.running)
    for call, number in ((s.abort, 9), (s.find, 9), (s.preempt, 9), (s.preempt, 2)):
        with pytest.raises(KeyError, match=str(number)):
            call(number)
    assert (dumps(s), s.waiting, s.running) == before


# Explicit preemption, as a caller may ask for it


@pytest.mark.parametrize("admission", CORRECT)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_preempted_request_goes_back_to_its_rank_and_ends_with_the_same_tokens(geometry, admission):
    """Pitfall 36: target and draft rows of it go together, in every manager."""
    manager, own = make_managers(geometry, 30, 30)
    s = make_scheduler(manager, draft_manager=own, admission=admission, max_batch_size=2)
    first, second, third = request(1, 12, 20, salt="a"), request(2, 12, 20), request(3, 12, 20)
    for r in (first, second, third):
        s.add(r)
    for _ in range(4):
        run_step(s)
    tokens = list(first.tokens)
    assert s.preempt(1) is first and ids(s.waiting) == [1, 3] and ids(s.running) == [2]
    assert (first.num_rows, first.num_preemptions, first.tokens, first.is_decoding) == (0, 1, tokens, False)
    assert all(m.live_requests() == [second.cache_id] for m in s.managers)
    plan = run_step(s)
    assert ids(plan.admitted) == [1] and first.prefill_len == len(tokens) and len(first.tokens) == len(tokens) + 1
    run(s)
    assert first.num_new_tokens == 20 and is_clean(s)


# 13: hooks


def test_hooks_come_once_for_each_admission_and_each_end():
    calls = []
    s = make_scheduler(
        on_begin=lambda r, start: calls.append(("begin", r.request_id, start.num_reused_tokens > 0)),
        on_end=lambda r: calls.append(("end", r.request_id)),
    )
    s.add(request(1, tokens=range(20), new=4))
    run_step(s)
    run_step(s)
    s.preempt(1)
    run_step(s)
    s.add(request(2))
    s.abort(2)
    run(s)
    assert calls == [("begin", 1, False), ("end", 1), ("begin", 1, True), ("end", 1)]


def test_a_prompt_is_found_within_its_salt_by_who_asks_for_it():
    """`on_begin` is told how many rows are known, after a preemption too."""
    found = {}
    s = make_scheduler(on_begin=lambda r, start: found.setdefault(r.request_id, []).append(start.num_reused_tokens))
    kinds = (dict(), dict(), dict(salt="a"), dict(salt="a"), dict(salt=1), dict(reuse_prefix=False))
    for i, options in enumerate(kinds):
        s.add(request(i, tokens=range(20), new=9, **options))
        run_step(s)
        if i == 3:
            s.preempt(3)
        run(s)
    assert [found[i][0] > 0 for i in range(6)] == [False, True, False, True, False, False]
    assert len(found[3]) == 2 and found[3][1] > 0 and is_clean(s)


def test_hooks_come_for_preemptions_by_policy():
    inside, begun = set(), []
    def begin(r, start):
        assert r.request_id not in inside
        inside.add(r.request_id)
        begun.append(r)
    end = lambda r: inside.remove(r.request_id)
    s = make_scheduler(make_manager(num_blocks=7), admission="max_utilization", on_begin=begin, on_end=end)
    requests = crowd(s)
    for _ in range(300):
        if s.waiting or s.running:
            run_step(s)
        assert inside == set(ids(s.running))
    assert is_clean(s)
    assert s.num_preemptions > 0 and len(begun) == len(requests) + s.num_preemptions


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("is_apart", [False, True])
def test_a_beginning_that_fails_leaves_the_request_first_in_the_queue(is_apart, is_resumed):
    """Blocks, queue and hooks are as before, and it may be tried again."""
    fails, begun, ended = set(), [], []
    def begin(r, start):
        if r.request_id in fails:
            raise RuntimeError("no room outside")
        begun.append(r.request_id)
    own = make_manager(draft=(), enable_prefix_reuse=False) if is_apart else None
    manager, end = make_manager(draft=() if is_apart else [None]), lambda r: ended.append(r.request_id)
    s = make_scheduler(manager, draft_manager=own, on_begin=begin, on_end=end)
    s.add(request(1, tokens=range(20)))
    run_step(s)
    s.add(request(2, tokens=range(20)))
    if is_resumed:
        run_step(s)
        s.preempt(2)
    s.add(request(3))
    begun.clear()
    ended.clear()
    fails.add(2)
    counts = [(m.stats().num_referenced, m.live_requests()) for m in s.managers]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no room outside"):
            s.schedule()
        assert ids(s.waiting) == [2, 3] and ids(s.running) == [1] and not begun and not ended
        assert counts == [(m.stats().num_referenced, m.live_requests()) for m in s.managers]
        assert s.waiting[0].num_rows == 0 and s.waiting[0].num_preemptions == is_resumed
    fails.clear()
    assert ids(run_step(s).admitted) == [2, 3] and begun == [2, 3]
    run(s)
    assert sorted(ended) == [1, 2, 3] and is_clean(s)


def test_a_failing_beginning_can_be_aborted():
    def begin(r, start):
        raise RuntimeError("never")
    s = make_scheduler(on_begin=begin)
    s.add(request(1))
    with pytest.raises(RuntimeError):
        s.schedule()
    s.abort(1)
    assert is_clean(s)


# 14: bad input


def live_manager() -> KVCacheManager:
    manager = make_manager()
    manager.add_sequence(0, [1])
    return manager


def own_manager(**options) -> KVCacheManager:
    return make_manager(draft=(), **{"enable_prefix_reuse": False, **options})


@pytest.mark.parametrize("make, message", [
    (lambda: make_scheduler(admission="all"), "admission: .*guaranteed_no_evict.* 'all'"),
    (lambda: make_scheduler(admission=None), "admission: .* None"),
    (lambda: make_scheduler(max_step_tokens=11), "max_step_tokens: .*12.* 11"),
    (lambda: make_scheduler(max_step_tokens=24.0), "max_step_tokens: .*24.0"),
    (lambda: make_scheduler(max_batch_size=5), r"max_batch_size: .*1\.\.4.* 5"),
    (lambda: make_scheduler(max_batch_size=0), r"max_batch_size: .*1\.\.4.* 0"),
    (lambda: make_scheduler(num_draft_tokens=-1), "num_draft_tokens: .*-1"),
    (lambda: make_scheduler(num_draft_tokens="2"), "num_draft_tokens: .*'2'"),
    (lambda: make_scheduler(steps_ahead=-1), "steps_ahead: .*-1"),
    (lambda: make_scheduler(priority_places=-1), "priority_places: .*-1"),
    (lambda: make_scheduler("manager"), "manager: .*KVCacheManager.* str"),
    (lambda: make_scheduler(draft_manager=3), "draft_manager: .*KVCacheManager.* int"),
    (lambda: make_scheduler(draft_manager=make_manager(draft=())), "draft_manager: .*enable_prefix_reuse=False"),
    (lambda: make_scheduler(draft_manager=own_manager(max_seq_len=63)), "draft_manager: .*max_seq_len .*64.* 63"),
    (lambda: make_scheduler(draft_manager=own_manager(max_batch_size=3)), "draft_manager: .*max_batch_size .*4.* 3"),
    (lambda: make_scheduler(live_manager()), r"manager: .*live.*\[0\]"),
    (lambda: make_scheduler(on_begin=3), "on_begin: .*3"),
    (lambda: make_scheduler(on_end="x"), "on_end: .*x"),
    (lambda: lookahead_tokens(-1), "num_draft_tokens: .*-1"),
    (lambda: lookahead_tokens(2, -1), "steps_ahead: .*-1"),
    (lambda: lookahead_rows(1.5), "num_draft_tokens: .*1.5"),
])
def test_bad_settings_name_the_argument(make, message):
    with pytest.raises(ValueError, match="^" + message):
        make()


@pytest.mark.parametrize("bad, message", [
    (lambda: request(2, priority=-1), r"priority: .*0\.\.9.* -1"),
    (lambda: request(2, priority=10), r"priority: .*0\.\.9.* 10"),
    (lambda: request(2, priority="high"), "priority: .*'high'"),
    (lambda: request(2, new=0), "max_new_tokens: .* 0"),
    (lambda: request(2, new=1.5), "max_new_tokens: .*1.5"),
    (lambda: request(2, length=0), "prompt_len: .* 0"),
    (lambda: ScheduledRequest(2, [1, 2], 3, 4), "prompt_len: .* 3"),
    (lambda: request(2, length=64), "prompt: .*64"),
])
def test_bad_requests_name_the_field(bad, message):
    s = make_scheduler()
    s.add(request(1))
    run_step(s)
    before = dumps(s), list(s.waiting), list(s.running), s.num_added
    for call in (s.check, s.add):
        with pytest.raises(RefusedRequest, match="^" + message):
            call(bad())
    assert (dumps(s), s.waiting, s.running, s.num_added) == before
    run(s)
    assert is_clean(s)


def test_a_request_is_added_once():
    s = make_scheduler()
    r = request(1)
    s.add(r)
    with pytest.raises(RefusedRequest, match="request 1: .*added before"):
        s.add(r)
    run(s)
    with pytest.raises(RefusedRequest, match="request 1: .*added before"):
        s.add(r)
    assert is_clean(s)


@pytest.mark.parametrize("field, value", [("salt", 1.5), ("salt", ["a"]), ("tokens", [1, -2]), ("tokens", [1, "b"])])
def test_what_the_manager_would_refuse_is_refused_when_it_comes(field, value):
    """Pitfall 32: a request that can't begin must not stay first in the queue for ever."""
    s = make_scheduler()
    bad = request(1, **{field: value})
    try:
        s.add(bad)
    except ValueError:
        assert not s.waiting
    s.add(request(2))
    run(s)
    assert is_clean(s)


def test_a_plan_is_settled_after_it_was_prepared():
    s = make_scheduler()
    s.add(request(1))
    plan = s.schedule()
    with pytest.raises((ValueError, RequestError)):
        finish_step(s, plan)


def test_a_running_request_that_gets_no_prompt_rows_is_named():
    """Three prompts share a budget that one of them takes."""
    s = make_scheduler()
    for i in range(3):
        s.add(request(i, 40, 4))
    plan = s.schedule()
    assert ids(r for r, _ in plan.prefill) == [0] and ids(s.running) == [0, 1, 2]
    assert reasons(s) == [(1, "budget"), (2, "budget")]


def test_who_waits_behind_one_that_left_is_not_called_new():
    s = make_scheduler(make_manager(max_batch_size=1))
    for i in range(3):
        s.add(request(i))
    run_step(s)
    s.abort(1)
    assert reasons(s) == [(2, "next")]
    s.abort(2)
    s.add(request(3))
    assert reasons(s) == [(3, "new")]


@pytest.mark.parametrize("moment", ["preempt", "abort", "settle"])
def test_an_on_end_that_raises_loses_nothing(moment):
    """The queue, the managers and the ids are as after the call; the hook's error comes out."""
    def fail(_):
        raise OSError("no")

    s = make_scheduler(on_end=fail)
    for i in range(2):
        s.add(request(i, new=1 if moment == "settle" else 8))
    plan = s.schedule()
    s.prepare(plan)
    with pytest.raises(OSError):
        finish_step(s, plan)
        s.preempt(0) if moment == "preempt" else s.abort(0)
    s.on_end = None
    if moment == "preempt":
        assert ids(s.waiting) == [0] and ids(s.running) == [1]
    else:
        assert not s.waiting and ids(s.running) == ([1] if moment == "abort" else [])
    run(s)
    assert is_clean(s)


@pytest.mark.parametrize("call", ["add", "abort", "preempt"])
def test_a_hook_cannot_change_the_queue_under_the_scheduler(call):
    s = make_scheduler()
    acts = {"add": lambda: s.add(request(9, priority=9)), "abort": lambda: s.abort(1), "preempt": lambda: s.preempt(0)}
    s.add(request(0))
    run_step(s)
    s.add(request(1))
    s.on_begin = lambda *_: acts[call]()
    with pytest.raises(RuntimeError, match="on_begin and on_end can't"):
        s.schedule()
    s.on_begin = None
    assert ids(s.running) == [0] and ids(s.waiting) == [1]
    run(s)
    assert is_clean(s)


def test_a_scheduler_over_a_manager_that_was_used_goes_on_with_new_ids():
    manager = make_manager()
    for number in range(2):
        s = make_scheduler(manager)
        s.add(request(number))
        run(s)
    manager.add_sequence(50, [1])
    manager.free_resources(50)
    s = make_scheduler(manager)
    s.add(request(7))
    run(s)
    assert is_clean(s)


def test_managers_that_do_not_belong_together_are_refused():
    manager, own = make_manager(draft=()), make_manager(draft=(), tokens_per_block=16, enable_prefix_reuse=False)
    with pytest.raises(ValueError, match="draft_manager: expected another manager with tokens_per_block 8, got 16"):
        make_scheduler(manager, draft_manager=own)
    with pytest.raises(ValueError, match="draft_manager: expected another manager"):
        make_scheduler(own, draft_manager=own)


@pytest.mark.parametrize("kept", [[], [9, 8], [0, 7], [-1, 8], [1, 8, 8]])
def test_counts_that_do_not_belong_to_a_plan_commit_nothing(kept):
    s = make_scheduler()
    s.add(request(0))
    run_step(s)
    s.add(request(1))
    plan = s.schedule()
    s.prepare(plan)
    before = dumps(s)
    with pytest.raises(ValueError, match="kept: expected 0..3 a verify pass"):
        s.settle(plan, kept)
    assert dumps(s) == before
    s.rollback(plan)
    run(s)
    assert is_clean(s)


@pytest.mark.parametrize("bad", ["x", None, ("request_id", [1]), ("reuse_prefix", None), ("reuse_prefix", "no")])
def test_nonsense_is_refused_when_it_comes(bad):
    """Pitfall 32: it never becomes the first in the queue."""
    s = make_scheduler()
    if isinstance(bad, tuple):
        broken = request(1)
        setattr(broken, *bad)
    with pytest.raises(RefusedRequest, match=bad[0] if isinstance(bad, tuple) else "request: expected a ScheduledRequest"):
        s.add(broken if isinstance(bad, tuple) else bad)
    with pytest.raises(RefusedRequest, match="max_new_tokens: expected an int >= 71, got 5"):
        s.add(ScheduledRequest(2, list(range(80)), 10, 5))
    s.add(request(3))
    run(s)
    assert is_clean(s)
