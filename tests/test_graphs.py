"""The ladder without a GPU: steps over fixed buffers and padded places, imitated replays."""

import warnings

import pytest
import torch
from conftest import make_tiny_drafter
from test_engine import CONTEXTS, Oracle, Script, run_all, watched

from dflash_paged.engine import Engine
from dflash_paged.graphs import GraphLadder, check_batch_sizes, default_batch_sizes, imitate
from dflash_paged.step import BONUS, EMITS, LENGTH, NUM_COLUMNS, ROW, TOP_P, float_bits, padded_numbers
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
