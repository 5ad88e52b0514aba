"""The manager: registration, budget, steps, prefix reuse, errors. Random histories: test_manager_model."""

from dataclasses import replace

import pytest
import torch

from dflash_paged import blocks as blocks_module
from dflash_paged.manager import (
    KVCacheManager,
    OutOfBlocks,
    RequestError,
    blocks_of,
    get_num_spec_layers,
    get_pp_layers,
)
from dflash_paged.memory import LayerSpec, blocks_held, bytes_per_token, paged_cost
from dflash_paged.store import read_rows_ref, store_kv

TPB = 8
TARGET, DRAFT = LayerSpec(2, 16, "float32"), LayerSpec(1, 8, "float32")


def make_manager(**changes) -> KVCacheManager:
    settings = dict(
        target_layers=[TARGET] * 2,
        draft_layers=[DRAFT] * 3,
        tokens_per_block=TPB,
        num_blocks=10,
        max_seq_len=64,
        max_batch_size=4,
        num_lookahead_tokens=4,
        max_num_seqs=12,
        enable_partial_reuse=False,  # most tests below are about whole blocks
    )
    settings.update(changes)
    if "kv_cache_bytes" in changes:
        settings.pop("num_blocks")
    return KVCacheManager(**settings)


def run(m: KVCacheManager, request_id: int, tokens: list[int], **options):
    """Add a request and store all of its tokens in one step."""
    start = m.add_sequence(request_id, tokens, **options)
    chunk = tokens[start.num_reused_tokens :]
    m.prepare_resources([(request_id, len(chunk))])
    m.update_resources([(request_id, chunk)])
    m.check_invariants()
    return start


def assert_refused(m: KVCacheManager, error: type, words: str, call) -> None:
    """`call` raises `error` with `words` and leaves everything as it was."""
    before = m.dump()
    with pytest.raises(error, match=words):
        call()
    assert m.dump() == before
    m.check_invariants()


# Registration, memory, budget


def test_spec_layers_follow_the_targets_on_the_last_rank_only():
    assert get_num_spec_layers([DRAFT] * 5) == 5
    assert get_pp_layers(6, 2) == [0, 1, 2, 3, 4, 5, 6, 7]
    ranks = [get_pp_layers(7, 2, 3, rank) for rank in range(3)]
    assert ranks == [[0, 1, 2], [3, 4], [5, 6, 7, 8]]
    assert get_pp_layers(6, 2, 2, 1, layer_mask=[True, False] * 3) == [4]
    m = make_manager()
    assert m.num_target_layers == 2 and len(m.layers) == 5
    assert m.num_groups == 1 and m.layer_to_group == [0] * 5


@pytest.mark.parametrize(
    "args, words",
    [
        ((0, 1), "num_target_layers"),
        ((4, 1, 5), "pp_size"),
        ((4, 1, 2, 2), "pp_rank"),
        ((4, 1, 1, 0, [True]), "layer_mask"),
    ],
)
def test_impossible_pipeline_cuts_are_refused(args, words):
    with pytest.raises(ValueError, match=words):
        get_pp_layers(*args)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_views_are_strided_windows_of_one_page_major_pool(kv_layout):
    m = make_manager(kv_layout=kv_layout)
    assert len(m.pools.tensors) == 2, "one allocation for each geometry"
    for layers, pool in ((range(0, 2), m.pools.tensors[0]), (range(2, 5), m.pools.tensors[1])):
        for j, layer_idx in enumerate(layers):
            view = m.page_view(layer_idx)
            for field, pages in enumerate((view.k, view.v)):
                assert pages.data_ptr() == pool[:, j, field].data_ptr()
                assert pages.stride() == pool[:, j, field].stride()
                assert pages.stride(0) == len(layers) * 2 * pages[0].numel(), "page-major"
            assert (view.layout, view.layer_idx, view.tokens_per_block) == (kv_layout, layer_idx, TPB)
            assert (view.num_pages, view.num_kv_heads, view.head_dim) == (
                10,
                *((2, 16), (1, 8))[layer_idx >= 2],
            )


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_buffers_show_the_pool_in_either_layout_without_a_copy(kv_layout):
    m = make_manager(kv_layout=kv_layout)
    nhd, hnd = m.get_buffers(1), m.get_buffers(1, "HND")
    assert nhd.shape == (10, 2, TPB, 2, 16) and hnd.shape == (10, 2, 2, TPB, 16)
    nhd[7, 1, 5, 1, 3] = 42.0
    assert hnd[7, 1, 1, 5, 3] == 42.0
    v = m.page_view(1).v
    assert (v[7, 5, 1, 3] if kv_layout == "NHD" else v[7, 1, 5, 3]) == 42.0


def test_latent_layers_have_buffers_but_no_view():
    m = make_manager(draft_layers=[LayerSpec(1, 24, "float32", kv_factor=1)])
    assert m.get_buffers(2).shape == (10, 1, TPB, 1, 24)
    with pytest.raises(ValueError, match="get_buffers"):
        m.page_view(2)


