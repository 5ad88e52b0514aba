"""Store kernels against the references, byte by byte over pools of canaries: interpreted on a CPU."""

import importlib.util
import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from test_block_table_kernel import on_device
from test_store import FP8, LAYOUTS, codes_of, e4m3_code, e4m3_values, hard_values, i64

from dflash_paged import store
from dflash_paged.kernels import power_of_two
from dflash_paged.store import (
    PAGE_DTYPES,
    ROW_DTYPES,
    PageView,
    _launch_store_draft_context,
    _launch_store_kv,
    make_cos_sin,
    quantise_ref,
    read_rows_ref,
    store_draft_context_ref,
    store_kv_ref,
)

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="needs Triton, which has no wheel for this platform"
    ),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),  # the interpreter's
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CANARY = 0x5A  # every byte of a pool before a test
SCALES = (0.1, 1 / 3, 0.0078, 3.7, 1.0, 0.037)  # divisions that must be rounded correctly
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


# ------------------------------------------------------------------ pools


@dataclass(frozen=True)
class Pools:
    """Layers' pages: each layer in pools of its own, or all of them in one page-major pool."""

    dtype: torch.dtype = FP8
    layout: str = "NHD"
    v_layout: str = "row"
    heads: int = 3
    dim: int = 16
    tokens: int = 16
    groups: tuple = (0, 1, 0)  # layer_to_group
    pages: tuple = (5, 9)  # of each group
    page_major: bool = False
    pad: int = 5  # elements between pages and around them
    scaled: bool | None = None  # None: fp8 pages only

    def make(self, device=None, dtype=None):
        """Views of new pools, every byte a canary, and the pools' bytes."""
        dtype, layers, views, pools = dtype or self.dtype, len(self.groups), [], []
        tokens, heads, dim = self.tokens, self.heads, self.dim
        row = (tokens, heads, dim) if self.layout == "NHD" else (heads, tokens, dim)
        v_row = row if self.v_layout == "row" else (heads, dim, tokens)

        def pool(pages, *shape):
            step, size = math.prod(shape) + self.pad, torch.empty(0, dtype=dtype).element_size()
            data = torch.full(((pages * step + self.pad) * size,), CANARY, dtype=torch.uint8)
            pools.append(data.to(device or DEVICE))
            elements = pools[-1].view(dtype)[self.pad :].view(pages, step)
            return elements[:, : step - self.pad].unflatten(1, shape)

        if self.page_major and self.v_layout == "row":
            both = pool(self.pages[0], layers, 2, *row)
            tensors = [(both[:, i, 0], both[:, i, 1]) for i in range(layers)]
        elif self.page_major:
            ks, vs = pool(self.pages[0], layers, *row), pool(self.pages[0], layers, *v_row)
            tensors = [(ks[:, i], vs[:, i]) for i in range(layers)]
        else:
            tensors = [(pool(self.pages[g], *row), pool(self.pages[g], *v_row)) for g in self.groups]
        scales = self.scales().to(device or DEVICE) if self.has_scales else None
        for i, (k, v) in enumerate(tensors):
            k_scale, v_scale = scales[:, i] if self.has_scales else (None, None)
            views.append(PageView(k, v, self.layout, self.v_layout, k_scale, v_scale, self.tokens, i))
        return views, pools

    @property
    def has_scales(self):
        return self.dtype == FP8 if self.scaled is None else self.scaled

    def scales(self):
        """Scales of K and V [2, L, n_kv]: another one for each head and layer."""
        count = 2 * len(self.groups) * self.heads
        return torch.tensor((SCALES * count)[:count]).view(2, len(self.groups), self.heads)

    def num_slots(self, group):
        return self.pages[0 if self.page_major else group] * self.tokens


def ordered(codes, bits):
    """Codes of floats as integers that grow with the value."""
    codes = codes.to(torch.int32)
    magnitude = codes & ((1 << bits - 1) - 1)
    return torch.where((codes >> bits - 1 & 1).bool(), -magnitude, magnitude)


def count_differences(got, want, quotient, dtype):
    """How many values of K differ, all by as little as the contract allows; codes as integers, [n] each.

    fp8: one code apart, and only where the fp32 value is within 1e-6 of a rounding midpoint: the kernel's sums
    run in another order. bf16 and fp16: 1 ulp. fp32: 1e-6 of the value.
    """
    x, y = got.view(dtype).float(), want.view(dtype).float()
    differ = (got != want) & ~(x.isnan() & y.isnan())
    if not differ.any():
        return 0
    if dtype == F32:
        torch.testing.assert_close(x[differ], y[differ], rtol=1e-6, atol=0.0)
    else:
        bits = 8 * got.element_size()
        steps = (ordered(got[differ], bits) - ordered(want[differ], bits)).abs()
        assert steps.max() == 1 == steps.min(), f"codes up to {steps.max()} apart"
    if dtype == FP8:
        finite = torch.from_numpy(e4m3_values()[:127])
        middle = (finite[1:] + finite[:-1]) / 2
        value = quotient[differ].abs().double()
        off = ((value[:, None] - middle).abs() / middle).amin(1)
        assert off.max() <= 1e-6, f"another code {off.max():.2e} away from a midpoint"
    return int(differ.sum())


