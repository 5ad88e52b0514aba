"""Captured steps on a CUDA device: the same tokens, no wait, no compilation, nothing written by empty places."""

import random
import warnings

import pytest
import torch
from conftest import TINY_LAYER_IDS, chi_square_p, joint_probs, make_tiny_drafter, make_tiny_target, poison_pages

from dflash_paged.engine import DeviceMemoryError, Engine
from dflash_paged.evaluate import Judge, tie_gap
from dflash_paged.graphs import GraphLadder
from dflash_paged.step import BONUS, DRAFT_ROW, EMITS, HAS_DRAFTS, LENGTH, ROW
from dflash_paged.target import PagedTarget, calibrate_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SLIDING = dict(layer_types=["sliding_attention", "full_attention"], use_sliding_window=True, sliding_window=18, is_causal=False)
CONTEXTS = ("paged", "dense", "separate")


@pytest.fixture(scope="module")
def model():
    return make_tiny_target(eos_token_id=None, head_dim=16).cuda()


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(3)
    base = [rng.randrange(5, 97) for _ in range(60)]
    return [base[: rng.choice([0, 16, 33, 50])] + [rng.randrange(5, 97) for _ in range(5)] for _ in range(14)]


@pytest.fixture(scope="module")
def judge(model, prompts):
    return Judge(model, prompts, 30)


def make(model, changes=None, **options):
    """An engine over poisoned pages."""
    engine = Engine(PagedTarget(model, TINY_LAYER_IDS), make_tiny_drafter(**(changes or {})).to("cuda"), **{
        **dict(max_seq_len=128, tokens_per_block=16, num_draft_tokens=3, max_batch_size=6, max_step_tokens=64), **options,
    })
    for manager in (engine.manager, engine.draft_manager):
        if manager is not None:
            poison_pages(manager)
    return engine