@pytest.mark.parametrize("target_dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("draft_kv_dtype", ["inherit", "bfloat16", "float8_e4m3fn"])
def test_the_bytes_billed_are_the_bytes_allocated(target_dtype, draft_kv_dtype):
    """Pitfall 13: budget billed in one dtype, pool made in another."""
    m = make_manager(target_layers=[LayerSpec(2, 16, target_dtype)] * 2, draft_kv_dtype=draft_kv_dtype)
    wanted = target_dtype if draft_kv_dtype == "inherit" else draft_kv_dtype
    assert m.get_buffers(4).dtype == getattr(torch, wanted)
    allocated = sum(p.untyped_storage().nbytes() for p in m.pools.tensors)
    assert allocated == 10 * TPB * m.get_cache_size_per_token()
    for kind, layers in (("target", range(2)), ("draft", range(2, 5))):
        per_token = sum(m.get_buffers(i)[0, :, 0].numel() * m.get_buffers(i).element_size() for i in layers)
        assert m.get_cache_size_per_token(kind) == per_token


def test_inheriting_from_mixed_target_dtypes_is_refused():
    mixed = [LayerSpec(2, 16, "bfloat16"), LayerSpec(2, 16, "float8_e4m3fn")]
    with pytest.raises(ValueError, match="draft_kv_dtype.*bfloat16 and float8_e4m3fn"):
        make_manager(target_layers=mixed)
    assert make_manager(target_layers=mixed, draft_kv_dtype="bfloat16").layers[2].dtype == "bfloat16"
    assert make_manager(target_layers=mixed, draft_layers=[]).num_target_layers == 2


@pytest.mark.parametrize("spare", [0, 1, 4095])
def test_one_budget_holds_target_and_draft(spare):
    """Pitfall 15: target and draft each claim the whole budget."""
    block_bytes = TPB * 2 * (2 * 2 * 16 * 4 + 3 * 1 * 8 * 4)
    m = make_manager(kv_cache_bytes=7 * block_bytes + spare)
    assert m.num_blocks == 7
    assert m.pools.num_bytes == 7 * block_bytes <= 7 * block_bytes + spare


def test_a_budget_below_one_request_is_refused_with_the_numbers():
    block_bytes = make_manager().get_cache_size_per_token() * TPB
    with pytest.raises(ValueError, match=f"2 blocks of {block_bytes} bytes.*got {2 * block_bytes - 1}"):
        make_manager(kv_cache_bytes=2 * block_bytes - 1, num_lookahead_tokens=8)
    with pytest.raises(ValueError, match="num_blocks.*got 1"):
        make_manager(num_blocks=1, num_lookahead_tokens=8)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(tokens_per_block=12), "tokens_per_block"),
        (dict(target_layers=[]), "target_layers"),
        (dict(draft_layers=["bfloat16"]), "LayerSpec"),
        (dict(draft_kv_dtype="int4"), "draft_kv_dtype"),
        (dict(kv_layout="NDH"), "kv_layout"),
        (dict(num_lookahead_tokens=0), "num_lookahead_tokens"),
        (dict(max_seq_len=0), "max_seq_len"),
        (dict(max_batch_size=True), "max_batch_size"),
        (dict(num_blocks=None), "exactly one"),
        (dict(num_blocks=4.0), "num_blocks"),
        (dict(recompute_tail_tokens=0), "recompute_tail_tokens"),
        (dict(missing_draft_policy="ignore"), "missing_draft_policy"),
    ],
)
def test_bad_settings_are_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=words):
        make_manager(**changes)


def test_both_sizes_at_once_are_refused():
    with pytest.raises(ValueError, match="exactly one"):
        KVCacheManager(
            target_layers=[TARGET],
            num_blocks=4,
            kv_cache_bytes=10**6,
            max_seq_len=64,
            max_batch_size=1,
            num_lookahead_tokens=1,
        )


def test_fp8_pages_have_no_view_before_their_scales_are_given():
    m = make_manager(draft_kv_dtype="float8_e4m3fn")
    with pytest.raises(ValueError, match=r"set_scales\(3"):
        m.page_view(3)
    m.set_scales(3, 1.0, torch.tensor([0.5]))
    view = m.page_view(3)
    assert view.k_scale.tolist() == [1.0] and view.v_scale.tolist() == [0.5]
    assert view.k_scale.dtype == torch.float32


@pytest.mark.parametrize(
    "layer_idx, k_scale, v_scale, words",
    [
        (0, 1.0, 1.0, "float32"),
        (9, 1.0, 1.0, "layer_idx"),
        (3, 0.0, 1.0, "k_scale"),
        (3, 1.0, float("nan"), "v_scale"),
        (3, torch.ones(2), 1.0, "k_scale.*shape"),
    ],
)
def test_bad_scales_are_refused(layer_idx, k_scale, v_scale, words):
    m = make_manager(draft_kv_dtype="float8_e4m3fn")
    with pytest.raises(ValueError, match=words):
        m.set_scales(layer_idx, k_scale, v_scale)
    assert m.pools.scales == {}


def test_scales_stay_while_rows_stored_with_them_may_be_read():
    m = make_manager(draft_kv_dtype="float8_e4m3fn")
    m.set_scales(2, 1.0, 1.0)
    run(m, 0, list(range(9)))
    m.free_resources(0)
    assert m.stats().num_cached == 1
    with pytest.raises(ValueError, match="present scales"):
        m.set_scales(2, 2.0, 2.0)
    m.clear_prefix_index()
    m.set_scales(2, 2.0, 2.0)
    assert m.page_view(2).k_scale.tolist() == [2.0]


# Steps


def test_lookahead_is_reserved_in_every_step_prefills_last_chunk_included():
    """Pitfall 19: K rows instead of K + 1, or none in the prefill's last chunk."""
    m = make_manager(num_lookahead_tokens=8)  # K = 7
    m.add_sequence(0, list(range(20)))
    for num_rows, chunk in ((0, 10), (10, 10)):
        m.prepare_resources([(0, chunk)])
        assert m.num_held_blocks(0) == blocks_of(num_rows + chunk + 8, TPB)
        m.update_resources([(0, list(range(num_rows, num_rows + chunk)))])
        assert m.num_held_blocks(0) == blocks_of(num_rows + chunk, TPB)
    for accepted in (1, 8, 3):
        num_rows = m.num_tokens(0)
        m.prepare_resources([(0, 0)])
        assert m.num_held_blocks(0) == blocks_of(num_rows + 8, TPB)
        m.update_resources([(0, [7] * accepted)])
        assert m.num_tokens(0) == num_rows + accepted
        assert m.num_held_blocks(0) == blocks_of(num_rows + accepted, TPB)


