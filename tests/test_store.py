"""Store: exact codes, exact places, nothing else touched; K as the reference drafter computes it."""

import itertools

import numpy as np
import pytest
import torch

from dflash_paged.store import (
    PAGE_DTYPES,
    PageView,
    apply_rope_ref,
    calibrate_scales,
    context_rows_ref,
    gather_pages_ref,
    make_cos_sin,
    quantise_ref,
    read_rows_ref,
    rms_norm_ref,
    store_draft_context,
    store_draft_context_ref,
    store_kv,
    store_kv_ref,
    v_columns,
)

FP8 = torch.float8_e4m3fn
LAYOUTS = [
    (layout, v_layout) for layout in ("NHD", "HND") for v_layout in ("row", "transposed", "transposed16")
]
PAGES, TOKENS, HEADS, DIM = 5, 16, 3, 8
i64 = lambda values: torch.tensor(values, dtype=torch.int64)


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(7)


# ------------------------------------------------------------------ oracles


def e4m3_values() -> np.ndarray:
    """The value of each of the 256 codes, from the definition: bias 7, no infinities, 0x7F is NaN."""
    values = np.empty(256)
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values[code] = np.nan if code & 127 == 127 else value
        values[code] *= -1 if code & 128 else 1
    return values


def e4m3_code(x: np.ndarray) -> np.ndarray:
    """Nearest code of each fp32 value, ties to even, saturating: comparisons in fp64 are exact."""
    finite = e4m3_values()[:127]
    magnitude = np.minimum(np.abs(x.astype(np.float64)), 448.0)
    above = np.clip(np.searchsorted(finite, magnitude), 0, 126)
    below = np.maximum(above - 1, 0)
    to_below, to_above = magnitude - finite[below], finite[above] - magnitude
    code = np.where(to_above < to_below, above, below)
    code = np.where(to_above == to_below, np.where(above % 2 == 0, above, below), code)
    code = np.where(np.isnan(x), 127, code)
    return (code | np.where(np.signbit(x), 128, 0)).astype(np.uint8)


def hard_values() -> np.ndarray:
    """Every code's value, every midpoint and the fp32 neighbours of both; subnormals, huge, infinite."""
    finite = e4m3_values()[:127]
    middle = (finite[1:] + finite[:-1]) / 2
    base = np.concatenate([finite, middle, [2.0**-10, 2.0**-11, 464.0, 480.0, 1e10, 3.4e38, 1e-38, 1e-45]])
    base = base.astype(np.float32)
    x = np.concatenate([base, np.nextafter(base, np.float32(np.inf)), np.nextafter(base, np.float32(0))])
    return np.concatenate([x, -x, np.float32([np.inf, -np.inf, 0.0, -0.0])])


def codes_of(x: torch.Tensor) -> torch.Tensor:
    """Bits of any page dtype."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def make_view(dtype=torch.float32, layout="NHD", v_layout="row", layers=3, layer=1, scales=None):
    """One layer of a page-major pool of canary bytes; V in a pool of its own where it is transposed."""
    tokens, heads, dim = TOKENS, HEADS, DIM
    row = (tokens, heads, dim) if layout == "NHD" else (heads, tokens, dim)
    shape = (PAGES, layers, 2, *row)
    size = torch.empty(0, dtype=dtype).element_size()
    canary = torch.full((*shape[:-1], shape[-1] * size), 0x5A, dtype=torch.uint8)
    pool = canary.view(dtype)
    k, v, pools = pool[:, layer, 0], pool[:, layer, 1], [canary]
    if v_layout != "row":
        v_canary = torch.full((PAGES, layers, heads, dim, tokens * size), 0x5A, dtype=torch.uint8)
        v = v_canary.view(dtype)[:, layer]
        pools.append(v_canary)
    if scales is None and dtype == FP8:
        scales = (torch.tensor([0.5, 1.0, 0.03]), torch.tensor([2.0, 0.25, 1.0]))
    k_scale, v_scale = scales or (None, None)
    return PageView(k, v, layout, v_layout, k_scale, v_scale, tokens_per_block=tokens, layer_idx=layer), pools


def place(view, page, offset):
    """The K and the V row of one slot, looked up from the layouts' definitions."""
    k = view.k[page, offset] if view.layout == "NHD" else view.k[page, :, offset]
    if view.v_layout == "row":
        v = view.v[page, offset] if view.layout == "NHD" else view.v[page, :, offset]
    elif view.v_layout == "transposed":
        v = view.v[page, :, :, offset]
    else:
        t = offset % 16  # token 8x + 2c + y -> column 4c + 2x + y
        x, c, y = t // 8, t % 8 // 2, t % 2
        v = view.v[page, :, :, offset - t + 4 * c + 2 * x + y]
    return k, v