def check_pages(pools, got, want, quotients, exact=False):
    """Compare the kernel's pools with the reference's, `got` and `want` being `(views, bytes)`.

    Every byte that the reference didn't write is a canary, V is exact (a NaN is any NaN), K is exact or as
    close as `count_differences` says; returns how many codes of K differ. `quotients()` gives what the
    reference stores in fp32 pages.
    """
    if all(torch.equal(a.cpu(), b) for a, b in zip(got[1], want[1])):
        return 0
    views, copies = pools.make("cpu")
    for copy, data in zip(copies, got[1]):
        copy.copy_(data)
    differences = 0
    for view, expected, quotient in zip(views, want[0], quotients()):
        written = codes_of(quotient.k) != 0x5A5A5A5A
        k, expected_k = codes_of(view.k), codes_of(expected.k)
        if exact:
            written &= view.k.float().isnan() & expected.k.float().isnan()
        differences += count_differences(k[written], expected_k[written], quotient.k[written], pools.dtype)
        k[written] = expected_k[written]
        nan = view.v.float().isnan() & expected.v.float().isnan() & (codes_of(quotient.v) != 0x5A5A5A5A)
        codes_of(view.v)[nan] = codes_of(expected.v)[nan]
    for i, (a, b) in enumerate(zip(copies, want[1])):
        wrong = (a != b).nonzero().flatten()
        assert not wrong.numel(), f"pool {i}: {wrong.numel()} bytes differ, the first at {wrong[0]}"
    return differences


# ------------------------------------------------------------------ the draft context


cos_sin_table = lru_cache(make_cos_sin)


def make_case(pools, n, seed=0, *, dtype=F32, rotary_dim=None, positions=64, norm=True, interleaved=False):
    """Arguments of a store of n rows, every fifth without a slot in some group."""
    rng, layers = torch.Generator().manual_seed(seed), len(pools.groups)
    slots = torch.stack([
        torch.cat([torch.randperm(pools.num_slots(g), generator=rng), torch.full((n,), -1)])[:n]
        for g in range(max(pools.groups) + 1)
    ])
    slots[torch.rand(slots.shape, generator=rng) < 0.2] = -1
    return dict(
        kv=(torch.randn(n, layers, 2, pools.heads, pools.dim, generator=rng) * 3).to(dtype),
        positions=torch.randint(0, positions, (n,), generator=rng), slot_mapping=slots,
        cos_sin=cos_sin_table(positions, rotary_dim or pools.dim, 1e4),
        k_norm_weight=torch.rand(layers, pools.dim, generator=rng) + 0.5 if norm else None,
        eps=1e-6, rope_interleaved=interleaved,
    )


def allowed_slots(pools, case):
    """The slots of the rows that a kernel writes: those in the pool, at positions in the table."""
    inside = (case["positions"] >= 0) & (case["positions"] < case["cos_sin"].shape[0])
    bound = i64([pools.num_slots(g) for g in range(case["slot_mapping"].shape[0])])[:, None]
    keep = inside & (case["slot_mapping"] >= 0) & (case["slot_mapping"] < bound)
    return torch.where(keep, case["slot_mapping"], -1)


def assert_unchanged(inputs, case):
    """A kernel's inputs hold what they held."""
    for name, x in case.items():
        if isinstance(x, torch.Tensor):
            assert torch.equal(inputs[name].cpu().nan_to_num(), x.nan_to_num()), name


def check_store(pools, case, store=_launch_store_draft_context):
    """Run kernel and reference over fresh pools and compare every byte; the inputs stay as they were."""
    call = lambda fn, case, pages: fn(pages=pages, layer_to_group=list(pools.groups), **case)
    want = pools.make("cpu")
    legal = {**case, "slot_mapping": allowed_slots(pools, case)}
    call(store_draft_context_ref, legal, want[0])
    inputs = {name: on_device(x) for name, x in case.items()}
    got = pools.make()
    call(store, inputs, got[0])
    assert_unchanged(inputs, case)

    def quotients():
        views = pools.make("cpu", F32)[0]
        call(store_draft_context_ref, legal, views)
        return views

    return check_pages(pools, got, want, quotients)