def test_a_request_never_holds_more_than_max_seq_len():
    m = make_manager(max_seq_len=30, num_blocks=20)
    run(m, 0, list(range(28)))
    m.prepare_resources([(0, 0)])
    assert m.num_held_blocks(0) == 4 == m.max_blocks_per_seq
    assert_refused(m, ValueError, "reserved up to 30", lambda: m.update_resources([(0, [1, 2, 3])]))
    m.update_resources([(0, [1, 2])])
    m.prepare_resources([(0, 0)])
    assert m.num_held_blocks(0) == 4
    assert_refused(m, ValueError, "max_seq_len 30", lambda: m.prepare_resources([(0, 1)]))
    assert_refused(m, ValueError, "reserved up to 30", lambda: m.update_resources([(0, [1])]))
    assert_refused(m, ValueError, "max_seq_len", lambda: m.add_sequence(1, [0] * 31))


def test_preparing_again_replaces_the_reservation():
    m = make_manager()
    m.add_sequence(0, list(range(40)))
    for new, held in ((40, 6), (4, 1), (12, 2), (12, 2)):
        m.prepare_resources([(0, new)])
        assert m.num_held_blocks(0) == held
        m.check_invariants()


def test_every_block_can_be_held_there_is_no_scratch_page():
    """Pitfall 2: a scratch row of the wrong size aliases a live one. Padding is -1 and owns nothing."""
    m = make_manager(num_blocks=8, max_batch_size=4)
    for request_id in range(4):
        m.add_sequence(request_id, [request_id] * 12)
    m.prepare_resources([(i, 12) for i in range(4)])
    tables = m.block_tables([2, None, 0, 1, None, 3])
    assert tables.shape == (1, 6, 8) and tables.dtype == torch.int32
    held = tables[tables >= 0].tolist()
    assert sorted(held) == list(range(8)), "each block once, all of them used"
    assert (tables[0, [1, 4]] == -1).all()
    assert m.ctx_starts([2, None]).tolist() == [0, 0] and m.ctx_starts([None]).dtype == torch.int32
    assert tables[0, 0, :2].tolist() == m.get_batch_cache_indices([2], layer_idx=4)[0]


def test_a_batch_that_does_not_fit_changes_nothing():
    """Pitfall 38: a failed allocation leaves orphans, or hands blocks out in another order afterwards."""
    m, twin = make_manager(), make_manager()
    for each in (m, twin):
        run(each, 0, list(range(24)))
        run(each, 1, [5] * 17)
        each.free_resources(0)  # three cached blocks, seven others of which three are held
        each.add_sequence(2, list(range(100, 140)))
        each.add_sequence(3, [9] * 30)
    assert m.stats().num_free == 4 and m.stats().num_evictable == 3
    # request 1 fits by itself, the batch doesn't
    batch = [(1, 0), (2, 40), (3, 30)]
    assert not m.can_prepare(batch) and m.can_prepare(batch[:2])
    words = "11 more blocks of group 0 are needed; 4 are free and 3 can be evicted, of 10"
    assert_refused(m, OutOfBlocks, words, lambda: m.prepare_resources(batch))
    for each in (m, twin):
        each.prepare_resources(batch[:2])
    assert m.get_batch_cache_indices([1, 2, 3]) == twin.get_batch_cache_indices([1, 2, 3])
    assert m.dump() == twin.dump()


def test_blocks_given_back_by_one_request_serve_another_of_the_same_batch():
    m = make_manager(num_blocks=6)
    m.add_sequence(0, list(range(40)))
    m.add_sequence(1, list(range(50, 90)))
    m.prepare_resources([(0, 40)])
    assert m.blocks_needed(1, 20) == [3] and not m.can_prepare([(1, 20)])
    m.prepare_resources([(1, 20), (0, 4)])
    assert (m.num_held_blocks(0), m.num_held_blocks(1)) == (1, 3)
    m.check_invariants()


def test_blocks_come_back_in_the_order_in_which_they_went():
    m = make_manager()
    m.add_sequence(0, list(range(30)))
    m.prepare_resources([(0, 30)])
    first = m.get_batch_cache_indices([0])
    m.free_resources(0)
    m.add_sequence(1, list(range(30)))
    m.prepare_resources([(1, 30)])
    assert m.get_batch_cache_indices([1]) == first


def test_rewinding_drops_rows_but_never_published_ones():
    m = make_manager()
    run(m, 0, list(range(21)))
    assert_refused(m, ValueError, "first 16 are published, .*at most 5", lambda: m.rewind(0, 6))
    assert_refused(m, ValueError, "num_tokens", lambda: m.rewind(0, -1))
    m.prepare_resources([(0, 0)])
    m.rewind(0, 5)
    assert (m.num_tokens(0), m.num_held_blocks(0)) == (16, 2)
    m.check_invariants()
    m.prepare_resources([(0, 0)])
    m.update_resources([(0, [70])])
    assert m.add_sequence(1, list(range(17))).num_reused_blocks == 2


def test_without_prefix_reuse_nothing_is_published_and_all_can_be_rewound():
    m = make_manager(enable_prefix_reuse=False)
    run(m, 0, list(range(21)))
    assert m.stats().num_published == 0
    m.rewind(0, 21)
    assert m.num_held_blocks(0) == 0
    run(m, 1, list(range(21)))
    m.free_resources(1)
    assert m.stats().num_free == 10


