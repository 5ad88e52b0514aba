"""The engine's admission over the manager's groups, without a model: who was admitted never runs out of blocks."""

import random

import pytest
from conftest import TINY_LAYER_IDS, make_tiny_drafter, make_tiny_target, poison_pages

from dflash_paged.engine import Engine, RefusedRequest, RunningRequest, emit_tokens
from dflash_paged.manager import KVCacheManager
from dflash_paged.memory import LayerSpec
from dflash_paged.scheduler import Scheduler
from dflash_paged.target import PagedTarget

SIZE = 8
SLIDING = dict(layer_types=["sliding_attention", "full_attention"], use_sliding_window=True, sliding_window=18, is_causal=False)


def draw_scheduler(rng: random.Random) -> Scheduler:
    """A scheduler over a manager with a small windowed group."""
    lookahead, batch, window = rng.choice([1, 2, 3, 5]), rng.choice([2, 3, 4, 6]), rng.choice([1, 2, 8, 9, 12, 18, 25, 33])
    step, length = batch * lookahead + rng.choice([0, 0, 3, 10]), rng.choice([61, 96, 128])
    least = (window - 1 + step + lookahead + 2 * SIZE - 2) // SIZE
    layer = lambda w=None: LayerSpec(1, 1, "float32", sliding_window=w)
    target, draft = rng.choice([([layer(), layer(window)], [layer()]), ([layer()], [layer(), layer(window)])])
    manager = KVCacheManager(
        target_layers=target, draft_layers=draft, tokens_per_block=SIZE, max_seq_len=length, max_batch_size=batch,
        num_blocks=[rng.choice([20, 40, 400]), least * rng.choice([1, 2, 3]) + rng.randrange(least)],
        num_lookahead_tokens=lookahead, enable_partial_reuse=rng.random() < 0.5, max_chunk_tokens=step,
    )
    return Scheduler(manager, num_draft_tokens=lookahead - 1, max_step_tokens=step)


def draw_request(rng: random.Random, scheduler: Scheduler, number: int, base: list[int]) -> RunningRequest:
    length = rng.randrange(1, scheduler.max_seq_len - 2)
    prompt = base[: rng.choice([length, length // 2])]
    prompt += [9 + rng.randrange(2) for _ in range(length - len(prompt))]
    return RunningRequest(number, prompt, length, rng.randrange(1, scheduler.max_seq_len - length + 1))


def run_step(rng: random.Random, scheduler: Scheduler, base: list[int]) -> None:
    """One step: `prepare` must find its blocks."""
    manager, plan, kept = scheduler.manager, scheduler.schedule(), []
    assert scheduler.running and plan.requests, "nothing runs, and what fits is not admitted"
    scheduler.prepare(plan)
    for r in plan.decode:
        known = [base[(len(r.tokens) + j) % len(base)] for j in range(rng.randint(1, scheduler.num_query_rows))]
        kept.append(emit_tokens(r, known, scheduler.max_seq_len))
    for r, n in plan.prefill:
        if r.num_rows + n == r.prompt_len:
            emit_tokens(r, [base[len(r.tokens) % len(base)]], scheduler.max_seq_len)
        kept.append(n)
    for pool in scheduler.pools:
        held = {r.cache_id: manager.num_held_blocks(r.cache_id, pool.group) for r in plan.requests}
        assert all(held[r.cache_id] <= scheduler.most_blocks(r, pool) for r in plan.requests)
        if pool.spec.window is not None:
            assert sum(held.values()) <= scheduler.window_blocks(plan.requests, pool)
    scheduler.settle(plan, kept)


@pytest.mark.parametrize("seed", range(8))
def test_who_was_admitted_can_always_take_its_next_step_and_everybody_is(seed):
    """Prompts that share prefixes, windows that pass blocks which others hold: letting go of those gives nothing back."""
    rng = random.Random(seed)
    for _ in range(20):
        scheduler = draw_scheduler(rng)
        base, number = [rng.randrange(3) for _ in range(scheduler.max_seq_len)], 0
        for _ in range(80):
            while len(scheduler.waiting) < 3:
                request, number = draw_request(rng, scheduler, number, base), number + 1
                try:
                    scheduler.add(request)
                except RefusedRequest:
                    continue
            run_step(rng, scheduler, base)
        scheduler.manager.check_invariants()


def test_a_request_that_fits_starts_on_an_idle_engine():
    """Cached blocks of a window are charged at most what the request can ever hold."""
    target, drafter = make_tiny_target(eos_token_id=None), make_tiny_drafter(**SLIDING)
    engine = Engine(
        PagedTarget(target, TINY_LAYER_IDS), drafter, max_seq_len=96, tokens_per_block=SIZE, num_blocks=[100, 5],
        max_batch_size=1, num_draft_tokens=2, max_step_tokens=8,
    )
    prompt = list(range(5, 45))
    for tokens, new in ((prompt, 1), ([*prompt, 7], 40)):
        engine.add_request(tokens, new)
        for _ in range(100):
            engine.step()
        assert not engine.waiting and not engine.running


def test_sharing_prompts_under_pressure_is_lossless_over_several_groups():
    """Pitfall 21, with a real engine: outputs equal plain decoding's whatever is shared, copied and evicted."""
    rng, target = random.Random(1), PagedTarget(make_tiny_target(eos_token_id=None), TINY_LAYER_IDS)
    drafter = make_tiny_drafter(**SLIDING)
    for _ in range(4):
        k, batch = rng.choice([1, 2, 4]), rng.choice([2, 3])
        step = batch * (k + 1) + rng.choice([0, 20])
        least = (18 - 1 + step + k + 1 + 14) // 8
        engine = Engine(
            target, drafter, max_seq_len=96, tokens_per_block=SIZE, num_blocks=[rng.choice([14, 40]), least + rng.randrange(least)],
            max_batch_size=batch, num_draft_tokens=k, max_step_tokens=step,
        )
        poison_pages(engine.manager)
        base = [rng.randrange(5, 97) for _ in range(60)]
        prompts = [base[: rng.choice([24, 32, 45, 56])] + [rng.randrange(5, 97) for _ in range(rng.randrange(8))] for _ in range(6)]
        got = engine.generate(prompts, 20)
        plain = Engine(target, None, max_seq_len=96, tokens_per_block=SIZE, max_batch_size=3).generate(prompts, 20)
        assert [r.token_ids for r in got] == [r.token_ids for r in plain]
        assert sum(r.stats.num_reused_tokens for r in got) > 0
        engine.manager.check_invariants()


@pytest.mark.parametrize("requests", [1.2, 1.9, 4.0])
def test_a_budget_split_for_long_requests_still_prefills_in_large_chunks(requests):
    """A windowed group has room for a step's prompt rows, beside its requests' windows."""
    target, drafter = PagedTarget(make_tiny_target(max_position_embeddings=4096), TINY_LAYER_IDS), make_tiny_drafter(**SLIDING)
    row = sum(s.bytes_per_token for s in [*target.layer_specs("float32"), *drafter.config.layer_specs("float32")])
    engine = Engine(target, drafter, max_seq_len=2048, kv_cache_bytes=int(requests * 2100 * row), expected_lengths=[2000])
    for length in (100, 600, 1000, 1900):
        engine.add_request([5] * length, 10)
    blocks = engine.manager.blocks_per_group
    assert blocks[1] >= 1024 // 32 and blocks[0] > 0.8 * requests * 2048 // 32
