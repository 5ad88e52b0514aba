"""What contexts cost in bytes, and how many requests fit."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_paged import memory
from dflash_paged.memory import (
    CATALOGUE,
    GB,
    GIB,
    KIB,
    LayerSpec,
    Lengths,
    Machine,
    ModelGeometry,
    ModelPair,
    Serving,
    blocks_held,
    bytes_per_token,
    dense_reservation,
    describe_layers,
    geometry_from_config,
    num_extra_kv_tokens,
    paged_cost,
    plan_capacity,
    plan_frame,
    plan_rows,
    plan_table,
    planner,
    planner_html,
    planner_plans,
    pp_split,
    requests_that_fit,
    rows_stored,
    shard_layer,
    stack,
    window_groups,
)

TOP = Path(__file__).parents[1]
NOTEBOOK = TOP / "notebooks" / "01_memory.ipynb"
MINIMAX = CATALOGUE["MiniMax-M2.5-NVFP4"]
ISSUE_RANK = tuple(shard_layer(layer, 2) for layer in MINIMAX.draft.layers)
ISSUE_MACHINE = Machine(180 * GB, tp_size=2, other_bytes=10 * GB)
ISSUE_SERVING = Serving(131_072, 64, 4)
few = settings(max_examples=60, deadline=None)


def issue_dense(**changes):
    fields = dict(max_batch_size=64, max_seq_len=131_072, num_draft_tokens=4, draft_block_size=8)
    return dense_reservation(ISSUE_RANK, **{**fields, **changes})


# The numbers of the issue and of the reports


def test_draft_token_costs_10240_bytes_a_rank():
    assert bytes_per_token(ISSUE_RANK) == 2 * 5 * 4 * 128 * 2 == 10_240


@pytest.mark.parametrize("num_draft_tokens, overlap", [(4, True), (6, False)])
def test_both_settings_give_the_logged_max_ctx(num_draft_tokens, overlap):
    dense = issue_dense(num_draft_tokens=num_draft_tokens, overlap_scheduler=overlap)
    assert (dense.max_ctx, dense.rows_per_slot, dense.token_slots) == (131_083, 131_091, 8_389_824)


def test_dense_reservation_is_80_gib_or_86_gb():
    dense = issue_dense()
    assert dense.reserved_bytes == 85_911_797_760
    assert f"{dense.reserved_bytes / GIB:.2f} {dense.reserved_bytes / GB:.2f}" == "80.01 85.91"


def test_dense_layout_equals_the_product_of_the_buffer_shape():
    """`[max_batch, layers, max_ctx + block, heads, dim]`, bf16, for K and for V."""
    assert issue_dense().reserved_bytes == 2 * (64 * 5 * (131_083 + 8) * 4 * 128) * 2


def test_extra_kv_tokens_are_never_negative():
    assert [num_extra_kv_tokens(k, o) for k in (0, 1) for o in (True, False)] == [0, 0, 2, 1]


def test_mla_drafter_costs_5760_bytes_beside_20480():
    gqa, mla = CATALOGUE["Kimi-K3 (GQA drafter)"], CATALOGUE["Kimi-K3 (MLA drafter)"]
    assert (gqa.draft.bytes_per_token, mla.draft.bytes_per_token) == (20_480, 5_760)
    assert gqa.target.bytes_per_token == mla.target.bytes_per_token == 27_648
    assert f"{1_779_275 * 20_480 / GIB:.2f} {2_491_831 * 5_760 / GIB:.2f}" == "33.94 13.37"


def test_qwen_draft_costs_20_kib_beside_64_kib_of_target():
    pair = CATALOGUE["Qwen3.8-27B"]
    assert pair.draft.bytes_per_token == 20 * KIB and pair.target.bytes_per_token == 64 * KIB
    assert round(pair.target.bytes_per_token * GB / GIB / KIB, 1) == 59.6  # the reported number: GB for GiB
    assert round(450_060 * pair.target.bytes_per_token / GIB, 1) == 27.5


def test_k3_reservation_is_21_4_gib_a_rank():
    rank = [shard_layer(layer, 8) for layer in CATALOGUE["Kimi-K3 (GQA drafter)"].draft.layers]
    dense = dense_reservation(
        rank, max_batch_size=9, max_seq_len=997_696, num_draft_tokens=0, draft_block_size=7
    )
    assert round(dense.reserved_bytes / GIB, 1) == 21.4


# Layers


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(num_kv_heads=0, head_dim=64), "num_kv_heads: expected an int >= 1, got 0"),
        (dict(num_kv_heads=8, head_dim=0), "head_dim: expected an int >= 1"),
        (dict(num_kv_heads=True, head_dim=64), "num_kv_heads: expected an int >= 1, got True"),
        (dict(num_kv_heads=8, head_dim=64, dtype="int4"), "dtype: expected one of 'float32'"),
        (dict(num_kv_heads=8, head_dim=64, sliding_window=0), "sliding_window: expected an int >= 1"),
        (dict(num_kv_heads=1, head_dim=64, kv_factor=3), "kv_factor: expected one of 1, 2, got 3"),
        (dict(num_kv_heads=8, head_dim=576, kv_factor=1), "num_kv_heads: expected 1 with kv_factor 1"),
    ],
)
def test_bad_layer_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        LayerSpec(**fields)


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2), ("float16", 2), ("float8_e4m3fn", 1)])
def test_layer_bytes_are_factor_heads_dim_size(dtype, size):
    assert LayerSpec(3, 64, dtype).bytes_per_token == 2 * 3 * 64 * size
    assert LayerSpec(1, 576, dtype, kv_factor=1).bytes_per_token == 576 * size


def test_heads_divide_then_replicate():
    assert [shard_layer(LayerSpec(8, 64), tp).num_kv_heads for tp in (1, 2, 4, 8, 16, 32)] == [8, 4, 2, 1, 1, 1]
    assert shard_layer(LayerSpec(1, 576, kv_factor=1), 8) == LayerSpec(1, 576, kv_factor=1)


@pytest.mark.parametrize("heads, tp_size", [(3, 2), (8, 3), (8, 12), (4, 6)])
def test_heads_that_neither_divide_nor_replicate_are_refused(heads, tp_size):
    with pytest.raises(ValueError, match=f"multiple of num_kv_heads {heads}, got {tp_size}"):
        shard_layer(LayerSpec(heads, 64), tp_size)


# Dense


def test_dense_size_follows_the_runtime_not_the_checkpoint_limit():
    """Pitfall 11: sized from max_position_embeddings, the buffer of a long-context drafter grows for nothing."""
    short = issue_dense(max_seq_len=4_096, draft_max_positions=1_048_576)
    assert short.max_ctx == 4_096 + 11
    assert issue_dense(draft_max_positions=32_768).max_ctx == 32_768


def test_dense_buffer_ignores_windows():
    windowed = stack(5, 4, 128, sliding_window=2_048)
    fields = dict(max_batch_size=64, max_seq_len=131_072, num_draft_tokens=4, draft_block_size=8)
    assert dense_reservation(windowed, **fields).reserved_bytes == issue_dense().reserved_bytes


@pytest.mark.parametrize("name", ["max_batch_size", "max_seq_len", "draft_block_size", "draft_max_positions"])
def test_bad_dense_size_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name}: expected an int >= 1, got 0"):
        issue_dense(**{name: 0})


def test_dense_buffer_takes_no_more_drafts_than_its_block_holds():
    assert issue_dense(num_draft_tokens=7).draft_block_size == 8
    with pytest.raises(ValueError, match="num_draft_tokens: expected at most 1 with a block of 2, got 9"):
        issue_dense(num_draft_tokens=9, draft_block_size=2)


# Pages


@st.composite
def paged_cases(draw):
    max_seq_len = draw(st.integers(1, 600))
    return dict(
        num_tokens=draw(st.integers(1, max_seq_len)),
        max_seq_len=max_seq_len,
        tokens_per_block=draw(st.sampled_from([8, 16, 32, 64])),
        num_lookahead_tokens=draw(st.integers(1, 17)),
        sliding_window=draw(st.none() | st.integers(1, 300)),
    )


@few
@given(paged_cases())
def test_blocks_held_are_the_pages_of_readable_and_next_rows(case):
    """Position by position: a page is held if a readable row, or one up to the last lookahead row, lies in it."""
    n, window = case["num_tokens"], case["sliding_window"]
    readable = [p for p in range(n) if window is None or n - p < window]
    ahead = range(n, min(n + case["num_lookahead_tokens"], case["max_seq_len"]))
    pages = {p // case["tokens_per_block"] for p in [*readable, *ahead]}
    assert rows_stored(n, window) == len(readable)
    if pages:
        assert blocks_held(**case) == max(pages) - min(pages) + 1 == len(pages)


def test_window_releases_a_page_at_the_exact_row():
    """Every (length, window) pair: the first held page is that of the oldest readable row."""
    for n in range(1, 60):
        for window in range(2, 40):
            oldest = min(p for p in range(n) if n - p < window)
            held = blocks_held(
                n, tokens_per_block=8, num_lookahead_tokens=1, max_seq_len=64, sliding_window=window
            )
            assert held == n // 8 - oldest // 8 + 1, (n, window)


def test_full_group_holds_the_block_count_of_the_design():
    """ceil(min(n + K + 1, max_seq_len) / tokens_per_block), as the manager holds between prepare and update."""
    for n in range(1, 101):
        held = blocks_held(n, tokens_per_block=8, num_lookahead_tokens=5, max_seq_len=100)
        assert held == -(-min(n + 5, 100) // 8)


@few
@given(
    lengths=st.lists(st.integers(1, 512), min_size=1, max_size=8),
    num_draft_tokens=st.integers(0, 16),
    tokens_per_block=st.sampled_from([8, 32, 128]),
    windows=st.lists(st.none() | st.integers(1, 600), min_size=1, max_size=4),
)
def test_paged_bytes_are_conserved_and_bounded(lengths, num_draft_tokens, tokens_per_block, windows):
    layers = [LayerSpec(2, 16, sliding_window=w) for w in windows]
    fields = dict(max_seq_len=512, num_draft_tokens=num_draft_tokens, tokens_per_block=tokens_per_block)
    cost = paged_cost(layers, lengths, **fields)
    full = paged_cost(layers, lengths, count_windows=False, **fields)
    page = tokens_per_block * layers[0].bytes_per_token
    assert min(cost.stored_bytes, cost.lookahead_bytes, cost.rounding_bytes) >= 0
    assert cost.stored_bytes + cost.lookahead_bytes + cost.rounding_bytes == cost.held_bytes
    assert cost.held_bytes % page == 0 and cost.rounding_bytes < 2 * page * len(lengths) * len(layers)
    assert cost.held_bytes <= full.held_bytes
    dense = dense_reservation(layers, max_batch_size=len(lengths), max_seq_len=512,
                              num_draft_tokens=num_draft_tokens, draft_block_size=num_draft_tokens + 1)
    assert full.stored_bytes <= full.held_bytes <= dense.reserved_bytes  # 512 is a multiple of every page


@few
@given(st.integers(1, 511), st.integers(0, 15), st.sampled_from([8, 32, 128]))
def test_paged_cost_grows_with_length_and_drafts(num_tokens, num_draft_tokens, tokens_per_block):
    def held(n, k):
        fields = dict(max_seq_len=512, num_draft_tokens=k, tokens_per_block=tokens_per_block)
        return paged_cost(ISSUE_RANK, [n], **fields).held_bytes

    assert held(num_tokens, num_draft_tokens) <= held(num_tokens + 1, num_draft_tokens)
    assert held(num_tokens, num_draft_tokens) <= held(num_tokens, num_draft_tokens + 1)


def test_windowed_layer_costs_a_constant():
    layers = stack(5, 8, 128, sliding_window=2_048)
    fields = dict(max_seq_len=262_144, num_draft_tokens=7)
    costs = {paged_cost(layers, [n], **fields).held_bytes for n in range(3_000, 4_000, 32)}
    assert len(costs) == 1
    assert costs.pop() <= (2_047 + 8 + 2 * 31) * bytes_per_token(layers)


def test_lookahead_is_k_plus_one():
    """Pitfall 19: K rows of lookahead are one too few."""
    fields = dict(max_seq_len=128, tokens_per_block=8)
    assert paged_cost(stack(1, 1, 1), [8], num_draft_tokens=7, **fields).held_bytes == 16 * 4
    assert paged_cost(stack(1, 1, 1), [8], num_draft_tokens=8, **fields).held_bytes == 24 * 4


def test_planner_reserves_the_lookahead_of_a_whole_verify_pass():
    """Pitfall 19, in admission: 8 tokens and K = 8 need 17 rows, a third page of 8."""
    pair = ModelPair(ModelGeometry("t", stack(1, 1, 1)), None)
    plans = [plan_capacity(Machine(6 * 8 * 4), pair, Lengths.constant(8), Serving(64, 99, k, tokens_per_block=8))
             for k in (7, 8)]
    assert [plan.requests for plan in plans] == [3, 2]


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(lengths=[]), "lengths: expected at least one request, got none"),
        (dict(lengths=[0]), "lengths: expected an int in 1..64, got 0"),
        (dict(lengths=[65]), "lengths: expected an int in 1..64, got 65"),
        (dict(lengths=[2.5]), "lengths: expected an int in 1..64, got 2.5"),
        (dict(max_seq_len=0), "max_seq_len: expected an int >= 1, got 0"),
        (dict(num_draft_tokens=-1), "num_draft_tokens: expected an int >= 0, got -1"),
        (dict(tokens_per_block=48), "tokens_per_block: expected a power of two from 8 to 256, got 48"),
    ],
)
def test_bad_paged_input_is_refused_by_name(changes, message):
    fields = {**dict(lengths=[3], max_seq_len=64, num_draft_tokens=2, tokens_per_block=8), **changes}
    with pytest.raises(ValueError, match=message):
        paged_cost(stack(1, 1, 1), **fields)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(num_tokens=500, max_seq_len=9, sliding_window=4),
         r"num_tokens: expected an int in 0\.\.9, got 500"),
        (dict(num_tokens=-5), r"num_tokens: expected an int in 0\.\.64, got -5"),
        (dict(tokens_per_block=0), "tokens_per_block: expected an int >= 1, got 0"),
        (dict(num_lookahead_tokens=-1), "num_lookahead_tokens: expected an int >= 0, got -1"),
        (dict(max_seq_len=0), "max_seq_len: expected an int >= 1, got 0"),
        (dict(sliding_window=-3), "sliding_window: expected an int >= 1, got -3"),
    ],
)
def test_blocks_of_impossible_requests_are_refused_by_name(changes, message):
    fields = dict(num_tokens=5, tokens_per_block=8, num_lookahead_tokens=3, max_seq_len=64)
    with pytest.raises(ValueError, match=message):
        blocks_held(**{**fields, **changes})


@pytest.mark.parametrize(
    "n, window, message",
    [
        (5, -3, "sliding_window: expected an int >= 1, got -3"),
        (5, 0, "sliding_window: expected an int >= 1, got 0"),
        (-1, None, "num_tokens: expected an int >= 0, got -1"),
    ],
)
def test_rows_of_impossible_requests_are_refused_by_name(n, window, message):
    with pytest.raises(ValueError, match=message):
        rows_stored(n, window)


def test_numpy_integers_count_like_ints_and_do_not_overflow():
    """131,072 tokens x 10,240 B x 64 requests is past 2**31: nothing may be computed in int32."""
    i32 = np.int32
    layers = stack(i32(5), i32(4), i32(128))
    lengths = np.full(64, 131_072, dtype=i32)
    fields = dict(max_seq_len=131_072, num_draft_tokens=4, tokens_per_block=32)
    cost = paged_cost(layers, lengths, **{name: i32(value) for name, value in fields.items()})
    assert cost == paged_cost(ISSUE_RANK, [131_072] * 64, **fields)
    sizes = dict(max_batch_size=64, max_seq_len=131_072, num_draft_tokens=4, draft_block_size=8)
    dense = dense_reservation(layers, **{name: i32(value) for name, value in sizes.items()})
    assert dense.reserved_bytes == issue_dense().reserved_bytes
    machine = Machine(np.int64(180 * GB), tp_size=i32(2), other_bytes=np.int64(10 * GB))
    plan = plan_capacity(machine, MINIMAX, Lengths.empirical(lengths), Serving(i32(131_072), i32(64), i32(4)))
    assert plan == plan_capacity(ISSUE_MACHINE, MINIMAX, Lengths.empirical([131_072] * 64), ISSUE_SERVING)
    assert plan.requests > 0


def test_groups_follow_windows():
    layers = stack(2, 8, 64) + stack(3, 8, 64, sliding_window=128)
    assert window_groups(layers) == {None: 2 * 2_048, 128: 3 * 2_048}
    assert window_groups(layers, count_windows=False) == {None: 5 * 2_048}


# Geometries and the catalogue


def test_catalogue_has_sourced_real_pairs():
    assert len(CATALOGUE) >= 6
    for pair in CATALOGUE.values():
        for model in (pair.target, pair.draft):
            assert "/" in model.source and model.bytes_per_token > 0
        assert pair.draft.draft_block_size > 1


def test_catalogue_entry_of_the_shipped_drafter_agrees_with_its_config():
    path = TOP / "dflash_paged" / "data" / "drafter" / "config.json"
    if not path.exists():
        pytest.skip("no drafter shipped in this tree")
    read = geometry_from_config(json.loads(path.read_text()), "shipped")
    ours = CATALOGUE["SmolLM2-135M-Instruct"].draft
    assert (read.layers, read.draft_block_size) == (ours.layers, ours.draft_block_size)


QWEN35 = dict(num_attention_heads=24, num_key_value_heads=4, head_dim=256, num_hidden_layers=64)


@pytest.mark.parametrize(
    "config, layers",
    [
        (dict(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_size=4_096),
         stack(32, 8, 128)),
        (dict(num_hidden_layers=2, num_attention_heads=4, hidden_size=256), stack(2, 4, 64)),
        (dict(text_config={**QWEN35, "full_attention_interval": 4}), stack(16, 4, 256)),
        ({**QWEN35, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16}, stack(16, 4, 256)),
        (dict(num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8, head_dim=64, sliding_window=128,
              layer_types=["sliding_attention", "full_attention"]),
         stack(1, 8, 64, sliding_window=128) + stack(1, 8, 64)),
        (dict(text_config=dict(num_hidden_layers=93, num_attention_heads=96, kv_lora_rank=512, qk_rope_head_dim=64,
                               linear_attn_config={"full_attn_layers": [*range(4, 93, 4), 93]})),
         stack(24, 1, 576, kv_factor=1)),
    ],
)
def test_geometry_is_read_from_a_config(config, layers):
    assert geometry_from_config(config, "test").layers == layers


def test_block_size_is_read_from_either_place():
    base = dict(num_hidden_layers=1, num_attention_heads=1, hidden_size=8)
    assert geometry_from_config({**base, "block_size": 16}, "a").draft_block_size == 16
    assert geometry_from_config({**base, "dflash_config": {"block_size": 8}}, "b").draft_block_size == 8
    assert geometry_from_config(base, "c").draft_block_size is None


@pytest.mark.parametrize(
    "config, message",
    [
        ({}, "expected the field 'num_hidden_layers' in the config of stub"),
        (dict(num_hidden_layers=1), "expected the field 'num_attention_heads'"),
        (dict(num_hidden_layers=1, layer_types=["chunked"]), "layer_types: .* in stub, got 'chunked'"),
        (dict(num_hidden_layers=1, layer_types=["linear_attention"]), "layers: expected at least one layer"),
        (dict(num_hidden_layers=1, num_attention_heads=4, head_dim=8, layer_types=["sliding_attention"]),
         "expected the field 'sliding_window'"),
        (None, "config of stub: expected a dict, got None"),
        (dict(text_config=None), "text_config of stub: expected a dict, got None"),
        (dict(text_config=[]), r"text_config of stub: expected a dict, got \[\]"),
        (dict(text_config="llama"), "text_config of stub: expected a dict, got 'llama'"),
        (dict(QWEN35, num_hidden_layers="64"), "num_hidden_layers of stub: expected an int >= 1, got '64'"),
        (dict(QWEN35, num_key_value_heads=0), "num_key_value_heads of stub: expected an int >= 1, got 0"),
        (dict(num_hidden_layers=1, num_attention_heads=0, hidden_size=8),
         "num_attention_heads of stub: expected an int >= 1, got 0"),
        (dict(QWEN35, head_dim=-1), "head_dim of stub: expected an int >= 1, got -1"),
        (dict(QWEN35, full_attention_interval=0), "full_attention_interval of stub: expected an int >= 1"),
        (dict(QWEN35, layer_types=["full_attention"] * 63),
         "layer_types of stub: expected 64, one a layer, got 63"),
        (dict(QWEN35, layer_types="full"), "layer_types of stub: expected a list, got 'full'"),
        (dict(QWEN35, linear_attn_config=7), "linear_attn_config of stub: expected a dict, got 7"),
        (dict(QWEN35, linear_attn_config={"full_attn_layers": 7}),
         "full_attn_layers of stub: expected a list, got 7"),
        (dict(num_hidden_layers=1, kv_lora_rank="512"), "kv_lora_rank of stub: expected an int >= 1"),
        (dict(QWEN35, num_hidden_layers=1, layer_types=["sliding_attention"], sliding_window=None),
         "sliding_window of stub: expected an int >= 1, got None"),
        (dict(QWEN35, dflash_config="b16"), "dflash_config of stub: expected a dict, got 'b16'"),
        (dict(QWEN35, block_size=0), "block_size of stub: expected an int >= 1, got 0"),
        (dict(QWEN35, max_position_embeddings="8k"), "max_position_embeddings of stub: expected an int >= 1"),
    ],
)
def test_unreadable_config_is_refused_by_name(config, message):
    with pytest.raises(ValueError, match=message):
        geometry_from_config(config, "stub")


def test_null_in_a_config_counts_as_absent():
    nulls = ("layer_types", "full_attention_interval", "linear_attn_config", "kv_lora_rank", "sliding_window",
             "block_size", "dflash_config", "max_position_embeddings")
    assert geometry_from_config({**QWEN35, **dict.fromkeys(nulls)}, "a") == geometry_from_config(QWEN35, "a")


def test_layers_are_described_in_runs():
    assert describe_layers(stack(2, 8, 64, sliding_window=2_048) + stack(1, 1, 576, kv_factor=1)) == (
        "2 x 8 x 64 within 2,048 + 1 x latent 576"
    )


# Lengths


def test_lengths_of_each_kind():
    assert Lengths.constant(7).values == (7,)
    assert Lengths.empirical([3, 5]).mean_tokens == 4
    spread = Lengths.lognormal(1_000, 1.0, 4_000, num_quantiles=101)
    assert spread.values[50] == 1_000 and max(spread.values) == 4_000 and list(spread.values) == sorted(spread.values)
    assert spread == Lengths.lognormal(1_000, 1.0, 4_000, num_quantiles=101)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Lengths.constant(0), "num_tokens: expected an int >= 1, got 0"),
        (lambda: Lengths.empirical([]), "values: expected at least one length, got none"),
        (lambda: Lengths.empirical([4, 0]), "values: expected an int >= 1, got 0"),
        (lambda: Lengths.empirical([4, 2.5]), "values: expected an int >= 1, got 2.5"),
        (lambda: Lengths(()), "values: expected at least one length, got none"),
        (lambda: Lengths((float("nan"),)), "values: expected an int >= 1, got nan"),
        (lambda: Lengths.lognormal(5, 1.0, 4), "median_tokens: expected an int in 1..4, got 5"),
        (lambda: Lengths.lognormal(5, 0.0, 8), "sigma: expected a number between 0 and 10, got 0.0"),
        (lambda: Lengths.lognormal(5, float("nan"), 8), "sigma: expected a number between 0 and 10, got nan"),
        (lambda: Lengths.lognormal(5, 1.0, 8, 0), "num_quantiles: expected an int >= 1, got 0"),
    ],
)
def test_bad_lengths_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# The planner


@few
@given(
    pool=st.integers(-100, 5_000),
    groups=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=3),
    num_samples=st.integers(1, 5),
)
def test_requests_that_fit_agrees_with_counting_upwards(pool, groups, num_samples):
    def need(requests):
        return sum(-(-requests * pages // num_samples) * size for pages, size in groups)

    count = 0
    while need(count + 1) <= pool:
        count += 1
    assert requests_that_fit(pool, groups, num_samples) == count


@st.composite
def plan_cases(draw):
    heads = draw(st.sampled_from([2, 4, 8]))
    window = draw(st.none() | st.sampled_from([16, 64, 1_000]))
    pair = ModelPair(
        ModelGeometry("t", stack(draw(st.integers(4, 9)), heads, 16) + stack(2, heads, 16, sliding_window=32),
                      weights_bytes=draw(st.integers(0, 10**6))),
        ModelGeometry("d", stack(draw(st.integers(1, 5)), 4, 32, sliding_window=window),
                      weights_bytes=draw(st.integers(0, 10**5)), draft_block_size=8),
    )
    machine = Machine(draw(st.integers(2 * 10**6, 10**9)), draw(st.sampled_from([1, 2, 8])),
                      draw(st.integers(1, 4)), draw(st.integers(0, 10**5)))
    serving = Serving(512, draw(st.integers(1, 200)), draw(st.integers(0, 7)),
                      draw(st.sampled_from(["paged", "dense"])), draw(st.sampled_from([8, 32, 64])),
                      draw(st.sampled_from([None, "bfloat16", "float8_e4m3fn"])))
    lengths = Lengths.empirical(draw(st.lists(st.integers(1, 500), min_size=1, max_size=5)))
    return machine, pair, lengths, serving


@few
@given(plan_cases())
def test_plan_conserves_bytes_on_every_rank(case):
    """Pitfall 15: target and draft live in one budget."""
    machine, plan = case[0], plan_capacity(*case)
    assert len(plan.ranks) == machine.pp_size
    for rank in plan.ranks:
        assert rank.weights_bytes + rank.other_bytes + rank.context_bytes + rank.free_bytes == rank.hbm_bytes
        assert rank.slack_bytes >= 0 and rank.draft_held_bytes >= rank.draft_stored_bytes >= 0
        assert rank.free_bytes >= 0 or plan.limited_by == "cannot start"
        assert sum(size for _, size, _, _ in memory.byte_parts(rank)) == rank.hbm_bytes
    assert 0 <= plan.fragmentation <= 1 and 0 <= plan.draft_share <= 1
    assert [rank.draft_held_bytes for rank in plan.ranks[:-1]] == [0] * (machine.pp_size - 1)


@few
@given(plan_cases(), st.integers(1, 3))
def test_plan_agrees_with_the_cost_of_real_requests(case, rounds):
    """`rounds` times the whole sample fit exactly if their pages fit on every rank."""
    machine, pair, lengths, serving = case
    serving = replace(serving, max_batch_size=10**9, context="paged")
    plan = plan_capacity(machine, pair, lengths, serving)
    target, draft = ([shard_layer(x, machine.tp_size) for x in m.layers] for m in (pair.target, pair.draft))
    dtype = serving.kv_dtype or "bfloat16"
    fits = True
    for rank, part in zip(plan.ranks, pp_split(len(target), machine.pp_size)):
        layers = [target[i] for i in part] + (draft if rank.pp_rank == machine.pp_size - 1 else [])
        held = paged_cost([replace(x, dtype=dtype) for x in layers], lengths.values * rounds, max_seq_len=512,
                          num_draft_tokens=serving.num_draft_tokens, tokens_per_block=serving.tokens_per_block)
        fits = fits and held.held_bytes <= rank.pool_bytes
    assert fits == (plan.requests >= rounds * len(lengths.values))


@few
@given(plan_cases())
def test_plan_is_monotone(case):
    machine, pair, lengths, serving = case
    requests = plan_capacity(*case).requests
    assert requests <= serving.max_batch_size
    assert plan_capacity(replace(machine, hbm_bytes=machine.hbm_bytes + 10**6), pair, lengths, serving).requests >= requests
    longer = Lengths.empirical([n + 8 for n in lengths.values])
    if serving.count_windows and all(x.sliding_window is None for x in pair.draft.layers):
        full = replace(serving, count_windows=False)
        assert (plan_capacity(machine, pair, longer, full).requests
                <= plan_capacity(machine, pair, lengths, full).requests)
    small = plan_capacity(machine, pair, lengths, replace(serving, kv_dtype="float8_e4m3fn"))
    assert small.requests >= plan_capacity(machine, pair, lengths, replace(serving, kv_dtype="bfloat16")).requests
    paged, dense = (plan_capacity(machine, pair, lengths, replace(serving, context=c)) for c in ("paged", "dense"))
    assert paged.requests >= dense.requests


def test_plan_of_the_issue():
    chat = Lengths.lognormal(8_192, 1.0, 131_072)
    plans = {c: plan_capacity(ISSUE_MACHINE, MINIMAX, chat, replace(ISSUE_SERVING, context=c))
             for c in ("dense", "paged")}
    assert plans["dense"].ranks[0].dense_reserved_bytes == 85_911_797_760
    assert plans["paged"].bytes_per_token == 2 * 62 * 4 * 128 * 2 + 10_240
    assert plans["paged"].pool_bytes - plans["dense"].pool_bytes == 85_911_797_760
    assert plans["paged"].requests > 4 * plans["dense"].requests > 0
    assert plans["dense"].limited_by == plans["paged"].limited_by == "memory"


def test_pool_tokens_are_whole_pages():
    plan = plan_capacity(ISSUE_MACHINE, MINIMAX, Lengths.constant(100), ISSUE_SERVING)
    assert plan.pool_tokens == plan.pool_bytes // (plan.bytes_per_token * 32) * 32
    assert plan.requests == 64 and plan.limited_by == "max_batch_size" and plan.tokens == 6_400


def test_windowed_target_without_a_full_layer_has_no_pool_tokens():
    pair = ModelPair(ModelGeometry("w", stack(4, 1, 16, sliding_window=64)), None)
    plan = plan_capacity(Machine(10**7), pair, Lengths.constant(200), Serving(256, 8, 0))
    assert plan.pool_tokens is None and plan.draft_bytes_per_token == 0 and plan.draft_dtype is None
    assert plan_rows([plan])[0]["draft KV"] == "-"


def test_draft_dtype_is_billed_as_stored():
    """Pitfall 13: a budget that bills fp8 for a bf16 pool gives the draft half its tokens."""
    def bytes_of(**changes):
        plan = plan_capacity(ISSUE_MACHINE, MINIMAX, Lengths.constant(1_000), replace(ISSUE_SERVING, **changes))
        rank = plan.ranks[-1]
        return plan.draft_dtype, plan.draft_bytes_per_token, rank.draft_held_bytes // (64 * 1_024)

    assert bytes_of() == ("bfloat16", 10_240, 10_240)
    assert bytes_of(kv_dtype="float8_e4m3fn") == ("float8_e4m3fn", 5_120, 5_120)
    assert bytes_of(kv_dtype="float8_e4m3fn", draft_kv_dtype="bfloat16") == ("bfloat16", 10_240, 10_240)
    assert bytes_of(draft_kv_dtype="float8_e4m3fn") == ("float8_e4m3fn", 5_120, 5_120)
    dense = replace(ISSUE_SERVING, context="dense", kv_dtype="float8_e4m3fn")
    assert plan_capacity(ISSUE_MACHINE, MINIMAX, Lengths.constant(9), dense).draft_dtype == "bfloat16"


def test_target_and_draft_pages_may_differ_in_bytes():
    """Pitfall 25: one pool a geometry, shared block ids; nothing is padded to the larger page."""
    plan = plan_capacity(Machine(10**11), CATALOGUE["Kimi-K3 (GQA drafter)"], Lengths.constant(32),
                         Serving(32, 4, 4))
    rank = plan.ranks[0]
    assert rank.target_stored_bytes == 4 * 32 * 27_648 and rank.draft_stored_bytes == 4 * 32 * 20_480
    assert rank.slack_bytes == 0


def test_draft_windows_count_by_window_or_in_full():
    pair, machine = CATALOGUE["Qwen3.8-27B"], Machine(80 * GB)
    serving = Serving(262_144, 4_096, 7)
    by_window, in_full = (plan_capacity(machine, pair, Lengths.constant(65_536), replace(serving, count_windows=f))
                          for f in (True, False))
    assert by_window.requests > in_full.requests
    assert in_full.draft_share == pytest.approx(20 / 84, abs=1e-6)
    assert by_window.ranks[0].draft_stored_bytes == by_window.requests * 2_047 * 20 * KIB


def test_pipeline_split_gives_the_rest_to_the_first_ranks():
    assert [list(r) for r in pp_split(5, 2)] == [[0, 1, 2], [3, 4]]
    assert [len(r) for r in pp_split(62, 4)] == [16, 16, 15, 15]
    for n in range(1, 20):
        for size in range(1, n + 1):
            assert [i for part in pp_split(n, size) for i in part] == list(range(n))


def test_draft_lives_on_the_last_rank_and_can_limit_it():
    plan = plan_capacity(Machine(120 * GB, pp_size=2), MINIMAX, Lengths.constant(60_000),
                         replace(ISSUE_SERVING, max_batch_size=1_000))
    assert plan.limiting_rank == 1 and plan.ranks[0].draft_held_bytes == 0 < plan.ranks[1].draft_held_bytes
    assert plan.ranks[0].memory_requests > plan.ranks[1].memory_requests == plan.requests


def test_more_ranks_than_heads_save_no_cache():
    pair = CATALOGUE["Qwen3-4B"]
    plans = [plan_capacity(Machine(80 * GB, tp_size=tp), pair, Lengths.constant(1_000), Serving(4_096, 9_999, 7))
             for tp in (8, 16)]
    assert plans[0].bytes_per_token == plans[1].bytes_per_token and plans[0].requests == plans[1].requests


def test_dense_buffer_that_leaves_nothing_cannot_start():
    """Pitfall 11: 21.4 GiB a rank that no budget knew; here it is a plan that says so, with the bytes it lacks."""
    plan = plan_capacity(replace(ISSUE_MACHINE, hbm_bytes=150 * GB), MINIMAX, Lengths.constant(1_000),
                         replace(ISSUE_SERVING, context="dense"))
    assert (plan.requests, plan.limited_by) == (0, "cannot start")
    assert plan.ranks[0].free_bytes == plan.pool_bytes == 150 * GB - 63 * GB - 10 * GB - 85_911_797_760


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(max_seq_len=0), "max_seq_len: expected an int >= 1"),
        (dict(max_batch_size=0), "max_batch_size: expected an int >= 1"),
        (dict(num_draft_tokens=-1), "num_draft_tokens: expected an int >= 0"),
        (dict(context="sparse"), "context: expected one of 'paged', 'dense', got 'sparse'"),
        (dict(tokens_per_block=12), "tokens_per_block: expected a power of two"),
        (dict(kv_dtype="int8"), "kv_dtype: expected one of None, 'float32'"),
        (dict(draft_kv_dtype="auto"), "draft_kv_dtype: expected one of 'inherit'"),
        (dict(context="dense", draft_kv_dtype="float16"), "draft_kv_dtype: the dense buffer keeps"),
    ],
)
def test_bad_serving_setting_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(ISSUE_SERVING, **changes)


@pytest.mark.parametrize("name", ["hbm_bytes", "tp_size", "pp_size"])
def test_bad_machine_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name}: expected an int >= 1, got 0"):
        Machine(**{**dict(hbm_bytes=1), name: 0})


@pytest.mark.parametrize(
    "machine, pair, lengths, serving, message",
    [
        (dict(), MINIMAX, 200_000, {}, "lengths: expected an int in 1..131072, got 200000"),
        (dict(), MINIMAX, 9, dict(num_draft_tokens=8), "num_draft_tokens: expected at most 7 with a block of 8, got 8"),
        (dict(), ModelPair(MINIMAX.target, None), 9, dict(context="dense"), "context: 'dense' needs a drafter"),
        (dict(tp_size=3), MINIMAX, 9, {}, "tp_size: expected a divisor or a multiple of num_kv_heads 8, got 3"),
        (dict(pp_size=63), MINIMAX, 9, {}, "pp_size: expected at most the number of KV layers 62, got 63"),
        (dict(hbm_bytes=70 * GB), MINIMAX, 9, {}, "hbm_bytes: expected at least 73,000,000,000 for the weights"),
    ],
)
def test_contradicting_plan_is_refused_with_the_numbers(machine, pair, lengths, serving, message):
    with pytest.raises(ValueError, match=message):
        plan_capacity(replace(ISSUE_MACHINE, **machine), pair, Lengths.constant(lengths),
                      replace(ISSUE_SERVING, **serving))


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_catalogue_pair_can_be_planned(name):
    plan = plan_capacity(Machine(10**12), CATALOGUE[name], Lengths.constant(4_000), Serving(8_192, 16, 6))
    assert plan.requests == 16 and plan.draft_bytes_per_token > 0


# Views


def test_table_and_frame_show_the_same_columns():
    pytest.importorskip("pandas")
    plans = planner_plans()
    frame = plan_frame(plans)
    header = plan_table(plans).splitlines()[0]
    assert all(column in header for column in frame.columns) and len(frame) == len(plans) == 4
    assert len({len(line) for line in plan_table(plans).splitlines()}) == 1
    assert "GB" not in header and header.count("GiB") == 2
    with pytest.raises(ValueError, match="plans: expected at least one plan"):
        plan_table([])


def test_frame_without_pandas_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"install dflash-paged\[lab\], or use plan_table"):
        plan_frame([])


def test_module_and_plans_need_no_notebook_or_plotting_package():
    code = (
        "import sys\n"
        "for m in ('matplotlib', 'pandas', 'ipywidgets', 'nbdev', 'IPython', 'triton', 'transformers'):\n"
        "    sys.modules[m] = None\n"
        "from dflash_paged.memory import planner_plans, plan_table\n"
        "print(plan_table(planner_plans()))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=TOP)
    assert out.returncode == 0, out.stderr
    assert "paged" in out.stdout


def test_figures_have_the_same_bytes_each_time(tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    from dflash_paged.nbtools import save_figure

    def draw(make, name):
        return save_figure(make(), tmp_path / name).read_bytes()

    serving = ISSUE_SERVING
    for make in (
        lambda: memory.figure_bytes(planner_plans()),
        lambda: memory.figure_concurrency(ISSUE_MACHINE, MINIMAX, serving, [1_024, 131_072]),
        lambda: memory.figure_reserved_used(issue_dense(), ISSUE_RANK, [1_024, 131_072], max_seq_len=131_072,
                                            num_draft_tokens=4),
    ):
        first = draw(make, "a.svg")
        assert first == draw(make, "b.svg") and len(first) < 60_000


def test_planner_is_a_fixed_figure_outside_jupyterlab(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    shown = planner(slots=32)
    assert (tmp_path / "figures" / "memory_planner.svg").exists()
    assert "paged fp8: 32 requests" in shown.alt and not hasattr(shown, "_repr_mimebundle_")


def test_planner_without_ipywidgets_falls_back_or_says_what_to_install(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JPY_SESSION_NAME", "01_memory.ipynb")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "requests" in planner().alt
    with pytest.raises(ImportError, match=r"install dflash-paged\[lab\], or interactive=False"):
        planner(interactive=True)


def test_sliders_redraw_the_picture(monkeypatch):
    pytest.importorskip("ipywidgets")
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.setenv("JPY_SESSION_NAME", "01_memory.ipynb")
    widget = planner(median_tokens=4_096)
    before = widget.picture.value
    assert "data:image/svg+xml;base64," in before and "median_tokens=4096" in repr(widget)
    widget.sliders["hbm_gb"].value = 192
    after = widget.picture.value
    assert after != before and after == planner_html(median_tokens=4_096, hbm_gb=192)
    widget.sliders["tp_size"].value = 1
    widget.sliders["hbm_gb"].value = 24
    assert "don&#x27;t" not in widget.picture.value and "hbm_bytes: expected at least" in widget.picture.value
    bundle = widget._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle and bundle["text/plain"] == repr(widget)


def test_unknown_model_is_one_sentence_in_the_planner():
    with pytest.raises(ValueError, match="model: expected one of 'SmolLM2-135M-Instruct'"):
        planner_plans(model="GPT-5")
    assert planner_html(model="GPT-5").startswith("<p><b>These settings don't fit.</b> model: expected one of")


def test_stored_notebook_keeps_no_widget_state():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert NOTEBOOK.stat().st_size < 1_000_000 and "widgets" not in notebook["metadata"]
    kinds = {kind for cell in notebook["cells"] for out in cell.get("outputs", []) for kind in out.get("data", {})}
    assert kinds == {"text/markdown", "text/plain"}