@pytest.mark.parametrize("kv_dtype", ROW_DTYPES)
@pytest.mark.parametrize("dtype", PAGE_DTYPES)
@pytest.mark.parametrize("layout, v_layout", LAYOUTS)
def test_every_dtype_and_layout_in_several_pools(dtype, layout, v_layout, kv_dtype):
    """Pitfalls 1, 7, 21, 22, 26 (TensorRT-LLM PR 16548, dflash.py; vLLM issue 50710, PR 47066).

    Two groups whose pools differ in pages and strides; a row without a slot in one group, or in all, writes
    nothing there.
    """
    pools = Pools(dtype, layout, v_layout)
    case = make_case(pools, 13, dtype=kv_dtype, interleaved=layout == "HND")
    case["slot_mapping"][:, 4] = -1
    check_store(pools, case)


@pytest.mark.parametrize("dtype", [F32, FP8])
@pytest.mark.parametrize("layout, v_layout", LAYOUTS)
def test_layers_of_one_page_major_pool(dtype, layout, v_layout):
    """Pitfall 7 (TensorRT-LLM dflash.py): a page's stride is the view's own, not the layer's size."""
    pools = Pools(dtype, layout, v_layout, groups=(0, 0, 0, 0), pages=(4,), page_major=True, pad=0)
    check_store(pools, make_case(pools, 21, dtype=BF16))