@pytest.mark.parametrize("num_lookahead_tokens", [1, 4, 9])
def test_the_planner_and_the_manager_count_the_same_blocks_and_bytes(num_lookahead_tokens):
    m = make_manager(num_blocks=40, num_lookahead_tokens=num_lookahead_tokens)
    assert m.get_cache_size_per_token() == bytes_per_token(list(m.layers.values()))
    lengths = [1, 8, 30, 63]
    for request_id, length in enumerate(lengths):
        run(m, request_id, [request_id] * length)
        assert m.blocks_for(length) == blocks_held(
            length, tokens_per_block=TPB, num_lookahead_tokens=num_lookahead_tokens, max_seq_len=64
        )
    m.prepare_resources([(i, 0) for i in range(4)])
    cost = paged_cost(
        list(m.layers.values()), lengths, max_seq_len=64, num_draft_tokens=num_lookahead_tokens - 1, tokens_per_block=TPB
    )
    assert m.stats().used_bytes == cost.held_bytes
    assert m.stats().fragmentation_bytes == cost.lookahead_bytes + cost.rounding_bytes


# Prefix reuse


@pytest.mark.parametrize(
    "num_tokens, reused", [(1, 0), (8, 0), (9, 1), (16, 1), (17, 2), (24, 2), (25, 3), (40, 3)]
)
def test_a_hit_takes_every_full_block_before_the_last_token(num_tokens, reused):
    """Pitfall 20: the last block is dropped as if the draft needed the next token."""
    m = make_manager()
    run(m, 0, list(range(24)))
    m.free_resources(0)
    start = m.add_sequence(1, list(range(num_tokens)))
    assert (start.num_reused_blocks, start.num_reused_tokens) == (reused, reused * TPB)
    assert m.stats().hit_tokens == reused * TPB == m.num_tokens(1)


def test_a_block_is_found_while_its_first_owner_still_runs():
    m = make_manager()
    run(m, 0, list(range(20)))
    assert run(m, 1, list(range(20))).num_reused_blocks == 2
    assert m.block_owners()[:2] == [(0, 1), (0, 1)]
    m.free_resources(0)
    assert m.block_owners()[:2] == [(1,), (1,)]


def test_rows_that_were_not_kept_are_not_published():
    """A full block of rejected rows, or of an aborted chunk, means nothing."""
    m = make_manager(num_lookahead_tokens=8)
    m.add_sequence(0, list(range(16)))
    m.prepare_resources([(0, 16)])
    m.free_resources(0)  # aborted between reservation and commit
    assert m.stats().num_free == 10 and m.stats().num_published == 0
    run(m, 1, list(range(100, 107)))
    m.prepare_resources([(1, 0)])
    m.update_resources([(1, [107, 108])])
    assert m.stats().num_published == 1
    assert m.add_sequence(2, list(range(100, 120))).num_reused_tokens == 8


def test_draft_rows_come_back_with_their_block_or_are_reported_missing():
    """Pitfall 16: restored tokens have no draft rows, yet the lengths span them."""
    m = make_manager()
    run(m, 0, list(range(30)))
    m.free_resources(0)
    assert m.add_sequence(1, list(range(30))).ctx_start == 0
    m.free_resources(1)
    assert m.withhold_draft_rows() == 3
    start = run(m, 2, list(range(40)))
    assert (start.num_reused_tokens, start.ctx_start) == (24, 24)
    assert m.ctx_starts([2, None]).tolist() == [24, 0]
    # its later blocks are complete, the first three still aren't
    assert m.add_sequence(3, list(range(50))).ctx_start == 24
    assert m.ctx_starts([3]).tolist() == [24] and m.num_tokens(3) == 40


def test_blocks_in_use_keep_their_draft_rows_when_others_are_withheld():
    m = make_manager()
    run(m, 0, list(range(10)))
    run(m, 1, list(range(30)))
    m.free_resources(1)
    assert m.withhold_draft_rows() == 2
    assert m.add_sequence(2, list(range(12))).ctx_start == 0
    start = m.add_sequence(3, list(range(30)))
    assert (start.num_reused_tokens, start.ctx_start) == (24, 24)


def test_truncate_ends_the_hit_before_the_first_missing_row():
    m = make_manager(missing_draft_policy="truncate")
    run(m, 0, list(range(10)))
    run(m, 1, list(range(30)))
    m.free_resources(1)
    m.withhold_draft_rows()
    start = run(m, 2, list(range(30)))
    assert (start.num_reused_tokens, start.ctx_start) == (8, 0)
    assert m.add_sequence(3, list(range(30))).num_reused_tokens == 24, "request 2 healed the index"


def test_a_manager_without_draft_layers_has_no_draft_rows_to_miss():
    m = make_manager(draft_layers=[])
    run(m, 0, list(range(30)))
    m.free_resources(0)
    assert m.withhold_draft_rows() == 0
    assert m.add_sequence(1, list(range(30))).ctx_start == 0


def test_a_recomputed_block_replaces_an_idle_one_without_draft_rows():
    m = make_manager()
    run(m, 0, list(range(30)))
    m.free_resources(0)
    m.withhold_draft_rows()
    run(m, 1, list(range(30)), reuse_prefix=False)
    assert m.stats().num_published == 3
    m.free_resources(1)
    start = m.add_sequence(2, list(range(30)))
    assert (start.num_reused_tokens, start.ctx_start) == (24, 0)