def rows(n, rng, dtype=torch.float32):
    return tuple(torch.randn(n, HEADS, DIM, generator=rng).to(dtype) for _ in range(2))


# ------------------------------------------------------------------ quantise


def test_fp8_codes_equal_the_formats_definition():
    x = hard_values()
    got = codes_of(quantise_ref(torch.from_numpy(x)[:, None, None], FP8)).flatten().numpy()
    np.testing.assert_array_equal(got, e4m3_code(x))


def test_fp8_nan_stays_nan_and_infinities_saturate():
    x = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), 1e30])[:, None, None]
    got = codes_of(quantise_ref(x, FP8)).flatten().tolist()
    assert [c & 127 for c in got[:2]] == [127, 127]
    assert got[2:] == [0x7E, 0xFE, 0x7E]


def test_fp8_codes_with_scales_use_a_correctly_rounded_division(rng):
    x = torch.randn(4000, HEADS, DIM, generator=rng) * torch.logspace(-4, 4, 4000)[:, None, None]
    scale = torch.tensor([0.1, 3.7, 1e-3])
    want = e4m3_code(x.numpy() / scale.numpy()[:, None])
    np.testing.assert_array_equal(codes_of(quantise_ref(x, FP8, scale)).numpy(), want)


def test_bf16_and_fp16_round_to_nearest_even_and_saturate():
    x = np.concatenate([hard_values(), np.float32([65504, 65520, 1e6, 1 + 2**-8, 1 + 3 * 2**-8])])
    t = torch.from_numpy(x)[:, None, None]
    half = np.clip(x, -65504, 65504).astype(np.float16)
    np.testing.assert_array_equal(quantise_ref(t, torch.float16).flatten().numpy(), half)
    largest = np.float32(torch.finfo(torch.bfloat16).max)
    bits = np.clip(x, -largest, largest).view(np.uint32).astype(np.uint64)
    want = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(np.int16)
    np.testing.assert_array_equal(codes_of(quantise_ref(t, torch.bfloat16)).flatten().numpy(), want)


# ------------------------------------------------------------------ places


