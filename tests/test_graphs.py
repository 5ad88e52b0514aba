"""The ladder without a GPU: steps over fixed buffers and padded places, imitated replays."""

import random
import warnings

import pytest
import torch
from conftest import make_tiny_drafter
from test_engine import CONTEXTS, Oracle, Script, run_all, watched

from dflash_paged.engine import Engine
from dflash_paged.graphs import GraphLadder, check_batch_sizes, default_batch_sizes, imitate
from dflash_paged.step import (
    BONUS, DRAFT_ROW, EMITS, LENGTH, NUM_COLUMNS, ROW, TOP_P, VARIANTS, float_bits, padded_numbers,
)
from dflash_paged.target import PagedTarget

PLACES = (*CONTEXTS, "separate")


@pytest.fixture(scope="module")
def oracle():
    return Oracle()


@pytest.fixture
def make(oracle, tiny_drafter):
    def engine(sizes=(2, 5), drafter=None, **options):
        target = PagedTarget(oracle.model, tiny_drafter.config.target_layer_ids)
        made = watched(Engine(target, drafter or tiny_drafter, **{**dict(max_seq_len=128, tokens_per_block=8), **options}))
        made.graphs = GraphLadder(made.device_step, sizes, imitate)
        return made

    return engine


@pytest.mark.parametrize("context", PLACES)
@pytest.mark.parametrize("scripted", [False, True])
def test_replays_are_lossless_over_batches_between_the_rungs(make, oracle, monkeypatch, context, scripted):
    engine = make(context=context, max_batch_size=5, max_step_tokens=40)
    if scripted:
        Script(monkeypatch, oracle, seed=3).engine = engine
    prompts = [oracle.prompts[i] for i in (9, 0, 4, 6, 2, 7, 10)]
    for prompt in prompts:
        engine.add_request(prompt, 22, stop_token_ids=[])
    results = run_all(engine)
    assert [results[i].token_ids for i in range(7)] == [oracle(p, 22) for p in prompts]
    assert engine.num_graph_steps == engine.graphs.num_replays > 0 and engine.num_eager_steps > 0


def test_beyond_the_ladder_steps_run_eager_with_one_warning(make, oracle):
    engine = make(sizes=(1, 2), max_batch_size=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = engine.generate([oracle.prompts[i] for i in (9, 4, 6)], 20, stop_token_ids=[])
    assert [r.token_ids for r in results] == [oracle(oracle.prompts[i], 20) for i in (9, 4, 6)]
    assert len([w for w in caught if "graph_batch_sizes: a batch of 3 is beyond" in str(w.message)]) == 1


@pytest.mark.parametrize("context", PLACES)
def test_empty_places_write_nothing_anywhere(make, oracle, context):
    """Pitfalls 1, 3, 26: a replay of five empty places changes no page, no buffer and nobody's drafts."""
    engine = make(sizes=(5,), context=context, max_batch_size=5)
    for i in (9, 4):
        engine.add_request(oracle.prompts[i], 20, stop_token_ids=[])
    for _ in range(3):
        engine.step()
    tensors = [p for m in (engine.manager, engine.draft_manager) if m for p in m.pools.tensors]
    tensors += [engine.context.k_buf, engine.context.v_buf, engine.context.ctx_len] if context == "dense" else []
    before = [t.clone() for t in tensors]
    drafts = engine.device_step.drafts.clone()
    result = engine.graphs.run(engine.device_step.padded(2), 5)
    assert not result[:, 0].any()
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(before, tensors))
    assert torch.equal(drafts[:-1], engine.device_step.drafts[:-1])
    assert not engine.context.step.inputs.ctx_lens.any()


