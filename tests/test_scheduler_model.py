"""Random workloads of a scheduler, without a model, beside what its specification promises.

A workload draws managers, requests that come over time and faults, then runs until every request has ended. Ranks, the
share of the token budget, who must give way and the bound on waiting are worked out here from the specification;
the scheduler is asked only for its plans, its queue and its reasons.
"""

import os
import random
import re
from collections import Counter
from dataclasses import dataclass, field

import pytest

from dflash_paged.manager import KVCacheManager
from dflash_paged.memory import LayerSpec
from dflash_paged.scheduler import RefusedRequest, ScheduledRequest, Scheduler

SIZE = 8
NUM_WORKLOADS = int(os.environ.get("DFLASH_PAGED_WORKLOADS", "1000"))
NUM_PARTS = 20
MOST_ATTEMPTS = 2000  # steps, failed ones included; a workload takes some 70, at most 600
MUST_OCCUR = (
    "admitted", "preempted", "paused", "resumed", "rolled back", "on_begin raised", "refused", "aborted waiting",
    "aborted running", "aborted preempted", "aborted in a step", "preempted by the caller", "ended", "stopped",
    "blocks", "slots", "behind", "preemption", "prefix hit", "draft manager", "windowed", "chunked",
)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def layer(window: int | None = None) -> LayerSpec:
    return LayerSpec(1, 1, "float32", sliding_window=window)


class HookFailed(Exception):
    """What a failing `on_begin` raises."""


@dataclass(eq=False)
class Tracked(ScheduledRequest):
    """A request and what the test knows of it."""

    arrived: int = 0  # steps settled by then
    seen: list["Tracked"] = field(default_factory=list)  # those that ran when it came or was preempted by the caller
    is_inside: bool = False  # between on_begin and on_end
    was_inside: bool = False
    num_calls: int = 0  # explicit preemptions
    has_ended: bool = False
    ended: int = 0


