"""Sampled requests in the engine: the target's own distribution, a stream each, and greedy neighbours as they were."""

import random

import pytest
import torch
from conftest import TINY_LAYER_IDS, chi_square_p, make_tiny_drafter, make_tiny_target
from test_engine import Oracle, run_all, watched

import dflash_paged.sampling as sampling
from dflash_paged.engine import Engine, RefusedRequest
from dflash_paged.graphs import GraphLadder, imitate
from dflash_paged.target import PagedTarget

VOCAB, COUNT, PROMPT = 11, 3000, [5, 6]


@pytest.fixture(scope="module")
def oracle():
    return Oracle()


def make(oracle, graphs=(), watch=True, **options):
    options = dict(max_seq_len=128, tokens_per_block=8) | options
    engine = Engine(PagedTarget(oracle.model, TINY_LAYER_IDS), make_tiny_drafter(), **options)
    engine = watched(engine) if watch else engine
    if graphs:
        engine.graphs = GraphLadder(engine.device_step, graphs, imitate)
    return engine


# The distribution


@pytest.fixture(scope="module")
def small():
    """A target of 11 tokens and one layer, and a drafter for it."""
    model = make_tiny_target(eos_token_id=None, vocab_size=VOCAB, num_hidden_layers=1)
    drafter = make_tiny_drafter(vocab_size=VOCAB, num_target_layers=1, num_hidden_layers=1,
                                dflash_config={"target_layer_ids": [0], "mask_token_id": 3})
    return model, drafter


