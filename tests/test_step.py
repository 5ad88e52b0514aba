"""One step on the device: a row of numbers a request in, its tokens out, and nothing of anybody else in between."""

import contextlib
import random

import numpy as np
import pytest
import torch
from conftest import TINY_LAYER_IDS, make_tiny_drafter
from test_engine import Oracle, Script, run_all, watched

import dflash_paged.attention as attention
from dflash_paged.checks import NO_TOKEN
from dflash_paged.drafter import PagedContext
from dflash_paged.engine import Engine, step_numbers
from dflash_paged.pools import LayerPages
from dflash_paged.step import (
    BONUS, CTX_START, EMITS, HAS_DRAFTS, LENGTH, NUM_COLUMNS, ROW, SEED, TEMPERATURE, TOP_K, TOP_P, VARIANTS,
    PrefillRows, Readback, StepRequests, float_bits, padded_numbers,
)
from dflash_paged.target import PagedTarget

PLACES = ("paged", "dense", "separate")
OPTIONS = ({}, dict(temperature=0.9), dict(temperature=0, top_p=0.5), dict(top_k=5, temperature=1.2))


@pytest.fixture(scope="module")
def oracle():
    return Oracle()


def make(oracle, **options):
    options = dict(max_seq_len=96, tokens_per_block=8, max_batch_size=5, max_step_tokens=64) | options
    return watched(Engine(PagedTarget(oracle.model, TINY_LAYER_IDS), make_tiny_drafter(), **options))


class Bench:
    """Four decoding requests, greedy ones among them, before one and the same step."""

    def __init__(self, oracle, greedy=False, **options):
        self.engine = engine = make(oracle, enable_prefix_reuse=False, **options)
        self.prompts = [oracle.prompts[i] for i in (9, 4, 6, 2)]
        for prompt, sampling in zip(self.prompts, [{}] * 4 if greedy else OPTIONS):
            engine.add_request(prompt, 40, stop_token_ids=[], **sampling)
        for _ in range(4):
            engine.step()
        engine.warm_up()
        self.plan = engine.scheduler.schedule()
        assert len(self.plan.decode) == 4 and not self.plan.prefill
        engine.scheduler.prepare(self.plan)
        for manager in filter(None, (engine.manager, engine.draft_manager)):
            manager.tables.flush()
        self.numbers = step_numbers(engine, self.plan)
        self.saved = [t.clone() for t in self.tensors()]

    def tensors(self):
        """All that a step may change."""
        engine = self.engine
        pools = [p for m in (engine.manager, engine.draft_manager) if m is not None for p in m.pools.tensors]
        dense = [engine.context._k, engine.context._v, engine.context._len] if engine.context.name == "dense" else []
        return [engine.device_step.drafts, engine.device_step.draft_probs, *pools, *dense]

    def run(self, numbers, variant="sorted"):
        """(result, drafts and their probabilities by table row, all tensors) of the step from the same beginning."""
        for tensor, saved in zip(self.tensors(), self.saved):
            tensor.copy_(saved)
        step = self.engine.device_step
        result = step.run(step.staging.send(np.ascontiguousarray(numbers)), variant=variant).clone()
        return result, step.drafts.clone(), step.draft_probs.clone(), [t.clone() for t in self.tensors()]


