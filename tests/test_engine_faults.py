"""Steps that fail anywhere, memory that isn't there, a draft pool of its own: everybody still gets their own tokens."""

import random
from contextlib import contextmanager

import pytest
import torch
from conftest import TINY_LAYER_IDS, make_tiny_drafter
from test_engine import Oracle, Script, assert_all_blocks_back, assert_drafts_right, run_all, watched

import dflash_paged.engine as engine_module
from dflash_paged.engine import DeviceMemoryError, Engine
from dflash_paged.graphs import GraphLadder, imitate
from dflash_paged.step import VARIANTS
from dflash_paged.target import PagedTarget

PLACES = ("paged", "dense", "separate")


@pytest.fixture(scope="module")
def oracle():
    return Oracle()


def make(oracle, graphs=False, **options):
    options = dict(max_seq_len=96, tokens_per_block=8, max_batch_size=3, max_step_tokens=24) | options
    drafter = options.pop("drafter", None) or make_tiny_drafter()
    engine = watched(Engine(PagedTarget(oracle.model, TINY_LAYER_IDS), drafter, **options))
    if graphs:
        engine.graphs = GraphLadder(engine.device_step, [2, engine.max_batch_size], imitate)
    return engine


def assert_all_back(engine):
    assert_all_blocks_back(engine)
    if engine.draft_manager is not None:
        engine.draft_manager.check_invariants()
        assert engine.draft_manager.stats().num_referenced == 0
        assert all(g.num_free == g.num_blocks for g in engine.draft_manager.stats().groups)


# Steps that fail


class Planted(BaseException):
    """Not even an Exception, as a KeyboardInterrupt isn't."""


def fault_places(engine) -> dict:
    """(owner, name) by name."""
    step, tables = engine.device_step, engine.manager.tables
    places = {
        "schedule_prepare": (engine.scheduler, "prepare"), "prepare": (engine.manager, "prepare_resources"),
        "flush": (tables, "flush"), "send_tables": (tables.staging, "send"), "send": (step.staging, "send"),
        "run": (step, "run"), "forward": (engine.target, "forward"), "embed": (engine.target, "embed"),
        "lm_head": (engine.target, "lm_head"), "store": (engine.context, "store"), "attend": (engine.context, "attend"),
        "propose": (step, "_propose"), "start": (step.readback, "start"), "emit": (engine_module, "emit"),
        "emit_tokens": (engine_module, "emit_tokens"), "record": (engine_module, "record_draft_bytes"),
        "settle": (engine_module, "settle"), "update": (engine.manager, "update_resources"),
    }
    if engine.graphs is not None:
        places |= {"replay": (engine.graphs, "run"), "capture": (engine.graphs, "capture")}
    if engine.draft_manager is not None:
        places |= {"draft_prepare": (engine.draft_manager, "prepare_resources"),
                   "draft_flush": (engine.draft_manager.tables, "flush"),
                   "draft_update": (engine.draft_manager, "update_resources")}
    return places


FINAL = ("settle", "update", "draft_update")  # behind these a step has happened
NAMES = ["schedule_prepare", "prepare", "flush", "send_tables", "send", "run", "forward", "embed", "lm_head", "store",
         "attend", "propose", "start", "emit", "emit_tokens", "record", "settle", "update"]
