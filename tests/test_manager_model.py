"""Random histories of the manager, beside a plain model of its blocks and of the contents of its pages.

`Model` knows no ref counts, pins or LRU lists: it works everything out from who holds what, naively, after
each call. `Pages` writes into the manager's pages what a row *means* (the tenant and all tokens up to it) and
reads it back through the block tables: a row restored, shared, moved or overwritten wrongly shows at once.
"""

import os
from array import array

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dflash_paged.manager import KVCacheManager, OutOfBlocks, RequestError
from dflash_paged.memory import LayerSpec

TPB, NUM_BLOCKS, MAX_SEQ_LEN, LOOKAHEAD = 8, 12, 61, 5
EXAMPLES = int(os.environ.get("DFLASH_PAGED_EXAMPLES", "60"))  # more for a long run


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class Request:
    """What the model knows of a live request: its tokens, and the copies of blocks that it holds."""

    def __init__(self, salt):
        self.salt = salt
        self.tokens: list[int] = []
        self.copies: list[int] = []  # one number for each physical block
        self.known: list[int] = []  # index entries that its full blocks belong to
        self.ctx_start = 0
        self.end = 0
        self.publishes = True

    def prefix(self, i: int) -> tuple:
        return (self.salt, *self.tokens[: (i + 1) * TPB])


class Entry:
    """A published prefix: which copy holds its last block, and since when nobody needs it."""

    def __init__(self, uid: int, copy: int):
        self.uid, self.copy, self.draft, self.since = uid, copy, True, None


class Model:
    """Blocks as sets. Everything is recomputed, nothing is counted."""

    def __init__(self, policy: str):
        self.policy = policy
        self.requests: dict[int, Request] = {}
        self.index: dict[tuple, Entry] = {}  # by (salt, *tokens)
        self.clock = self.evicted = self.hits = 0

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def held(self) -> set:
        return {copy for request in self.requests.values() for copy in request.copies}

    def idle(self) -> list[tuple]:
        """Prefixes that nobody holds and that lead to nothing held."""
        held = self.held()
        wanted = {key[: 1 + n] for key, e in self.index.items() if e.copy in held for n in range(len(key))}
        return [key for key in self.index if key not in wanted]

    def evictable(self) -> list[tuple]:
        """Prefixes that nobody holds and that lead to nothing held, oldest first; sets their age."""
        idle = self.idle()
        for key in set(self.index) - set(idle):
            self.index[key].since = None
        for key in sorted((k for k in idle if self.index[k].since is None), key=len, reverse=True):
            self.index[key].since = self.tick()
        return sorted(idle, key=lambda k: self.index[k].since)

    @property
    def num_free(self) -> int:
        return NUM_BLOCKS - len(self.held() | {entry.copy for entry in self.index.values()})

    def lookup(self, salt, tokens: list[int], reuse: bool) -> tuple[list[Entry], int]:
        """(entries of the longest hit, first position with draft rows)."""
        hit = []
        for n in range(TPB, len(tokens), TPB):
            entry = self.index.get((salt, *tokens[:n])) if reuse else None
            if entry is None:
                break
            hit.append(entry)
        missing = [i for i, entry in enumerate(hit) if not entry.draft]
        if missing and self.policy == "truncate":
            return hit[: missing[0]], 0
        return hit, (missing[-1] + 1) * TPB if missing else 0

    def add(self, request_id: int, salt, tokens: list[int], reuse: bool) -> Request:
        hit, ctx_start = self.lookup(salt, tokens, reuse)
        request = self.requests[request_id] = Request(salt)
        request.tokens = tokens[: len(hit) * TPB]
        request.copies, request.known = [e.copy for e in hit], [e.uid for e in hit]
        request.ctx_start, request.end = ctx_start, len(request.tokens)
        self.hits += len(request.tokens)
        return request

    def reserve(self, plan: list[tuple[int, int]]) -> bool:
        """Reserve rows for all or for nobody."""
        ends = {i: min(len(self.requests[i].tokens) + new + LOOKAHEAD, MAX_SEQ_LEN) for i, new in plan}
        gains = {i: cdiv(end, TPB) - len(self.requests[i].copies) for i, end in ends.items()}
        if sum(gains.values()) > self.num_free + len(self.evictable()):
            return False
        for i, end in ends.items():
            self.requests[i].end = end
            del self.requests[i].copies[cdiv(end, TPB) :]
        for i, gain in gains.items():
            for _ in range(gain):
                if self.num_free == 0:
                    del self.index[self.evictable()[0]]
                    self.evicted += 1
                self.requests[i].copies.append(self.tick())
        return True

    def settle(self, request: Request) -> None:
        request.end = len(request.tokens)
        del request.copies[cdiv(request.end, TPB) :]

    def commit(self, request_id: int, tokens: list[int]) -> None:
        request = self.requests[request_id]
        request.tokens += tokens
        self.settle(request)
        full = len(request.tokens) // TPB
        if not request.publishes or full <= len(request.known):
            return
        while request.known:
            entry = self.index.get(request.prefix(len(request.known) - 1))
            if entry is not None and entry.uid == request.known[-1]:
                break
            request.known.pop()
        idle = self.idle()
        for i in range(len(request.known)):
            if request.prefix(i) in idle:  # only the cache has the other copy: this one takes its place
                entry = self.index[request.prefix(i)]
                entry.copy, entry.draft = request.copies[i], True
        for i in range(len(request.known), full):
            entry = self.index.get(request.prefix(i))
            if entry is None:
                entry = self.index[request.prefix(i)] = Entry(self.tick(), request.copies[i])
            elif entry.copy not in self.held():
                entry.copy, entry.draft = request.copies[i], True
            request.known.append(entry.uid)

    def end(self, request_id: int) -> None:
        """A request ends. Where others build on a block that nobody holds any more, the index goes over to their copy."""
        gone = self.requests.pop(request_id)
        for i, uid in enumerate(gone.known):
            entry, held, idle = self.index.get(gone.prefix(i)), self.held(), self.idle()
            twins = [r for r in self.requests.values() if r.known[i : i + 1] == [uid]]
            if twins and entry is not None and entry.uid == uid and entry.copy not in held and gone.prefix(i) not in idle:
                entry.copy, entry.draft = twins[0].copies[i], True

    def withhold(self) -> int:
        cached = [e for e in self.index.values() if e.copy not in self.held()]
        for entry in cached:
            entry.draft = False
        return len(cached)

    def clear(self) -> None:
        self.index = {}
        for request in self.requests.values():
            request.publishes = False