def test_a_real_request_beside_empty_places_gets_the_same_row(make, oracle):
    engine = make(sizes=(1, 5), max_batch_size=5)
    engine.add_request(oracle.prompts[9], 20, stop_token_ids=[])
    for _ in range(3):
        engine.step()
    [request] = engine.running
    engine.manager.prepare_resources([(request.cache_id, 0)])
    numbers, drafts = engine.device_step.padded(1), engine.device_step.drafts.clone()
    numbers[0, [ROW, LENGTH, BONUS, EMITS]] = engine.manager.table_rows([request.cache_id])[0], request.num_rows, request.tokens[-1], 1
    rows = []
    for size in (1, 5):
        engine.device_step.drafts.copy_(drafts)
        rows.append(engine.graphs.run(numbers, size)[0].tolist())
    n = len(request.tokens) - request.prompt_len
    assert rows[0] == rows[1] and rows[0][0] >= 1 and rows[0][1] == oracle(oracle.prompts[9], n + 1)[-1]


@pytest.mark.parametrize("what", ["freeze", "positions", "pools", "same"])
def test_graphs_of_moved_tensors_are_captured_anew(make, oracle, what):
    """Pitfalls 9 and 33: a graph knows addresses."""
    drafter = make_tiny_drafter()
    engine = make(drafter=drafter)
    engine.generate([oracle.prompts[9]], 12, stop_token_ids=[])
    captures = engine.graphs.num_captures
    if what == "freeze":
        kept = drafter.fused_kv()  # or the new matrix may take its place, and the graph would be right
        drafter.freeze()
        assert kept is not drafter.fused_kv()
    elif what == "positions":
        drafter.ensure_positions(5000)
    elif what == "pools":
        engine.manager.reallocate(num_blocks=70)
    [result] = engine.generate([oracle.prompts[9]], 20, stop_token_ids=[])
    assert result.token_ids == oracle(oracle.prompts[9], 20)
    assert (engine.graphs.num_captures > captures) == (what != "same")


def test_the_ladder_is_checked_by_name(make, oracle, tiny_drafter):
    assert default_batch_sizes(1) == (1,) and default_batch_sizes(3) == (1, 2, 3) and default_batch_sizes(64)[-2:] == (56, 64)
    assert default_batch_sizes(100)[-2:] == (96, 100) and check_batch_sizes([4, 1, 4], 4) == (1, 4)
    for bad in ([], [0], [9], ["1"], "12", 7, [True]):
        with pytest.raises(ValueError, match="graph_batch_sizes"):
            Engine(PagedTarget(oracle.model, tiny_drafter.config.target_layer_ids), tiny_drafter, max_batch_size=8,
                   max_seq_len=64, graph_batch_sizes=bad)
    for bad in (True, "yes", 1, None, 0):
        with pytest.raises(ValueError, match="cuda_graphs"):
            Engine(PagedTarget(oracle.model, tiny_drafter.config.target_layer_ids), tiny_drafter, max_seq_len=64, cuda_graphs=bad)
    with pytest.raises(ValueError, match="variants"):
        make().graphs.warm_up(["odd"])


def test_padded_numbers_are_inert():
    numbers = padded_numbers(3, 7, 9)
    assert numbers.shape == (3, NUM_COLUMNS) and (numbers[:, ROW] == 7).all() and (numbers[:, BONUS] == -1).all()
    assert not numbers[:, [LENGTH, EMITS]].any() and (numbers[:, TOP_P] == float_bits(1.0)).all()


@pytest.mark.parametrize("context,seed", [("paged", 0), ("paged", 1), ("dense", 0), ("separate", 1)])
def test_replays_are_lossless_while_requests_come_and_go(make, oracle, context, seed):
    """Arrivals, hits, preemptions and aborts, batches on, between and beyond the rungs; the warning comes once."""
    rng = random.Random(f"{context} {seed}")
    engine = make(sizes=(1, 3, 4), context=context, max_batch_size=6, num_blocks=40, max_step_tokens=48)
    wanted, results, gone, sizes = {}, {}, set(), set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        while len(wanted) < 12 or engine.running or engine.waiting:
            if len(wanted) < 12 and rng.random() < 0.4:
                for _ in range(rng.choice([1, 1, 4])):
                    base = oracle.prompts[rng.choice([4, 6, 7, 9, 10])]
                    prompt, cap = base + oracle(base, rng.choice([0, 0, 5])), rng.choice([9, 16, 24])
                    wanted[engine.add_request(prompt, cap, stop_token_ids=[])] = oracle(prompt, cap)
            if engine.running and rng.random() < 0.08:
                engine.preempt(rng.choice(engine.running).request_id)
            if engine.running and rng.random() < 0.03:
                victim = rng.choice(engine.running).request_id
                gone.add(victim)
                engine.abort(victim)
            replays = engine.num_graph_steps
            results.update((r.request_id, r) for r in engine.step())
            if engine.num_graph_steps > replays:
                sizes.add(len(engine.running))
    assert {i: r.token_ids for i, r in results.items()} == {i: t for i, t in wanted.items() if i not in gone}
    assert len([w for w in caught if "beyond the ladder" in str(w.message)]) <= 1 and len(sizes) > 2
    assert engine.manager.stats().num_referenced == 0