CASES = [(name, "paged", graphs, "before" if name in FINAL or graphs == n % 2 else "after")
         for n, name in enumerate(NAMES) for graphs in (False, True)
         if name in ("forward", "attend", "propose", "start", "send") or graphs == n // 2 % 2]
CASES += [("replay", "paged", True, "before"), ("replay", "paged", True, "after"), ("capture", "paged", True, "before")]
CASES += [(name, context, True, "after") for name in ("store", "attend", "start", "prepare") for context in PLACES[1:]]
CASES += [("draft_prepare", "separate", False, m) for m in ("before", "after")]
CASES += [("draft_flush", "separate", True, "before"), ("draft_update", "separate", False, "before"),
          ("update", "separate", True, "before")]


def plant(monkeypatch, engine, place, moment, fails):
    """Raise at a step's calls of a place for which `fails(number of the call)`, before or behind its work."""
    owner, name = place
    real, calls, schedule = getattr(owner, name), iter(range(1, 10**6)), engine.scheduler.schedule
    check, armed = engine.manager.check_invariants, [True]

    def plan():
        armed[0] = True
        return schedule()

    def quiet_check():  # which flushes the tables too
        armed[0] = False
        check()

    monkeypatch.setattr(engine.scheduler, "schedule", plan)
    monkeypatch.setattr(engine.manager, "check_invariants", quiet_check)

    def planted(*args, **kwargs):
        bad = armed[0] and fails(next(calls))
        if bad and moment == "before":
            raise Planted
        result = real(*args, **kwargs)
        if bad:
            raise Planted
        return result

    monkeypatch.setattr(owner, name, planted)


def held(engine) -> list:
    """What requests have, and have been given."""
    managers = [m for m in (engine.manager, engine.draft_manager) if m is not None]
    return [
        (r.request_id, list(r.tokens), r.finish_reason, r.num_rows, vars(r.stats) | {"num_preemptions": 0},
         [(m.num_tokens(r.cache_id), m.get_batch_cache_indices([r.cache_id])[0]) for m in managers])
        for r in engine.running
    ]


def kept(manager) -> tuple:
    """The manager's dump, but for the order of free blocks."""
    nodes, roots, pools, *rest = manager.dump()
    return nodes, roots, [(counts, sorted(free), *others) for counts, free, *others in pools], *rest


@pytest.mark.parametrize("name,context,graphs,moment", CASES, ids=["-".join(map(str, c)) for c in CASES])
def test_a_step_that_fails_anywhere_leaves_everything_as_it_was(oracle, monkeypatch, name, context, graphs, moment):
    """Blocks, rows, tokens and counts; then everybody's tokens are their own. The fault comes again and again."""
    engine = make(oracle, graphs, context=context, max_batch_size=2)
    place = fault_places(engine)[name]
    plant(monkeypatch, engine, place, moment, lambda call: call % (2 if name == "capture" else 7) == 1)
    seen, results, planted = {}, {}, 0
    note = lambda i, token: seen.setdefault(i, []).append(token)
    prompts = [oracle.prompts[i] for i in (10, 4, 6)]
    for prompt in prompts:
        engine.add_request(prompt, 9, stop_token_ids=[], on_token=note)
    while engine.running or engine.waiting:
        before, dump = {r[0]: r for r in held(engine)}, kept(engine.manager)
        try:
            results.update((r.request_id, r.token_ids) for r in engine.step())
        except Planted:
            planted += 1
            after = {r[0]: r for r in held(engine)}
            assert {i: after[i] for i in before} == before
            if after.keys() == before.keys():  # nobody was admitted
                assert kept(engine.manager) == dump
        told = {r.request_id: r.tokens[r.prompt_len :] for r in engine.running if len(r.tokens) > r.prompt_len}
        assert seen == {**told, **results}
    assert planted >= 1 and results == {i: oracle(p, 9) for i, p in enumerate(prompts)}
    assert_all_back(engine)
    monkeypatch.undo()
    again = [r.token_ids for r in engine.generate(prompts, 4, stop_token_ids=[])]  # behind what was published
    assert again == [oracle(p, 4) for p in prompts]
    assert_all_back(engine)


@pytest.mark.parametrize("context", PLACES)
@pytest.mark.parametrize("seed", range(2))
def test_storms_of_faults_under_pressure_are_lossless(oracle, monkeypatch, context, seed):
    """Any place, any call, with few blocks, shared prompts, arrivals, preemptions, aborts and withheld draft rows."""
    rng = random.Random(f"{context} {seed}")
    engine = make(oracle, seed % 2 == 0, context=context, max_batch_size=4, num_blocks=15,
                  admission=rng.choice(["guaranteed_no_evict", "max_utilization"]))
    places = fault_places(engine)
    for name in ("draft_update", "capture"):  # tested alone above
        places.pop(name, None)
    wanted, results, aborted, planted, count = {}, {}, set(), 0, 14
    while count or engine.running or engine.waiting:
        if count and rng.random() < 0.6:
            base = oracle.prompts[rng.choice([5, 7, 7, 9])]
            prompt, cap = base + oracle(base, rng.choice([0, 3, 9])), rng.choice([2, 7, 15])
            wanted[engine.add_request(prompt, cap, stop_token_ids=[])], count = oracle(prompt, cap), count - 1
        if engine.running and rng.random() < 0.1:
            engine.preempt(rng.choice(engine.running).request_id)
        if engine.running and rng.random() < 0.04:
            victim = rng.choice(engine.running).request_id
            ended = engine.abort(victim)
            assert ended.token_ids == wanted[victim][: len(ended.token_ids)]
            aborted.add(victim)
        if rng.random() < 0.05:
            engine.manager.withhold_draft_rows()
        with monkeypatch.context() as patch:
            if rng.random() < 0.6:
                name, at = rng.choice(sorted(places)), rng.randint(1, 2)
                moment = "before" if name in FINAL else rng.choice(["before", "after"])
                plant(patch, engine, places[name], moment, lambda call, at=at: call == at)
            try:
                results.update((r.request_id, r) for r in engine.step())
            except Planted:
                planted += 1
        if engine.draft_manager is not None:
            engine.draft_manager.check_invariants()
    assert planted >= 4 and len(results) + len(aborted) == 14
    assert {i: r.token_ids for i, r in results.items()} == {i: t for i, t in wanted.items() if i not in aborted}
    assert_all_back(engine)


def test_a_fault_in_a_callback_costs_no_other_request_anything(oracle):
    """on_token and on_text alike; what is owed comes with the next steps."""
    from test_text import word_tokenizer

    engine, seen, texts, raised = make(oracle, True, tokenizer=word_tokenizer()), {}, {}, []

    def token(i, t):
        seen.setdefault(i, []).append(t)
        if i == 1 and len(seen[i]) % 3 == 0:
            raise Planted

    def text(i, piece):
        texts[i] = texts.get(i, "") + piece
        if i == 0 and len(raised) < 9:
            raise Planted

    for i in (9, 4, 6):
        engine.add_request(oracle.prompts[i], 12, stop_token_ids=[], on_token=token, on_text=text)
    results = {}
    while engine.running or engine.waiting or engine.finished or engine.undelivered:
        try:
            results.update((r.request_id, r) for r in engine.step())
        except Planted:
            raised.append(1)
    assert len(raised) >= 5
    for i, prompt in enumerate(oracle.prompts[j] for j in (9, 4, 6)):
        assert results[i].token_ids == seen[i] == oracle(prompt, 12) and results[i].text == texts[i]


def test_a_sampled_step_that_fails_keeps_its_neighbours_drafts_out(oracle, monkeypatch):
    """What a failed step left in `drafts` and `draft_probs` is nobody's proposal: the retry accepts none of it."""
    engine = make(oracle, max_batch_size=2, enable_prefix_reuse=False)
    engine.add_request(oracle.prompts[9], 20, stop_token_ids=[], temperature=0.8)
    engine.add_request(oracle.prompts[4], 20, stop_token_ids=[])
    for _ in range(4):
        engine.step()
    lengths = {r.request_id: len(r.tokens) for r in engine.running}
    assert all(r.has_drafts for r in engine.running)
    with monkeypatch.context() as patch:
        plant(patch, engine, (engine.device_step.readback, "start"), "before", lambda call: True)
        with pytest.raises(Planted):
            engine.step()
    assert not any(r.has_drafts for r in engine.running)
    engine.step()
    assert {r.request_id: len(r.tokens) - lengths[r.request_id] for r in engine.running} == {0: 1, 1: 1}
    assert run_all(engine)[1].token_ids == oracle(oracle.prompts[4], 20)


# Memory that isn't there


OUT = [(torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 9.00 GiB."), (MemoryError,),
       (RuntimeError, "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes. Error code 12")]


def raising(error):
    def fail(*args, **kwargs):
        raise error

    return fail


@pytest.mark.parametrize("kind,words", [(kind, words) for kind, *words in OUT], ids=[kind.__name__ for kind, *_ in OUT])
@pytest.mark.parametrize("name,context,part", [
    ("KVCacheManager", "paged", "KV pools"), ("KVCacheManager", "separate", "KV pools"),
    ("DenseContext", "dense", "dense draft context"),
])
def test_what_finds_no_memory_is_named_with_its_size(oracle, monkeypatch, name, context, part, kind, words):
    error = kind(*words)
    monkeypatch.setattr(engine_module, name, raising(error))
    with pytest.raises(DeviceMemoryError, match=rf"{part}: asked for \d+\.\d+ GB on cpu.*lower") as caught:
        make(oracle, context=context)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("kind,words", [(kind, words) for kind, *words in OUT], ids=[kind.__name__ for kind, *_ in OUT])
def test_no_memory_for_draft_probabilities_refuses_the_sampled_request_alone(oracle, monkeypatch, kind, words):
    """By name, before it has an id; greedy ones go on, and a later one may find room."""
    engine = make(oracle)
    engine.add_request(oracle.prompts[4], 9, stop_token_ids=[])
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.device_step, "allow_sampling", raising(kind(*words)))
        for call in (lambda: engine.add_request(oracle.prompts[9], 5, temperature=1.0), engine.warm_up,
                     lambda: engine.generate([oracle.prompts[9]] * 2, 5, temperature=1.0)):
            with pytest.raises(DeviceMemoryError, match=r"draft probabilities: asked for \d+\.\d+ GB"):
                call()
    assert engine.num_requests == 1 and not engine.waiting and not engine.allows_sampling
    assert run_all(engine)[0].token_ids == oracle(oracle.prompts[4], 9)
    assert len(engine.generate([oracle.prompts[9]], 5, stop_token_ids=[], temperature=1.0)[0].token_ids) == 5


@pytest.mark.parametrize("kind,words", [
    (RuntimeError, "planted"), (ValueError, "num_blocks: expected 3"), (KeyError, "x"),
    (RuntimeError, "CUDA error: an illegal memory access was encountered"),
    (RuntimeError, "CUDA error: misaligned memory address"),
])
def test_other_errors_stay_what_they_are(oracle, monkeypatch, kind, words):
    """An illegal access is no lack of memory, and a smaller pool wouldn't help."""
    error = kind(words)
    monkeypatch.setattr(engine_module, "KVCacheManager", raising(error))
    with pytest.raises(type(error)) as caught:
        make(oracle)
    assert caught.value is error


# A pool of the draft's own


@contextmanager
def counting_preparations(engine):
    """Yields a list that gets the number of rows of every preparation of the draft's pool."""
    seen, real = [], engine.draft_manager.prepare_resources

    def prepare(batch):
        batch = list(batch)
        real(batch)
        seen.append(batch)

    engine.draft_manager.prepare_resources = prepare
    yield seen
    engine.draft_manager.prepare_resources = real


@pytest.mark.parametrize("graphs", [False, True])
def test_a_separate_draft_pool_is_lossless_and_gives_all_blocks_back(oracle, monkeypatch, graphs):
    script = Script(monkeypatch, oracle, seed=4)
    engine = script.engine = make(oracle, graphs, context="separate", max_batch_size=4)
    assert len(engine.manager.layers) == 4 and len(engine.draft_manager.layers) == 2
    for _ in range(2):  # the second time behind hits
        script.log.clear()
        with counting_preparations(engine) as seen:
            prompts = [oracle.prompts[i] for i in (9, 4, 6, 10, 7)]
            ids = {engine.add_request(p, 12, stop_token_ids=[]): p for p in prompts}
            results = run_all(engine)
        assert seen
        assert {i: results[i].token_ids for i in ids} == {i: oracle(p, 12) for i, p in ids.items()}
        for i in ids:
            script.check(results[i])
        assert_all_back(engine)


@pytest.mark.parametrize("num_bytes", [100_000, 123_457, 400_001])
def test_one_budget_is_split_so_that_both_pools_hold_as_many_tokens(oracle, num_bytes):
    """Pitfall 15: together at most what was given, and hardly less."""
    engine = make(oracle, context="separate", kv_cache_bytes=num_bytes, max_batch_size=1)
    pools = [p for m in (engine.manager, engine.draft_manager) for p in m.pools.tensors]
    used, block = sum(p.numel() * p.element_size() for p in pools), 8 * (4 * 2 * 2 * 8 + 2 * 2 * 2 * 16) * 4
    assert engine.manager.num_blocks == engine.draft_manager.num_blocks
    assert num_bytes - 2 * block < used <= num_bytes
    assert engine.generate([oracle.prompts[4]], 9, stop_token_ids=[])[0].token_ids == oracle(oracle.prompts[4], 9)


def test_too_small_a_budget_for_two_pools_is_refused_by_name(oracle):
    for bad in (100, 0, -5, "1", 1.5):
        with pytest.raises(ValueError, match="kv_cache_bytes"):
            make(oracle, context="separate", kv_cache_bytes=bad)


def test_behind_a_hit_a_separate_pool_begins_at_its_end(oracle, monkeypatch):
    """Pitfalls 16 and 17: only rows that exist count, and they lie at their own positions."""
    script = Script(monkeypatch, oracle, seed=2, log_real=True, accept=lambda num_tokens: num_tokens % 5)
    engine = script.engine = make(oracle, context="separate")
    prompts = [oracle.prompts[i] for i in (6, 7, 9, 10)]
    cold = engine.generate(prompts, 14, stop_token_ids=[])
    assert [r.stats.ctx_start for r in cold] == [0] * 4
    hits = engine.generate(prompts, 14, stop_token_ids=[])
    for prompt, hit in zip(prompts, hits):
        assert hit.stats.ctx_start == hit.stats.num_reused_tokens == len(prompt) - 1
        assert hit.token_ids == oracle(prompt, 14)
    assert {start for _, start, _ in script.real_log} == {0, *(len(p) - 1 for p in prompts)}
    assert_drafts_right(script.real_log, oracle, engine.drafter)


@pytest.mark.parametrize("admission", ["guaranteed_no_evict", "max_utilization"])
def test_admission_counts_both_pools(oracle, admission):
    """Pitfall 14: six requests share a prefix in the target's pool; their draft rows share nothing, and are short."""
    engine = make(oracle, context="separate", num_blocks=14, max_batch_size=6, max_step_tokens=64, admission=admission)
    base = oracle.prompts[10]
    prompts = [base + oracle(base, n) for n in range(6)]
    engine.generate(prompts[:1], 2, stop_token_ids=[])
    ids = {engine.add_request(p, 12, stop_token_ids=[]): p for p in prompts}
    results, most = {}, 0
    while engine.running or engine.waiting:
        results.update((r.request_id, r) for r in engine.step())
        most = max(most, len(engine.running))
        engine.draft_manager.check_invariants()
    assert {i: r.token_ids for i, r in results.items()} == {i: oracle(p, 12) for i, p in ids.items()} and 1 <= most < 6
    assert_all_back(engine)


def test_a_separate_pool_may_have_its_own_dtype_and_drafters_with_windows(oracle):
    sliding = dict(layer_types=["sliding_attention", "full_attention"], use_sliding_window=True, sliding_window=18,
                   is_causal=False)
    for options in (dict(draft_kv_dtype="bfloat16"), dict(drafter=make_tiny_drafter(**sliding)),
                    dict(draft_kv_dtype="float16", drafter=make_tiny_drafter(**sliding), kv_cache_bytes=900_000)):
        engine = make(oracle, True, context="separate", **options)
        prompts = [oracle.prompts[i] for i in (10, 4, 7)]
        results = engine.generate(prompts, 20, stop_token_ids=[])
        assert [r.token_ids for r in results] == [oracle(p, 20) for p in prompts]
        wanted = options.get("draft_kv_dtype", "float32")
        assert {str(p.dtype) for p in engine.draft_manager.pools.tensors} == {f"torch.{wanted}"}
        assert_all_back(engine)


@pytest.mark.parametrize("context", PLACES)
def test_shared_prefix_blocks_keep_their_bytes_while_drafts_are_made_behind_them(oracle, context):
    """Pitfall 18 with the real drafter, eager and replayed, greedy and sampled: draft passes write to no shared block."""
    engine = make(oracle, True, context=context, max_batch_size=4, max_step_tokens=64)
    base = oracle.prompts[10]
    engine.generate([base], 2, stop_token_ids=[])
    for i, extra in enumerate(([], [7], [9, 9])):
        engine.add_request(base[:32] + extra + [5 + i], 24, stop_token_ids=[], **({} if i < 2 else dict(top_p=0.9)))
    engine.step()
    tables = engine.manager.get_batch_cache_indices([r.cache_id for r in engine.running])
    shared = tables[0][:4]
    assert len(tables) == 3 and all(t[:4] == shared for t in tables)
    before = [pool[shared].clone() for pool in engine.manager.pools.tensors]
    run_all(engine)
    assert engine.num_graph_steps > 3
    for old, pool in zip(before, engine.manager.pools.tensors):
        assert torch.equal(old, pool[shared])


def test_warm_up_is_idempotent_and_changes_no_page(oracle):
    """Pitfalls 1 and 33: over padded requests only; it makes what sampled steps need, once."""
    engine = make(oracle, True)
    engine.generate([oracle.prompts[9]], 5, stop_token_ids=[])
    pages = [p.clone() for p in engine.manager.pools.tensors]
    engine.warm_up(sampling=False)
    assert engine.device_step.draft_probs is None and not engine.allows_sampling
    engine.warm_up()
    probs = engine.device_step.draft_probs
    engine.warm_up()
    engine.graphs.warm_up(VARIANTS)
    assert engine.device_step.draft_probs is probs and engine.allows_sampling
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(pages, engine.manager.pools.tensors))