@torch.inference_mode()
def exact_probs(model, temperature=1.0, top_p=1.0, top_k=0):
    """Probabilities [V, V, V] of the three tokens behind PROMPT, by transformers' own model and warpers."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []

    def probs(tails):
        ids = torch.cat([torch.tensor(PROMPT).expand(len(tails), -1), tails], 1)
        logits = model(ids).logits[:, -1].float()
        for warp in warpers:
            logits = warp(ids, logits)
        return logits.softmax(-1).double()

    every = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
    first, second = probs(torch.zeros(1, 0, dtype=torch.long))[0], probs(torch.arange(VOCAB)[:, None])
    return first[:, None, None] * second[:, :, None] * probs(every).view(VOCAB, VOCAB, VOCAB)


def small_engine(small, **options):
    model, drafter = small
    return Engine(PagedTarget(model, (0,)), drafter, max_seq_len=16, tokens_per_block=8, enable_prefix_reuse=False,
                  max_batch_size=64, max_step_tokens=1024, **options)


def p_values(small, results, **options):
    """Chi-square of tokens 1 and 2 together, of 2 and 3, and of all three."""
    seen = torch.zeros(VOCAB, VOCAB, VOCAB, dtype=torch.double)
    for result in results:
        seen[tuple(result.token_ids)] += 1
    expected = exact_probs(small[0], **options) * len(results)
    assert not seen[expected == 0].any(), "a token that top-k or top-p cuts off"
    first, last = (seen.sum(2), expected.sum(2)), (seen.sum(0), expected.sum(0))
    return [chi_square_p(s, e) for s, e in (first, last, (seen, expected))]


CASES = [dict(temperature=0.8), dict(top_p=0.9, top_k=4, temperature=1.5)]


@pytest.mark.parametrize("k", [4, 0])
@pytest.mark.parametrize("options", CASES, ids=["temperature", "cut"])
def test_tokens_are_distributed_as_the_targets_own(small, options, k):
    """Pitfall 31, through prefill, drafts, rejection and refill, in full batches."""
    engine = small_engine(small, num_draft_tokens=k, seed=1)
    results = engine.generate([PROMPT] * COUNT, 3, stop_token_ids=[], **options)
    passes, gained = (sum(getattr(r.stats, n) for r in results) for n in ("num_verify_passes", "num_gained_tokens"))
    assert passes == gained == 2 * COUNT if k == 0 else COUNT * 1.2 < passes < 0.95 * gained, "accepts and rejects"
    assert min(p_values(small, results, **options)) > 1e-4


def test_drafts_that_share_the_acceptances_numbers_would_be_noticed(small, monkeypatch):
    """Pitfall 31: the statistic above can fail."""
    real = sampling.uniform
    same = {sampling.DRAFT: sampling.ACCEPT}
    shared = lambda seeds, positions, stream: real(seeds, positions, same.get(stream, stream))
    monkeypatch.setattr(sampling, "uniform", shared)
    results = small_engine(small, seed=1).generate([PROMPT] * 800, 3, stop_token_ids=[], temperature=0.8)
    assert min(p_values(small, results, temperature=0.8)) < 1e-8


def test_the_distribution_survives_preemptions_and_failing_steps(small, monkeypatch):
    """Drafts are lost or made anew, so other tokens may come; they have the same distribution. Mixed with other
    temperatures, in imitated graphs."""
    engine, (a, b) = small_engine(small, seed=2), CASES
    engine.graphs = GraphLadder(engine.device_step, [1, 16, 48], imitate)
    start, calls, results, step = engine.device_step.readback.start, iter(range(10**6)), {}, 0

    def fail_sometimes(values):
        if next(calls) % 4 == 3:
            raise RuntimeError("planted")
        return start(values)

    monkeypatch.setattr(engine.device_step.readback, "start", fail_sometimes)
    with pytest.warns(RuntimeWarning, match="graph_batch_sizes"):
        while len(results) < 1500:
            if not engine.running:  # all at once, so that steps without prompt rows come too
                for i in range(len(results), len(results) + 64):
                    engine.add_request(PROMPT, 3, stop_token_ids=[], **(a, b, {})[i % 5 // 2])
            step += 1
            if step % 5 == 0:
                for request in list(engine.running)[::4]:
                    engine.preempt(request.request_id)
            try:
                results.update((r.request_id, r) for r in engine.step())
            except RuntimeError as error:
                assert "planted" in str(error)
    for part, options in ((0, a), (1, b)):
        chosen = [results[i] for i in results if i % 5 // 2 == part]
        assert len(chosen) > 590 and min(p_values(small, chosen, **options)) > 1e-4
    assert len({tuple(results[i].token_ids) for i in results if i % 5 == 4}) == 1, "the greedy ones"
    assert engine.num_graph_steps and sum(r.stats.num_preemptions for r in results.values()) > 100


# Streams


def test_a_requests_tokens_depend_on_its_seed_alone(oracle):
    """Not on its place, its neighbours, a second run, the context's place or padded places."""
    prompts = [oracle.prompts[i] for i in (9, 4, 6, 2, 7)]
    options = [dict(temperature=0.9, seed=11), dict(top_p=0.8, seed=12), dict(temperature=1.3, top_k=7, seed=2**63 - 1),
               {}, dict(temperature=0.7, seed=0)]

    def serve(order, **settings):
        engine = make(oracle, **settings)
        for _ in range(2):
            ids = {engine.add_request(prompts[i], 9, stop_token_ids=[], **options[i]): i for i in order}
            got = {ids[j]: r.token_ids for j, r in run_all(engine).items()}
            yield [got[i] for i in sorted(got)]

    alone = lambda p, o: make(oracle, max_batch_size=1).generate([p], 9, stop_token_ids=[], **o)[0].token_ids
    want = [alone(p, o) for p, o in zip(prompts, options)]
    assert want[3] == oracle(prompts[3], 9) and want[0] != oracle(prompts[0], 9)
    for settings in (dict(max_batch_size=2, seed=9), dict(max_batch_size=5, graphs=(3, 5)),
                     dict(max_batch_size=3, context="dense", enable_prefix_reuse=False),
                     dict(max_batch_size=5, context="separate", enable_prefix_reuse=False, graphs=(4, 5))):
        order = random.Random(str(settings)).sample(range(5), 5)
        for tokens in serve(order, **settings):
            assert tokens == want, settings


def test_requests_without_a_seed_have_a_stream_each_which_the_engines_seed_decides(oracle):
    def serve(**settings):
        return [r.token_ids for r in make(oracle, watch=False, **settings).generate(
            [oracle.prompts[4]] * 6, 8, stop_token_ids=[], temperature=1.0)]

    first = serve(seed=5)
    assert serve(seed=5) == first and len({tuple(t) for t in first}) > 1
    assert serve(seed=5, max_batch_size=2) == first
    assert serve(seed=6) != first and serve() == serve(seed=0) != first


