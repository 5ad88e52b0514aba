"""The engine on the scheduler: preempted, overtaken and squeezed requests still get plain decoding's tokens."""

import random

import pytest
from conftest import TINY_LAYER_IDS, make_tiny_drafter, make_tiny_target, poison_pages

from dflash_paged.engine import Engine, RefusedRequest
from dflash_paged.scheduler import DraftPoolExhausted
from dflash_paged.target import PagedTarget

SLIDING = dict(layer_types=["sliding_attention", "full_attention"], use_sliding_window=True, sliding_window=18, is_causal=False)


@pytest.fixture(scope="module")
def target():
    return PagedTarget(make_tiny_target(eos_token_id=None), TINY_LAYER_IDS)


@pytest.fixture(scope="module")
def oracle(target):
    """Plain greedy decoding, one request at a time."""
    known = {}

    def tokens(prompt, count):
        key = (tuple(prompt), count)
        if key not in known:
            engine = Engine(target, None, max_seq_len=96, tokens_per_block=8, max_batch_size=1)
            known[key] = engine.generate([prompt], count)[0].token_ids
        return known[key]

    return tokens


def make(target, **options):
    """A small engine whose pages start as NaN."""
    defaults = dict(max_seq_len=96, tokens_per_block=8, num_draft_tokens=3, max_step_tokens=24, max_batch_size=4, num_blocks=16)
    engine = Engine(target, options.pop("drafter", None) or make_tiny_drafter(), **defaults | options)
    poison_pages(engine.manager)
    return engine


def finish(engine):
    """Steps until nothing is left; the results by id."""
    done = []
    for _ in range(2_000):
        if not (engine.running or engine.waiting):
            break
        done += engine.step()
    assert not engine.running and not engine.waiting, "the engine doesn't end"
    engine.manager.check_invariants()
    assert engine.manager.stats().num_referenced == 0
    return {r.request_id: r for r in done}


@pytest.mark.parametrize("context", ["paged", "dense"])
@pytest.mark.parametrize("seed", range(3))
def test_outputs_are_plain_decodings_whatever_is_preempted(target, oracle, context, seed):
    """Max-utilisation over too few blocks, shared prompts, priorities, preemptions by hand; pitfall 36: both kinds of rows again."""
    rng, preempted, recomputed = random.Random(f"{context} {seed}"), 0, 0
    for _ in range(4):
        drafter = make_tiny_drafter(**SLIDING) if context == "paged" and rng.random() < 0.5 else None
        engine = make(target, context=context, drafter=drafter, admission="max_utilization", num_blocks=rng.choice([12, 14, 20]))
        base, asked = [rng.randrange(5, 97) for _ in range(50)], {}
        for _ in range(6):
            prompt = base[: rng.choice([3, 17, 30, 41])] + [rng.randrange(5, 97) for _ in range(rng.randrange(1, 5))]
            count = rng.randrange(8, 36)
            asked[engine.add_request(prompt, count, priority=rng.randrange(3))] = (prompt, count)
        results = {}
        while engine.running or engine.waiting:
            results |= {r.request_id: r for r in engine.step()}
            if engine.running and rng.random() < 0.1:
                engine.preempt(rng.choice(engine.running).request_id)
        assert {i: r.token_ids for i, r in results.items()} == {i: oracle(*what) for i, what in asked.items()}
        assert all(r.stats.num_verify_passes <= len(r.token_ids) for r in results.values())
        preempted += sum(r.stats.num_preemptions for r in results.values())
        recomputed += sum(r.stats.num_recomputed_tokens for r in results.values())
        engine.manager.check_invariants()
    assert preempted > 3 and recomputed > 0


