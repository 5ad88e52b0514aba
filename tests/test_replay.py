"""A recorded run of the engine, done again by the simulator over a twin scheduler: the same blocks, step by step."""

import random
from dataclasses import replace

import pytest
from conftest import TINY_LAYER_IDS, make_tiny_drafter, make_tiny_target

from dflash_paged.engine import Engine
from dflash_paged.replay import (
    Arrival, KnownTokens, StepTap, TraceStep, first_difference, record_trace, replay_trace, twin_scheduler, used_blocks,
)
from dflash_paged.target import PagedTarget

SLIDING = dict(
    layer_types=["sliding_attention", "full_attention"], use_sliding_window=True, sliding_window=18, is_causal=False
)
TARGET = PagedTarget(make_tiny_target(eos_token_id=None), TINY_LAYER_IDS)
DRAFTERS = {"full": make_tiny_drafter(), "window": make_tiny_drafter(**SLIDING)}


def make_engine(rng: random.Random, admission: str, drafter: str | None = None, num_blocks: int = 0) -> Engine:
    """An engine of a few slots over a small pool."""
    k, batch = rng.choice([0, 1, 2, 4]), rng.choice([2, 3, 5])
    return Engine(
        TARGET, DRAFTERS[drafter or rng.choice(list(DRAFTERS))], num_draft_tokens=k, max_seq_len=96, tokens_per_block=8,
        max_batch_size=batch, num_blocks=num_blocks or rng.choice([14, 20, 40]),
        max_step_tokens=batch * (k + 1) + rng.choice([0, 4, 20]), admission=admission,
    )


def draw_arrivals(rng: random.Random, count: int = 12) -> list[Arrival]:
    """Prompts that share beginnings, out of order, of several priorities; some share nothing."""
    base, arrivals = [rng.randrange(5, 97) for _ in range(60)], []
    for _ in range(count):
        prompt = base[: rng.randrange(1, 56)] + [rng.randrange(5, 97) for _ in range(rng.randrange(6))]
        options = {"priority": rng.randrange(3)}
        if rng.random() < 0.3:
            options |= rng.choice([{"reuse_prefix": False}, {"salt": "mine"}])
        arrivals.append(Arrival(rng.randrange(30), prompt, rng.randrange(1, 30), options))
    return arrivals


def draw_events(rng: random.Random, count: int = 12) -> list[tuple[int, str, int]]:
    return [(rng.randrange(40), rng.choice(["abort", "preempt"]), rng.randrange(count)) for _ in range(4)]


@pytest.fixture(scope="module")
def recorded():
    """One run with two preemptions and an abort, and its engine."""
    rng = random.Random(9)
    engine = make_engine(rng, "max_utilization", "full", 20)
    events = [*((8 + i, "preempt", i) for i in range(4)), (12, "abort", 5), (13, "preempt", 4)]
    return record_trace(engine, draw_arrivals(rng), events), engine