@pytest.mark.parametrize(
    "heads, dim, rotary_dim",
    [
        (1, 8, 8), (1, 128, 64), (3, 80, 80), (4, 96, 32), (8, 64, 64), (4, 128, 128), (8, 16, 2), (3, 24, 22),
        (2, 112, 96),
    ],
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_and_rotary_dimensions_of_any_size(heads, dim, rotary_dim, interleaved):
    """Not powers of two too; dimensions past rotary_dim pass unrotated."""
    pools = Pools(FP8, heads=heads, dim=dim, groups=(0, 0), pages=(3,))
    check_store(pools, make_case(pools, 11, dtype=BF16, rotary_dim=rotary_dim, interleaved=interleaved))
    pools = replace(pools, dtype=F32, layout="HND", v_layout="transposed")
    check_store(pools, make_case(pools, 5, 1, rotary_dim=rotary_dim, interleaved=interleaved))


@pytest.mark.parametrize("tokens", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("v_layout", ["row", "transposed", "transposed16"])
def test_pages_of_every_size(tokens, v_layout):
    if v_layout == "transposed16" and tokens < 16:
        pytest.skip("transposed16 orders the tokens of 16")
    pools = Pools(FP8, "HND", v_layout, tokens=tokens, groups=(0,), pages=(3,))
    check_store(pools, make_case(pools, 12))


@pytest.mark.parametrize("n", [0, 1, 2, 15, 16, 17, 31, 33, 64, 100])
def test_any_number_of_rows(n):
    """Around the edges of a tile; N = 0 is legal."""
    pools = Pools(FP8, "NHD", "transposed16", groups=(0, 0), pages=(8,))
    check_store(pools, make_case(pools, n, n, dtype=BF16))


@pytest.mark.parametrize("layers", [1, 2, 5, 7])
def test_any_number_of_layers_and_groups(layers):
    """A group of its own for each layer, of other sizes each."""
    pools = Pools(BF16, heads=2, dim=8, groups=tuple(range(layers))[::-1], pages=tuple(range(2, 2 + layers)))
    check_store(pools, make_case(pools, 9))


def test_a_group_without_layers_is_not_read():
    """Slots of a group in which the drafter has no layer may be anything."""
    pools = Pools(FP8, groups=(1, 1), pages=(1, 6))
    case = make_case(pools, 9)
    case["slot_mapping"][0] = torch.arange(9) + 10**12
    check_store(pools, case)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_wide_pages_may_have_scales_too(dtype):
    pools = Pools(dtype, scaled=True)
    check_store(pools, make_case(pools, 9, dtype=F16))


@pytest.mark.parametrize("interleaved", [False, True])
def test_without_k_norm_k_is_only_rotated(interleaved):
    for dtype in (F32, FP8):
        pools = Pools(dtype)
        check_store(pools, make_case(pools, 9, norm=False, rotary_dim=12, interleaved=interleaved))


@pytest.mark.parametrize("weight_dtype", ROW_DTYPES)
def test_norm_weights_of_any_dtype_and_stride(weight_dtype):
    """Per-layer weights, as a model holds them or as a slice of something larger."""
    pools = Pools(F32)
    case = make_case(pools, 9)
    weights = torch.full((6, 20), 9.0, dtype=weight_dtype)
    weights[::2, 2:18] = case["k_norm_weight"].to(weight_dtype)
    check_store(pools, {**case, "k_norm_weight": weights[::2, 2:18]})


@pytest.mark.parametrize("eps", [1e-12, 1e-6, 1e-2, 3.0])
def test_the_norms_eps_counts(eps):
    """On rows whose mean square is below it, and of zeros."""
    pools = Pools(F32, groups=(0, 0), pages=(4,))
    case = {**make_case(pools, 12), "eps": eps}
    case["kv"] *= torch.logspace(-9, 3, 12)[:, None, None, None, None]
    case["kv"][3] = 0.0
    check_store(pools, case)


def test_rows_of_any_magnitude():
    """Squares that overflow or vanish in fp32 do not in the sum."""
    pools = Pools(F32, groups=(0, 0), pages=(4,))
    case = make_case(pools, 14)
    case["kv"] *= torch.logspace(-30, 30, 14)[:, None, None, None, None]
    check_store(pools, case)


@pytest.mark.parametrize("dtype", PAGE_DTYPES)
def test_nan_and_infinite_rows_spoil_only_themselves(dtype):
    """NaN stays NaN, an infinity saturates in V; the rows beside them are exact."""
    pools = Pools(dtype)
    case = make_case(pools, 12, dtype=BF16)
    case["kv"][2, :, :, 1, 3] = float("nan")
    case["kv"][5, :, :, 0, 7] = float("inf")
    case["kv"][7, 1, :, 2, :] = -float("inf")
    check_store(pools, case)


def test_a_scaled_rope_table():
    """YaRN: its frequencies and its factor are in the table."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    for dtype in (F32, FP8):
        pools = Pools(dtype, "HND")
        case = make_case(pools, 10)
        table = make_cos_sin(64, 16, 1e4, rope)
        assert not torch.equal(table, case["cos_sin"])
        check_store(pools, {**case, "cos_sin": table})


def test_inputs_may_be_slices_of_larger_tensors():
    """Pitfall 7 (TensorRT-LLM dflash.py): every stride is the tensor's own; the last alone is 1."""
    pools = Pools(FP8, heads=3, dim=16)
    case = make_case(pools, 9, dtype=BF16)
    rows = torch.full((21, 5, 3, 5, 40), 7.0, dtype=BF16)
    rows[1:19:2, 1:4, :2, 1:4, 9:25] = case["kv"]
    by_layer = case["kv"].permute(1, 2, 0, 3, 4).contiguous().permute(2, 0, 1, 3, 4)
    by_head = case["kv"].permute(3, 0, 1, 2, 4).contiguous().permute(1, 2, 3, 0, 4)
    slots = torch.full((4, 14), 3)
    slots[1:3, 2:11] = case["slot_mapping"]
    positions = torch.cat([i64([5]), case["positions"], i64([9])])[1:-1]
    table = torch.full((70, 24), 9.0)
    table[3:67, 5:21] = case["cos_sin"]
    for kv in (rows[1:19:2, 1:4, :2, 1:4, 9:25], by_layer, by_head):
        assert kv.stride(-1) == 1 and not kv.is_contiguous()
        check_store(pools, {**case, "kv": kv})
    check_store(pools, {
        **case, "slot_mapping": slots[1:3, 2:11], "positions": positions, "cos_sin": table[3:67, 5:21]
    })


@pytest.mark.parametrize("layout, v_layout", LAYOUTS)
def test_rows_without_a_place_are_skipped(layout, v_layout):
    """Pitfalls 1, 3, 4, 10, 26 (TensorRT-LLM PR 16548, 19040, dspark.py; vLLM PR 47066).

    Slots below 0 and past the pool, positions outside the RoPE table: no byte is written, page 0 least of all.
    """
    pools = Pools(FP8, layout, v_layout)  # groups of 80 and 144 slots
    case = make_case(pools, 16)
    case["slot_mapping"] = torch.stack([torch.arange(16) + 30, torch.arange(16) + 100])
    case["slot_mapping"][0, :6] = i64([-1, -2, 80, 81, 2**40, -(2**63)])
    case["slot_mapping"][1, 3:8] = i64([144, 2**31 + 5, 2**32 + 3, 2**63 - 1, -16])
    case["positions"][8:14] = i64([64, -1, 2**31, 2**32 + 5, 2**63 - 1, -(2**63)])
    assert (allowed_slots(pools, case) >= 0).sum() == 2 + 2 + 3 + 2
    check_store(pools, case)


def test_a_batch_of_padding_writes_nothing():
    """Pitfalls 1, 3, 26 (TensorRT-LLM PR 16548; vLLM PR 47066): a padded graph batch, whatever its rows hold."""
    pools = Pools(BF16)
    case = make_case(pools, 20)
    case["slot_mapping"].fill_(-1)
    case["kv"].fill_(float("nan"))
    check_store(pools, case)


def test_the_first_and_the_last_slot_of_each_pool():
    """Every offset of the first and the last page; nothing before or after them."""
    pools = Pools(FP8, "HND", "transposed16", groups=(0, 1), pages=(3, 4))
    case = make_case(pools, 32)
    case["slot_mapping"] = torch.stack([
        torch.cat([torch.arange(16), torch.arange(n - 16, n)]) for n in (48, 64)
    ]).flip(1)
    check_store(pools, case)


def test_a_replaced_pool_and_a_longer_rope_table_are_the_ones_used():
    """Pitfalls 9, 10 (TensorRT-LLM dflash.py, dspark.py): nothing of an earlier call's pointers is kept.

    The list of views is the same object throughout, as in an engine that rebinds it.
    """
    pools = Pools(F32, groups=(0, 0), pages=(4,))
    case = make_case(pools, 9)
    case["slot_mapping"][:] = torch.arange(9)
    longer = {**case, "cos_sin": make_cos_sin(300, 16, 1e4), "positions": case["positions"] + 200}
    old = pools.make()
    pages = list(old[0])

    def store(**inputs):
        _launch_store_draft_context(**{**inputs, "pages": pages})

    store(layer_to_group=[0, 0], **{name: on_device(x) for name, x in case.items()})
    before = [p.clone() for p in old[1]]

    def store_in_new(*, pages: list, **inputs):
        shared[:] = pages
        _launch_store_draft_context(pages=shared, **inputs)

    shared = pages
    check_store(pools, longer, store=store_in_new)
    assert all(torch.equal(a, b) for a, b in zip(old[1], before))
    swapped = pools.make()
    shared[:] = swapped[0][::-1]  # layers the other way round
    store(layer_to_group=[0, 0], **{name: on_device(x) for name, x in case.items()})
    for view, first in zip(swapped[0][::-1], old[0]):
        assert torch.equal(view.k[:1], first.k[:1]) and torch.equal(view.v[:1], first.v[:1])


# ------------------------------------------------------------------ rows of the target


def make_rows(pools, n, seed=0, dtype=F32):
    """Arguments of `store_kv`: k, v and slots, one in five -1."""
    rng = torch.Generator().manual_seed(seed)
    slots = torch.cat([torch.randperm(pools.num_slots(0), generator=rng), torch.full((n,), -1)])[:n]
    slots[torch.rand(n, generator=rng) < 0.2] = -1
    k, v = (torch.randn(2, n, pools.heads, pools.dim, generator=rng) * 3).to(dtype)
    return dict(k=k, v=v, slots=slots)


def check_store_kv(pools, case, store=_launch_store_kv):
    """Run kernel and reference of `store_kv` over fresh pools: every byte equal."""
    legal = torch.where(case["slots"] < pools.num_slots(0), case["slots"], -1)
    want, got = pools.make("cpu"), pools.make()
    store_kv_ref(case["k"], case["v"], legal, want[0][0])
    inputs = {name: on_device(x) for name, x in case.items()}
    store(**inputs, page_view=got[0][0])
    assert_unchanged(inputs, case)

    def quotients():
        views = pools.make("cpu", F32)[0]
        store_kv_ref(case["k"], case["v"], legal, views[0])
        return views

    check_pages(pools, got, want, quotients, exact=True)
    return got[0][0]


@pytest.mark.parametrize("kv_dtype", ROW_DTYPES)
@pytest.mark.parametrize("dtype", PAGE_DTYPES)
@pytest.mark.parametrize("layout, v_layout", LAYOUTS)
def test_target_rows_of_every_dtype_and_layout(dtype, layout, v_layout, kv_dtype):
    """No norm and no rotation: K and V both exact."""
    pools = Pools(dtype, layout, v_layout, groups=(0,), pages=(5,))
    check_store_kv(pools, make_rows(pools, 13, dtype=kv_dtype))


@pytest.mark.parametrize("n", [0, 1, 16, 17, 70])
@pytest.mark.parametrize("heads, dim", [(1, 64), (3, 80), (8, 8), (4, 128)])
def test_target_rows_of_any_number_and_size(n, heads, dim):
    pools = Pools(FP8, "HND", heads=heads, dim=dim, groups=(0,), pages=(5,))
    check_store_kv(pools, make_rows(pools, n, n, dtype=BF16))


def test_target_rows_may_be_slices_of_a_fused_projection():
    """K and V of one [N, (q + 2 n_kv) D] product, and with strides of their own."""
    pools = Pools(FP8, groups=(0,), pages=(5,))
    case = make_rows(pools, 9, dtype=BF16)
    fused = torch.full((9, 10, 16), 7.0, dtype=BF16)
    fused[:, 4:7], fused[:, 7:] = case["k"], case["v"]
    check_store_kv(pools, {**case, "k": fused[:, 4:7], "v": fused[:, 7:]})
    by_head = case["v"].transpose(0, 1).contiguous().transpose(0, 1)
    check_store_kv(pools, {**case, "k": fused[:, 4:7], "v": by_head})


@pytest.mark.parametrize("layout, v_layout", LAYOUTS)
def test_target_rows_without_a_place_are_skipped(layout, v_layout):
    """Pitfalls 1, 4, 26 (TensorRT-LLM PR 16548, 19040; vLLM PR 47066): slots below 0 and past the pool."""
    pools = Pools(FP8, layout, v_layout, groups=(0,), pages=(5,))
    case = make_rows(pools, 9)
    case["slots"] = i64([-1, 80, 3, 2**31 + 3, 2**40, 79, -(2**63), 2**63 - 1, 0])
    check_store_kv(pools, case)


# ------------------------------------------------------------------ codes


def as_heads(values, heads, dim):
    """The same values for each head, [N, heads, dim], the last row filled up with zeros."""
    x = np.zeros(-(-len(values) // dim) * dim, np.float32)
    x[: len(values)] = values
    return torch.from_numpy(x).view(-1, 1, dim).expand(-1, heads, dim)


def hard_inputs(scale):
    """Values that are hard once divided by `scale`, and hard ones as they are."""
    x = hard_values()
    with np.errstate(over="ignore"):
        scaled = x * np.float32(scale)
    around = np.concatenate([np.nextafter(scaled, np.float32(np.inf)), np.nextafter(scaled, np.float32(0))])
    return np.concatenate([x, scaled, around, np.float32([np.nan, -np.nan])])


def check_codes(got, x, scale):
    """Stored fp8 codes against a correctly rounded fp32 division and the format's definition."""
    with np.errstate(all="ignore"):
        want = e4m3_code(x / np.float32(scale))
    nan = np.isnan(x)
    np.testing.assert_array_equal(got[~nan], want[~nan])
    assert np.all(got[nan] & 127 == 127)


@pytest.mark.parametrize("scale", [*SCALES, 448.0, 1e-3, 2.0**-10])
def test_fp8_codes_of_hard_values(scale):
    """Every code, every midpoint, their neighbours, subnormals, huge, infinite, NaN: V, and the target's K."""
    x = hard_inputs(scale)
    rows = as_heads(x, 1, 64)
    n = len(rows)
    scales = torch.full((1,), scale, device=DEVICE)
    for rows_of in ("target", "draft"):
        k, v = (torch.zeros(n // 16 + 1, 16, 1, 64, device=DEVICE).to(FP8) for _ in range(2))
        view = PageView(k, v, k_scale=scales, v_scale=scales, tokens_per_block=16)
        slots = torch.arange(n, device=DEVICE)
        if rows_of == "target":
            _launch_store_kv(on_device(rows), on_device(rows), slots, view)
            check_codes(codes_of(k).cpu().numpy().flatten()[: len(x)], x, scale)
        else:
            kv = torch.stack([torch.ones(n, 1, 64), rows], 1)[:, None]  # [N, 1, 2, 1, 64]
            _launch_store_draft_context(
                on_device(kv), torch.zeros_like(slots), slots[None], [view], [0], eps=1e-6, k_norm_weight=None,
                cos_sin=make_cos_sin(4, 64, 1e4).to(DEVICE), rope_interleaved=False,
            )
        check_codes(codes_of(v).cpu().numpy().flatten()[: len(x)], x, scale)


@pytest.mark.parametrize("scale", [1.0, 0.1])
@pytest.mark.parametrize("kv_dtype", [BF16, F16])
def test_fp8_codes_of_every_half_precision_value(kv_dtype, scale):
    """All 65,536 bit patterns."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(kv_dtype).view(64, 8, 128)
    scales = torch.full((8,), scale, device=DEVICE)
    k, v = (torch.zeros(2, 32, 8, 128, device=DEVICE).to(FP8) for _ in range(2))
    view = PageView(k, v, k_scale=scales, v_scale=scales, tokens_per_block=32)
    _launch_store_kv(on_device(every), on_device(every.flip(0)), torch.arange(64, device=DEVICE), view)
    x = every.float().numpy()
    check_codes(codes_of(k).cpu().numpy().reshape(x.shape), x, scale)
    check_codes(codes_of(v).cpu().numpy().reshape(x.shape), x[::-1], scale)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("scaled", [False, True])
def test_wide_codes_of_hard_values(dtype, scaled):
    """To nearest even with ties, saturating, subnormals kept, NaN stays: as quantise_ref, bit for bit."""
    x = np.concatenate([
        hard_values(), np.float32([65504, 65519.99, 65520, 1e6, 3.39e38, 6e-8, 2.9e-8, 5.96e-8, np.nan]),
        np.float32(1 + np.arange(64) * 2.0**-12), np.float32(2.0**-20 * (1 + np.arange(64) * 2.0**-12)),
    ])
    pools = Pools(dtype, heads=3, dim=64, groups=(0,), pages=(3,), scaled=scaled)
    rows = as_heads(x, 3, 64)
    check_store_kv(pools, dict(k=rows, v=rows.flip(0), slots=torch.arange(len(rows)) + 3))


# ------------------------------------------------------------------ read back


@pytest.mark.parametrize("dtype", PAGE_DTYPES)
@pytest.mark.parametrize("layout, v_layout", LAYOUTS)
def test_what_was_stored_is_read_back_through_its_own_layout_alone(dtype, layout, v_layout):
    """Pitfall 28 (vLLM PR 45343): reading the same bytes through another layout gives other numbers."""
    pools = Pools(dtype, layout, v_layout, groups=(0,), pages=(3,), pad=0)
    case = make_rows(pools, 48)
    case["slots"] = torch.randperm(48, generator=torch.Generator().manual_seed(3))
    view = check_store_kv(pools, case)
    slots = case["slots"].to(DEVICE)
    k, v = (x.cpu() for x in read_rows_ref(view, slots))
    for got, meant, scale in ((k, case["k"], view.k_scale), (v, case["v"], view.v_scale)):
        scale = None if scale is None else scale.cpu()
        exact = quantise_ref(meant, dtype, scale).float()
        assert torch.equal(got, exact if scale is None else exact * scale[:, None])
    for other, other_v in LAYOUTS:
        shape = (3, 16, 3, 16) if other == "NHD" else (3, 3, 16, 16)
        v_shape = shape if other_v == "row" else (3, 3, 16, 16)
        misread = PageView(view.k.reshape(shape), view.v.reshape(v_shape), other, other_v, view.k_scale,
                           view.v_scale, 16)
        other_k, wrong_v = (x.cpu() for x in read_rows_ref(misread, slots))
        assert torch.equal(other_k, k) == (other == layout)
        same_v = other_v == v_layout and (v_layout != "row" or other == layout)
        assert torch.equal(wrong_v, v) == same_v


def test_all_layers_and_heads_come_back_at_their_own_place():
    """Pitfalls 21, 28 (vLLM issue 50710, PR 45343): V names its row, layer and head; none is in another's page."""
    pools = Pools(F32, "HND", "transposed", groups=(0, 1, 1, 0), pages=(2, 3))
    n, layers = 20, 4
    case = make_case(pools, n)
    name = torch.arange(n * layers * 3 * 16, dtype=F32).view(n, layers, 3, 16)
    case["kv"][:, :, 1] = name
    case["slot_mapping"] = torch.stack([torch.arange(n), torch.arange(n) + 28])
    pages, _ = pools.make()
    _launch_store_draft_context(
        pages=pages, layer_to_group=[0, 1, 1, 0], **{key: on_device(x) for key, x in case.items()}
    )
    for i, group in enumerate(pools.groups):
        assert torch.equal(read_rows_ref(pages[i], case["slot_mapping"][group].to(DEVICE))[1].cpu(), name[:, i])


def test_random_small_cases_equal_the_reference():
    """Any mixture of dtypes, layouts, groups, paddings and places, over canaries."""
    rng = np.random.default_rng(17)
    pick = lambda *values: values[int(rng.integers(len(values)))]
    for seed in range(60):
        layout, v_layout = pick(*LAYOUTS)
        major = bool(rng.integers(2))
        pools = Pools(
            pick(*PAGE_DTYPES), layout, v_layout, heads=pick(1, 2, 3), dim=pick(8, 16, 24), tokens=pick(16, 32),
            groups=(0, 0) if major else (1, 0), page_major=major, pad=pick(0, 1, 8),
        )
        check_random_store(
            rng, seed, pools, dtype=pick(*ROW_DTYPES), interleaved=bool(rng.integers(2)),
            rotary_dim=pick(pools.dim, pools.dim // 2), norm=bool(rng.integers(4)),
        )


def check_random_store(rng, seed, pools, store=_launch_store_draft_context, **options):
    """One store of 0..24 rows in 1..5 pages a group, some without a place; returns codes of K that differ."""
    pools = replace(pools, pages=tuple(int(n) for n in rng.integers(1, 6, 2)))
    n = int(rng.integers(0, 25))
    case = make_case(pools, n, seed, positions=40, **options)
    if n:
        case["positions"][rng.random(n) < 0.1] = int(rng.choice([-1, 40, 2**33]))
        case["slot_mapping"][0, rng.random(n) < 0.1] = int(rng.choice([-3, pools.num_slots(0), 2**34]))
        if rng.random() < 0.2:
            case["kv"][rng.integers(n)] = rng.choice([np.nan, np.inf, 0.0, 1e4])
    return check_store(pools, case, store)


def test_a_large_store_counts_its_differences():
    """The share of K's fp8 codes that differ from the reference's is under 1e-4; V's is none."""
    pools = Pools(FP8, heads=4, dim=128, tokens=32, groups=(0, 0), pages=(8,), page_major=True, pad=0)
    case = make_case(pools, 256, dtype=BF16, positions=512)
    case["slot_mapping"][:] = torch.randperm(256)
    differing = check_store(pools, case)
    print(f"{differing} of {256 * 2 * 4 * 128} codes of K differ")
    assert differing <= 1e-4 * 256 * 2 * 4 * 128


# ------------------------------------------------------------------ compilation


class Recorder:
    """Stands for a kernel and keeps what it would be compiled with."""

    def __init__(self):
        self.constants = []

    def __getitem__(self, grid):
        return lambda *args, **constants: self.constants.append(constants)


def test_nothing_that_is_compiled_in_depends_on_the_rows(monkeypatch):
    """Pitfall 40 (vLLM PR 49903): row counts, strides of rows and padding are run-time arguments of the store."""
    recorder = Recorder()
    monkeypatch.setattr(store, "_store_kernel", recorder)
    pools = Pools(FP8, heads=4, dim=16, groups=(0, 0), pages=(70,), pad=0)
    views, _ = pools.make()
    for n in (1, 2, 15, 16, 17, 100):
        rows = {name: on_device(x) for name, x in make_rows(pools, n, dtype=BF16).items()}
        by_head = {name: rows[name].transpose(0, 1).contiguous().transpose(0, 1) for name in ("k", "v")}
        for case in (rows, {**rows, **by_head}):
            _launch_store_kv(**case, page_view=views[0])
    assert len(recorder.constants) == 12 and all(c == recorder.constants[0] for c in recorder.constants)
    recorder.constants.clear()
    for n in (1, 16, 33):
        case = {name: on_device(x) if torch.is_tensor(x) else x for name, x in make_case(pools, n, dtype=BF16).items()}
        wide = torch.zeros(n, 3, 2, 4, 16, dtype=BF16, device=case["kv"].device)[:, :2]  # of a larger projection
        for kv in (case["kv"], wide):
            _launch_store_draft_context(pages=views, layer_to_group=[0, 0], **{**case, "kv": kv})
    assert len(recorder.constants) == 6 and all(c == recorder.constants[0] for c in recorder.constants)


@pytest.mark.parametrize("dim", [8, 16, 40])
def test_strides_of_rows_are_whole_numbers_of_the_unit(monkeypatch, dim):
    """Whatever n is, the unit compiled in depends on D alone, and unit x argument is the stride."""
    seen = []

    class Launches:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: seen.append((arguments, constants))

    monkeypatch.setattr(store, "_store_kernel", Launches())
    views, _ = Pools(FP8, heads=3, dim=dim, groups=(0,), pages=(70,), pad=0).make()
    for n in (2, 3, 16, 17):
        k = on_device(torch.zeros(3, n, dim, dtype=BF16)).transpose(0, 1)
        _launch_store_kv(k, k, on_device(torch.arange(n)), views[0])
        arguments, constants = seen[-1]
        strides = k[:, None].stride()[:3]
        assert [x * constants["UNIT"] for x in arguments[-6:]] == [*strides, *strides]
    assert {c["UNIT"] for _, c in seen} == {16 if dim == 16 else 1}


def test_a_transposed_tile_stays_small():
    """Triton 3.5.1 fails on tiles of more than 128 rows, and registers spill past 16,384 values."""
    for heads in (1, 2, 3, 8, 9, 16, 32, 128):
        for dim in (8, 64, 80, 128, 256):
            tile, warps = store._store_tile(heads, dim, True)
            rows = tile * power_of_two(heads)
            assert tile >= 1 and 1 <= warps <= 8
            assert rows <= max(128, 2048 // power_of_two(dim), power_of_two(heads))
            assert rows * power_of_two(dim) <= max(16384, power_of_two(heads) * power_of_two(dim))