class Workload:
    """One scheduler with its requests, from the first arrival to the end of the last."""

    def __init__(self, seed: int, seen: Counter):
        self.rng, self.seen = random.Random(seed), seen
        self.draw_limits()
        self.managers = self.draw_managers()
        self.scheduler = Scheduler(
            self.managers[0], num_draft_tokens=self.num_query_rows - 1, max_step_tokens=self.max_step_tokens,
            admission=self.rng.choice(["guaranteed_no_evict", "max_utilization", "max_utilization"]),
            max_batch_size=self.batch, draft_manager=self.managers[1] if len(self.managers) > 1 else None,
            priority_places=self.places, steps_ahead=self.steps_ahead, on_begin=self.on_begin, on_end=self.on_end,
        )
        self.admission = self.scheduler.admission
        self.base = [self.rng.randrange(3) for _ in range(self.max_seq_len + 1)]
        self.coming = self.draw_requests()
        self.known: list[Tracked] = []  # accepted, in the order of arrival
        self.num_settled = self.num_attempts = 0
        self.fails_next, self.given_way = False, None

    # What is drawn

    def draw_limits(self) -> None:
        rng = self.rng
        self.num_query_rows, self.steps_ahead = rng.randint(1, 5), rng.choice([0, 0, 0, 1])
        self.lookahead = self.num_query_rows * (self.steps_ahead + 1)
        self.is_crowded = rng.random() < 0.5  # short prompts, long outputs, little room: "max_utilization" preempts
        self.batch = rng.choice([3, 4, 6, 8] if self.is_crowded else [1, 2, 3, 4, 6])
        self.max_seq_len = rng.choice([29, 61, 64, 96])
        self.max_step_tokens = self.batch * self.num_query_rows + rng.choice([0, 0, 3, 10, 40])
        self.chunk = self.max_step_tokens - (self.batch - 1) * self.num_query_rows
        self.places = rng.choice([0, 1, 3, 64])
        self.has_priorities, self.fault_rate = rng.random() < 0.6, rng.choice([0.0, 0.05, 0.1])

    def draw_managers(self) -> list[KVCacheManager]:
        """One manager with 1 to 3 groups, or two of them."""
        rng, (v, w) = self.rng, self.rng.sample([1, 2, 8, 9, 12, 18, 25, 33], 2)
        target, draft = rng.choice([
            ([None], [None]), ([None], [None]), ([None], [w]), ([None, w], [None]), ([None, w], [w]),
            ([None, w], [None, v]), ([None], [v, w]), ([None, w], [v]), ([w], [w]), ([w], [v]),
        ])
        owners = [(target, draft)] if rng.random() < 0.7 else [(target, []), (draft, [])]
        self.seen["draft manager"] += len(owners) > 1
        self.seen["windowed"] += any(window for owner in owners for windows in owner for window in windows)
        return [self.draw_manager(mine, drafts, i == 0) for i, (mine, drafts) in enumerate(owners)]

    def draw_manager(self, target: list, draft: list, is_first: bool) -> KVCacheManager:
        rng, blocks = self.rng, []
        for window in sorted({*target, *draft}, key=lambda w: (w is not None, w)):
            rows = self.max_seq_len
            if window is not None:
                rows = min(window + self.max_step_tokens + self.lookahead + SIZE, rows)
            room = rng.choice([1.0, 1.0, 1.2, 1.5] if self.is_crowded else [0.7, 1.0, 1.3, 2.0, 3.0])
            blocks.append(int(cdiv(rows, SIZE) * room) + rng.randrange(2))
        return KVCacheManager(
            target_layers=[layer(w) for w in target], draft_layers=[layer(w) for w in draft], tokens_per_block=SIZE,
            max_seq_len=self.max_seq_len, max_batch_size=self.batch + (not is_first or rng.random() < 0.5),
            num_blocks=blocks, num_lookahead_tokens=self.lookahead, enable_partial_reuse=rng.random() < 0.5,
            enable_prefix_reuse=is_first and rng.random() < 0.9, device="meta",
        )

    def draw_requests(self) -> list[tuple[int, Tracked]]:
        """(attempt before which it comes, request), some of which fit no pool."""
        rng, requests, when = self.rng, [], 0
        salts = rng.choice([[None], [None], [None, "a", "b"]])
        for number in range(rng.randint(6, 20)):
            length = rng.randint(1, 12 if self.is_crowded else self.max_seq_len - 1)
            prompt = self.base[: rng.choice([length, length, length // 2, 0])]  # outputs go on like base: many agree
            prompt += [rng.randrange(3) for _ in range(length - len(prompt))]
            new = rng.randint(1, rng.choice([self.max_seq_len] if self.is_crowded else [4, 16, self.max_seq_len]))
            requests.append((when, Tracked(
                100 + number, prompt, length, new, reuse_prefix=rng.random() < 0.9, salt=rng.choice(salts),
                priority=rng.choice([0, 0, 1, 9]) if self.has_priorities else 0,
            )))
            when += rng.choice([0, 0, 1, 3])
        return requests

    def happens(self, scale: float = 1.0) -> bool:
        """Whether a fault strikes here."""
        return self.rng.random() < self.fault_rate * scale

    # What the specification says

    def rank(self, request: Tracked) -> tuple[int, int]:
        place = self.known.index(request)
        return (place - request.priority * self.places, place)

    def num_passes(self, request: Tracked) -> int:
        """P: chunks that its longest prefill takes at most."""
        return cdiv(request.prompt_len + request.max_new_tokens, self.chunk)

    def can_hold(self, request: Tracked, without_windows=()) -> bool:
        """Whether empty pools hold it to its end, in some managers as if windows gave nothing back.

        A draft's own pool lacks the rows of a prefix hit and has to take them at once, whatever its window.
        """
        rows = min(request.prompt_len + request.max_new_tokens, self.max_seq_len)
        return all(
            m.limits.most_blocks(rows, None if m in without_windows else g.window, self.max_step_tokens) <= g.num_blocks
            for m in self.managers for g in m.groups
        )

    def bound(self, request: Tracked) -> int:
        """Steps after which a request has ended; one that its caller preempts is as one that comes again."""
        before = [q for q in self.known if self.rank(q) < self.rank(request)]
        before = [q for q in before if not q.has_ended or q.ended >= request.arrived]
        these, steps = {*before, *request.seen, request}, 0
        for q in these:
            passed = [s for s in these if self.rank(s) < self.rank(q)]
            later = sum((self.known.index(s) > self.known.index(q)) + s.num_calls for s in passed)
            steps += q.max_new_tokens + self.num_passes(q) * (1 + later + q.num_calls)
        return steps

    def step_rows(self, requests: list[Tracked]) -> dict[Tracked, int]:
        """Prompt rows of each request of a step, 0 for a decoding one: the best rank takes first."""
        rows = {r: 0 for r in requests if r.is_decoding}
        budget = self.max_step_tokens - len(rows) * self.num_query_rows
        for r in sorted((r for r in requests if not r.is_decoding), key=self.rank):
            chunk = min(budget, r.prefill_len - r.num_rows)
            if chunk:
                rows[r], budget = chunk, budget - chunk
        return rows

    def fits(self, requests: list[Tracked]) -> bool:
        """Whether every manager has blocks for a step of these, now."""
        rows = self.step_rows(requests).items()
        return all(
            m.can_prepare([(r.cache_id, r.num_rows + n - m.num_tokens(r.cache_id)) for r, n in rows])
            for m in self.managers
        )

    # What the scheduler calls

    def on_begin(self, request: Tracked, start) -> None:
        if self.fails_next:
            self.fails_next = False
            raise HookFailed
        assert not request.is_inside, f"on_begin twice for {request.request_id}"
        self.seen["resumed"] += request.was_inside
        self.seen["prefix hit"] += start.num_reused_tokens > 0
        request.is_inside = request.was_inside = True

    def on_end(self, request: Tracked) -> None:
        assert request.is_inside, f"on_end without on_begin for {request.request_id}"
        request.is_inside = False

    def watch_preempt(self, manager: KVCacheManager):
        """The manager's `preempt`, behind a check of promise 3: the worst rank, for better ones that lack blocks."""
        def preempt(cache_id: int) -> int:
            if self.given_way is not None and manager is self.managers[0]:
                active = sorted((r for r in self.given_way if r.is_inside), key=self.rank)
                if cache_id in [r.cache_id for r in active]:  # else a failed on_begin takes back what it got
                    assert self.admission == "max_utilization", "guaranteed_no_evict preempted"
                    assert active[-1].cache_id == cache_id, "preempted another than the worst rank"
                    assert not self.fits(active[:-1]), "preempted though those of better rank have their blocks"
                    self.given_way = active[:-1]
            return type(manager).preempt(manager, cache_id)
        return preempt

    # What happens

    def run(self) -> None:
        for manager in self.managers:
            manager.preempt = self.watch_preempt(manager)
        while self.coming or self.scheduler.waiting or self.scheduler.running:
            self.num_attempts += 1
            if self.num_attempts > MOST_ATTEMPTS:
                raise AssertionError(f"deadlock: {self.scheduler.why_waiting()}, running {self.scheduler.running}")
            self.arrivals()
            self.calls()
            self.step()
            if self.num_attempts % 16 == 0:
                self.check_managers()
        self.check_managers()
        assert all(r.finish_reason and r.has_ended and not r.is_inside for r in self.known)
        assert not any(m.stats().num_referenced or m.live_requests() for m in self.managers), "blocks are left behind"

    def check_managers(self) -> None:
        for manager in self.managers:
            manager.check_invariants()

    def state(self) -> tuple:
        """Queue, batch and blocks, to see that a call changed nothing."""
        s = self.scheduler
        held = [(m.stats().num_referenced, m.live_requests()) for m in self.managers]
        return list(s.waiting), list(s.running), held, [(r.num_rows, r.cache_id, r.finish_reason) for r in self.known]

    def arrivals(self) -> None:
        while self.coming and self.coming[0][0] < self.num_attempts:
            request, before = self.coming.pop(0)[1], self.state()
            request.arrived, request.seen = self.num_settled, list(self.scheduler.running)
            try:
                self.scheduler.add(request)
            except RefusedRequest:
                assert not self.can_hold(request, self.managers[1:]) and self.state() == before
                self.seen["refused"] += 1
                continue
            assert self.can_hold(request), "a request that never fits was taken"
            self.known.append(request)
            assert request.place == len(self.known) - 1 and self.scheduler.rank(request) == self.rank(request)

    def calls(self) -> None:
        """What callers do between steps: abort, preempt, and mistakes."""
        rng, s = self.rng, self.scheduler
        for request in [*s.waiting, *s.running]:
            where = "running" if request in s.running else "preempted" if request.num_preemptions else "waiting"
            if self.happens(0.5 if where == "preempted" else 0.1):
                self.abort(request, where)
        for request in list(s.running):
            if self.happens(0.2):
                assert s.preempt(request.request_id) is request and request in s.waiting
                request.num_calls, request.seen = request.num_calls + 1, request.seen + s.running
                self.seen["preempted by the caller"] += 1
        if self.happens(2):
            before, wrong = self.state(), rng.choice([99, *(r.request_id for r in self.known if r.has_ended)])
            for call in (s.abort, s.preempt, s.find):
                with pytest.raises(KeyError):
                    call(wrong)
            for request in s.waiting[:1]:
                with pytest.raises(KeyError):
                    s.preempt(request.request_id)
            for request in self.known[:1]:
                with pytest.raises(RefusedRequest):
                    s.add(request)
            assert self.state() == before

    def abort(self, request: Tracked, where: str) -> None:
        assert self.scheduler.abort(request.request_id) is request and request.finish_reason == "aborted"
        request.has_ended, request.ended = True, self.num_settled
        self.seen["aborted " + where] += 1

    def schedule(self):
        """The next plan, its promises checked."""
        s, waiting, running = self.scheduler, list(self.scheduler.waiting), list(self.scheduler.running)
        assert waiting == sorted(waiting, key=self.rank), "the queue isn't in the order of ranks"
        self.fails_next, self.given_way, had_room = self.happens(), running, self.fits(running)
        try:
            plan = s.schedule()
        except HookFailed:
            self.seen["on_begin raised"] += 1
            assert s.waiting == waiting[len(s.running) - len(running) :], "the queue isn't as before"
            assert all(not r.is_inside for r in s.waiting) and all(r.is_inside for r in s.running)
            held = {r.cache_id for r in s.running}
            assert all(set(m.live_requests()) == held for m in self.managers), "blocks of a failed beginning are left"
            return None
        finally:
            self.fails_next, self.given_way = False, None
        self.check_plan(plan, waiting, running, had_room)
        self.check_reasons(plan)
        return plan

    def check_plan(self, plan, waiting: list[Tracked], running: list[Tracked], had_room: bool) -> None:
        """Promises 1 to 4 of one plan."""
        s, rank = self.scheduler, self.rank
        for name in ("admitted", "preempted", "paused"):
            self.seen[name] += len(getattr(plan, name))
        assert len(s.running) <= self.batch
        assert len(plan.decode) * self.num_query_rows + sum(n for _, n in plan.prefill) <= self.max_step_tokens
        assert set(s.running) == {*running, *plan.admitted} - {*plan.preempted}
        assert s.running or not waiting, "nobody runs, and what fits isn't admitted"
        assert all(rank(a) < rank(w) for a in plan.admitted for w in s.waiting), "admitted past one of better rank"
        active = [r for r in s.running if r not in plan.paused]
        assert dict(plan.rows) == self.step_rows(active), "not all that can take part do"
        assert not s.running or min(s.running, key=rank) in plan.requests, "the request of the best rank sits out"
        if self.admission == "guaranteed_no_evict" or had_room:
            assert not plan.preempted and not plan.paused, "preempted or paused where all had room"
        if plan.preempted:
            assert not plan.admitted, "admitted in a step that preempted"
        if plan.paused:
            stayed = [r for r in s.running if r not in plan.admitted]
            assert plan.paused == [max(stayed, key=rank)], "paused another than the worst rank"
            assert not self.fits(stayed), "paused though it has its blocks"
        self.seen["chunked"] += any(r.num_rows + n < r.prefill_len for r, n in plan.prefill)

    def check_reasons(self, plan) -> None:
        """Promise 11: each once, with a reason that is true."""
        s, reasons = self.scheduler, self.scheduler.why_waiting()
        unfed = [r for r in s.running if r not in plan.requests and r not in plan.paused]
        assert [w.request_id for w in reasons] == [r.request_id for r in [*s.waiting, *plan.paused, *unfed]]
        assert [w.reason for w in reasons[len(s.waiting) :]] == ["paused"] * len(plan.paused) + ["budget"] * len(unfed)
        for i, reason in enumerate(reasons[: len(s.waiting)]):
            self.seen[reason.reason] += 1
            assert (reason.reason == "behind") == (i > 0)
            assert (reason.reason == "preemption") == (i == 0 and bool(plan.preempted))
            if reason.reason == "slots":
                assert len(s.running) == self.batch
            elif reason.reason == "blocks":
                needed, available, promised = shortage_numbers(reason.words)
                assert needed + promised > available
            else:
                assert reason.reason in ("behind", "preemption")

    def step(self) -> None:
        plan = self.schedule()
        if plan is None or not plan.requests:
            return
        before = self.state()
        self.scheduler.prepare(plan)
        while self.happens(2):
            self.scheduler.rollback(plan)
            self.seen["rolled back"] += 1
            assert self.state() == before, "a step that was rolled back left something"
            if self.rng.random() < 0.5:
                return
            self.scheduler.prepare(plan)
        if self.happens(0.5):
            self.abort(self.rng.choice(plan.requests), "in a step")
            self.scheduler.rollback(plan)
            return
        self.check_rows(plan)
        kept = [self.emit(r) for r in plan.decode]
        for r, chunk in plan.prefill:
            if r.num_rows + chunk == r.prefill_len:
                self.emit(r, 1)
            kept.append(chunk)
        self.settle(plan, kept)

    def check_rows(self, plan) -> None:
        """Promise 9: a block for each row of the step and the lookahead, cut at max_seq_len."""
        for m in self.managers:
            for spec in m.groups:
                for r, chunk in plan.rows:
                    end = min(r.num_rows + chunk + self.lookahead, self.max_seq_len)
                    first = 0 if spec.window is None else r.num_rows // SIZE
                    blocks = m.get_batch_cache_indices([r.cache_id], spec.layers[0])[0]
                    assert len(blocks) == cdiv(end, SIZE) and min(blocks[first:], default=0) >= 0

    def emit(self, request: Tracked, most: int | None = None) -> int:
        """Append 1 to K + 1 tokens, until it ends; returns how many."""
        number = self.rng.randint(1, most or self.num_query_rows)
        for i in range(number):
            request.tokens.append(self.base[len(request.tokens) % len(self.base)])
            if len(request.tokens) == min(request.prompt_len + request.max_new_tokens, self.max_seq_len):
                request.finish_reason = "length"
            elif self.rng.random() < 0.01:
                request.finish_reason = "stop"
                self.seen["stopped"] += 1
            if request.finish_reason:
                return i + 1
        return number

    def settle(self, plan, kept: list[int]) -> None:
        """Promise 5: who ended did so in time."""
        finished = self.scheduler.settle(plan, kept)
        self.num_settled += 1
        assert finished == [r for r in plan.requests if r.finish_reason]
        for r in finished:
            r.has_ended, r.ended = True, self.num_settled
            self.seen["ended"] += 1
        for r in finished:
            assert r not in self.scheduler.running and not r.is_inside
            took, bound = r.ended - r.arrived, self.bound(r)
            assert took <= bound, f"request {r.request_id} took {took} steps, at most {bound} are promised"


def shortage_numbers(words: str) -> tuple[int, int, int]:
    """(needed, available, promised) of a reason's words; of a window, what all may hold at once counts as needed."""
    window = re.search(r"running requests' [\d,]+ that may be ([\d,]+) at once, of ([\d,]+)$", words)
    if window:
        together, available = (int(n.replace(",", "")) for n in window.groups())
        return together, available, 0
    numbers = re.search(r"needs ([\d,]+) blocks .*; ([\d,]+) of [\d,]+ are available, ([\d,]+) of them promised", words)
    return tuple(int(n.replace(",", "")) for n in numbers.groups())


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_random_workloads_keep_what_the_scheduler_promises(part):
    """Pitfalls 14, 19 and 35: no planned step is refused, nobody starves, and nothing is left behind."""
    seen = Counter()
    for seed in range(part, NUM_WORKLOADS, NUM_PARTS):
        workload = None
        try:
            workload = Workload(seed, seen)
            workload.run()
        except Exception as error:
            attempt = workload.num_attempts if workload else 0
            raise AssertionError(f"workload {seed}, attempt {attempt}: {type(error).__name__}: {error}") from error
    if NUM_WORKLOADS >= 50 * NUM_PARTS:
        assert not [name for name in MUST_OCCUR if not seen[name]], f"the workloads met too little: {dict(seen)}"