def test_a_warm_up_of_all_variants_leaves_all_of_them_captured(make):
    """Room for draft probabilities is made before anything is captured, or the greedy rungs would be stale at once."""
    engine = make()
    engine.graphs.warm_up(VARIANTS)
    assert engine.graphs.num_captures == 6 == len(engine.graphs.rungs)


@pytest.mark.parametrize("context", PLACES)
def test_every_replays_empty_places_have_length_0_and_no_slot(make, oracle, context):
    """Pitfalls 3 and 26: on every replay, however many came before: no length that grows, no slot, no page 0."""
    engine = make(sizes=(4,), context=context, max_batch_size=4)
    store, forward, seen, slots = engine.context.store, engine.target.forward, [], []

    def checked_store(step, features):
        empty = (step.rows == engine.manager.tables.padded_row).nonzero()[:, 0].tolist()
        for r in empty:
            rows = slice(int(step.row_start_loc[r]), int(step.row_start_loc[r + 1]))
            assert step.inputs.ctx_lens[r] == 0 and (step.inputs.context_slot_mapping[:, rows] == -1).all()
            assert (slots[-1][:, rows] == -1).all() and (step.block_tables[:, r] == -1).all()
            assert (step.inputs.sample_indices.view(len(step.rows), -1)[r] == -1).all()
        seen.append(len(empty))
        return store(step, features)

    def noted_forward(batch):
        slots.append(batch.slot_mapping)
        return forward(batch)

    engine.context.store, engine.target.forward = checked_store, noted_forward
    for i, cap in ((9, 30), (4, 18), (6, 10)):
        engine.add_request(oracle.prompts[i], cap, stop_token_ids=[])
    run_all(engine)
    assert {1, 2, 3} <= set(seen) and engine.num_graph_steps > 20


@pytest.mark.parametrize("context", PLACES)
def test_one_real_request_of_eight_places_changes_only_its_own(make, oracle, context):
    """Pitfalls 1, 2, 3, 26: every byte of pages, slots and drafts that aren't its own stays."""
    engine = make(sizes=(8,), context=context, max_batch_size=8, enable_prefix_reuse=False)
    for i in (9, 4, 6):
        engine.add_request(oracle.prompts[i], 30, stop_token_ids=[])
    for _ in range(4):
        engine.step()
    request, managers = engine.running[1], [m for m in (engine.manager, engine.draft_manager) if m]
    for manager in managers:
        manager.prepare_resources([(request.cache_id, 0)])
        manager.tables.flush()
    numbers = engine.device_step.padded(1)
    row = engine.manager.table_rows([request.cache_id])[0]
    numbers[0, [ROW, DRAFT_ROW]] = row, managers[-1].table_rows([request.cache_id])[0]
    numbers[0, [LENGTH, BONUS, EMITS]] = request.num_rows, request.tokens[-1], 1
    before = [[p.clone() for p in m.pools.tensors] for m in managers]
    drafts, dense = engine.device_step.drafts.clone(), []
    if context == "dense":
        slot = engine.context.slot_of[request.cache_id]
        others = [s for s in range(8) if s != slot]
        dense = [(t, t.clone()) for t in (engine.context.k_buf, engine.context.v_buf, engine.context.ctx_len)]
    result = engine.graphs.run(numbers, 8)
    assert result.shape[0] == 1 and result[0, 0] >= 1
    for manager, old in zip(managers, before):
        own = manager.get_batch_cache_indices([request.cache_id])[0]
        rest = [b for b in range(manager.num_blocks) if b not in own]
        for a, b in zip(old, manager.pools.tensors):
            assert torch.equal(a[rest].nan_to_num(7.0), b[rest].nan_to_num(7.0))
            assert not torch.equal(a[own].nan_to_num(7.0), b[own].nan_to_num(7.0))
    rest = [r for r in range(8) if r != row]
    assert torch.equal(drafts[rest], engine.device_step.drafts[rest])
    for now, old in dense:
        assert torch.equal(now[others], old[others]) and not torch.equal(now[slot], old[slot])