def test_a_block_without_draft_rows_stays_while_somebody_reads_its_target_rows():
    m = make_manager()
    run(m, 0, list(range(10)))
    m.free_resources(0)
    m.withhold_draft_rows()
    assert m.add_sequence(1, list(range(10))).ctx_start == 8
    held = m.get_batch_cache_indices([1])
    run(m, 2, list(range(10)), reuse_prefix=False)
    m.check_invariants()
    assert m.get_batch_cache_indices([1]) == held and m.stats().num_published == 1
    assert m.add_sequence(3, list(range(10))).ctx_start == 8


@pytest.mark.parametrize("one, other", [(None, 0), (0, 1), (1, "1"), ("a", "b"), (None, "None")])
def test_tenants_with_different_salts_share_nothing(one, other):
    m = make_manager()
    run(m, 0, list(range(20)), salt=one)
    assert run(m, 1, list(range(20)), salt=other).num_reused_tokens == 0
    assert not set(m.get_batch_cache_indices([0])[0]) & set(m.get_batch_cache_indices([1])[0])
    assert m.add_sequence(2, list(range(20)), salt=one).num_reused_tokens == 16
    assert m.add_sequence(3, list(range(20)), salt=other).num_reused_tokens == 16


def test_equal_hashes_of_different_contents_are_no_hit(monkeypatch):
    monkeypatch.setattr(blocks_module, "chain_hash", lambda parent_key, tokens: 7)
    m = make_manager(num_blocks=20)
    run(m, 0, list(range(30)))
    assert m.stats().num_published == 1, "the second block collides with the first"
    assert run(m, 1, list(range(100, 130))).num_reused_tokens == 0
    assert run(m, 2, list(range(30))).num_reused_tokens == 8
    assert run(m, 3, list(range(30)), salt="other").num_reused_tokens == 0
    for request_id in range(4):
        m.free_resources(request_id)
    m.check_invariants()
    assert m.stats().num_free == 19 and m.stats().num_cached == 1


def test_the_same_tokens_behind_another_prefix_are_another_block():
    m = make_manager()
    run(m, 0, [1] * 8 + [2] * 8)
    assert m.add_sequence(1, [3] * 8 + [2] * 8 + [0]).num_reused_tokens == 0
    assert m.add_sequence(2, [2] * 9).num_reused_tokens == 0


def test_two_requests_that_compute_the_same_block_keep_their_own():
    m = make_manager()
    for request_id in (0, 1):
        m.add_sequence(request_id, list(range(20)))
    m.prepare_resources([(0, 20), (1, 20)])
    tables = m.get_batch_cache_indices([0, 1])
    m.update_resources([(0, list(range(20))), (1, list(range(20)))])
    assert m.stats().num_published == 2
    assert m.get_batch_cache_indices([0, 1]) == tables, "no table changes under a running request"
    m.free_resources(1)
    assert m.stats().num_cached == 0, "the second copy is free at once"
    m.free_resources(0)
    assert m.stats().num_cached == 2


def test_publishing_never_makes_an_available_block_unavailable():
    """What admission promised to others stays there while a request only commits what it has reserved."""
    m = make_manager()
    for request_id in (0, 1):
        m.add_sequence(request_id, list(range(20)))
    m.prepare_resources([(0, 20), (1, 20)])
    m.update_resources([(i, list(range(20))) for i in (0, 1)])  # request 1 holds copies
    m.free_resources(0)
    m.prepare_resources([(1, 0)])
    copies, available = m.get_batch_cache_indices([1])[0], m.num_available_blocks()
    m.update_resources([(1, [20, 21, 22, 23])])  # its third block is published behind two cached ones
    m.check_invariants()
    assert m.num_available_blocks() == available
    assert m.stats().num_published == 3 and m.stats().num_cached == 0, "they moved onto its copies"
    assert m.get_batch_cache_indices([1])[0] == copies
    assert m.add_sequence(2, list(range(25))).num_reused_blocks == 3
    assert m.get_batch_cache_indices([2])[0] == copies


def test_nothing_is_left_of_a_tenant_whose_blocks_are_gone():
    m = make_manager(max_seq_len=128)
    run(m, 0, [1] * 16, salt="one")
    run(m, 1, [1] * 8, salt="two")
    m.free_resources(0)
    m.free_resources(1)
    assert set(m._ledger.tree.roots) == {"one", "two"}
    m.add_sequence(2, [2])
    m.prepare_resources([(2, 68)])
    assert set(m._ledger.tree.roots) == {"two"}
    m.prepare_resources([(2, 72)])
    assert m._ledger.tree.roots == {} == m._ledger.tree.nodes


def test_a_copy_is_published_when_the_first_one_was_evicted():
    m = make_manager(num_blocks=8)
    for request_id in (0, 1):
        m.add_sequence(request_id, list(range(10)))
    m.prepare_resources([(0, 10), (1, 10)])
    m.update_resources([(i, list(range(10))) for i in (0, 1)])
    m.free_resources(0)
    m.add_sequence(2, [9] * 40)
    m.prepare_resources([(2, 40)])  # six blocks: evicts the first copy
    assert m.stats().num_evicted == 1 and m.stats().num_published == 0
    m.free_resources(2)
    m.prepare_resources([(1, 6)])
    m.update_resources([(1, list(range(10, 16)))])
    m.check_invariants()
    assert m.stats().num_published == 2
    assert m.add_sequence(3, list(range(17))).num_reused_tokens == 16