def test_a_request_without_a_seed_shares_its_stream_with_no_small_seed(oracle):
    """Pitfall 31's kind: a client's own seeds of 0, 1, 2 ... must not be the streams of its unseeded neighbours."""
    engine = make(oracle, enable_prefix_reuse=False)
    options = dict(stop_token_ids=[], temperature=1.2)
    own = [r.token_ids for r in engine.generate([oracle.prompts[4]] * 4, 8, **options)]
    for seed in range(4):
        [given] = engine.generate([oracle.prompts[4]], 8, seed=seed, **options)
        assert given.token_ids not in own, seed


@pytest.mark.parametrize("k", [0, 4])
def test_a_cap_or_a_stop_token_only_cuts_a_sampled_text(oracle, k):
    """Pitfalls 37 and 41 for sampled requests."""
    engine = make(oracle, num_draft_tokens=k, enable_prefix_reuse=False)
    prompt, options = oracle.prompts[6], dict(temperature=1.1, top_p=0.95, seed=3)
    [whole] = engine.generate([prompt], 18, stop_token_ids=[], **options)
    for cap in (1, 2, 5, 6, 7, 11):
        for at in (0, 3, 5, 12):
            end = min(cap, whole.token_ids.index(whole.token_ids[at]) + 1)
            [result] = engine.generate([prompt], cap, stop_token_ids=[whole.token_ids[at]], **options)
            reason = "stop" if whole.token_ids[end - 1] == whole.token_ids[at] else "length"
            assert (result.token_ids, result.finish_reason) == (whole.token_ids[:end], reason)


def test_without_drafts_a_sampled_text_survives_anything(oracle, monkeypatch):
    """K = 0: each token is one draw at its own position, so preemptions and failing steps change nothing."""
    prompts = [oracle.prompts[i] for i in (9, 4, 6)]
    options = dict(temperature=0.9, top_p=0.9, stop_token_ids=[])
    engine = make(oracle, num_draft_tokens=0, max_batch_size=3, enable_prefix_reuse=False)
    want = [r.token_ids for r in engine.generate(prompts, 14, **options, seed=8)]
    forward, calls, results, step = engine.target.forward, iter(range(10**6)), {}, 0

    def fail_sometimes(*args):
        out = forward(*args)
        if next(calls) % 4 == 2:
            raise RuntimeError("planted")
        return out

    monkeypatch.setattr(engine.target, "forward", fail_sometimes)
    ids = [engine.add_request(p, 14, **options, seed=8) for p in prompts]
    while engine.running or engine.waiting:
        step += 1
        if step % 5 == 4:
            engine.preempt(engine.running[step % len(engine.running)].request_id)
        try:
            results.update((r.request_id, r) for r in engine.step())
        except RuntimeError as error:
            assert "planted" in str(error)
    assert [results[i].token_ids for i in ids] == want


@pytest.mark.parametrize("context", ["paged", "dense", "separate"])
def test_what_happens_to_neighbours_changes_no_sampled_token(oracle, context):
    """Aborted, preempted or new ones, while this one keeps its drafts."""
    engine = make(oracle, context=context, max_batch_size=4, graphs=(2, 4), enable_prefix_reuse=False)
    prompt, options = oracle.prompts[7], dict(temperature=1.0, seed=77, stop_token_ids=[])
    [want] = engine.generate([prompt], 24, **options)
    other = dict(temperature=0.8, stop_token_ids=[])
    mine = engine.add_request(prompt, 24, **options)
    others = [engine.add_request(oracle.prompts[i], 30, **other) for i in (9, 4, 6)]
    results = {}
    for step in range(60):
        running = [r.request_id for r in engine.running]
        if step == 3:
            engine.abort(others[0])
            others.append(engine.add_request(oracle.prompts[10], 9, **other))
        if step in (4, 6) and others[1] in running:
            engine.preempt(others[1])
        results.update((r.request_id, r) for r in engine.step())
    assert results[mine].token_ids == want.token_ids and len(results) == 4


# Greedy neighbours and options


@pytest.mark.parametrize("context,graphs", [("paged", ()), ("paged", (2, 5)), ("dense", (2, 5))])
def test_greedy_requests_beside_sampled_ones_stay_greedy(oracle, context, graphs):
    """Pitfall 42: whatever the neighbours ask for, and when the last of them has gone."""
    engine = make(oracle, context=context, graphs=graphs, max_batch_size=5, max_step_tokens=40)
    want, number = {}, 0
    for i in (9, 0, 4, 6, 2, 7):
        prompt = oracle.prompts[i]
        sampled = (dict(temperature=1.0), dict(top_k=3), dict(top_p=0.5, temperature=2.0))[number % 3]
        greedy = ({}, dict(temperature=0, top_p=0.5, top_k=9))[number % 2]
        want[engine.add_request(prompt, 12, stop_token_ids=[], **greedy)] = prompt
        engine.add_request(prompt, 3 + 2 * number, stop_token_ids=[], **sampled)
        number += 1
    results = run_all(engine)
    assert {i: results[i].token_ids for i in want} == {i: oracle(p, 12) for i, p in want.items()}