class Pages:
    """The contents: what each row of each layer means, written and read through the block tables."""

    def __init__(self, manager: KVCacheManager):
        self.manager = manager
        self.meanings: dict[tuple, int] = {}
        for pool in manager.pools.tensors:
            pool.fill_(float("nan"))
        views = [manager.page_view(layer_idx) for layer_idx in range(len(manager.layers))]
        swap = manager.pools.kv_layout == "HND"
        self.fields = [[f.transpose(1, 2) if swap else f for f in (view.k, view.v)] for view in views]

    def rows(self, request: Request, tokens: list[int]) -> list[float]:
        """For each position a number that stands for (tenant, every token up to there)."""
        keys = ((request.salt, *tokens[: position + 1]) for position in range(len(tokens)))
        return [float(self.meanings.setdefault(key, len(self.meanings))) for key in keys]

    def slots(self, request_id: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        table = self.manager.block_tables([request_id])[0, 0].long()
        positions = torch.arange(start, end)
        pages = table[positions // TPB]
        assert (pages >= 0).all(), "a row without a page"
        return pages, positions % TPB

    def write(self, request_id: int, start: int, values: list[float]) -> None:
        where = self.slots(request_id, start, start + len(values))
        rows = torch.tensor(values)[:, None, None]
        for layer_idx, (k, v) in enumerate(self.fields):
            k[where], v[where] = rows + layer_idx / 16, -rows - layer_idx / 16

    def check(self, request_id: int, request: Request) -> None:
        """Every row that the request may read is its own: the target's from 0, the draft's from ctx_start."""
        where = self.slots(request_id, 0, len(request.tokens))
        rows = torch.tensor(self.rows(request, request.tokens))[:, None, None]
        for layer_idx, (k, v) in enumerate(self.fields):
            start = 0 if layer_idx < self.manager.num_target_layers else request.ctx_start
            expected = rows[start:] + layer_idx / 16
            assert (k[where][start:] == expected).all(), f"layer {layer_idx}: K of others"
            assert (v[where][start:] == -expected).all(), f"layer {layer_idx}: V of others"

    def poison(self, blocks: list[int], layers: range) -> None:
        for layer_idx in layers:
            for field in self.fields[layer_idx]:
                field[blocks] = float("nan")


class ManagerMachine(RuleBasedStateMachine):
    """Any order of calls: the manager, its model and its pages agree after each."""

    policy, kv_layout = "mask", "NHD"

    @initialize()
    def start(self):
        self.manager = KVCacheManager(
            target_layers=[LayerSpec(1, 2, "float32")] * 2,
            draft_layers=[LayerSpec(2, 1, "float32")],
            tokens_per_block=TPB,
            num_blocks=NUM_BLOCKS,
            max_seq_len=MAX_SEQ_LEN,
            max_batch_size=4,
            num_lookahead_tokens=LOOKAHEAD,
            kv_layout=self.kv_layout,
            missing_draft_policy=self.policy,
            enable_partial_reuse=False,
        )
        self.model, self.pages = Model(self.policy), Pages(self.manager)
        self.prompts: dict[int, list[int]] = {}
        self.finished: list[int] = []
        self.next_id = 0

    def pick(self, data) -> int:
        return data.draw(st.sampled_from(sorted(self.model.requests)), label="request")

    def next_tokens(self, data, request_id: int) -> list[int]:
        """Tokens of the rows that the next step keeps: prompt first, then generated ones."""
        done, prompt = len(self.model.requests[request_id].tokens), self.prompts[request_id]
        if done < len(prompt):
            return prompt[done : done + data.draw(st.sampled_from([64, 64, 24, 8, 5]), label="chunk")]
        count = min(data.draw(st.sampled_from([LOOKAHEAD, 4, 3, 1, 0]), label="kept"), MAX_SEQ_LEN - done)
        return [data.draw(st.sampled_from([0, 0, 0, 1]), label="token")] * count

    @precondition(lambda self: len(self.model.requests) < 4)
    @rule(
        data=st.data(),
        salt=st.sampled_from([None, None, None, "tenant"]),
        family=st.sampled_from([0, 0, 0, 1]),
        branch=st.sampled_from([8, 16, 24, 40]),
        length=st.sampled_from([9, 16, 17, 24, 25, 33, 20, 41, 45, 1]),
        reuse=st.sampled_from([True, True, True, False]),
        copies=st.sampled_from([1, 1, 2]),
        run=st.sampled_from([True, True, False]),
    )
    def add(self, data, salt, family, branch, length, reuse, copies, run):
        prompt = [family if i < branch else 2 for i in range(length)]
        added = [self.add_one(prompt, salt, reuse) for _ in range(copies) if len(self.model.requests) < 4]
        if run:
            self.run_step(data, added)

    def add_one(self, prompt: list[int], salt, reuse: bool) -> int:
        length = len(prompt)
        request_id, self.next_id = self.next_id, self.next_id + 1
        num_available, cost = (
            self.manager.num_available_blocks(),
            self.manager.blocks_to_admit(prompt, length, salt=salt, reuse_prefix=reuse),
        )
        start = self.manager.add_sequence(request_id, prompt, salt=salt, reuse_prefix=reuse)
        request = self.model.add(request_id, salt, prompt, reuse)
        self.prompts[request_id] = prompt
        assert start.num_reused_tokens == len(request.tokens) == start.num_reused_blocks * TPB
        assert start.ctx_start == request.ctx_start
        missing = self.manager.blocks_needed(request_id, length - len(request.tokens))[0]
        assert cost == [num_available - self.manager.num_available_blocks() + missing]
        return request_id

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data(), commit=st.sampled_from([True, True, True, False]))
    def step(self, data, commit):
        ids = sorted(self.model.requests)
        some = data.draw(st.sampled_from([ids, ids, ids[:2], ids[1:], ids[-1:]]), label="batch")
        self.run_step(data, some or ids, commit)

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data(), times=st.integers(2, 4))
    def steps(self, data, times):
        for _ in range(times):
            self.run_step(data, sorted(self.model.requests))
            self.agree()

    def run_step(self, data, ids: list[int], commit: bool = True) -> None:
        """One batch: reserve for all or nobody, write every reserved row, keep some, give the rest back."""
        kept = {i: self.next_tokens(data, i) for i in ids}
        plan = [(i, len(kept[i]) if self.is_prefill(i) else 0) for i in ids]
        before, fits = self.manager.dump(), self.manager.can_prepare(plan)
        assert self.model.reserve(plan) == fits
        if not fits:
            with pytest.raises(OutOfBlocks):
                self.manager.prepare_resources(plan)
            assert self.manager.dump() == before, "a failed call changed something"
            if data.draw(st.sampled_from([True, True, False]), label="make room"):
                self.end(data.draw(st.sampled_from(ids), label="victim"))
            return
        self.manager.prepare_resources(plan)
        for i in ids:
            self.write_step(i, kept[i])
        if commit:
            available = self.manager.num_available_blocks()
            self.manager.update_resources([(i, kept[i]) for i in ids])
            assert self.manager.num_available_blocks() >= available, "a commit took blocks from others"
            for i in ids:
                self.model.commit(i, kept[i])

    def is_prefill(self, request_id: int) -> bool:
        return len(self.model.requests[request_id].tokens) < len(self.prompts[request_id])

    def write_step(self, request_id: int, kept: list[int]) -> None:
        """Kept rows carry their meaning, the other reserved ones something of nobody's."""
        request = self.model.requests[request_id]
        start, tokens = len(request.tokens), request.tokens + kept
        values = self.pages.rows(request, tokens)[start:] + [-1000.0 - request_id] * (
            request.end - len(tokens)
        )
        self.pages.write(request_id, start, values)

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data())
    def rewind(self, data):
        request_id = self.pick(data)
        request = self.model.requests[request_id]
        limit = len(request.tokens) - len(request.known) * TPB
        count = data.draw(st.integers(0, limit), label="rows")
        before = self.manager.dump()
        with pytest.raises(ValueError, match="published"):
            self.manager.rewind(request_id, limit + 1)
        assert self.manager.dump() == before
        self.manager.rewind(request_id, count)
        del request.tokens[len(request.tokens) - count :]
        self.model.settle(request)

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data(), abort=st.booleans())
    def free(self, data, abort):
        request_id = self.pick(data)
        if abort and self.model.reserve([(request_id, 0)]):  # in the middle of a step
            self.manager.prepare_resources([(request_id, 0)])
            self.write_step(request_id, [])
        self.end(request_id)

    def end(self, request_id: int) -> None:
        self.manager.free_resources(request_id)
        self.model.end(request_id)
        del self.prompts[request_id]
        self.finished.append(request_id)

    @rule(data=st.data(), what=st.sampled_from(["bad calls", "bad calls", "clear"]))
    def rarely(self, data, what):
        if what == "clear":
            self.manager.clear_prefix_index()
            self.model.clear()
        else:
            self.bad_calls(data)

    @precondition(lambda self: self.manager.stats().num_cached)
    @rule()
    def withhold(self):
        assert self.manager.withhold_draft_rows() == self.model.withhold()
        cached = [b for b, owner in enumerate(self.manager.block_owners()) if owner == "cached"]
        self.pages.poison(cached, range(2, 3))

    def bad_calls(self, data):
        before, m = self.manager.dump(), self.manager
        with pytest.raises(KeyError):
            m.free_resources(self.next_id)
        for request_id in self.finished[-2:]:
            m.free_resources(request_id)
            with pytest.raises(RequestError, match="finished"):
                m.update_resources([(request_id, [])])
        if self.model.requests:
            request_id = self.pick(data)
            for batch in (
                [(request_id, 0)] * 2,
                [(request_id, 0), (self.next_id, 0)],
                [(request_id, MAX_SEQ_LEN + 1)],
            ):
                with pytest.raises((ValueError, KeyError)):
                    m.prepare_resources(batch)
            too_many = self.model.requests[request_id].end - len(self.model.requests[request_id].tokens) + 1
            with pytest.raises(ValueError, match="reserved"):
                m.update_resources([(request_id, [0] * too_many)])
        assert self.manager.dump() == before

    @invariant()
    def agree(self):
        m, model = self.manager, self.model
        m.check_invariants()
        evictable, stats = model.evictable(), m.stats()
        assert stats.num_free == model.num_free
        assert (stats.num_published, stats.num_evictable) == (len(model.index), len(evictable))
        assert (stats.num_evicted, stats.hit_tokens) == (model.evicted, model.hits)
        assert stats.num_referenced == len(model.held())
        assert [self.path(block) for block in m._ledger.pools[0].evictable] == evictable, "eviction order"
        for request_id, request in model.requests.items():
            assert m.num_tokens(request_id) == len(request.tokens)
            assert m.num_held_blocks(request_id) == cdiv(request.end, TPB) == len(request.copies)
            self.pages.check(request_id, request)
        self.pages.poison([b for b, owner in enumerate(m.block_owners()) if owner == "free"], range(3))

    def path(self, block: int) -> tuple:
        """(salt, *tokens) that lead to a published block, its own included."""
        node, path = self.manager._ledger.pools[0].node_of_block[block], ()
        while node is not None:
            own = (node.tokens,) if node.parent is None else array("i", node.tokens)  # a root has its salt
            node, path = node.parent, (*own, *path)
        return path

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        for request_id in list(self.model.requests):
            self.manager.free_resources(request_id)
        self.manager.check_invariants()
        stats = self.manager.stats()
        assert stats.num_free + stats.num_cached == NUM_BLOCKS, "a block leaked"
        self.manager.clear_prefix_index()
        assert self.manager.stats().num_free == NUM_BLOCKS


class TruncatingMachine(ManagerMachine):
    """The same with hits that end before missing draft rows, over HND pages."""

    policy, kv_layout = "truncate", "HND"


COMMON = dict(
    deadline=None,
    database=None,
    derandomize=EXAMPLES == 60,
    suppress_health_check=list(HealthCheck),
    stateful_step_count=40,
    max_examples=EXAMPLES,
)
TestRandomHistories = ManagerMachine.TestCase
TestRandomHistories.settings = settings(**COMMON)
TestRandomHistoriesTruncating = TruncatingMachine.TestCase
TestRandomHistoriesTruncating.settings = settings(**COMMON)