@pytest.mark.parametrize("dtype", PAGE_DTYPES)
@pytest.mark.parametrize("layout, v_layout", LAYOUTS)
def test_rows_land_in_their_slots_and_nowhere_else(dtype, layout, v_layout, rng):
    """Pitfalls 1, 3, 4, 22, 26, 28: a row without a slot writes nothing; each layout is what it says."""
    view, pools = make_view(dtype, layout, v_layout)
    slots = i64([17, -1, 3, 79, -1, 31, 64, -5])
    k, v = rows(len(slots), rng, torch.bfloat16)
    want = [p.clone() for p in pools]
    twin = PageView(
        *(_like(view.k, want[0], view), _like(view.v, want[-1], view)), layout, v_layout, view.k_scale,
        view.v_scale, TOKENS, 1,
    )
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            k_row, v_row = place(twin, slot // TOKENS, slot % TOKENS)
            codes_of(k_row)[:] = codes_of(quantise_ref(k[i].float(), dtype, view.k_scale))
            codes_of(v_row)[:] = codes_of(quantise_ref(v[i].float(), dtype, view.v_scale))
    store_kv(k, v, slots, view)
    for pool, expected in zip(pools, want):
        assert torch.equal(pool, expected)


def _like(tensor, new_bytes, view):
    """The same strided view of another copy of the pool."""
    storage = new_bytes.view(tensor.dtype)
    return torch.as_strided(storage, tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.mark.parametrize("dtype", PAGE_DTYPES)
@pytest.mark.parametrize("layout, v_layout", LAYOUTS)
def test_what_was_stored_is_read_back(dtype, layout, v_layout, rng):
    """Pitfall 28: read through the layout in which it was written, for every layout."""
    view, _ = make_view(dtype, layout, v_layout)
    slots = torch.randperm(PAGES * TOKENS, generator=rng)[:23]
    k, v = rows(23, rng)
    store_kv_ref(k, v, slots, view)
    got_k, got_v = read_rows_ref(view, slots)
    for got, meant, scale in ((got_k, k, view.k_scale), (got_v, v, view.v_scale)):
        exact = quantise_ref(meant, dtype, scale).float()
        assert torch.equal(got, exact if scale is None else exact * scale[:, None])
        # fp8 keeps 4 bits: half a step is 1/16 of the value, or half the smallest subnormal of the scale
        atol = 0.0 if scale is None else float(scale.max()) * 2**-10
        rtol = {torch.float32: 0, torch.bfloat16: 2**-8, torch.float16: 2**-10, FP8: 2**-4}[dtype]
        torch.testing.assert_close(got, meant, rtol=rtol, atol=atol + (0 if dtype == torch.float32 else 1e-7))


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
@pytest.mark.parametrize("layout, v_layout", LAYOUTS)
def test_whole_pages_come_back_in_token_order(dtype, layout, v_layout, rng):
    view, _ = make_view(dtype, layout, v_layout)
    k, v = rows(PAGES * TOKENS, rng)
    store_kv(k, v, torch.arange(PAGES * TOKENS), view)
    ids = torch.tensor([3, 0, 4], dtype=torch.int32)
    slots = (ids.long()[:, None] * TOKENS + torch.arange(TOKENS)).flatten()
    got_k, got_v = gather_pages_ref(view, ids)
    want_k, want_v = read_rows_ref(view, slots)
    for got, want, scale in ((got_k, want_k, view.k_scale), (got_v, want_v, view.v_scale)):
        got = got.float() if scale is None else got.float() * scale[:, None]
        assert torch.equal(got, want)


def test_transposed16_is_the_tensor_cores_token_order():
    order = v_columns("transposed16", 32)
    tokens = torch.arange(32)
    page = torch.empty(32, dtype=torch.int64)
    page[order] = tokens  # what a page holds, column by column
    assert page[:16].tolist() == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    assert page[16:].tolist() == [16 + t for t in page[:16].tolist()]
    assert v_columns("transposed", 8).tolist() == list(range(8))


def test_reading_no_slot_gives_zeros(rng):
    view, _ = make_view()
    k, v = rows(1, rng)
    store_kv(k, v, i64([5]), view)
    got_k, got_v = read_rows_ref(view, i64([-1, 5]))
    assert torch.equal(got_k, torch.cat([torch.zeros_like(k), k]))
    assert torch.equal(got_v, torch.cat([torch.zeros_like(v), v]))
    assert read_rows_ref(view, i64([]))[0].shape == (0, HEADS, DIM)


def test_nothing_to_store_is_legal(rng):
    view, pools = make_view()
    before = pools[0].clone()
    store_kv(*rows(0, rng), i64([]), view)
    store_kv(*rows(2, rng), i64([-1, -1]), view)
    assert torch.equal(pools[0], before)


# ------------------------------------------------------------------ norm and RoPE


def qwen3_layer_inputs(rng, dim=16, theta=10000.0, positions=64, **rope):
    """transformers' own k_norm and rotary embedding, as the layers of Qwen3 and the drafter use them."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

    config = Qwen3Config(
        hidden_size=dim * 2, num_attention_heads=2, num_key_value_heads=2, head_dim=dim, rope_theta=theta,
        max_position_embeddings=positions,
        **({"rope_scaling": {**rope, "rope_theta": theta}} if rope else {}),
    )
    norm = Qwen3RMSNorm(dim, eps=1e-6)
    norm.weight.data = torch.rand(dim, generator=rng) + 0.5
    return norm, Qwen3RotaryEmbedding(config)


def test_stored_k_is_the_reference_drafters_k(rng):
    """K through transformers' RMSNorm and rotary embedding, V untouched, for every layer."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    layers, n, dim = 3, 7, 16
    kv = torch.randn(n, layers, 2, HEADS, dim, generator=rng) * 3
    positions = i64([0, 1, 5, 63, 17, 2, 40])
    norms = [qwen3_layer_inputs(rng, dim) for _ in range(layers)]
    cos, sin = norms[0][1](kv, positions[None])
    pool = torch.zeros(4, layers, 2, 8, HEADS, dim)
    views = [PageView(pool[:, i, 0], pool[:, i, 1], tokens_per_block=8, layer_idx=i) for i in range(layers)]
    slots = i64([[9, 3, 31, 0, 16, 22, 8]])
    store_draft_context(
        kv, positions, slots, views, [0] * layers, cos_sin=make_cos_sin(64, dim, 10000.0),
        k_norm_weight=torch.stack([norm.weight.data for norm, _ in norms]), eps=1e-6,
    )
    for i, (norm, _) in enumerate(norms):
        k = norm(kv[:, i, 0]).transpose(0, 1)[None].detach()  # [1, heads, rows, dim]
        want = apply_rotary_pos_emb(k, k, cos, sin)[0][0].transpose(0, 1)
        got_k, got_v = read_rows_ref(views[i], slots[0])
        torch.testing.assert_close(got_k, want, rtol=1e-6, atol=1e-6)
        assert torch.equal(got_v, kv[:, i, 1])


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
    ids=lambda rope: rope.get("rope_type", "default"),
)
def test_cos_sin_equals_transformers_tables(rope, rng):
    _, rotary = qwen3_layer_inputs(rng, 16, 10000.0, 64, **rope)
    cos, sin = rotary(torch.zeros(1), torch.arange(64)[None])
    table = make_cos_sin(64, 16, 10000.0, rope or None)
    assert table.dtype == torch.float32
    # one is fp32 arithmetic in one order, the other in another: a few ulp of angles up to 64
    torch.testing.assert_close(table, torch.cat([cos[0, :, :8], sin[0, :, :8]], -1), rtol=0, atol=1e-5)


def test_a_table_is_a_prefix_of_a_longer_one():
    """Pitfall 10: growing the table changes no row that was in use."""
    for rope in (None, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}):
        assert torch.equal(make_cos_sin(64, 16, 1e4, rope), make_cos_sin(200, 16, 1e4, rope)[:64])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [4, 12, 16])