def test_several_evicted_blocks_are_published_again_from_a_copy():
    m = make_manager(num_blocks=12)
    for request_id in (0, 1):
        m.add_sequence(request_id, list(range(20)))
    m.prepare_resources([(0, 20), (1, 20)])
    m.update_resources([(i, list(range(20))) for i in (0, 1)])
    copies = m.get_batch_cache_indices([1])[0]
    m.free_resources(0)
    m.add_sequence(2, [9] * 60)
    m.prepare_resources([(2, 60)])
    assert m.stats().num_evicted == 1, "the deeper one"
    m.add_sequence(3, [8])
    m.prepare_resources([(3, 1)])
    assert m.stats().num_evicted == 2
    m.free_resources(2)
    m.prepare_resources([(1, 0)])
    m.update_resources([(1, list(range(20, 24)))])
    m.check_invariants()
    assert m.stats().num_published == 3
    m.add_sequence(4, list(range(25)))
    assert m.get_batch_cache_indices([4])[0] == copies


# Eviction


def evictions(m: KVCacheManager, prompts: dict[str, list[int]]) -> list[str]:
    """Names of the prompts whose last block goes, in the order in which pressure evicts them."""
    known = dict(prompts)
    order = []
    while known:
        block_count = m.stats().num_free + 1
        request_id = 1000 + len(order)
        m.add_sequence(request_id, [77])
        m.prepare_resources([(request_id, TPB * block_count - m.num_lookahead_tokens)])
        m.check_invariants()
        m.free_resources(request_id)
        m.check_invariants()
        gone = [n for n, p in known.items() if len(m._ledger.tree.match(m.hash_prompt([*p, 0]))) < len(p) // TPB]
        for name in gone:
            del known[name]
        order += gone
    return order


def test_the_least_recently_used_prefix_goes_first():
    m = make_manager(max_seq_len=128)
    prompts = {name: [i] * TPB for i, name in enumerate("abcd")}
    for i, name in enumerate("abcd"):
        run(m, i, prompts[name])
        m.free_resources(i)
    m.add_sequence(10, [*prompts["a"], 0])  # a hit makes it recent
    m.free_resources(10)
    assert evictions(m, prompts) == ["b", "c", "d", "a"]


def test_leaves_go_before_the_prefix_that_they_hang_on():
    m = make_manager(max_seq_len=128)
    trunk = [1] * TPB
    branches = {"trunk": trunk, "left": trunk + [2] * TPB, "right": trunk + [3] * TPB}
    for i, name in enumerate(("left", "right")):
        run(m, i, branches[name])
        m.free_resources(i)
    assert evictions(m, branches) == ["left", "right", "trunk"]


def test_free_blocks_are_used_before_anything_is_evicted():
    m = make_manager()
    run(m, 0, [1] * 32)
    m.free_resources(0)
    m.add_sequence(1, [2] * 44)
    m.prepare_resources([(1, 44)])
    assert m.stats().num_evicted == 0 and m.stats().num_free == 0
    m.add_sequence(2, [3] * 2)
    m.prepare_resources([(2, 2)])
    assert m.stats().num_evicted == 1


def test_a_referenced_block_is_never_evicted_nor_what_leads_to_it():
    m = make_manager(num_blocks=6)
    for request_id in (0, 1):
        m.add_sequence(request_id, [1] * 16)
    m.prepare_resources([(0, 8), (1, 8)])
    m.update_resources([(0, [1] * 8), (1, [1] * 8)])  # request 1 holds a copy of request 0's block
    m.prepare_resources([(1, 8)])
    m.update_resources([(1, [1] * 8)])  # published behind request 0's block
    before = m.block_owners()
    assert before.count((0,)) == 1 and before.count((1,)) == 2
    m.free_resources(0)  # request 1 builds on its block: the index goes over to request 1's copy
    stats = m.stats()
    assert (stats.num_cached, stats.num_evictable, stats.num_free, stats.num_published) == (0, 0, 4, 2)
    m.add_sequence(2, [2] * 36)
    words = "5 more blocks of group 0 are needed; 4 are free and 0 can be"
    assert_refused(m, OutOfBlocks, words, lambda: m.prepare_resources([(2, 36)]))
    m.free_resources(1)
    m.check_invariants()
    m.prepare_resources([(2, 36)])
    m.check_invariants()


def test_a_block_whose_last_holder_was_a_copy_goes_back_too(monkeypatch):
    """Its holder ends while a copy of it is under way; a twin builds on it with a copy of its own."""
    m = make_manager(num_blocks=8, enable_partial_reuse=True)
    for request_id in (0, 1):
        m.add_sequence(request_id, [1] * 16)
    m.prepare_resources([(0, 8), (1, 8)])
    m.update_resources([(0, [1] * 8), (1, [1] * 8)])
    m.prepare_resources([(1, 8)])
    m.update_resources([(1, [1] * 8)])
    with monkeypatch.context() as patch:
        patch.setattr("dflash_paged.manager.has_passed", lambda mark: False)
        assert m.add_sequence(2, [1] * 4 + [7] * 8).num_copied_tokens == 4
        m.free_resources(0)
    stats = m.stats()  # joins the copy
    assert (stats.num_cached, stats.num_referenced, stats.num_free, stats.num_published) == (0, 3, 5, 2)
    m.check_invariants()


def test_clearing_the_index_frees_cached_blocks_and_stops_publication_of_old_rows():
    m = make_manager()
    run(m, 0, list(range(24)))
    m.free_resources(0)
    run(m, 1, list(range(18)))
    run(m, 2, list(range(18)))
    assert m.block_owners()[:2] == [(1, 2), (1, 2)]
    m.clear_prefix_index()
    m.check_invariants()
    stats = m.stats()
    assert (stats.num_cached, stats.num_published, stats.num_referenced) == (0, 0, 4)
    m.prepare_resources([(1, 0), (2, 0)])
    m.update_resources([(1, [1] * 4), (2, [2] * 4)])
    m.prepare_resources([(1, 0), (2, 0)])
    m.update_resources([(1, [1] * 4), (2, [2] * 4)])
    assert m.stats().num_published == 0
    assert_refused(m, ValueError, "published", lambda: m.rewind(1, 20))
    m.free_resources(1)
    m.free_resources(2)
    m.check_invariants()
    assert m.stats().num_free == 10
    run(m, 3, list(range(18)))
    assert m.stats().num_published == 2


# Admission, ids, values


def test_admission_counts_the_hit_and_the_cached_blocks_that_it_pins():
    m = make_manager(num_blocks=8)
    run(m, 0, list(range(24)))
    m.free_resources(0)
    assert m.num_available_blocks() == 8 and m.stats().num_cached == 3
    prompt = list(range(28))
    assert m.blocks_to_admit(prompt, 28) == [4] == m.blocks_to_admit([9] * 28, 28), (
        "cached ones are taken, too"
    )
    assert m.blocks_to_admit(prompt, 50) == [7] and m.blocks_to_admit(prompt, 8) == [3]
    run(m, 1, prompt)
    assert m.num_available_blocks() == 4
    assert m.blocks_to_admit(prompt, 28) == [1], "held ones are shared for nothing"
    assert m.blocks_to_admit(prompt, 28, salt="x") == [4] == m.blocks_to_admit(prompt, 28, reuse_prefix=False)
    assert_refused(m, ValueError, "num_tokens", lambda: m.blocks_to_admit(prompt, -1))
    before = m.dump()
    cost = m.blocks_to_admit(prompt, 40)[0]
    assert m.dump() == before
    m.add_sequence(2, prompt)
    m.prepare_resources([(2, 16)])
    assert m.num_available_blocks() == 4 - cost


def test_a_prompt_that_can_never_fit_is_refused_by_itself():
    """Pitfall 32: one oversized request kills the batch."""
    m = make_manager(num_blocks=4)
    run(m, 0, [1] * 8)
    words = "29 and 4 lookahead rows need 5 blocks of 8 .*, the pool has 4"
    assert_refused(m, ValueError, words, lambda: m.add_sequence(1, [2] * 29))
    m.add_sequence(1, [2] * 28)


CALLS = {
    "prepare_resources": lambda m, i: m.prepare_resources([(i, 1)]),
    "can_prepare": lambda m, i: m.can_prepare([(i, 1)]),
    "update_resources": lambda m, i: m.update_resources([(i, [1])]),
    "rewind": lambda m, i: m.rewind(i, 0),
    "num_tokens": lambda m, i: m.num_tokens(i),
    "num_held_blocks": lambda m, i: m.num_held_blocks(i),
    "blocks_needed": lambda m, i: m.blocks_needed(i),
    "get_batch_cache_indices": lambda m, i: m.get_batch_cache_indices([i]),
    "block_tables": lambda m, i: m.block_tables([i]),
    "ctx_starts": lambda m, i: m.ctx_starts([i]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_calls_on_unknown_and_finished_requests_raise(call):
    m = make_manager()
    run(m, 0, [1] * 12)
    run(m, 1, [1] * 12)
    m.free_resources(1)
    assert_refused(m, RequestError, "request 1 has finished", lambda: call(m, 1))
    assert_refused(m, KeyError, "request 2 is unknown", lambda: call(m, 2))


def test_freeing_twice_is_harmless_and_freeing_a_stranger_is_not():
    m = make_manager()
    run(m, 0, [1] * 12)
    m.free_resources(0)
    before = m.dump()
    m.free_resources(0)
    assert m.dump() == before
    assert_refused(m, KeyError, "request 5 is unknown", lambda: m.free_resources(5))
    assert_refused(m, ValueError, "0 has finished", lambda: m.add_sequence(0, [1]))


def test_a_bad_entry_fails_the_whole_batch_and_nothing_else_happens():
    m = make_manager()
    for request_id in range(5):
        run(m, request_id, [request_id] * 3)
    good = [(0, 4), (1, 4)]
    for entry, error, words in [
        ((0, 0), ValueError, "request 0 comes more than once"),
        ((9, 0), KeyError, "request 9 is unknown"),
        ((2, -1), ValueError, "num_new_tokens"),
        ((2, 1.0), ValueError, "num_new_tokens"),
        ((2, 62), ValueError, "request 2.*max_seq_len 64"),
    ]:
        assert_refused(m, error, words, lambda: m.prepare_resources([*good, entry]))  # noqa: B023
    assert_refused(
        m, ValueError, "at most 4 requests", lambda: m.prepare_resources([(i, 0) for i in range(5)])
    )
    m.prepare_resources([(i, 0) for i in range(4)])
    kept = [(0, [7] * 4), (1, [7] * 2)]
    for entry, error, words in [
        ((0, [1]), ValueError, "request 0 comes more than once"),
        ((9, [1]), KeyError, "request 9 is unknown"),
        ((2, [1] * 5), ValueError, "request 2: 5 rows after 3, but rows are reserved up to 7"),
        ((4, [1]), ValueError, "request 4.*prepare_resources comes first"),
        ((2, [1, -1]), ValueError, "request 2.*-1"),
        ((2, torch.tensor([1])), ValueError, "request 2.*tolist"),
    ]:
        assert_refused(m, error, words, lambda: m.update_resources([*kept, entry]))  # noqa: B023
    m.update_resources(kept)


@pytest.mark.parametrize(
    "request_id, tokens, options, words",
    [
        (0, [1], {}, "0 is running"),
        (-1, [1], {}, "request_id"),
        ("a", [1], {}, "request_id"),
        (1, [], {}, "1 to 64"),
        (1, [1, True], {}, "tokens.*True"),
        (1, [1, -1], {}, "tokens.*-1"),
        (1, [1.0], {}, "tokens"),
        (1, [1], dict(salt=1.5), "salt"),
        (1, [1], dict(salt=True), "salt"),
    ],
)
def test_a_bad_request_is_refused_before_it_exists(request_id, tokens, options, words):
    m = make_manager()
    run(m, 0, [1] * 12)
    assert_refused(m, ValueError, words, lambda: m.add_sequence(request_id, tokens, **options))


def test_layers_groups_and_kinds_out_of_range_are_refused():
    m = make_manager()
    run(m, 0, [1] * 3)
    for words, call in [
        ("layer_idx", lambda: m.page_view(5)),
        ("layer_idx", lambda: m.get_buffers(-1)),
        ("kv_layout", lambda: m.get_buffers(0, "HDN")),
        ("layer_idx", lambda: m.get_batch_cache_indices([0], layer_idx=5)),
        ("group", lambda: m.num_held_blocks(0, group=1)),
        ("group", lambda: m.num_available_blocks(1)),
        ("kind", lambda: m.get_cache_size_per_token("noise")),
    ]:
        assert_refused(m, ValueError, words, call)


def test_stats_count_blocks_and_bytes():
    m = make_manager()
    run(m, 0, list(range(20)))
    run(m, 1, list(range(20)))
    row_bytes = m.get_cache_size_per_token()
    stats = m.stats()
    assert (stats.num_free, stats.num_cached, stats.num_referenced, stats.num_published) == (6, 0, 4, 2)
    assert stats.used_bytes == 4 * TPB * row_bytes
    assert stats.fragmentation_bytes == 2 * 4 * row_bytes, "half of each last block"
    assert stats.hit_tokens == 16
    m.free_resources(0)
    m.free_resources(1)
    stats = m.stats()
    assert (stats.num_free, stats.num_cached, stats.used_bytes, stats.fragmentation_bytes) == (8, 2, 0, 0)


# The invariant checker itself


@pytest.mark.parametrize(
    "damage",
    [
        lambda m: m._ledger.pools[0].free.append(m._ledger.pools[0].free[0]),
        lambda m: m._ledger.pools[0].free.pop(),
        lambda m: m._ledger.pools[0].add_holder(0),
        lambda m: m._sequences[0].blocks[0].pop(),
        lambda m: m._sequences[1].blocks[0].__setitem__(2, m._sequences[0].blocks[0][2]),
        lambda m: m._sequences[0].tokens.__setitem__(0, 55),
        lambda m: m._ledger.pools[0].evictable.__setitem__(0, None),
        lambda m: m._ledger.pools[0].evictable.popitem(),
        lambda m: m._ledger.pools[0].evictable.move_to_end(next(iter(m._ledger.pools[0].evictable))),
        lambda m: m._ledger.tree.roots.clear(),
        lambda m: m._ledger.tree.nodes.popitem(),
        lambda m: setattr(next(iter(m._ledger.tree.nodes.values())), "pins", 0),
        lambda m: m._finished.add(0),
        lambda m: m.pools.group_tensors[0].pop(),
        lambda m: m.tables.host.__setitem__((0, 0, 5), 3),
        lambda m: m.tables.device.__setitem__((0, 0, 1), 3),
        lambda m: m.tables.free_rows.pop(),
        lambda m: m._sequences[0].nodes.append(m._sequences[0].nodes[0]),
    ],
)
def test_the_invariant_check_sees_damage(damage):
    m = make_manager()
    run(m, 0, list(range(20)))
    run(m, 1, list(range(20)))
    run(m, 2, [5] * 17)
    m.free_resources(2)
    m.check_invariants()
    damage(m)
    with pytest.raises((AssertionError, KeyError)):
        m.check_invariants()


# ------------------------------------------------------------------ V transposed in its page


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("v_layout", ["transposed", "transposed16"])
def test_a_layers_v_may_lie_transposed_in_its_pages(kv_layout, v_layout):
    """Pitfall 28 (vLLM PR 45343): the layout is part of the view, a pool of its own, and what is stored reads back."""
    draft = replace(DRAFT, v_layout=v_layout)
    manager = make_manager(draft_layers=[draft] * 2, tokens_per_block=16, kv_layout=kv_layout)
    plain = make_manager(draft_layers=[DRAFT] * 2, tokens_per_block=16, kv_layout=kv_layout)
    assert manager.pools.num_bytes == plain.pools.num_bytes  # the same bytes, in another order
    assert len(manager.pools.tensors) == 2
    slots = torch.tensor([0, 5, 31, 16, 159])
    k, v = (torch.randn(2, 5, draft.num_kv_heads, draft.head_dim) for _ in range(2))
    for i, layer in enumerate((2, 3)):
        view = manager.page_view(layer)
        assert view.v_layout == v_layout and view.v.untyped_storage().data_ptr() == view.k.untyped_storage().data_ptr()
        store_kv(k[i].to(view.dtype), v[i].to(view.dtype), slots, view)
    for i, layer in enumerate((2, 3)):
        got = read_rows_ref(manager.page_view(layer), slots)
        assert torch.equal(got[0], k[i].to(view.dtype).float()) and torch.equal(got[1], v[i].to(view.dtype).float())
        with pytest.raises(ValueError, match=f"^layer_idx: expected a layer with V by row, got {layer}, {v_layout}"):
            manager.get_buffers(layer)
    assert manager.get_buffers(0).shape[1] == 2


def test_an_unknown_v_layout_is_refused():
    with pytest.raises(ValueError, match="^v_layout: expected one of 'row', 'transposed', 'transposed16'"):
        replace(DRAFT, v_layout="columns")
