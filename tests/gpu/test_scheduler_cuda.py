"""Requests that are preempted, overtaken and squeezed on a CUDA device, over the kernels."""

import random

import pytest
import torch
from conftest import TINY_LAYER_IDS, make_tiny_drafter, make_tiny_target, poison_pages

from dflash_paged.engine import Engine
from dflash_paged.evaluate import Judge
from dflash_paged.replay import Arrival, first_difference, record_trace, replay_trace, twin_scheduler
from dflash_paged.target import PagedTarget

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SLIDING = dict(layer_types=["sliding_attention", "full_attention"], use_sliding_window=True, sliding_window=18, is_causal=False)


@pytest.mark.parametrize("context", ["paged", "dense"])
@pytest.mark.parametrize("seed", range(3))
def test_preempted_requests_are_lossless_and_the_simulator_holds_the_same_blocks(context, seed):
    """Pitfall 36 under max-utilisation, with aborts and preemptions by hand; ties settled in float64."""
    rng = random.Random(f"{context} {seed}")
    model, options = make_tiny_target(eos_token_id=None).cuda(), SLIDING if context == "paged" and seed else {}
    base = [rng.randrange(5, 97) for _ in range(50)]
    prompts = [base[: rng.choice([17, 30, 41])] + [rng.randrange(5, 97) for _ in range(4)] for _ in range(10)]
    engine = Engine(
        PagedTarget(model, TINY_LAYER_IDS), make_tiny_drafter(**options).to("cuda"), context=context, num_draft_tokens=3,
        max_seq_len=128, tokens_per_block=16, num_blocks=10, max_batch_size=4, max_step_tokens=24, admission="max_utilization",
    )
    poison_pages(engine.manager)
    arrivals = [Arrival(2 * i, prompt, 30, {"priority": rng.randrange(3)}) for i, prompt in enumerate(prompts)]
    events = [(rng.randrange(60), kind, rng.randrange(10)) for kind in ("preempt", "preempt", "preempt", "abort")]
    trace, judge = record_trace(engine, arrivals, events), Judge(model, prompts, 30)
    for i, request in enumerate(trace.requests):
        if request.finish_reason != "aborted":
            assert judge(i, request.tokens[request.prompt_len :])[0], i
    assert engine.scheduler.num_preemptions > 0 and engine.manager.stats().num_referenced == 0
    engine.manager.check_invariants()
    assert first_difference(trace.steps, replay_trace(trace, twin_scheduler(engine.scheduler))) is None