def test_rope_is_a_rotation_of_pairs(interleaved, rotary_dim, rng):
    """Against complex numbers in fp64; dimensions past rotary_dim pass unchanged."""
    x = torch.randn(5, 2, HEADS, 16, generator=rng)
    positions = torch.randint(0, 100, (5, 2), generator=rng)
    half = rotary_dim // 2
    angle = positions.double()[..., None, None] * 1e4 ** (-torch.arange(half).double() / half)
    pairs = x[..., :half], x[..., half:rotary_dim]
    if interleaved:
        pairs = x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2]
    turned = torch.complex(pairs[0].double(), pairs[1].double()) * torch.polar(torch.ones_like(angle), angle)
    want = x.double().clone()
    if interleaved:
        want[..., 0:rotary_dim:2], want[..., 1:rotary_dim:2] = turned.real, turned.imag
    else:
        want[..., :half], want[..., half:rotary_dim] = turned.real, turned.imag
    got = apply_rope_ref(x, positions, make_cos_sin(100, rotary_dim, 1e4), interleaved)
    # fp32 angles up to 99 carry an error of about 99 * 2**-24
    torch.testing.assert_close(got.double(), want, rtol=0, atol=5e-5)
    assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_norm_and_rope_keep_the_dtype_and_compute_in_fp32(dtype, rng):
    x = torch.randn(4, HEADS, 16, generator=rng).to(dtype)
    weight, table, positions = torch.rand(16, generator=rng) + 0.5, make_cos_sin(8, 16, 1e4), torch.arange(4)
    wide = x.double()
    normed = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    got = rms_norm_ref(x, weight, 1e-6)
    assert got.dtype == dtype
    # one rounding at the end: half an ulp
    rtol = {torch.float32: 1e-6, torch.float64: 1e-12}.get(dtype, torch.finfo(dtype).eps)
    torch.testing.assert_close(got.double(), normed, rtol=rtol, atol=1e-7)
    rotated = apply_rope_ref(x, positions, table)
    assert rotated.dtype == dtype
    torch.testing.assert_close(
        rotated.double(), apply_rope_ref(wide, positions, table), rtol=rtol, atol=1e-6
    )


def test_without_k_norm_k_is_only_rotated(rng):
    kv = torch.randn(3, 2, 2, HEADS, 16, generator=rng)
    table = make_cos_sin(8, 16, 1e4)
    k, v = context_rows_ref(kv, torch.arange(3), cos_sin=table, k_norm_weight=None, eps=1e-6)
    assert torch.equal(k[:, 1], apply_rope_ref(kv[:, 1, 0], torch.arange(3), table))
    assert torch.equal(v, kv[:, :, 1])


# ------------------------------------------------------------------ the draft context of several layers


