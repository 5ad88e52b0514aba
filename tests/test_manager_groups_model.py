"""Random histories of a manager with several groups, beside what its specification says must hold.

Nothing here looks inside the manager. `Contents` writes into its pages what a row *means* (the tenant, all tokens
up to it and the layer) and reads back, through the block tables, all that each layer of each request may read.
`Request` knows which blocks a request must hold, worked out from its length alone. What depends on evictions (how
long a hit is, where its draft rows begin) is bounded instead: never wrong, and never less than what a running
request visibly holds.
"""

import os
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dflash_paged.manager import KVCacheManager, OutOfBlocks, RequestError
from dflash_paged.memory import LayerSpec

TPB, MAX_SEQ_LEN, LOOKAHEAD, MAX_NUM_SEQS, TAIL = 8, 61, 5, 5, 16
NUM_STEPS = int(
    os.environ.get("DFLASH_PAGED_STEPS", "57000")
)  # rules executed, over all machines of this file
STEPS_A_HISTORY = 50
NAN = float("nan")

RULES = Counter()  # rules executed in this process; sum(RULES.values()) is the number of steps
SEEN = Counter()  # what they met: copies, holes, refusals, ...

POSITIONS = np.arange(MAX_SEQ_LEN)
BLOCK_OF, OFFSET_OF = POSITIONS // TPB, POSITIONS % TPB
NUM_ENTRIES = -(-MAX_SEQ_LEN // TPB)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def digit(mix: int, place: int, base: int = 6) -> int:
    """One of many small choices that a drawn number holds."""
    return mix // base**place % base


@dataclass(frozen=True)
class Setup:
    """What a machine's manager is made of; `num_blocks` in the order of the groups."""

    target: tuple[LayerSpec, ...]
    draft: tuple[LayerSpec, ...]
    num_blocks: tuple[int, ...]
    policy: str = "mask"
    kv_layout: str = "NHD"


def layer(heads: int, dim: int, window: int | None = None) -> LayerSpec:
    return LayerSpec(heads, dim, "float32", sliding_window=window)


class Request:
    """A request as its caller knows it."""

    def __init__(self, request_id: int, salt, prompt: list[int], reuse: bool):
        self.id, self.salt, self.prompt, self.reuse = request_id, salt, prompt, reuse
        self.tokens: list[int] = []
        self.values = np.zeros(MAX_SEQ_LEN, np.float32)  # what its rows mean
        self.ctx_start = self.end = self.hit_end = 0
        self.publishes = True
        self.published: set[int] = set()  # blocks, by index, that the prefix index must know by its own copy

    @property
    def n(self) -> int:
        return len(self.tokens)

    def reads_from(self, window: int | None, is_draft: bool) -> int:
        """First position that a layer may read."""
        start = 0 if window is None else max(0, self.n - (window - 1))
        return max(start, self.ctx_start) if is_draft else start

    def blocks(self, window: int | None) -> range:
        """Indices of the blocks that it holds in a group, holes included."""
        first = 0 if window is None else max(0, self.n - (window - 1)) // TPB
        return range(first, cdiv(self.end, TPB))

    def may_lack(self, index: int) -> bool:
        """Could this block of a group without target layers be a hole?"""
        return index * TPB < self.hit_end and min((index + 1) * TPB, self.end) <= self.ctx_start


class Contents:
    """The pages: what each row of each layer means."""

    def __init__(self, manager: KVCacheManager, setup: Setup):
        for pool in manager.pools.tensors:
            pool.fill_(NAN)
        self.meanings: dict[tuple, int] = {}  # (meaning of the row before, token) -> meaning
        self.fields, self.kinds = [], {}
        swap = setup.kv_layout == "HND"
        for layer_idx, spec in enumerate((*setup.target, *setup.draft)):
            view = manager.page_view(layer_idx)
            k, v = ((f.transpose(1, 2) if swap else f).numpy() for f in (view.k, view.v))
            group, is_draft = manager.layer_to_group[layer_idx], layer_idx >= len(setup.target)
            field = (k, v, np.float32(layer_idx / 16))
            self.fields.append((group, is_draft, field))
            self.kinds.setdefault((group, spec.sliding_window, is_draft), []).append(field)

    def meaning(self, salt, tokens: list[int], before: float | None = None) -> list[int]:
        """For each position a number that stands for (tenant, every token up to there)."""
        known, values = self.meanings, []
        last = known.setdefault(("salt", salt), len(known)) if before is None else int(before)
        for token in tokens:
            last = known.setdefault((last, token), len(known))
            values.append(last)
        return values

    def write(self, table: np.ndarray, start: int, values, kinds=(False, True)) -> None:
        """Rows from `start` on of the target's and draft's layers, through one request's `table` [G, T]."""
        if not len(values):
            return
        where = slice(start, start + len(values))
        values = np.asarray(values, np.float32)[:, None, None]
        pages = table[:, BLOCK_OF[where]]
        assert pages.min() >= 0, "a reserved row without a page"
        for group, is_draft, (k, v, code) in self.fields:
            if is_draft in kinds:
                k[pages[group], OFFSET_OF[where]] = values + code
                v[pages[group], OFFSET_OF[where]] = -values - code

    def check(self, requests: list[Request], tables: np.ndarray) -> None:
        """All that a layer of a request may read is its own."""
        for (group, window, is_draft), fields in self.kinds.items():
            pages, offsets, values = [], [], []
            for row, request in enumerate(requests):
                where = slice(request.reads_from(window, is_draft), request.n)
                pages.append(tables[group, row][BLOCK_OF[where]])
                offsets.append(OFFSET_OF[where])
                values.append(request.values[where])
            pages, offsets = np.concatenate(pages), np.concatenate(offsets)
            expected = np.concatenate(values)[:, None, None]
            name = f"group {group}, {'draft' if is_draft else 'target'}"
            assert not len(pages) or pages.min() >= 0, f"{name}: a row to be read has no page"
            for k, v, code in fields:
                assert (k[pages, offsets] == expected + code).all(), f"{name}: K of others"
                assert (v[pages, offsets] == -expected - code).all(), f"{name}: V of others"

    def poison(self, group: int, blocks, draft_only: bool = False) -> None:
        blocks = list(blocks)
        for g, is_draft, (k, v, _) in self.fields if blocks else ():
            if g == group and (is_draft or not draft_only):
                k[blocks] = v[blocks] = NAN


WHO = st.integers(0, MAX_NUM_SEQS - 1)
MIX = st.integers(0, 6**5 - 1)  # one digit a request
TOKEN = st.sampled_from([0, 0, 0, 1])
CHUNKS, KEPT = (64, 64, 24, 8, 5, 13), (LOOKAHEAD, 4, 3, 1, 0, 2)


class GroupsMachine(RuleBasedStateMachine):
    """Any order of calls; after each, every request reads its own rows and holds its own blocks."""

    setup: Setup

    @initialize()
    def start(self):
        setup = self.setup
        self.m = KVCacheManager(
            target_layers=setup.target,
            draft_layers=setup.draft,
            tokens_per_block=TPB,
            num_blocks=list(setup.num_blocks),
            max_seq_len=MAX_SEQ_LEN,
            max_batch_size=MAX_NUM_SEQS,
            num_lookahead_tokens=LOOKAHEAD,
            kv_layout=setup.kv_layout,
            missing_draft_policy=setup.policy,
            recompute_tail_tokens=TAIL,
        )
        self.contents = Contents(self.m, setup)
        self.live: dict[int, Request] = {}
        self.preempted: dict[int, Request] = {}
        self.finished: list[int] = []
        self.next_id = self.hit_tokens = 0
        self.last_rare = sum(RULES.values())
        self.lost_draft_rows = False  # has anything but eviction ever taken draft rows?
        self.groups = range(self.m.num_groups)
        self.windows = [group.window for group in self.m.groups]
        self.poisoned = [set(range(count)) for count in setup.num_blocks]
        assert list(self.m.blocks_per_group) == list(setup.num_blocks)
        ordered = sorted(
            {spec.sliding_window or 10**6 for spec in (*setup.target, *setup.draft)}, reverse=True
        )
        assert [window or 10**6 for window in self.windows] == ordered, (
            "the full group, then large to small windows"
        )

    # What the tests look at

    def pick(self, who: int) -> Request:
        return list(self.live.values())[who % len(self.live)]

    def tables(self) -> np.ndarray:
        """[G, R, T] of all live requests, in the order of `live`; from the device's tables."""
        return self.m.block_tables(list(self.live)).cpu().numpy()

    def row(self, request: Request) -> np.ndarray:
        return self.m.block_tables([request.id]).cpu().numpy()[:, 0]

    def available(self) -> list[int]:
        return [self.m.num_available_blocks(group) for group in self.groups]

    def holders(self, tables: np.ndarray) -> list[np.ndarray]:
        """For each group, how many requests hold each of its blocks."""
        counts = []
        for group, num_blocks in enumerate(self.setup.num_blocks):
            held = tables[group].reshape(-1)
            counts.append(np.bincount(held[held >= 0], minlength=num_blocks))
        return counts

    def refused(self, error, call, *args, match: str | None = None, **options) -> None:
        """The call raises, and nothing changes."""
        before = self.m.dump()
        with pytest.raises(error, match=match):
            call(*args, **options)
        assert self.m.dump() == before, "a failed call changed something"

    # Arrivals

    @precondition(lambda self: len(self.live) < MAX_NUM_SEQS)
    @rule(
        salt=st.sampled_from([None, None, None, "tenant"]),
        family=st.sampled_from([0, 0, 0, 1]),
        branch=st.sampled_from([8, 12, 16, 24, 20, 40]),
        length=st.sampled_from([9, 16, 17, 24, 25, 33, 20, 41, 47, 55, 1]),
        reuse=st.sampled_from([True, True, True, True, False]),
        copies=st.sampled_from([1, 1, 2]),
        run=st.sampled_from([True, True, False]),
        mix=MIX,
    )
    def add(self, salt, family, branch, length, reuse, copies, run, mix):
        RULES["add"] += 1
        prompt = [family if i < branch else 2 for i in range(length)]
        added = []
        for _ in range(min(copies, MAX_NUM_SEQS - len(self.live))):
            request = Request(self.next_id, salt, prompt, reuse)
            self.next_id += 1
            options = dict(salt=salt, reuse_prefix=reuse)
            tokens = prompt
            if mix % 2:  # hashed once, asked for more than once
                tokens, options = self.m.hash_prompt(prompt, salt), dict(reuse_prefix=reuse)
            ask = lambda count: self.m.blocks_to_admit(tokens, count, **options)  # noqa: B023 called at once
            self.arrive(request, prompt, ask, lambda: self.m.add_sequence(request.id, tokens, **options))  # noqa: B023
            added.append(request)
        if run:
            self.run_step(added, mix, 0)

    @precondition(lambda self: self.preempted and len(self.live) < MAX_NUM_SEQS)
    @rule(who=WHO, pending=TOKEN, run=st.booleans(), mix=MIX)
    def resume(self, who, pending, run, mix):
        RULES["resume"] += 1
        request = list(self.preempted.values())[who % len(self.preempted)]
        tokens = (
            (request.tokens + [pending])[:MAX_SEQ_LEN] if request.n >= len(request.prompt) else request.prompt
        )
        del self.preempted[request.id]
        options = dict(salt=request.salt, reuse_prefix=request.reuse)
        ask = lambda count: self.m.blocks_to_admit(tokens, count, **options)
        self.arrive(request, tokens, ask, lambda: self.m.resume(request.id, tokens))
        if run:
            self.run_step([request], mix, 0)

    def arrive(self, request: Request, prompt: list[int], ask, call) -> None:
        """A request comes, or comes back: its hit is its own prompt's and as long as what others visibly hold."""
        least, draft_is_there = self.least_hit(request.salt, prompt) if request.reuse else (0, False)
        available = self.available()
        costs = {
            count: ask(count) for count in {len(prompt), min(len(prompt), 24)}
        }  # all of it, a first chunk
        start = call()
        hit = start.num_reused_tokens
        assert least <= hit <= len(prompt) - 1
        assert hit == start.num_reused_blocks * TPB + start.num_copied_tokens
        assert 0 <= start.num_copied_tokens < TPB and 0 <= start.ctx_start <= hit
        assert request.reuse or hit == 0
        if self.setup.policy == "truncate":
            assert start.ctx_start == 0
        if draft_is_there and hit == least:
            assert start.ctx_start == 0, "the draft rows of this hit are there"
        taken = [before - now for before, now in zip(available, self.available())]
        for count, cost in costs.items():
            if count >= hit:
                needed = self.m.blocks_needed(request.id, count - hit)
                assert cost == [a + b for a, b in zip(taken, needed)], "admission was told another number"
        request.prompt, request.tokens, request.ctx_start = list(prompt), prompt[:hit], start.ctx_start
        request.end = request.hit_end = hit
        request.values[:hit] = self.contents.meaning(request.salt, request.tokens)
        request.published = set(range(start.num_reused_blocks))
        self.live[request.id] = request
        self.hit_tokens += hit
        SEEN["hit" if hit else "no hit"] += 1
        SEEN["copied"] += start.num_copied_tokens > 0
        SEEN["least"] += least > 0
        SEEN["masked"] += start.ctx_start > 0

    def least_hit(self, salt, prompt: list[int]) -> tuple[int, bool]:
        """(tokens in full blocks that a live request holds for this prompt, are their draft rows there too?)."""
        best, tables = (0, False), None
        meaning = np.array(self.contents.meaning(salt, prompt), np.float32)
        for row, other in enumerate(self.live.values()):
            size = min(other.n, len(prompt) - 1)
            common = np.count_nonzero(other.values[:size] == meaning[:size]) // TPB
            if other.salt != salt or common * TPB <= best[0]:
                continue
            tables = self.tables() if tables is None else tables
            for blocks in range(common, best[0] // TPB, -1):
                if not other.published.issuperset(range(blocks)):
                    continue
                is_held, has_draft = self.holds_hit(other, tables[:, row], blocks)
                if is_held and (has_draft or self.setup.policy == "mask"):
                    best = blocks * TPB, has_draft
                    break
        return best

    def holds_hit(self, other: Request, table: np.ndarray, blocks: int) -> tuple[bool, bool]:
        """Does `other` hold what a hit of so many blocks reads: (of the target, of the draft too)?"""
        has_draft = not self.lost_draft_rows
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, blocks * TPB - (window - 1)) // TPB
            complete = (table[group, first:blocks] >= 0).all()
            if self.m.groups[group].has_target and not complete:
                return False, False
            if self.m.groups[group].has_draft:
                has_draft = has_draft and complete and first * TPB >= other.ctx_start
        return True, bool(has_draft)

    # Steps

    @precondition(lambda self: self.live)
    @rule(
        subset=st.sampled_from([31, 31, 31, 3, 6, 1, 2, 20, 13]),
        mix=MIX,
        token=TOKEN,
        how=st.sampled_from(["commit", "commit", "commit", "commit", "leave", "restored"]),
        room=st.sampled_from(["free", "preempt", "preempt", None]),
    )
    def step(self, subset, mix, token, how, room):
        RULES["step"] += 1
        requests = [r for i, r in enumerate(self.live.values()) if subset >> i & 1]
        self.run_step(requests or list(self.live.values()), mix, token, how, room)

    @precondition(lambda self: self.live)
    @rule(times=st.integers(2, 4), mix=MIX, token=TOKEN)
    def steps(self, times, mix, token):
        RULES["steps"] += 1
        for i in range(times):
            if self.live:
                self.run_step(list(self.live.values()), mix + i, token, room=("free", "preempt")[mix % 2])
                self.agree()

    def run_step(self, requests: list[Request], mix: int, token: int, how: str = "commit", room=None) -> None:
        """One batch: reserve for all or nobody, write every reserved row, keep some."""
        kept, plan = {}, []
        for place, request in enumerate(requests):
            choice = digit(mix, place)
            if request.n < len(request.prompt):
                kept[request.id] = request.prompt[request.n : request.n + CHUNKS[choice]]
                plan.append((request.id, len(kept[request.id])))
            else:
                kept[request.id] = [token] * min(KEPT[choice], MAX_SEQ_LEN - request.n)
                plan.append((request.id, 0))
        if not self.prepare(plan):
            if room is not None:
                victim = self.pick(mix)
                (self.end if room == "free" else self.let_go)(victim)
            return
        for request in requests:
            self.write_step(request, kept[request.id], how != "restored")
        if how != "leave":
            self.commit(requests, kept, how != "restored")

    def prepare(self, plan: list[tuple[int, int]]) -> bool:
        """Reserve, or see that it can't be done and that nothing has changed."""
        tables, available = self.tables(), self.available()
        holders, rows = self.holders(tables), {request_id: i for i, request_id in enumerate(self.live)}
        most, least, is_exact = [0] * len(self.groups), [0] * len(self.groups), True
        for request_id, num_new in plan:
            request, gains = self.live[request_id], []
            end = min(request.n + num_new + LOOKAHEAD, MAX_SEQ_LEN)
            for group in self.groups:
                table = tables[group, rows[request_id]]
                writes = table[request.n // TPB : cdiv(end, TPB)]
                fresh = int((writes < 0).sum()) - int((table[cdiv(end, TPB) :] >= 0).sum())
                shared = int((holders[group][writes[writes >= 0]] > 1).sum())
                gains.append(max(fresh + shared, 0))
                most[group] += gains[group]
                least[group] += fresh
                is_exact = is_exact and not shared
            assert self.m.blocks_needed(request_id, num_new) == gains
        fits = self.m.can_prepare(plan)
        if not fits:
            assert any(count > have for count, have in zip(most, available)), "refused without a reason"
            self.refused(OutOfBlocks, self.m.prepare_resources, plan)
            SEEN["refused"] += 1
            return False
        assert all(count <= have for count, have in zip(least, available)), "promised what isn't there"
        self.m.prepare_resources(plan)
        if is_exact:
            assert self.available() == [have - count for have, count in zip(available, least)]
        SEEN["copy on write"] += not is_exact
        for request_id, num_new in plan:
            request = self.live[request_id]
            request.end = min(request.n + num_new + LOOKAHEAD, MAX_SEQ_LEN)
        tables = self.tables()
        holders = self.holders(tables)
        for request_id, _ in plan:
            request = self.live[request_id]
            first, last = request.n // TPB, cdiv(request.end, TPB)
            for group in self.groups if request.end > request.n else ():
                writes = tables[group, rows[request_id], first:last]
                assert writes.min() >= 0, "a reserved row without a page"
                assert holders[group][writes].max() == 1, "a block that is written has another holder"
        for group in self.groups:
            self.poisoned[group] -= set(np.flatnonzero(holders[group]).tolist())
        if not is_exact:
            self.contents.check(list(self.live.values()), tables)  # before the copies are written to
        return True

    def write_step(self, request: Request, kept: list[int], draft_rows: bool = True) -> None:
        """Kept rows carry their meaning, the other reserved ones something of nobody's."""
        table, garbage = self.row(request), [-1000.0 - request.id] * (request.end - request.n - len(kept))
        before = request.values[request.n - 1] if request.n else None
        values = self.contents.meaning(request.salt, kept, before) + garbage
        self.contents.write(table, request.n, values)
        if not draft_rows:
            self.contents.write(table, request.n, [NAN] * len(values), (True,))

    def commit(self, requests: list[Request], kept: dict[int, list[int]], draft_rows: bool) -> None:
        available, starts = self.available(), {}
        batch = [(request.id, kept[request.id]) for request in requests]
        if draft_rows:
            self.m.update_resources(batch)
        else:
            self.m.update_resources(batch, draft_rows=False)
            self.lost_draft_rows = True
        assert all(now >= had for now, had in zip(self.available(), available)), (
            "a commit took blocks from others"
        )
        for request in requests:
            starts[request.id] = first = request.n
            before = request.values[first - 1] if first else None
            request.tokens = request.tokens + kept[request.id]
            request.end = request.n
            values = self.contents.meaning(request.salt, kept[request.id], before)
            request.values[first : request.n] = values
            if not draft_rows and request.n > first:
                request.ctx_start = request.n
        for request in requests:
            if request.publishes:
                full = range(starts[request.id] // TPB, request.n // TPB)
                request.published |= {i for i in full if not self.has_twin(request, (i + 1) * TPB - 1)}

    def has_twin(self, request: Request, position: int) -> bool:
        """Has another live request the same tokens up to this position? Then the index may know its copy."""
        value = request.values[position]
        return any(
            r.n > position and r.values[position] == value for r in self.live.values() if r is not request
        )

    # What may come between

    @precondition(lambda self: self.live)
    @rule(who=WHO, part=st.integers(0, 13), mix=MIX)
    def fail_between_reserve_and_store(self, who, part, mix):
        RULES["fail"] += 1
        request = self.pick(who)
        num_new = min(CHUNKS[digit(mix, 1)], max(0, len(request.prompt) - request.n))
        if self.prepare([(request.id, num_new)]):
            garbage = [-1000.0 - request.id] * min(part, request.end - request.n)
            self.contents.write(self.row(request), request.n, garbage)
            self.m.rewind(request.id, 0)
            request.end = request.n
            self.agree()
            self.run_step([request], mix, 0)

    @precondition(lambda self: self.live)
    @rule(who=WHO, part=st.integers(0, 7))
    def rewind(self, who, part):
        RULES["rewind"] += 1
        request = self.pick(who)
        limit = self.m.max_rewind(request.id)
        bound = request.n
        for window in self.windows:
            first = request.blocks(window).start
            if first:
                bound = min(bound, request.n - (first * TPB + window - 1))
        assert min(bound, request.n % TPB) <= limit <= bound
        if request.published:
            assert limit <= request.n - (max(request.published) + 1) * TPB, "into a published block"
        self.refused(ValueError, self.m.rewind, request.id, limit + 1)
        count = limit if part == 7 else min(part, limit)
        SEEN["rewound"] += count > 0
        SEEN["rewound past a block"] += count > request.n % TPB
        self.m.rewind(request.id, count)
        del request.tokens[request.n - count :]
        request.end = request.n
        now = int(self.m.ctx_starts([request.id])[0])
        assert now in (request.ctx_start, min(request.ctx_start, request.n))
        request.ctx_start = now

    @precondition(lambda self: self.live and len(self.live) < MAX_NUM_SEQS)
    @rule(who=WHO, run=st.booleans(), mix=MIX)
    def fork(self, who, run, mix):
        RULES["fork"] += 1
        parent = self.pick(who)
        child = Request(self.next_id, parent.salt, parent.prompt, parent.reuse)
        self.next_id += 1
        self.m.fork_sequence(parent.id, child.id)
        parent.end = child.end = parent.n
        child.tokens, child.values = list(parent.tokens), parent.values.copy()
        child.ctx_start, child.hit_end, child.publishes = parent.ctx_start, parent.hit_end, parent.publishes
        child.published = set(parent.published)
        self.live[child.id] = child
        tables = self.m.block_tables([parent.id, child.id])
        assert (tables[:, 0] == tables[:, 1]).all(), "all blocks are shared"
        if run:
            self.run_step([parent, child] if mix % 2 else [child], mix, digit(mix, 3) % 2)

    @precondition(lambda self: self.live and len(self.preempted) < 3)
    @rule(who=WHO, in_step=st.booleans())
    def preempt(self, who, in_step):
        RULES["preempt"] += 1
        request = self.pick(who)
        if in_step and self.prepare([(request.id, 0)]):
            self.write_step(request, [])
        self.let_go(request)

    def let_go(self, request: Request) -> None:
        available = self.available()
        assert self.m.preempt(request.id) == request.n
        assert all(now >= had for now, had in zip(self.available(), available))
        self.preempted[request.id] = self.live.pop(request.id)
        request.published = set()

    @precondition(lambda self: self.live or self.preempted)
    @rule(who=WHO, abort=st.sampled_from([False, True, "preempted"]))
    def free(self, who, abort):
        RULES["free"] += 1
        if self.preempted and (abort == "preempted" or not self.live):
            self.end(list(self.preempted.values())[who % len(self.preempted)])
            return
        request = self.pick(who)
        if abort:  # in the middle of a chunk
            num_new = min(8 * (who + 1), max(0, len(request.prompt) - request.n))
            if self.prepare([(request.id, num_new)]):
                self.write_step(request, [])
        self.end(request)

    def end(self, request: Request) -> None:
        self.m.free_resources(request.id)
        (self.live if request.id in self.live else self.preempted).pop(request.id)
        self.finished.append(request.id)

    @precondition(lambda self: sum(RULES.values()) > self.last_rare + 2)
    @rule(
        who=WHO,
        first=st.integers(0, 60),
        what=st.sampled_from(["bad calls"] * 3 + ["withhold", "withhold", "clear"]),
    )
    def rarely(self, who, first, what):
        RULES[what] += 1
        self.last_rare = sum(RULES.values())
        if what == "bad calls":
            self.bad_calls(who, first)
        elif what == "withhold":
            self.withhold()
        else:
            self.m.clear_prefix_index()
            for request in (*self.live.values(), *self.preempted.values()):
                request.publishes, request.published = False, set()
            groups = self.m.stats().groups
            assert not any(group.num_cached for group in groups)

    def withhold(self):
        self.m.withhold_draft_rows()
        self.lost_draft_rows = True
        holders = (
            self.holders(self.tables()) if self.live else [np.zeros(count) for count in self.setup.num_blocks]
        )
        for group in self.groups:
            self.contents.poison(group, np.flatnonzero(holders[group] == 0), draft_only=True)
            if not self.m.groups[group].has_target:
                assert self.m.stats().groups[group].num_cached == 0

    # Calls that fail

    def bad_calls(self, who, first):
        calls = self.list_bad_calls(who)
        for i in range(first, first + 6):
            error, match, call, *args = calls[i % len(calls)]
            self.refused(error, call, *args, match=match)
        before = self.m.dump()
        for request_id in self.finished[-2:]:
            self.m.free_resources(request_id)
        assert self.m.dump() == before, "a second free is a no-op"

    def list_bad_calls(self, who: int) -> list[tuple]:
        m, new = self.m, self.next_id
        calls = [(KeyError, None, *call) for call in self.calls_of(new)]
        calls += [(KeyError, None, m.free_resources, new), (KeyError, None, m.resume, new, [1, 2])]
        for tokens in ([], [0] * (MAX_SEQ_LEN + 1), [0, -1], [0, True], [0.5]):
            calls.append((ValueError, None, m.add_sequence, new, tokens))
        calls.append((ValueError, None, m.num_available_blocks, len(self.groups)))
        if self.finished:
            calls += [(RequestError, None, *call) for call in self.calls_of(self.finished[-1])]
            calls.append((RequestError, None, m.resume, self.finished[-1], [1, 2]))
            calls.append((ValueError, None, m.add_sequence, self.finished[-1], [1, 2]))
        if self.preempted:
            request = list(self.preempted.values())[who % len(self.preempted)]
            calls += [(RequestError, "preempted", *call) for call in self.calls_of(request.id)]
            calls.append((ValueError, None, m.add_sequence, request.id, [1, 2]))
            calls += [
                (ValueError, None, m.resume, request.id, tokens) for tokens in ([], [0] * (MAX_SEQ_LEN + 1))
            ]
        if self.live:
            request = self.pick(who)
            i, room = request.id, request.end - request.n
            calls += [
                (ValueError, None, m.prepare_resources, [(i, 0), (i, 0)]),
                (ValueError, None, m.update_resources, [(i, []), (i, [])]),
                (KeyError, None, m.prepare_resources, [(i, 0), (new, 0)]),
                (KeyError, None, m.update_resources, [(i, []), (new, [])]),
                (ValueError, None, m.prepare_resources, [(i, MAX_SEQ_LEN + 1 - request.n)]),
                (ValueError, None, m.prepare_resources, [(i, -1)]),
                (ValueError, None, m.update_resources, [(i, [0] * (room + 1))]),
                (ValueError, None, m.rewind, i, -1),
                (ValueError, None, m.rewind, i, request.n + 1),
                (ValueError, None, m.add_sequence, i, [1, 2]),
                (ValueError, None, m.fork_sequence, i, i),
                ((ValueError, KeyError), None, m.resume, i, [1, 2]),
            ]
            if room:
                calls.append((ValueError, None, m.update_resources, [(i, [-1])]))
            if self.finished and len(self.live) < MAX_NUM_SEQS:
                calls.append((ValueError, None, m.fork_sequence, i, self.finished[-1]))
            if len(self.groups) > 1:
                calls.append((ValueError, None, m.get_batch_cache_indices, [i]))
            if len(self.live) == MAX_NUM_SEQS:
                calls += [(ValueError, None, m.add_sequence, new, [1, 2])] * 3
                calls += [(ValueError, None, m.fork_sequence, i, new)] * 3
                calls += [(ValueError, None, m.resume, r, [0] * 9) for r in self.preempted]
        return calls

    def calls_of(self, request_id: int) -> list[tuple]:
        """All calls that name a request, but free_resources and resume."""
        m = self.m
        return [
            (m.prepare_resources, [(request_id, 0)]),
            (m.can_prepare, [(request_id, 0)]),
            (m.blocks_needed, request_id, 0),
            (m.update_resources, [(request_id, [])]),
            (m.rewind, request_id, 0),
            (m.max_rewind, request_id),
            (m.fork_sequence, request_id, self.next_id + 1),
            (m.preempt, request_id),
            (m.num_tokens, request_id),
            (m.num_held_blocks, request_id),
            (m.block_tables, [request_id]),
            (m.ctx_starts, [request_id]),
            (m.get_batch_cache_indices, [request_id], 0),
        ]

    # After each rule

    @invariant()
    def agree(self):
        self.m.check_invariants()
        requests = list(self.live.values())
        tables = self.tables()
        if requests:
            self.contents.check(requests, tables)
        for row, request in enumerate(requests):
            self.check_blocks(request, tables[:, row])
        assert self.m.ctx_starts(list(self.live)).tolist() == [request.ctx_start for request in requests]
        self.check_pools(self.holders(tables))

    def check_blocks(self, request: Request, table: np.ndarray) -> None:
        """It holds just the blocks that its length asks for."""
        assert self.m.num_tokens(request.id) == request.n
        for group, window in enumerate(self.windows):
            held, expected = np.flatnonzero(table[group] >= 0).tolist(), request.blocks(window)
            assert self.m.num_held_blocks(request.id, group) == len(held)
            if len(held) != len(expected):
                assert not self.m.groups[group].has_target, "a hole in the target's rows"
                SEEN["hole"] += 1
                expected = [i for i in expected if i in held or not request.may_lack(i)]
            assert held == list(expected), f"group {group}: blocks that it doesn't need, or lacks"
        layer_idx = request.id % len(self.m.layer_to_group)
        (pages,) = self.m.get_batch_cache_indices([request.id], layer_idx)
        whole = table[self.m.layer_to_group[layer_idx]].tolist()
        assert pages + [-1] * (NUM_ENTRIES - len(pages)) == whole

    def check_pools(self, holders: list[np.ndarray]) -> None:
        """Every block is free, cached or referenced; what is free can't be read: it is NaN from now on."""
        stats = self.m.stats()
        for group, (num_blocks, s) in enumerate(zip(self.setup.num_blocks, stats.groups)):
            assert s.num_blocks == num_blocks == s.num_free + s.num_cached + s.num_referenced
            assert s.num_referenced == np.count_nonzero(holders[group])
            assert 0 <= s.num_evictable <= s.num_cached
            assert self.m.num_available_blocks(group) == s.num_free + s.num_evictable
            owners = self.m.block_owners(group)
            free = {block for block, owner in enumerate(owners) if owner == "free"}
            assert len(free) == s.num_free and not holders[group][list(free)].any()
            self.contents.poison(group, free - self.poisoned[group])
            self.poisoned[group] = free
        assert stats.num_shared == sum(np.count_nonzero(counts > 1) for counts in holders)
        assert stats.hit_tokens == self.hit_tokens
        for name in ("num_free", "num_cached", "num_evictable", "num_referenced"):
            assert getattr(stats, name) == sum(getattr(group, name) for group in stats.groups)

    def teardown(self):
        if not hasattr(self, "live"):
            return
        for request in (*self.live.values(), *self.preempted.values()):
            self.m.free_resources(request.id)
        self.m.check_invariants()
        for group in self.m.stats().groups:
            assert group.num_free + group.num_cached == group.num_blocks, "a block leaked"
        self.m.clear_prefix_index()
        self.m.check_invariants()
        assert [g.num_free for g in self.m.stats().groups] == list(self.setup.num_blocks)
        assert (self.m.block_tables([None] * MAX_NUM_SEQS) == -1).all()
        assert (self.m.tables.host == -1).all() and (self.m.tables.device == -1).all()


FULL_AND_WINDOWED_DRAFT = Setup((layer(1, 2),) * 2, (layer(2, 1), layer(2, 1, 20)), (14, 11))
WINDOWED_TARGET = Setup((layer(2, 1), layer(2, 1, 16)), (layer(1, 2),), (13, 12), "recompute_tail", "HND")
ALL_WINDOWED = Setup((layer(1, 2, 24),), (layer(1, 1, 12),), (12, 10))
THREE_GROUPS = Setup(
    (layer(1, 2), layer(1, 2, 24)), (layer(2, 1, 12),) * 2, (16, 12, 10), "recompute_tail", "HND"
)
FULL_DRAFT_ALONE = Setup((layer(2, 2, 20),), (layer(1, 1), layer(1, 1, 20)), (13, 11), kv_layout="HND")
ONE_GROUP = Setup((layer(2, 2),) * 2, (layer(1, 3), layer(2, 1)), (12,))
SETUPS = {
    "FullAndWindowedDraft": FULL_AND_WINDOWED_DRAFT,
    "FullAndWindowedDraftTruncating": replace(FULL_AND_WINDOWED_DRAFT, policy="truncate", kv_layout="HND"),
    "WindowedTarget": WINDOWED_TARGET,
    "AllWindowed": ALL_WINDOWED,
    "AllWindowedTruncating": replace(ALL_WINDOWED, policy="truncate", num_blocks=(10, 12)),
    "ThreeGroups": THREE_GROUPS,
    "FullDraftAlone": FULL_DRAFT_ALONE,
    "OneGroup": ONE_GROUP,
    "OneGroupRecomputing": replace(ONE_GROUP, policy="recompute_tail", kv_layout="HND"),
}
SETTINGS = settings(
    deadline=None,
    database=None,
    derandomize="DFLASH_PAGED_STEPS" not in os.environ,
    suppress_health_check=list(HealthCheck),
    stateful_step_count=STEPS_A_HISTORY,
    max_examples=max(1, NUM_STEPS // (len(SETUPS) * STEPS_A_HISTORY)),
)
for name, setup in SETUPS.items():
    case = type(f"{name}Machine", (GroupsMachine,), {"setup": setup}).TestCase
    case.settings = SETTINGS
    globals()[f"Test{name}"] = case
del case, name, setup