@pytest.mark.parametrize("admission", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize("seed", range(8))
def test_the_simulator_takes_the_engines_steps(seed, admission):
    rng = random.Random(f"{admission} {seed}")
    engine = make_engine(rng, admission)
    trace = record_trace(engine, draw_arrivals(rng), draw_events(rng))
    again = twin_scheduler(engine.scheduler)
    assert first_difference(trace.steps, replay_trace(trace, again)) is None
    assert len(trace.steps) > 20 and len(trace.requests) == 12 and not engine.running and not engine.waiting
    assert again.num_preemptions == engine.scheduler.num_preemptions
    assert used_blocks(again) == used_blocks(engine.scheduler) == (0,) * len(again.pools)


def test_a_trace_can_be_replayed_twice(recorded):
    trace, engine = recorded
    first, second = (replay_trace(trace, twin_scheduler(engine.scheduler)) for _ in range(2))
    assert first == second == trace.steps


def test_a_recorded_run_tells_what_happened(recorded):
    trace, engine = recorded
    assert engine.scheduler.num_preemptions >= 2 and {r.finish_reason for r in trace.requests} == {"aborted", "length"}
    assert [r.request_id for r in trace.requests] == list(range(12)) and len(trace.arrivals) == 12
    assert [a.step for a in trace.arrivals] == sorted(a.step for a in trace.arrivals)
    for request, arrival in zip(trace.requests, trace.arrivals):
        assert request.tokens[: request.prompt_len] == arrival.prompt
        assert request.priority == arrival.options["priority"]
    kept = {r.request_id: 0 for r in trace.requests}
    for step in trace.steps:
        ids = [*step.decode, *(i for i, _ in step.prefill)]
        assert len(step.kept) == len(ids) == len(set(ids)) and not set(ids) & set(step.waiting)
        assert all(chunk == rows for (_, chunk), rows in zip(step.prefill, step.kept[len(step.decode) :]))
        assert all(0 < n <= engine.scheduler.num_query_rows for n in step.kept[: len(step.decode)])
        assert all(a >= b for a, b in zip(step.used, step.used_after))
        for i, n in zip(step.decode, step.kept):
            kept[i] += n
    whole = [r for r in trace.requests if r.finish_reason == "length" and not r.num_preemptions]
    assert whole and all(kept[r.request_id] == r.num_new_tokens - 1 for r in whole)


@pytest.mark.parametrize("admission", ["guaranteed_no_evict", "max_utilization"])
def test_outputs_of_preempted_requests_are_plain_decoding(admission):
    rng, preempted = random.Random(f"plain {admission}"), 0
    for _ in range(3):
        engine, arrivals = make_engine(rng, admission), draw_arrivals(rng, 8)
        events = [(step, "preempt", rng.randrange(8)) for step in range(3, 40, 3)]
        trace = record_trace(engine, arrivals, events)
        plain = Engine(TARGET, None, max_seq_len=96, tokens_per_block=8, max_batch_size=4)
        for request, arrival in zip(trace.requests, trace.arrivals):
            (want,) = plain.generate([list(arrival.prompt)], arrival.max_new_tokens)
            assert request.tokens[request.prompt_len :] == want.token_ids
        preempted += sum(r.num_preemptions > 0 for r in trace.requests)
        assert first_difference(trace.steps, replay_trace(trace, twin_scheduler(engine.scheduler))) is None
    assert preempted >= 4


# Differences are seen


def test_each_planted_difference_is_seen(recorded):
    trace, engine = recorded
    again = replay_trace(trace, twin_scheduler(engine.scheduler))
    at = next(i for i, step in enumerate(again) if step.decode and step.prefill)
    step = again[at]
    plants = dict(
        decode=step.decode[1:], prefill=((step.prefill[0][0], step.prefill[0][1] + 1), *step.prefill[1:]),
        kept=(step.kept[0] + 1, *step.kept[1:]), used=(step.used[0] - 1, *step.used[1:]),
        used_after=(step.used_after[0] + 1, *step.used_after[1:]), waiting=(*step.waiting, 99),
        preempted=(*step.preempted, 99),
    )
    assert set(plants) == set(TraceStep.__dataclass_fields__)
    for name, value in plants.items():
        changed = [*again[:at], replace(step, **{name: value}), *again[at + 1 :]]
        assert first_difference(trace.steps, changed).startswith(f"step {at}, {name}: ")
        assert first_difference(changed, trace.steps).startswith(f"step {at}, {name}: ")


def test_a_step_too_few_is_seen(recorded):
    steps = recorded[0].steps
    assert first_difference(steps, steps[:-1]) == f"{len(steps)} steps and {len(steps) - 1}"
    assert first_difference(steps, [*steps[:3], *steps[4:]]).startswith("step 3")
    assert first_difference(steps, list(steps)) is None and first_difference([], []) is None


@pytest.mark.parametrize("change", [
    lambda trace: replace(trace, events=[e for e in trace.events if e[1] == "abort"]),
    lambda trace: replace(trace, arrivals=[replace(trace.arrivals[0], step=9), *trace.arrivals[1:]]),
], ids=["no preemptions", "arrival"])
def test_a_run_that_was_another_is_seen(recorded, change):
    trace, engine = recorded
    assert first_difference(trace.steps, replay_trace(change(trace), twin_scheduler(engine.scheduler)))


def test_a_pool_of_another_size_is_seen(recorded):
    """The twin has the engine's blocks, and they matter."""
    trace, engine = recorded
    bigger = make_engine(random.Random(9), "max_utilization", "full", 200)
    assert engine.scheduler.pools[0].spec.num_blocks == 20
    assert first_difference(trace.steps, replay_trace(trace, twin_scheduler(bigger.scheduler)))


# Recording


@pytest.mark.parametrize("drafter", [*DRAFTERS, None])
def test_a_twin_has_the_settings_and_no_pages(drafter):
    rng = random.Random(4)
    engine = Engine(TARGET, None, max_seq_len=96, tokens_per_block=8)
    if drafter:
        engine = make_engine(rng, "max_utilization", drafter)
    ours, twin = engine.scheduler, twin_scheduler(engine.scheduler)
    for name in ("max_step_tokens", "max_batch_size", "num_query_rows", "admission", "priority_places", "max_seq_len"):
        assert getattr(twin, name) == getattr(ours, name), name
    for name in ("blocks_per_group", "tokens_per_block", "num_lookahead_tokens", "max_chunk_tokens",
                 "enable_prefix_reuse", "enable_partial_reuse", "missing_draft_policy", "recompute_tail_tokens",
                 "num_target_layers"):
        assert getattr(twin.manager, name) == getattr(ours.manager, name), name
    assert twin.manager is not ours.manager
    assert [p.spec.window for p in twin.pools] == [p.spec.window for p in ours.pools]
    assert all(pool.device.type == "meta" for pool in twin.manager.pools.tensors)


def test_a_used_engine_is_refused():
    engine = make_engine(random.Random(2), "guaranteed_no_evict", "full")
    engine.generate([[5, 6, 7]], 3)
    with pytest.raises(ValueError, match="engine: expected a new one, this one has had 1 requests"):
        record_trace(engine, [Arrival(0, [5, 6], 2)])


@pytest.mark.parametrize("fails", [False, True])
def test_nobody_listens_after_the_recording(fails):
    """Nor after one that failed; the engine then serves on."""
    engine = make_engine(random.Random(2), "guaranteed_no_evict", "full")
    prepare, settle = engine.scheduler.prepare, engine.scheduler.settle
    if fails:
        with pytest.raises(ValueError):
            record_trace(engine, [Arrival(0, [5] * 20, 5), Arrival(2, [5] * 200, 50)])
    else:
        record_trace(engine, [Arrival(0, [5] * 20, 5)])
    assert engine.scheduler.prepare == prepare and engine.scheduler.settle == settle
    assert len(engine.generate([[7] * 9], 4)[0].token_ids) == 4


def test_a_tap_hears_each_settled_step():
    engine = make_engine(random.Random(3), "guaranteed_no_evict", "full", 40)
    tap = StepTap(engine.scheduler)
    engine.generate([[5, 6, 7, 8] * 5, [9] * 30], 6)
    steps = len(tap.steps)
    assert steps == engine.scheduler.num_steps > 2 and tap.steps[-1].used_after == (0,)
    assert max(s.used for s in tap.steps) > (0,)
    tap.remove()
    engine.generate([[5, 6]], 3)
    assert len(tap.steps) == steps


def test_known_tokens_grow_by_what_is_known():
    tokens = KnownTokens([1, 2], [3, 4, 5])
    tokens.extend(2)
    assert tokens == [1, 2, 3, 4]
    tokens.extend(1)
    assert tokens == [1, 2, 3, 4, 5] and len(tokens) == 5


def test_nothing_is_recorded_of_nobody():
    engine = make_engine(random.Random(3), "guaranteed_no_evict")
    trace = record_trace(engine, [])
    assert trace.steps == [] == replay_trace(trace, twin_scheduler(engine.scheduler))


def test_a_gap_between_arrivals_takes_no_step_of_either():
    engine = make_engine(random.Random(5), "guaranteed_no_evict", "full", 40)
    trace = record_trace(engine, [Arrival(60, [5] * 9, 3), Arrival(0, [6] * 12, 4)])
    assert [r.prompt_len for r in trace.requests] == [12, 9] and len(trace.steps) < 20
    assert first_difference(trace.steps, replay_trace(trace, twin_scheduler(engine.scheduler))) is None


@pytest.mark.model
def test_real_models_are_replayed_block_by_block(real_model, real_drafter):
    """The shipped prompts in a pool too small for all, with a preemption and an abort."""
    from dflash_paged.cli import read_prompts

    model, tokenizer = real_model
    prompts = [tokenizer(p.text)["input_ids"] for p in read_prompts() if not p.chat][:4]
    target = PagedTarget(model, real_drafter.config.target_layer_ids)
    engine = Engine(target, real_drafter, max_batch_size=3, max_seq_len=256, num_blocks=14, admission="max_utilization")
    arrivals = [Arrival(3 * i, prompt, 24, {"priority": i % 2}) for i, prompt in enumerate([*prompts, *prompts])]
    trace = record_trace(engine, arrivals, [(5, "preempt", 0), (9, "abort", 2)])
    assert engine.scheduler.num_preemptions >= 1 and sum(map(len, (s.decode for s in trace.steps))) > 10
    assert max(n for s in trace.steps for n in s.kept[: len(s.decode)]) > 1
    assert first_difference(trace.steps, replay_trace(trace, twin_scheduler(engine.scheduler))) is None