def context_case(rng, dtype, layout="NHD", v_layout="row", layers=3, n=9):
    kv = torch.randn(n, layers, 2, HEADS, DIM, generator=rng)
    norm = torch.rand(layers, DIM, generator=rng) + 0.5
    arguments = dict(cos_sin=make_cos_sin(64, DIM, 1e4), k_norm_weight=norm, eps=1e-6)
    views = [make_view(dtype, layout, v_layout, layers=1, layer=0) for _ in range(layers)]
    return kv, arguments, [view for view, _ in views], [pool for _, pools in views for pool in pools]


@pytest.mark.parametrize("dtype", PAGE_DTYPES)
@pytest.mark.parametrize("layout, v_layout", LAYOUTS)
def test_layers_of_several_pools_and_groups(dtype, layout, v_layout, rng):
    """Pitfalls 1, 21, 22: each layer through its group's slots; a row skipped in one group, or in all."""
    kv, arguments, views, pools = context_case(rng, dtype, layout, v_layout)
    positions = i64([3, 4, 5, 10**12, 6, 7, 8, -9, 9])
    slots = i64([[5, 6, 7, -1, 8, 9, 10, -1, 11], [40, -1, 42, -1, 79, 0, -1, -1, 3]])
    groups = [0, 1, 0]
    store_draft_context(kv, positions, slots, views, groups, **arguments)
    used = (slots >= 0).any(0)
    k, v = context_rows_ref(kv[used], positions[used], **arguments)
    for i, view in enumerate(views):
        mapping = slots[groups[i]][used]
        want, _ = make_view(dtype, layout, v_layout, layers=1, layer=0)
        store_kv(k[:, i].contiguous(), v[:, i].contiguous(), mapping, want)
        for got, expected in zip(view.codes, want.codes):
            assert torch.equal(codes_of(got), codes_of(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_projection_is_computed_in_fp32(dtype, rng):
    kv, arguments, views, _ = context_case(rng, torch.float32)
    slots = torch.arange(9)[None]
    store_draft_context(kv.to(dtype), torch.arange(9), slots, views, [0] * 3, **arguments)
    k, _ = context_rows_ref(kv.to(dtype).float(), torch.arange(9), **arguments)
    assert torch.equal(read_rows_ref(views[2], slots[0])[0], k[:, 2])


def test_no_rows_write_nothing(rng):
    """Pitfall 1: a batch of padded requests."""
    kv, arguments, views, pools = context_case(rng, torch.float32)
    before = [p.clone() for p in pools]
    store_draft_context(kv, torch.full((9,), -1), torch.full((1, 9), -1), views, [0] * 3, **arguments)
    store_draft_context(kv[:0], i64([]), torch.empty(1, 0).long(), views, [0] * 3, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(pools, before))


@pytest.mark.parametrize("position", [64, 10**12, -1])
def test_a_position_past_the_rope_table_is_refused_before_any_write(position, rng):
    """Pitfall 10: too short a table is an error, not a wrong rotation."""
    kv, arguments, views, pools = context_case(rng, torch.float32)
    before = [p.clone() for p in pools]
    positions = torch.arange(9)
    positions[4] = position
    with pytest.raises(ValueError, match=f"positions: expected 0..63, the rows of cos_sin, got {position}"):
        store_draft_context(kv, positions, torch.arange(9)[None], views, [0] * 3, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(pools, before))


def test_a_slot_past_the_pool_is_refused_before_any_write(rng):
    """Pitfall 4: in whichever layer it would be."""
    kv, arguments, views, pools = context_case(rng, torch.float32)
    before = [p.clone() for p in pools]
    slots = torch.stack([torch.arange(9), torch.arange(72, 81)])
    with pytest.raises(ValueError, match=r"slot_mapping: expected less than 80 \(5 pages of 16\), got 80"):
        store_draft_context_ref(kv, torch.arange(9), slots, views, [0, 0, 1], **arguments)
    with pytest.raises(ValueError, match="slots: expected less than 80"):
        store_kv(*rows(1, rng), i64([80]), views[0])
    with pytest.raises(ValueError, match="slots: expected less than 80"):
        read_rows_ref(views[0], i64([80]))
    assert all(torch.equal(a, b) for a, b in zip(pools, before))


# ------------------------------------------------------------------ scales


def test_calibrated_scales_put_the_largest_value_on_the_largest_code(rng):
    kv, arguments, _, _ = context_case(rng, torch.float32, n=40)
    kv[:, 2, 1, 1] = 0  # a head that is always zero
    kv[7, 0, 1, 2, 3] = 900.0  # an outlier
    positions = torch.arange(40)
    k_scale, v_scale = calibrate_scales([(kv[:25], positions[:25]), (kv[25:], positions[25:])], **arguments)
    k, v = context_rows_ref(kv, positions, **arguments)
    for scale, x in ((k_scale, k), (v_scale, v)):
        for layer, head in itertools.product(range(3), range(HEADS)):
            largest = x[:, layer, head].abs().max()
            assert scale[layer, head] == (largest / 448 if largest else 1.0)
    assert v_scale[2, 1] == 1.0 and v_scale[0, 2] == 900.0 / 448
    codes = quantise_ref(v[:, 0], FP8, v_scale[0])
    assert codes_of(codes)[7, 2, 3] == 0x7E
    doubled, _ = calibrate_scales([(kv, positions)], **arguments, margin=2.0)
    torch.testing.assert_close(doubled, k_scale * 2)


def test_a_scale_of_one_must_be_asked_for():
    k = torch.zeros(2, 8, 3, 4, dtype=FP8)
    with pytest.raises(ValueError, match="ones for a scale of 1.0"):
        PageView(k, k.clone(), tokens_per_block=8)
    PageView(k, k.clone(), k_scale=torch.ones(3), v_scale=torch.ones(3), tokens_per_block=8)


# ------------------------------------------------------------------ errors


def view_arguments():
    return dict(
        k=torch.zeros(2, 16, 3, 4), v=torch.zeros(2, 16, 3, 4), layout="NHD", v_layout="row", k_scale=None,
        v_scale=None, tokens_per_block=16, layer_idx=0,
    )


VIEW_ERRORS = {
    "layout": dict(layout="HDN"),
    "v_layout": dict(v_layout="column"),
    "layer_idx": dict(layer_idx=-1),
    "k": dict(k=torch.zeros(2, 3, 16, 4)),
    "k ": dict(k=torch.zeros(2, 16, 3, 4, dtype=torch.float64)),
    "k  ": dict(k=torch.zeros(2, 16, 3, 8)[..., ::2]),
    "k   ": dict(k=torch.zeros(0, 16, 3, 4), v=torch.zeros(0, 16, 3, 4)),
    "v": dict(v=torch.zeros(2, 16, 3, 4, dtype=torch.bfloat16)),
    "v ": dict(v_layout="transposed"),
    "tokens_per_block": dict(tokens_per_block=48),
    "tokens_per_block ": dict(
        k=torch.zeros(2, 8, 3, 4), v=torch.zeros(2, 3, 4, 8), v_layout="transposed16", tokens_per_block=8
    ),
    "k_scale": dict(k=torch.zeros(2, 16, 3, 4, dtype=FP8), v=torch.zeros(2, 16, 3, 4, dtype=FP8)),
    "k_scale ": dict(k_scale=torch.ones(4), v_scale=torch.ones(3)),
    "k_scale  ": dict(k_scale=torch.ones(3).double(), v_scale=torch.ones(3)),
    "v_scale": dict(k_scale=torch.ones(3)),
}


@pytest.mark.parametrize("name", VIEW_ERRORS)
def test_a_wrong_page_view_is_refused(name):
    """Pitfalls 7, 12: at construction, with what is allowed."""
    with pytest.raises(ValueError, match=rf"^{name.strip()}: expected .* got "):
        PageView(**{**view_arguments(), **VIEW_ERRORS[name]})


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 2.0**-101])
def test_scales_out_of_range_are_refused(value):
    """Their reciprocals must be fp32 too; where the check would wait for a device it is debug-only."""
    with pytest.raises(ValueError, match="^v_scale: expected scales of"):
        PageView(**{**view_arguments(), "k_scale": torch.ones(3), "v_scale": torch.tensor([1.0, value, 1.0])})