def serve(engine, prompts, num_tokens=30, seed=0, disturb=True, **options) -> dict:
    """Serve `prompts` as they arrive, with preemptions and one abort; results by prompt."""
    rng, ids, results, waiting = random.Random(seed), {}, {}, list(range(len(prompts)))
    aborted = None
    while waiting or engine.running or engine.waiting:
        for _ in range(rng.choice([0, 1, 1, 3])):
            if waiting:
                i = waiting.pop(0)
                ids[engine.add_request(prompts[i], num_tokens, stop_token_ids=[], **options)] = i
        if disturb and engine.running and rng.random() < 0.1:
            engine.preempt(rng.choice(engine.running).request_id)
        if disturb and aborted is None and len(engine.running) > 3:
            aborted = rng.choice(engine.running).request_id
            engine.abort(aborted)
        for result in engine.step():
            results[ids[result.request_id]] = result
    engine.manager.check_invariants()
    assert engine.manager.stats().num_referenced == 0 and len(results) == len(prompts) - (aborted is not None)
    return results


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("context,changes", [("paged", {}), ("paged", SLIDING), ("dense", {}), ("separate", {})])
def test_captured_and_eager_steps_give_the_targets_tokens(model, prompts, judge, context, changes, graphs):
    """Batches on, between and beyond the ladder's sizes; hits, preemptions, an abort; ties settled in float64."""
    engine = make(model, changes, context=context, cuda_graphs=graphs, **(dict(graph_batch_sizes=[1, 3, 4]) if graphs else {}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = serve(engine, prompts)
    beyond = [w for w in caught if "beyond the ladder" in str(w.message)]
    assert len(beyond) == (1 if graphs else 0), "one warning, however many such steps"
    assert (engine.num_graph_steps > 0) == graphs and engine.num_eager_steps > 0
    for i, result in results.items():
        lossless, ties = judge(i, result.token_ids)
        assert lossless, (i, ties)


@pytest.mark.xfail(strict=False, reason="a product's last bit, which changes with the batch's shape, turns stored fp8 codes")
def test_fp8_target_pages_are_lossless_against_plain_decoding_over_them(model, prompts):
    target = calibrate_target(PagedTarget(model, TINY_LAYER_IDS), prompts)
    options = dict(max_seq_len=128, tokens_per_block=16, kv_dtype="float8_e4m3fn", max_batch_size=6, max_step_tokens=64)
    plain = Engine(target, None, **options)
    want = [r.token_ids for r in plain.generate(prompts, 30, stop_token_ids=[])]
    engine = Engine(target, make_tiny_drafter().to("cuda"), draft_kv_dtype="bfloat16", **options)
    got = serve(engine, prompts)
    different = [i for i, r in got.items() if r.token_ids != want[i]]
    assert len(different) <= 2 and engine.num_graph_steps
    for i in different:
        # A product's last bit, which changes with the batch's shape, may turn one stored fp8 code, 6 % of a value: then
        # plain decoding differs between batch sizes too. Only close calls may turn with it.
        n = next(n for n, (a, b) in enumerate(zip(got[i].token_ids, want[i])) if a != b)
        assert tie_gap(model, prompts[i] + want[i][:n], got[i].token_ids[n], want[i][n]) < 0.1, i


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("variant", ["greedy", "sampled", "sorted"])
def test_no_step_waits_for_the_device(model, prompts, context, variant):
    """Whole steps run under torch's sync check, mixed ones too; the one awaited event is no such call."""
    engine = make(model, context=context)
    if variant != "greedy":
        engine.warm_up()
    options = {"greedy": {}, "sampled": dict(temperature=0.9), "sorted": dict(temperature=0.9, top_p=0.9)}[variant]
    engine.generate(prompts[:6], 8, stop_token_ids=[], **options)  # first uses pin buffers
    for prompt in prompts[6:12]:
        engine.add_request(prompt, 20, stop_token_ids=[], **options)
    torch.cuda.synchronize()
    steps = engine.num_graph_steps, engine.num_eager_steps
    torch.cuda.set_sync_debug_mode("error")
    try:
        while engine.running or engine.waiting:
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.num_graph_steps > steps[0] and engine.num_eager_steps > steps[1]


@pytest.mark.parametrize("context", CONTEXTS)
def test_nothing_is_compiled_after_the_start(model, prompts, context, monkeypatch):
    """Pitfall 40: no first request of a shape waits for a compiler; sampled ones neither after `warm_up`."""
    import triton

    engine = make(model, context=context)
    engine.warm_up()
    compiled = []
    real = triton.compiler.compile
    for module in (triton.compiler, triton.runtime.jit):
        if hasattr(module, "compile"):
            monkeypatch.setattr(module, "compile", lambda *a, **k: compiled.append(a) or real(*a, **k))
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "_do_compile", spy(triton.runtime.jit.JITFunction, compiled))
    captures = engine.graphs.num_captures
    serve(engine, prompts)
    serve(engine, prompts[:5], temperature=0.7)
    serve(engine, prompts[:5], temperature=0.7, top_k=5)
    assert not compiled, [getattr(c, "__name__", c) for c in compiled]
    assert engine.graphs.num_captures == captures, "no capture in the middle of serving"


def spy(owner, log):
    """`_do_compile`, which writes down whom it compiles."""
    real = owner._do_compile

    def compile_(self, *args, **kwargs):
        log.append(self)
        return real(self, *args, **kwargs)

    return compile_


@pytest.mark.parametrize("context", CONTEXTS)
def test_empty_places_of_a_replay_write_nothing(model, prompts, context):
    """Pitfalls 1, 3, 26: one request of six places; every byte but its own rows stays, page 0 included."""
    engine = make(model, context=context, graph_batch_sizes=[6], enable_prefix_reuse=False)
    for prompt in prompts[:2]:
        engine.add_request(prompt, 30, stop_token_ids=[])
    for _ in range(4):
        engine.step()
    pools = [p for m in (engine.manager, engine.draft_manager) if m is not None for p in m.pools.tensors]
    if context == "dense":
        pools += [engine.context.k_buf, engine.context.v_buf]
    before = [p.view(torch.uint8).clone() for p in pools]
    drafts = engine.device_step.drafts.clone()
    size = engine.graphs.pick(1)
    engine.graphs.run(engine.device_step.padded(1), size)  # six empty places
    torch.cuda.synchronize()
    for old, pool in zip(before, pools):
        assert torch.equal(old, pool.view(torch.uint8))
    assert torch.equal(drafts[:-1], engine.device_step.drafts[:-1])


def test_a_replay_reads_what_is_there_now(model, prompts, judge):
    """Pitfall 33: lengths, tables and drafts change under a graph; a row's result doesn't depend on its place or neighbours."""
    engine = make(model, graph_batch_sizes=[6])
    for prompt in prompts[:3]:
        engine.add_request(prompt, 30, stop_token_ids=[])
    for _ in range(6):
        engine.step()
    assert not [r for r in engine.running if not r.is_decoding]
    numbers = engine.device_step.padded(3)
    engine.manager.prepare_resources([(r.cache_id, 0) for r in engine.running])
    engine.manager.tables.flush()
    for i, r in enumerate(engine.running):
        numbers[i, [ROW, LENGTH, BONUS, EMITS]] = engine.manager.table_rows([r.cache_id])[0], r.num_rows, r.tokens[-1], 1
    saved = engine.device_step.drafts.clone()
    first = engine.graphs.run(numbers, 6).clone()
    engine.device_step.drafts.copy_(saved)
    again = engine.graphs.run(numbers[[2, 0, 1]], 6).clone()
    assert torch.equal(first[[2, 0, 1]][:, :2], again[:, :2]) and (first[:, 0] >= 1).all()
    for r, row in zip(engine.running, first.tolist()):
        i, n = prompts.index(r.tokens[: r.prompt_len]), len(r.tokens) - r.prompt_len
        assert row[1] == judge.reference(i)[n]
        engine.manager.rewind(r.cache_id, 0)


@pytest.mark.parametrize("what", ["freeze", "positions", "pools"])
def test_stale_graphs_are_captured_anew(model, prompts, judge, what):
    """Pitfall 9 at this level: weights fused anew, a grown RoPE table, pools that were allocated again."""
    engine = make(model)
    engine.generate(prompts[:2], 10, stop_token_ids=[])
    captures = engine.graphs.num_captures
    if what == "freeze":
        kept = engine.drafter.fused_kv()  # or the new matrix may take its place, and the graph would be right
        engine.drafter.freeze()
        assert kept is not engine.drafter.fused_kv()
    elif what == "positions":
        engine.drafter.ensure_positions(4096)
    else:
        engine.manager.reallocate(num_blocks=80)
        poison_pages(engine.manager)
    for i, result in enumerate(engine.generate(prompts[:3], 30, stop_token_ids=[])):
        assert judge(i, result.token_ids)[0]
    assert engine.graphs.num_captures > captures


@pytest.mark.parametrize("options", [dict(temperature=0.8), dict(temperature=1.2, top_p=0.8), dict(temperature=1.0, top_k=4)])
def test_sampled_tokens_are_distributed_as_the_targets_own(options):
    """Pitfall 31 on the device, in graphs: chi-square of the first two tokens over 6,000 requests."""
    vocab = dict(vocab_size=11)
    target_model = make_tiny_target(eos_token_id=None, head_dim=16, **vocab).cuda()
    drafter = make_tiny_drafter(vocab_size=11).to("cuda")
    engine = Engine(PagedTarget(target_model, TINY_LAYER_IDS), drafter, max_batch_size=64, max_seq_len=32, tokens_per_block=16,
                    enable_prefix_reuse=False, max_step_tokens=2048)
    prompt, count = [5, 6, 7, 8], 6000
    results = engine.generate([prompt] * count, 4, stop_token_ids=[], **options)
    assert engine.num_graph_steps and sum(r.stats.num_gained_tokens > r.stats.num_verify_passes for r in results) > 100
    seen = torch.zeros(11, 11)
    for r in results:
        seen[r.token_ids[0], r.token_ids[1]] += 1
    expected = joint_probs(target_model, prompt, **options) * count
    assert not seen[expected == 0].any()
    assert chi_square_p(seen, expected) > 1e-4


def test_greedy_rows_beside_sampled_ones_stay_greedy(model, prompts, judge):
    """Pitfall 42."""
    engine = make(model)
    ids = [engine.add_request(p, 30, stop_token_ids=[], **(dict(temperature=1.0, top_p=0.9) if i % 2 else {}))
           for i, p in enumerate(prompts)]
    results = {}
    while engine.running or engine.waiting:
        results.update((r.request_id, r) for r in engine.step())
    for i in range(0, len(prompts), 2):
        assert judge(i, results[ids[i]].token_ids)[0]


def test_a_step_that_fails_leaves_everybody_able_to_go_on(model, prompts, judge, monkeypatch):
    """Faults before and behind the device's part of captured and eager steps."""
    engine, planted = make(model), 0
    ids = {engine.add_request(p, 30, stop_token_ids=[]): i for i, p in enumerate(prompts)}
    places = [(engine.device_step.readback, "start"), (engine.manager, "update_resources"), (engine.graphs, "run"),
              (engine.device_step, "run"), (engine.target, "forward")]
    results, step = {}, 0
    while engine.running or engine.waiting:
        step += 1
        if step % 4 == 0:
            owner, name = places[step // 4 % len(places)]

            def fail(*args, **kwargs):
                raise RuntimeError("planted")

            with monkeypatch.context() as patch:
                patch.setattr(owner, name, fail)
                try:
                    results.update((r.request_id, r) for r in engine.step())
                except RuntimeError as error:
                    assert "planted" in str(error)
                    planted += 1
        else:
            results.update((r.request_id, r) for r in engine.step())
        engine.manager.check_invariants()
    assert planted >= 5
    for request_id, result in results.items():
        assert judge(ids[request_id], result.token_ids)[0]


def prepared(engine, requests):
    """The numbers of a decode step of `requests`, whose rows are reserved."""
    managers = [m for m in (engine.manager, engine.draft_manager) if m is not None]
    for manager in managers:
        manager.prepare_resources([(r.cache_id, 0) for r in requests])
        manager.tables.flush()
    numbers = engine.device_step.padded(len(requests))
    for i, r in enumerate(requests):
        numbers[i, [ROW, DRAFT_ROW]] = [m.table_rows([r.cache_id])[0] for m in (managers[0], managers[-1])]
        numbers[i, [LENGTH, BONUS, EMITS, HAS_DRAFTS]] = r.num_rows, r.tokens[-1], 1, r.has_drafts
    return numbers


def decoding(engine, prompts, count=30, **options):
    """Requests of `prompts` that have all decoded a step or more; by id."""
    ids = {engine.add_request(p, count, stop_token_ids=[], **options): i for i, p in enumerate(prompts)}
    while not all(r.has_drafts for r in engine.running) or len(engine.running) < len(prompts):
        assert not engine.step()
    return ids


def finish(engine) -> dict:
    results = {}
    while engine.running or engine.waiting:
        results.update((r.request_id, r) for r in engine.step())
    return results


@pytest.mark.parametrize("context", CONTEXTS)
def test_one_real_request_of_six_places_changes_only_its_own(model, prompts, judge, context):
    """Pitfalls 1, 2, 3, 26: every byte of pages, slots and drafts that aren't its own stays; then all go on as ever."""
    engine = make(model, context=context, graph_batch_sizes=[6], enable_prefix_reuse=False)
    ids = decoding(engine, prompts[:3])
    request, managers = engine.running[1], [m for m in (engine.manager, engine.draft_manager) if m is not None]
    numbers, saved = prepared(engine, [request]), engine.device_step.drafts.clone()
    before = [[p.clone() for p in m.pools.tensors] for m in managers]
    dense = [engine.context.k_buf, engine.context.v_buf, engine.context.ctx_len] if context == "dense" else []
    old_dense = [t.clone() for t in dense]
    result = engine.graphs.run(numbers, 6)
    torch.cuda.synchronize()
    assert result.shape[0] == 1 and int(result[0, 0]) >= 1
    for manager, pools in zip(managers, before):
        own = manager.get_batch_cache_indices([request.cache_id])[0]
        rest = [b for b in range(manager.num_blocks) if b not in own]
        for old, now in zip(pools, manager.pools.tensors):
            assert torch.equal(old[rest].view(torch.uint8), now[rest].view(torch.uint8))
            assert not torch.equal(old[own].view(torch.uint8), now[own].view(torch.uint8))
    rest = [r for r in range(6) if r != numbers[0, ROW]]
    assert torch.equal(saved[rest], engine.device_step.drafts[rest])
    if dense:
        slot = engine.context.slot_of[request.cache_id]
        others = [s for s in range(6) if s != slot]
        assert all(torch.equal(old[others], now[others]) for old, now in zip(old_dense, dense))
    for manager in managers:
        manager.rewind(request.cache_id, 0)
    engine.device_step.drafts.copy_(saved)
    for i, r in finish(engine).items():
        assert judge(ids[i], r.token_ids)[0]


def test_the_host_may_run_ahead_of_the_device(model, prompts, judge):
    """Pitfall 34: replays queue behind a sleeping stream, the host changes their numbers at once; each reads its own."""
    engine = make(model, graph_batch_sizes=[6])
    ids = decoding(engine, prompts[:5])
    numbers, saved, step = prepared(engine, engine.running), engine.device_step.drafts.clone(), engine.device_step
    orders = [random.Random(i).sample(range(5), 1 + i % 5) for i in range(16)]

    def run(order):
        step.drafts.copy_(saved)
        mine = numbers[order].copy()
        result = engine.graphs.run(mine, 6).clone()
        mine[:] = -1
        return result

    want = []
    for order in orders:
        want.append(run(order))
        torch.cuda.synchronize()
    step.staging.reserve(24)
    sleeps = torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    sleeps.record()
    got = [run(order) for order in orders]
    assert not sleeps.query(), "the host waited"
    torch.cuda.synchronize()
    for order, a, b in zip(orders, want, got):
        assert torch.equal(a, b), order
    for r in engine.running:
        engine.manager.rewind(r.cache_id, 0)
    step.drafts.copy_(saved)
    for i, r in finish(engine).items():
        assert judge(ids[i], r.token_ids)[0]


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_device_that_lags_changes_no_token(model, prompts, judge, context):
    """Pitfall 34 over whole steps: arrivals, tables and numbers are sent while the device still sleeps."""
    engine = make(model, context=context)
    real = engine.scheduler.schedule

    def late():
        torch.cuda._sleep(3_000_000)
        return real()

    engine.scheduler.schedule = late
    for i, result in serve(engine, prompts, seed=2).items():
        lossless, ties = judge(i, result.token_ids)
        assert lossless, (i, ties)


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_first_sampled_request_may_come_in_mid_flight(model, prompts, judge, context):
    """It allocates and captures while others run: their rows, drafts and tokens stay."""
    engine = make(model, context=context)
    ids = decoding(engine, prompts[:4])
    assert engine.device_step.draft_probs is None
    sampled = engine.add_request(prompts[5], 20, stop_token_ids=[], temperature=0.9, top_p=0.9)
    captures, results = engine.graphs.num_captures, finish(engine)
    assert engine.graphs.num_captures == captures and len(results.pop(sampled).token_ids) == 20
    for i, r in results.items():
        assert judge(ids[i], r.token_ids)[0]


def test_one_seed_gives_the_same_tokens_twice(model, prompts):
    runs = []
    for _ in range(2):
        engine = make(model, seed=4)
        ids = [engine.add_request(p, 20, stop_token_ids=[], temperature=0.9, **({} if i % 2 else dict(top_k=9, seed=i)))
               for i, p in enumerate(prompts)]
        results = finish(engine)
        runs.append([results[i].token_ids for i in ids])
    assert runs[0] == runs[1]
    other = make(model, seed=5)
    changed = [other.add_request(p, 20, stop_token_ids=[], temperature=0.9) for p in prompts[:4]]
    results = finish(other)
    assert [results[i].token_ids for i in changed] != runs[0][:4]


@pytest.mark.parametrize("kind,words", [(torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 9.00 GiB")])
def test_captures_and_probabilities_that_find_no_memory_are_named(model, prompts, judge, monkeypatch, kind, words):
    def fail(*args, **kwargs):
        raise kind(words)

    with monkeypatch.context() as patch:
        patch.setattr(GraphLadder, "warm_up", fail)
        with pytest.raises(DeviceMemoryError, match=r"CUDA graphs of batch sizes \[.*were free"):
            make(model)
    engine = make(model)
    engine.add_request(prompts[0], 30, stop_token_ids=[])
    engine.step()
    for name, part in (("allow_sampling", "draft probabilities"), ("run", "first steps")):
        with monkeypatch.context() as patch:
            patch.setattr(engine.device_step, name, fail)
            with pytest.raises(DeviceMemoryError, match=part):
                engine.add_request(prompts[1], 9, temperature=1.0)
    assert engine.num_requests == 1
    assert judge(0, finish(engine)[0].token_ids)[0]
    [result] = engine.generate([prompts[1]], 9, stop_token_ids=[], temperature=1.0)
    assert len(result.token_ids) == 9