@pytest.mark.parametrize("context", ["paged", "dense"])
def test_a_request_may_be_preempted_after_any_step(target, oracle, context):
    """In mid-prompt, before its first token, and at every later one; callbacks hear each token once."""
    prompt = list(range(5, 45))
    for moment in range(1, 14):
        engine, heard = make(target, context=context), []
        engine.add_request(prompt, 20, on_token=lambda _, token, heard=heard: heard.append(token))
        for _ in range(moment):
            engine.step()
        if not engine.running:
            break
        engine.preempt(0)
        assert engine.waiting and not engine.manager.live_requests()
        (result,) = finish(engine).values()
        assert result.token_ids == heard == oracle(prompt, 20), moment
        assert result.stats.num_preemptions == 1
    assert moment > 6


def test_a_preempted_request_can_be_aborted_and_only_a_running_one_preempted(target):
    engine = make(target, max_batch_size=1)
    ids = [engine.add_request([5, 6, 7], 8) for _ in range(2)]
    engine.step()
    with pytest.raises(KeyError, match=f"request {ids[1]} is waiting"):
        engine.preempt(ids[1])
    engine.preempt(ids[0])
    assert engine.abort(ids[0]).finish_reason == "aborted"
    with pytest.raises(KeyError, match="neither waiting nor running"):
        engine.preempt(ids[0])
    assert len(finish(engine)[ids[1]].token_ids) == 8


def test_counting_the_target_alone_fails_in_mid_flight_and_joint_admission_does_not(target, oracle):
    """Pitfall 14: the drafter's window has too few blocks. The failed step happened to nobody; who is aborted makes room."""
    prompts = [[5 + i, *range(6, 30)] for i in range(4)]
    options = dict(drafter=make_tiny_drafter(**SLIDING), num_blocks=[60, 12], max_step_tokens=30)
    engine = make(target, admission="target_only", **options)
    ids = [engine.add_request(p, 40) for p in prompts]
    with pytest.raises(DraftPoolExhausted, match=r"let in \d requests whose draft rows don't fit: \d+ more blocks of group 1"):
        finish(engine)
    engine.manager.check_invariants()
    results = {i: engine.abort(i) for i in ids[1:]}
    assert all(r.finish_reason == "aborted" for r in results.values())
    assert finish(engine)[ids[0]].token_ids == oracle(prompts[0], 40)
    for admission in ("guaranteed_no_evict", "max_utilization"):
        engine = make(target, admission=admission, **options)
        got = engine.generate(prompts, 40)
        assert [r.token_ids for r in got] == [oracle(p, 40) for p in prompts], admission


def test_priority_goes_first_and_the_first_in_the_queue_says_why_it_waits(target):
    engine = make(target, max_batch_size=1)
    ids = [engine.add_request([5, 6, 7], 6, priority=p) for p in (0, 0, 2)]
    engine.step()
    assert [r.request_id for r in engine.running] == [ids[2]]
    first, second = engine.scheduler.why_waiting()
    assert (first.request_id, first.reason) == (ids[0], "slots") and second.reason == "behind"
    with pytest.raises(RefusedRequest, match=r"priority: expected an int in 0..9, got 10"):
        engine.add_request([5], 2, priority=10)
    with pytest.raises(ValueError, match="admission: expected one of"):
        make(target, admission="first")
    assert len(finish(engine)) == 3


def test_a_long_prompt_takes_blocks_chunk_by_chunk(target, oracle):
    """Pitfall 35: chunk 1 of a prompt of 80 reserves its own rows and the lookahead, not the whole prompt's."""
    engine = make(target, max_batch_size=1)
    prompt, held, prepare = [5 + i % 90 for i in range(80)], [], engine.manager.prepare_resources

    def listen(batch):
        prepare(batch)
        held.append(engine.manager.num_held_blocks(batch[0][0]))

    engine.manager.prepare_resources = listen
    engine.add_request(prompt, 4)
    assert finish(engine)[0].token_ids == oracle(prompt, 4)
    assert held[:4] == [-(-(rows + 4) // 8) for rows in (24, 48, 72, 80)]


def test_queue_time_is_counted(target):
    engine = make(target, max_batch_size=1)
    ids = [engine.add_request([5, 6, 7], 6) for _ in range(2)]
    results = finish(engine)
    assert results[ids[1]].stats.queue_s > results[ids[0]].stats.queue_s >= 0