def close(a, b):
    return torch.allclose(a.float().nan_to_num(7.0), b.float().nan_to_num(7.0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("context", PLACES)
def test_a_requests_row_depends_on_no_other_and_not_on_its_place(oracle, context):
    """Pitfalls 1 and 26: any order, alone, and with empty places anywhere: the same tokens, drafts and pages."""
    bench = Bench(oracle, context=context)
    result, drafts, probs, tensors = bench.run(bench.numbers)
    assert result.shape == (4, 6) and result.dtype == torch.int64 and bool((result[:, 0] >= 1).all())
    empty = bench.engine.device_step.padded(1)[0]
    for order in ([3, 1, 0, 2], [None, 2, 0, None, 1, 3, None], [1, None, 0, 3, 2], [None] * 3 + [0, 1, 2, 3]):
        got, *rest = bench.run(np.stack([empty if i is None else bench.numbers[i] for i in order]))
        for place, i in enumerate(order):
            assert got[place].tolist() == ([0] * 6 if i is None else result[i].tolist()), order
        rows = bench.numbers[:, ROW]
        assert torch.equal(rest[0][rows], drafts[rows]) and close(rest[1][rows], probs[rows])
        end = -1 if context == "dense" else None  # the dense buffers' last row is for what goes nowhere
        assert all(close(a[:end], b[:end]) for a, b in zip(rest[2][2:], tensors[2:]))
    for i in range(4):
        got, alone, _, _ = bench.run(bench.numbers[i : i + 1])
        row = int(bench.numbers[i, ROW])
        assert got[0].tolist() == result[i].tolist() and torch.equal(alone[row], drafts[row])
        others = [r for r in range(len(drafts)) if r != row]
        assert torch.equal(alone[others], bench.saved[0][others]), "another request's drafts"


def test_greedy_requests_have_the_same_row_in_every_variant(oracle):
    """Pitfall 42 on the device: the same decision, whatever the batch asks for; no token is left behind the last."""
    bench = Bench(oracle)
    greedy = [0, 2]
    want, drafts, *_ = bench.run(bench.numbers[greedy], "greedy")
    for variant in VARIANTS[1:]:
        got, sampled_drafts, *_ = bench.run(bench.numbers, variant)
        assert torch.equal(got[greedy], want)
        rows = bench.numbers[greedy, ROW]
        assert torch.equal(drafts[rows], sampled_drafts[rows])
    for row in bench.run(bench.numbers)[0].tolist():
        assert row[row[0] + 1 :] == [NO_TOKEN] * (5 - row[0]) and min(row[1 : row[0] + 1]) >= 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_drafts_of_its_own_a_request_gains_one_token(oracle, variant):
    """Pitfall 36's kind: what lies in its row of `drafts` from a failed step or another request is never accepted."""
    bench = Bench(oracle, greedy=True)
    numbers = bench.numbers.copy()
    truth = [oracle(p, 40)[len(r.tokens) - len(p) :][:4] for p, r in zip(bench.prompts, bench.plan.decode)]
    for row, right in zip(numbers[:, ROW], truth):
        bench.saved[0][row] = torch.tensor(right)
        bench.saved[1][row] = torch.nn.functional.one_hot(torch.tensor(right), 97).float()
    last = [oracle(p, 40)[len(r.tokens) - len(p) + 4] for p, r in zip(bench.prompts, bench.plan.decode)]
    assert bench.run(numbers, variant)[0].tolist() == [[5, *right, token] for right, token in zip(truth, last)]
    numbers[:, HAS_DRAFTS] = 0
    assert bench.run(numbers, variant)[0].tolist() == [[1, right[0]] + [NO_TOKEN] * 4 for right in truth]
    numbers[:2, HAS_DRAFTS] = 1
    assert bench.run(numbers, variant)[0][:, 0].tolist() == [5, 5, 1, 1]


@pytest.mark.parametrize("context", PLACES)
def test_prompt_rows_beside_it_change_no_decoding_request(oracle, context):
    bench = Bench(oracle, context=context, greedy=True)
    engine, step = bench.engine, bench.engine.device_step
    want, drafts, *_ = bench.run(bench.numbers, "greedy")
    engine.scheduler.rollback(bench.plan)
    engine.add_request(oracle.prompts[10], 9, stop_token_ids=[])
    plan = engine.scheduler.schedule()
    assert len(plan.decode) == 4 and [n for _, n in plan.prefill] == [33]
    engine.scheduler.prepare(plan)
    for manager in filter(None, (engine.manager, engine.draft_manager)):
        manager.tables.flush()
    for tensor, saved in zip(bench.tensors()[:2], bench.saved):
        tensor.copy_(saved)
    rows = PrefillRows.send([(oracle.prompts[10], 0)], step.staging)
    got = step.run(step.staging.send(step_numbers(engine, plan)), rows)
    assert torch.equal(got[:4], want) and got[4].tolist() == [1, oracle(oracle.prompts[10], 1)[0]] + [NO_TOKEN] * 4
    assert torch.equal(step.drafts[bench.numbers[:, ROW]], drafts[bench.numbers[:, ROW]])


def test_a_chunk_in_mid_prefill_decides_no_token(oracle):
    engine = make(oracle, max_batch_size=2, max_step_tokens=12)
    engine.add_request(oracle.prompts[9], 6, stop_token_ids=[])
    seen, real = [], engine.device_step.readback.start

    def start(values):
        seen.append(values.tolist())
        return real(values)

    engine.device_step.readback.start = start
    run_all(engine)
    assert seen[0] == seen[1] == [[0] * 6] and seen[2][0][:2] == [1, oracle(oracle.prompts[9], 1)[0]]


@pytest.mark.parametrize("context", PLACES)
@pytest.mark.parametrize("k", [1, 4])
def test_lengths_on_the_device_are_those_that_the_host_counts_afterwards(oracle, monkeypatch, context, k):
    """Pitfalls 3 and 34: `ctx_lens` comes from what was accepted on the device, never from the host; rejected rows get
    no slot, kept ones their own."""
    script = Script(monkeypatch, oracle, seed=6)
    engine = script.engine = make(oracle, context=context, num_draft_tokens=k, max_batch_size=3, max_step_tokens=20)
    for i in (9, 4, 6, 10):
        engine.add_request(oracle.prompts[i], 15, stop_token_ids=[])
    steps = 0
    while engine.running or engine.waiting:
        before = {r.request_id: r.num_rows for r in engine.running}
        engine.step()
        inputs, rows = engine.context.step.inputs, engine.context.step.rows.tolist()
        lengths = dict(zip(rows, inputs.ctx_lens.tolist()))
        edges, slots = engine.context.step.row_start_loc.tolist(), inputs.context_slot_mapping[0]
        for r in engine.running:
            row = engine.manager.table_rows([r.cache_id])[0]
            if row not in lengths:
                continue
            assert lengths[row] == r.num_rows
            place, gained = rows.index(row), r.num_rows - before.get(r.request_id, r.stats.num_reused_tokens)
            mine = slots[edges[place] : edges[place + 1]]
            assert (mine[:gained] >= 0).all() and (mine[gained:] == -1).all()
            assert len(set(mine[:gained].tolist())) == gained
            steps += 1
    assert steps > 12


def test_no_drafts_no_draft_columns(oracle):
    """K = 0: one token a request, no draft context, and no room for draft probabilities."""
    engine = make(oracle, num_draft_tokens=0)
    shapes, real = set(), engine.device_step.readback.start

    def start(values):
        shapes.add(values.shape[1])
        return real(values)

    engine.device_step.readback.start = start
    for options in ({}, dict(temperature=1.0, top_p=0.9)):
        engine.generate([oracle.prompts[4]] * 2, 5, stop_token_ids=[], **options)
    assert shapes == {2} and engine.device_step.draft_probs is None and engine.device_step.draft_probs_bytes == 0


def test_draft_probabilities_are_made_once_and_as_large_as_was_said(oracle):
    """Pitfall 33: where a later capture finds them."""
    engine = make(oracle)
    step, said = engine.device_step, engine.device_step.draft_probs_bytes
    assert step.draft_probs is None and said == 4 * 6 * 4 * 97
    engine.generate([oracle.prompts[4]], 3, stop_token_ids=[], temperature=1.0)
    made = step.draft_probs
    assert made.numel() * made.element_size() == said and made.shape == (6, 4, 97)
    step.allow_sampling()
    engine.generate([oracle.prompts[4]], 3, stop_token_ids=[], top_k=3)
    assert step.draft_probs is made


def test_a_workspace_that_a_capture_would_have_to_make_raises(monkeypatch):
    """Pitfall 33: it is made before, or not at all; one that exists is handed out."""
    monkeypatch.setattr(attention, "runs_kernel", lambda q: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(attention.AttentionWorkspace, "allocate", lambda *sizes, device: object())
    workspaces, q = attention.AttentionWorkspaces(4), torch.zeros(2, 5, 4, 16)
    made = workspaces.get(q, 2)
    capturing[0] = True
    assert workspaces.get(torch.zeros(4, 5, 4, 16), 2) is made
    with pytest.raises(RuntimeError, match="workspace.*capture"):
        workspaces.get(torch.zeros(2, 1, 4, 16), 2)


def test_what_a_draft_context_lacks_is_named(oracle):
    """Pitfall 8: no draft pages, too few of them, another manager's."""
    plain = make(oracle, num_draft_tokens=0)
    with pytest.raises(ValueError, match="layer.*4"):
        PagedContext(make_tiny_drafter(), LayerPages(plain.manager, [4, 5]), [0, 0])
    paged = make(oracle)
    for ids in ([], [4], [3, 4, 5]):
        with pytest.raises(ValueError, match=f"pages: expected 2 draft layers, got {len(ids)}"):
            PagedContext(make_tiny_drafter(), LayerPages(paged.manager, ids), [0] * len(ids))


# Numbers and copies


def test_columns_are_what_was_put_in_them():
    rng = random.Random(0)
    numbers = padded_numbers(6, 9, 9)
    temperatures = [rng.choice([0.0, 1e-5, 0.1 + 0.2, 3e38]) for _ in range(6)]
    top_ps = [rng.random() for _ in range(6)]
    for i in range(6):
        numbers[i, [TEMPERATURE, TOP_P]] = float_bits(temperatures[i]), float_bits(top_ps[i])
        numbers[i, [SEED, TOP_K, LENGTH]] = 2**63 - 1 - i, i, 10 * i
    requests = StepRequests(torch.from_numpy(numbers.copy()))
    assert [x.tolist() for x in requests.sampling] == [temperatures, top_ps, list(range(6))]
    assert requests.column(SEED).tolist() == [2**63 - 1 - i for i in range(6)] and len(requests) == 6
    assert requests[2:4].column(LENGTH).tolist() == [20, 30] and not requests.emits.any()
    assert numbers.dtype == np.int64 and padded_numbers(0, 9, 9).shape == (0, NUM_COLUMNS)
    assert (padded_numbers(2, 9, 8)[:, [CTX_START, BONUS]] == [0, NO_TOKEN]).all()


def test_prompt_rows_are_sent_in_one_go(oracle):
    engine = make(oracle)
    sends, real = [], engine.device_step.staging.send

    def send(values):
        sends.append(values.size)
        return real(values)

    engine.device_step.staging.send = send
    rows = PrefillRows.send([([5, 6, 7], 16), ([8], 0), ([9, 10], 3)], engine.device_step.staging)
    assert rows.token_ids.tolist() == [5, 6, 7, 8, 9, 10] and rows.positions.tolist() == [16, 17, 18, 0, 3, 4]
    assert rows.owners.tolist() == [0, 0, 0, 1, 2, 2] and rows.starts.tolist() == [0, 3, 4, 6] and len(sends) == 1
    assert {t.dtype for t in vars(rows).values()} == {torch.int64}


def test_a_readback_is_of_the_moment_it_was_started():
    """Pitfall 34: what the device writes afterwards, as a next replay into the same buffer does, isn't in it."""
    values = torch.tensor([[3, 4], [5, 6]])
    wait = Readback(torch.device("cpu"), 8).start(values)
    values.fill_(9)
    first = wait()
    values.fill_(7)
    assert first.tolist() == [[3, 4], [5, 6]]


def test_one_row_a_request_says_everything(oracle):
    engine = make(oracle, enable_prefix_reuse=True)
    engine.generate([oracle.prompts[9]], 3, stop_token_ids=[])
    engine.manager.withhold_draft_rows()
    engine.add_request(oracle.prompts[9], 12, stop_token_ids=[], temperature=0.5, top_k=7, seed=2**62)
    engine.step()
    engine.add_request(oracle.prompts[4], 12, stop_token_ids=[])
    plan = engine.scheduler.schedule()
    numbers, (decode, (prefill, chunk)) = step_numbers(engine, plan), (plan.decode[0], plan.prefill[0])
    rows = engine.manager.table_rows([decode.cache_id, prefill.cache_id])
    assert numbers[:, ROW].tolist() == rows and numbers[:, LENGTH].tolist() == [decode.num_rows, 0]
    assert numbers[:, BONUS].tolist() == [decode.tokens[-1], NO_TOKEN] and numbers[:, EMITS].tolist() == [1, 1]
    assert numbers[:, CTX_START].tolist() == [decode.stats.ctx_start, 0] and decode.stats.ctx_start > 0
    assert numbers[0, [SEED, TOP_K, TEMPERATURE, TOP_P]].tolist() == [2**62, 7, float_bits(0.5), float_bits(1.0)]
    assert numbers[1, [TOP_K, TEMPERATURE, TOP_P]].tolist() == [0, float_bits(0.0), float_bits(1.0)]
    assert numbers[:, HAS_DRAFTS].tolist() == [1, 0] and chunk == len(oracle.prompts[4])