@pytest.mark.parametrize(
    "name, value",
    [
        ("k", torch.zeros(2, HEADS, DIM + 1)),
        ("k", torch.zeros(2, HEADS, DIM, dtype=torch.float64)),
        ("k", torch.zeros(2, HEADS, DIM * 2)[..., ::2]),
        ("v", torch.zeros(1, HEADS, DIM)),
        ("v", torch.zeros(2, HEADS, DIM, dtype=torch.bfloat16)),
        ("slots", torch.zeros(2, dtype=torch.int32)),
        ("slots", torch.zeros(3, dtype=torch.int64)),
        ("page_view", torch.zeros(1)),
    ],
)
def test_a_wrong_argument_of_store_kv_is_named(name, value, rng):
    view, pools = make_view()
    before = pools[0].clone()
    k, v = rows(2, rng)
    arguments = dict(k=k, v=v, slots=i64([0, 1]), page_view=view)
    with pytest.raises(ValueError, match=rf"^{name}: expected .* got "):
        store_kv(**{**arguments, name: value})
    assert torch.equal(pools[0], before)


def test_wrong_arguments_of_store_draft_context_are_named(rng):
    kv, arguments, views, pools = context_case(rng, torch.float32)
    other, _ = make_view(torch.bfloat16, layers=1, layer=0)
    call = dict(kv=kv, positions=torch.arange(9), slot_mapping=torch.arange(9)[None], pages=views,
                layer_to_group=[0] * 3, **arguments)
    before = [p.clone() for p in pools]
    wrong = [
        ("kv", kv[:, :, :1]), ("kv", kv.double()), ("positions", torch.arange(8)),
        ("positions", torch.arange(9).int()), ("slot_mapping", torch.arange(9)), ("pages", views[:2]),
        ("pages", [*views[:2], other]), ("layer_to_group", [0, 0]), ("layer_to_group", [0, 0, 1]),
        ("cos_sin", arguments["cos_sin"].double()), ("cos_sin", make_cos_sin(8, DIM + 2, 1e4)),
        ("k_norm_weight", torch.ones(DIM)), ("k_norm_weight", torch.ones(3, DIM).double()),
    ]
    for name, value in wrong:
        with pytest.raises(ValueError, match=rf"^{name}(\[\d\])?: expected .*got "):
            store_draft_context(**{**call, name: value})
    assert all(torch.equal(a, b) for a, b in zip(pools, before))