def test_the_warning_comes_once_an_engine(make, oracle):
    prompts = [oracle.prompts[i] for i in (9, 4)]
    for engine in (make(sizes=(1,), max_batch_size=2), make(sizes=(1,), max_batch_size=2)):
        with pytest.warns(RuntimeWarning, match="graph_batch_sizes"):
            engine.generate(prompts, 5, stop_token_ids=[])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.generate(prompts, 5, stop_token_ids=[])


def test_everything_that_a_step_keeps_exists_before_it_is_captured(make, oracle):
    """Pitfall 33: a capture that saw a clone, or made a buffer, would replay over memory that nobody else writes."""
    engine = make()
    step, seen = engine.device_step, []

    def pointers():
        manager = engine.manager
        kept = (step.drafts, step.draft_probs, manager.tables.device, engine.graphs.numbers, *manager.pools.tensors)
        return [None if t is None else t.data_ptr() for t in kept]

    def capture(run, pool):
        before = pointers()
        replay = imitate(run)
        assert pointers() == before, "allocated while capturing"
        seen.append(before)
        return replay

    engine.graphs.capture = capture
    step.allow_sampling()
    engine.graphs.warm_up(VARIANTS)
    assert len(seen) == engine.graphs.num_captures == 6 and not any(None in s for s in seen)
    for options in ({}, dict(temperature=0.9), dict(top_k=5)):
        results = engine.generate([oracle.prompts[i] for i in (9, 4, 6)], 12, stop_token_ids=[], **options)
        assert options or [r.token_ids for r in results] == [oracle(oracle.prompts[i], 12) for i in (9, 4, 6)]
    assert pointers() == seen[-1] and engine.graphs.num_replays > 0
    assert engine.graphs.num_captures == 6, "captured in the middle of serving"


def test_the_draft_pool_may_move_too_and_no_pool_moves_under_a_request(make, oracle):
    """Pitfall 9: the pool of `separate`; and what is refused leaves the graphs as they were."""
    engine = make(context="separate")
    engine.generate([oracle.prompts[9]], 12, stop_token_ids=[])
    captures = engine.graphs.num_captures
    engine.draft_manager.reallocate(num_blocks=engine.draft_manager.num_blocks)
    i = engine.add_request(oracle.prompts[9], 20, stop_token_ids=[])
    for _ in range(3):
        engine.step()
    assert engine.graphs.num_captures > captures
    captures = engine.graphs.num_captures
    for manager in (engine.manager, engine.draft_manager):
        with pytest.raises(ValueError, match="reallocate"):
            manager.reallocate(num_blocks=99)
    assert run_all(engine)[i].token_ids == oracle(oracle.prompts[9], 20) and engine.graphs.num_captures == captures


def test_a_capture_that_fails_is_tried_again(make, oracle):
    engine, calls = make(), []

    def capture(run, pool):
        calls.append(1)
        if len(calls) < 3:
            raise RuntimeError("planted")
        return imitate(run)

    engine.graphs.capture = capture
    i = engine.add_request(oracle.prompts[9], 12, stop_token_ids=[])
    results, failed = {}, 0
    while engine.running or engine.waiting:
        try:
            results.update((r.request_id, r) for r in engine.step())
        except RuntimeError:
            failed += 1
    assert failed == 2 and results[i].token_ids == oracle(oracle.prompts[9], 12) and engine.num_graph_steps