def test_one_token_to_choose_from_is_greedy_decoding(oracle):
    engine = make(oracle)
    for options in (dict(temperature=1.7, top_k=1), dict(top_p=1e-9), dict(temperature=1e-5)):
        results = engine.generate([oracle.prompts[i] for i in (4, 9)], 12, stop_token_ids=[], **options)
        assert [r.token_ids for r in results] == [oracle(oracle.prompts[i], 12) for i in (4, 9)], options


def test_top_k_or_top_p_alone_samples(oracle):
    """Pitfall 42: not greedy; as with temperature 1."""
    engine, prompt = make(oracle, enable_prefix_reuse=False), oracle.prompts[9]
    for options in (dict(top_k=5), dict(top_p=0.95)):
        texts = [engine.generate([prompt], 7, stop_token_ids=[], seed=s, **options)[0].token_ids for s in range(4)]
        assert len({tuple(t) for t in texts}) > 1
        [same] = engine.generate([prompt], 7, stop_token_ids=[], seed=3, temperature=1.0, **options)
        assert same.token_ids == texts[3]
    [greedy] = engine.generate([prompt], 7, stop_token_ids=[], seed=3)
    assert greedy.token_ids == oracle(prompt, 7)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("name,values", [
    ("temperature", [NAN, INF, -INF, -1, -1e-9, 1e-6, "1", True, 1 + 0j, [1.0]]),
    ("top_p", [NAN, INF, 0, -0.5, 1.0001, "0.5", True]),
    ("top_k", [-1, 1.5, NAN, "3", True, 2**31]),
    ("seed", [-1, 1.5, "1", True, 2**63, NAN]),
])
def test_sampling_options_out_of_range_are_refused_before_anything_else(oracle, name, values):
    """Pitfalls 41 and 42: by name; no request, no number, no stream and no memory is used up."""
    engine = make(oracle)
    engine.add_request(oracle.prompts[4], 6, stop_token_ids=[])
    engine.step()
    before = engine.manager.dump()
    for value in values:
        for call in (lambda o: engine.add_request([5], 6, **o), lambda o: engine.generate([[5], [6]], 6, **o)):
            with pytest.raises(RefusedRequest, match=name):
                call({"temperature": 1.0, name: value})
    assert (engine.num_requests, len(engine.waiting), len(engine.running)) == (1, 0, 1)
    assert engine.manager.dump() == before and engine.device_step.draft_probs is None
    assert run_all(engine)[0].token_ids == oracle(oracle.prompts[4], 6)


@pytest.mark.parametrize("name", ["min_p", "temprature", "n", "logit_bias", "repetition_penalty", "default_seed",
                                  "sorts", "max_tokens", "sampling", "stream"])
def test_options_by_another_name_are_errors_that_name_them(oracle, name):
    """Pitfall 41: no option is dropped in silence."""
    engine = make(oracle)
    for options in ({name: 1}, {"temperature": 1.0, name: None}):
        with pytest.raises(TypeError, match=name):
            engine.add_request(oracle.prompts[4], 5, **options)
        with pytest.raises(TypeError, match=name):
            engine.generate([oracle.prompts[4]], 5, **options)
    assert not engine.waiting and not engine.num_requests


def test_none_means_not_given(oracle):
    engine = make(oracle)
    nothing = dict(temperature=None, top_p=None, top_k=None, seed=None)
    [result] = engine.generate([oracle.prompts[4]], 6, stop_token_ids=[], **nothing)
    assert result.token_ids == oracle(oracle.prompts[4], 6)
    assert engine.device_step.draft_probs is None and not engine.allows_sampling


def test_the_engines_seed_is_checked_by_name(oracle):
    for bad in (-1, 1.5, True, "1", None, NAN):
        with pytest.raises(ValueError, match="seed"):
            make(oracle, seed=bad)