def test_two_rows_for_one_slot_are_refused_in_debug_mode(monkeypatch, rng):
    view, _ = make_view()
    monkeypatch.setenv("DFLASH_PAGED_DEBUG", "1")
    store_kv(*rows(3, rng), i64([4, -1, -1]), view)
    with pytest.raises(ValueError, match="slots: expected distinct slots"):
        store_kv(*rows(2, rng), i64([4, 4]), view)
    kv, arguments, views, _ = context_case(rng, torch.float32)
    with pytest.raises(ValueError, match="slot_mapping: expected distinct slots"):
        store_draft_context(kv, torch.arange(9), torch.zeros(1, 9).long(), views, [0] * 3, **arguments)


NO_ROWS = dict(cos_sin=None, k_norm_weight=None, eps=0.0)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: make_cos_sin(0, 8, 1e4), "max_positions: expected"),
        (lambda: make_cos_sin(8, 7, 1e4), "rotary_dim: expected an even number, got 7"),
        (lambda: make_cos_sin(8, 8, 1e4, {"rope_type": "dynamic", "factor": 2.0}), "rope_type.*one of"),
        (lambda: make_cos_sin(8, 8, 1e4, {"type": "yarn", "factor": 2.0}), "original_max_pos.*got None"),
        (lambda: calibrate_scales([], **NO_ROWS), "batches: expected at least one row"),
        (lambda: calibrate_scales([], **NO_ROWS, margin=0), "margin: expected"),
    ],
)
def test_other_errors_say_what_was_expected(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_calibration_refuses_values_that_are_not_finite(value, rng):
    kv, arguments, _, _ = context_case(rng, torch.float32)
    kv[3, 1, 1, 2, 0] = value
    with pytest.raises(ValueError, match="V of layer 1, head 2"):
        calibrate_scales([(kv, torch.arange(9))], **arguments)


# ------------------------------------------------------------------ one call, one geometry


def store_two(first, second):
    """The public call with two layers' views."""
    store_draft_context(
        torch.zeros(1, 2, 2, HEADS, DIM), i64([3]), i64([[5]]), [first, second], [0, 0],
        cos_sin=make_cos_sin(16, DIM, 1e4), k_norm_weight=None, eps=1e-6,
    )


def test_layers_of_one_call_share_strides_within_a_page():
    """One kernel computes all addresses: a view whose tokens lie elsewhere in its pages is refused, by its index."""
    plain = torch.zeros(PAGES, TOKENS, HEADS, DIM)
    token_major = torch.zeros(PAGES, TOKENS, 2, HEADS, DIM)[:, :, 0]
    transposed = torch.zeros(PAGES, HEADS, TOKENS, DIM).transpose(1, 2)
    for other in (token_major, transposed):
        with pytest.raises(ValueError, match=r"^pages\[1\]: expected the geometry"):
            store_two(PageView(plain, plain, tokens_per_block=TOKENS), PageView(other, other, tokens_per_block=TOKENS))


def test_layers_of_one_call_all_have_scales_or_none():
    """Scales of one layer must not be ignored because another has none."""
    k, ones = torch.zeros(PAGES, TOKENS, HEADS, DIM), torch.ones(HEADS)
    plain = PageView(k, k, tokens_per_block=TOKENS)
    scaled = PageView(k, k, k_scale=ones, v_scale=ones, tokens_per_block=TOKENS)
    for pair in ((plain, scaled), (scaled, plain)):
        with pytest.raises(ValueError, match=r"^pages\[1\]: expected the geometry.*scales"):
            store_two(*pair)


@pytest.mark.parametrize("changes, name", [
    (dict(eps=None), "eps"), (dict(eps=float("nan")), "eps"), (dict(eps=-1.0), "eps"),
    (dict(kv=torch.zeros(1, 0, 2, HEADS, DIM)), "kv"), (dict(slot_mapping=torch.zeros(0, 1).long()), "slot_mapping"),
    (dict(pages=None), "pages"),
])
def test_a_store_of_nothing_and_odd_numbers_are_refused_by_name(changes, name):
    """No layer, no group, an eps that is no small number: said before anything is written."""
    k = torch.zeros(PAGES, TOKENS, HEADS, DIM)
    arguments = dict(
        kv=torch.zeros(1, 1, 2, HEADS, DIM), positions=i64([3]), slot_mapping=i64([[5]]),
        pages=[PageView(k, k, tokens_per_block=TOKENS)], layer_to_group=[0], cos_sin=make_cos_sin(16, DIM, 1e4),
        k_norm_weight=None, eps=1e-6,
    )
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        store_draft_context(**{**arguments, **changes})


@pytest.mark.parametrize("changes, name", [
    (dict(margin=float("inf")), "margin"), (dict(margin="2"), "margin"), (dict(dtype=torch.int8), "dtype"),
    (dict(k_norm_weight=torch.ones(1, DIM)), "k_norm_weight"), (dict(cos_sin=None), "cos_sin"),
    (dict(cos_sin=make_cos_sin(16, 2 * DIM, 1e4)), "cos_sin"), (dict(positions=i64([-1, 3])), "positions"),
    (dict(positions=i64([3, 16])), "positions"), (dict(eps="small"), "eps"),
])
def test_calibration_refuses_what_it_would_get_wrong(changes, name):
    """Nothing wraps, broadcasts or overflows into a scale."""
    options = dict(cos_sin=make_cos_sin(16, DIM, 1e4), k_norm_weight=torch.ones(2, DIM), eps=1e-6)
    positions = changes.get("positions", i64([3, 4]))
    options |= {k: v for k, v in changes.items() if k != "positions"}
    with pytest.raises(ValueError, match=f"^{name}"):
        calibrate_scales([(torch.ones(2, 2, 2, HEADS, DIM), positions)], **options)


def test_calibration_refuses_batches_of_another_shape():
    """One head's amax must not spread over three."""
    options = dict(cos_sin=make_cos_sin(16, DIM, 1e4), k_norm_weight=None, eps=1e-6)
    batches = [(torch.ones(2, 2, 2, HEADS, DIM), i64([3, 4])), (torch.ones(2, 2, 2, 1, DIM), i64([3, 4]))]
    with pytest.raises(ValueError, match="^kv: expected shape"):
        calibrate_scales(batches, **options)


@pytest.mark.parametrize("theta", [0, -1.0, float("nan"), None, "1e4"])
def test_a_rotation_table_needs_a_base_above_zero(theta):
    """Anything else would fill the table with NaN."""
    with pytest.raises(ValueError, match="^theta: expected a finite number > 0"):
        make_cos_sin(8, 4, theta)


def test_numpy_numbers_work_as_ints_do():
    """A page size from a NumPy array is as good as a Python int."""
    k = torch.zeros(PAGES, TOKENS, HEADS, DIM)
    view = PageView(k, k.clone(), tokens_per_block=np.int64(TOKENS))
    store_kv(torch.ones(1, HEADS, DIM), torch.ones(1, HEADS, DIM), i64([5]), view)
    assert view.k[0, 5].eq(1).all() and view.num_slots == PAGES * TOKENS
