"""Store kernels on a CUDA device: exact codes, random cases, one launch, graph replay, pools past 2^31 elements."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_block_table_cuda import capture, num_compiled, quietly, to_cuda
from test_block_table_kernel import bucket_sizes, guarded, random_draft_case
from test_store import FP8, LAYOUTS, codes_of
from test_store_kernel import (
    BF16, CANARY, F16, F32, SCALES, Pools, allowed_slots, as_heads, check_codes, check_pages, check_random_store,
    check_store, check_store_kv, count_differences, hard_inputs, make_case, make_rows,
)

from dflash_paged import store
from dflash_paged.block_table import DraftInputs, build_draft_inputs, build_draft_inputs_ref
from dflash_paged.store import (
    PAGE_DTYPES,
    PageView,
    context_rows_ref,
    make_cos_sin,
    quantise_ref,
    store_draft_context,
    store_draft_context_ref,
    store_kv,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DRAFTER = Pools(FP8, heads=4, dim=128, tokens=32, groups=(0,) * 5, pages=(64,), page_major=True, pad=0)


def launch(case, pools, views):
    """The public call on tensors that are on the device."""
    store_draft_context(pages=views, layer_to_group=list(pools.groups), **case)


# ------------------------------------------------------------------ equality


@pytest.mark.parametrize("kv_dtype", [BF16, F32])
@pytest.mark.parametrize("dtype", PAGE_DTYPES)
@pytest.mark.parametrize("layout, v_layout", LAYOUTS)
def test_pages_equal_the_reference(dtype, layout, v_layout, kv_dtype):
    """Every byte of the pools of the issue's drafter's shapes, two groups; V exact."""
    pools = Pools(dtype, layout, v_layout, heads=4, dim=128, tokens=32, pages=(9, 12))
    check_store(pools, make_case(pools, 150, dtype=kv_dtype, positions=512), store_draft_context)


@pytest.mark.parametrize("layout, v_layout", LAYOUTS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kv_dtype", [BF16, F16, F32])
def test_codes_of_k_differ_at_midpoints_alone(layout, v_layout, interleaved, kv_dtype):
    """Within 1e-6 of a rounding midpoint, one code apart, under 1e-4 of the codes; V exact."""
    pools = replace(DRAFTER, layout=layout, v_layout=v_layout, groups=(0, 0))
    n = 1024
    case = make_case(pools, n, dtype=kv_dtype, positions=4096, interleaved=interleaved)
    case["slot_mapping"] = torch.randperm(pools.num_slots(0), generator=torch.Generator().manual_seed(1))[None, :n]
    differing, total = check_store(pools, case, store_draft_context), n * 2 * 4 * 128
    print(f"{differing} of {total} codes of K differ")
    assert differing <= 1e-4 * total


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_wide_pages_hold_k_to_an_ulp(dtype):
    """fp32 within 1e-6, bf16 and fp16 within 1 ulp; how many differ at all is printed."""
    pools = replace(DRAFTER, dtype=dtype, groups=(0, 0))
    case = make_case(pools, 1024, dtype=BF16, positions=4096)
    print(check_store(pools, case, store_draft_context), "values of K differ")


@pytest.mark.parametrize("scale", [*SCALES, 448.0, 1e-3, 2.0**-10])
def test_fp8_codes_of_hard_and_random_values(scale):
    """A million bit patterns of fp32, every code, midpoint and neighbour: correctly rounded division, NaN stays."""
    rng = np.random.default_rng(int(scale * 1e6))
    near = (rng.standard_normal(2**19) * scale * 2.0 ** rng.uniform(-12, 10, 2**19)).astype(np.float32)
    x = np.concatenate([hard_inputs(scale), near, rng.integers(0, 2**32, 2**19, dtype=np.uint32).view(np.float32)])
    rows = as_heads(x, 1, 128).contiguous().cuda()
    n, scales = len(rows), torch.full((1,), scale, device="cuda")
    k, v = (torch.zeros(n // 32 + 1, 32, 1, 128, device="cuda").to(FP8) for _ in range(2))
    view = PageView(k, v, k_scale=scales, v_scale=scales)
    slots = torch.arange(n, device="cuda")
    store_kv(rows, rows, slots, view)
    for got in (k, v):
        check_codes(codes_of(got).cpu().numpy().flatten()[: len(x)], x, scale)
    codes_of(v).fill_(CANARY)
    store_draft_context(
        torch.stack([torch.ones_like(rows), rows], 1)[:, None], slots, slots[None], [view], [0], eps=1e-6,
        cos_sin=make_cos_sin(n, 128, 1e4).cuda(), k_norm_weight=None,
    )
    check_codes(codes_of(v).cpu().numpy().flatten()[: len(x)], x, scale)


@pytest.mark.parametrize("layout, v_layout", LAYOUTS)
@pytest.mark.parametrize("dtype", PAGE_DTYPES)
def test_target_rows_equal_the_reference(dtype, layout, v_layout):
    """No norm and no rotation: K and V both exact, from slices of a fused projection."""
    pools = Pools(dtype, layout, v_layout, heads=2, dim=64, tokens=32, groups=(0,), pages=(9,))
    for n in (0, 1, 5, 200):
        case = make_rows(pools, n, n, dtype=BF16)
        fused = torch.cat([torch.ones(n, 3, 64).to(BF16), case["k"], case["v"]], 1)
        check_store_kv(pools, {**case, "k": fused[:, 3:5], "v": fused[:, 5:]}, store_kv)


RANDOM = [
    (Pools(FP8, "NHD", "row", groups=(1, 0)), dict(dtype=BF16)),
    (Pools(FP8, "HND", "transposed16", heads=2, groups=(1, 0)), dict(dtype=BF16)),
    (Pools(FP8, "NHD", "transposed", heads=4, dim=24, groups=(0, 0), page_major=True), dict(interleaved=True)),
    (Pools(BF16, "HND", "row", heads=1, dim=32, groups=(0, 1)), dict(dtype=BF16, rotary_dim=16)),
    (Pools(F16, "NHD", "row", dim=8, groups=(0, 0), page_major=True), dict(dtype=F16, norm=False)),
    (Pools(F32, "HND", "transposed16", groups=(0, 0), page_major=True), dict(rotary_dim=10)),
]


def test_ten_thousand_random_cases_equal_the_reference():
    """Pitfalls 1, 3, 4, 10, 22, 26 (TensorRT-LLM PR 16548, 19040, dspark.py; vLLM PR 47066).

    Rows without a slot, past the pool, past the RoPE table, of NaN: no byte outside the expected slots changes.
    """
    rng, differing = np.random.default_rng(23), 0
    for i in range(10_000):
        pools, options = RANDOM[i % len(RANDOM)]
        differing += check_random_store(rng, i, pools, store_draft_context, **options)
    print(differing, "values of K differ, nearly all of them in fp32 pages")


def test_cuda_tensors_run_the_kernel_and_cpu_tensors_the_reference(monkeypatch):
    """Nothing falls back in silence."""
    pools = Pools(F32, groups=(0,), pages=(4,))
    case, rows = make_case(pools, 9), make_rows(pools, 9)

    def refuse(*args, **kwargs):
        raise AssertionError("the reference ran")

    monkeypatch.setattr(store, "store_draft_context_ref", refuse)
    monkeypatch.setattr(store, "store_kv_ref", refuse)
    views, _ = pools.make("cuda")
    launch(to_cuda(case), pools, views)
    store_kv(**to_cuda(rows), page_view=views[0])
    views, _ = pools.make("cpu")
    with pytest.raises(AssertionError, match="the reference ran"):
        launch(case, pools, views)
    with pytest.raises(AssertionError, match="the reference ran"):
        store_kv(**rows, page_view=views[0])


# ------------------------------------------------------------------ large pools


@pytest.mark.parametrize("layout, v_layout", [("NHD", "row"), ("HND", "transposed16")])
def test_the_last_pages_of_a_pool_past_two_to_the_31_elements(layout, v_layout):
    """Pitfall 39 (vLLM PR 47671): page id times stride is an int64 product, past 2^32 too.

    Rows go to the first page, to both sides of 2^31 and 2^32 elements and to the last pages; all else stays.
    """
    pages, shape = 82_000, (32, 4, 128) if layout == "NHD" else (4, 32, 128)
    pool = torch.full((pages, 4, *shape), CANARY, dtype=torch.uint8, device="cuda")  # 65,536 elements a page
    assert pool.numel() > 2**32
    scale = torch.full((4,), 0.037, device="cuda")
    tensors = [pool[:, i].view(FP8) for i in range(4)]
    vs = tensors[2:] if v_layout == "row" else [v.view(pages, 4, 128, 32) for v in tensors[2:]]
    views = [PageView(k, v, layout, v_layout, scale, scale, 32) for k, v in zip(tensors[:2], vs)]
    ids = torch.tensor([0, 32_767, 32_768, 65_535, 65_536, pages - 2, pages - 1])
    slots = (ids[:, None] * 32 + torch.arange(32)).flatten()
    n = slots.numel()
    shuffled = slots[torch.randperm(n, generator=torch.Generator().manual_seed(0))]
    rng = torch.Generator().manual_seed(1)
    case = dict(
        kv=torch.randn(n, 2, 2, 4, 128, generator=rng).to(BF16), positions=torch.arange(n) * 7,
        slot_mapping=shuffled[None], cos_sin=make_cos_sin(7 * n, 128, 1e6),
        k_norm_weight=torch.rand(2, 128, generator=rng) + 0.5, eps=1e-6,
    )
    store_draft_context(pages=views, layer_to_group=[0, 0], **to_cuda(case))
    k, v = context_rows_ref(case["kv"], case["positions"], **{
        name: case[name] for name in ("cos_sin", "k_norm_weight", "eps")
    })
    rows_k, rows_v = row_codes(views, shuffled.cuda())
    host_scale = scale.cpu()
    for i in range(2):
        want_k, want_v = (codes_of(quantise_ref(x[:, i], FP8, host_scale)) for x in (k, v))
        quotient = (k[:, i] / host_scale[:, None]).flatten()
        assert count_differences(rows_k[i].flatten(), want_k.flatten(), quotient, FP8) <= 1e-4 * want_k.numel() + 1
        assert torch.equal(rows_v[i], want_v)
    pool.view(pages, -1)[ids.cuda()] = CANARY
    assert bool((pool == CANARY).all())  # nothing at an address that wrapped

    k_rows, v_rows = (x.cuda().to(BF16) for x in torch.randn(2, n, 4, 128, generator=rng))
    store_kv(k_rows, v_rows, shuffled.cuda(), views[1])
    rows_k, rows_v = row_codes(views, shuffled.cuda())
    for got, meant in ((rows_k[1], k_rows), (rows_v[1], v_rows)):
        assert torch.equal(got, codes_of(quantise_ref(meant.cpu().float(), FP8, host_scale)))
    pool.view(pages, -1)[ids.cuda()] = CANARY
    assert bool((pool == CANARY).all())


def row_codes(views, slots):
    """fp8 codes of K and V [N, n_kv, D] at slots, looked up page by page, for each view."""
    keys, values = [], []
    page, offset = slots // 32, slots % 32
    for view in views:
        k, v = (codes_of(x)[page] for x in (view.k, view.v))  # whole pages of each row
        row = torch.arange(len(slots), device=slots.device)
        keys.append((k[row, offset] if view.layout == "NHD" else k[row, :, offset]).cpu())
        if view.v_layout == "row":
            values.append((v[row, offset] if view.layout == "NHD" else v[row, :, offset]).cpu())
        else:
            values.append(v[row, :, :, view.v_columns[offset]].cpu())
    return keys, values


# ------------------------------------------------------------------ one launch, captured and replayed


@pytest.mark.parametrize("pools", [
    DRAFTER, replace(DRAFTER, layout="HND", v_layout="transposed16"),
    Pools(BF16, heads=4, dim=128, tokens=32, groups=(0, 1, 0, 1, 1), pages=(40, 50)),
], ids=["page-major", "transposed", "several pools"])
def test_one_launch_without_sync_or_allocation(pools):
    """One kernel for all layers, K and V; nothing waits for the device, nothing is allocated."""
    case = to_cuda(make_case(pools, 300, dtype=BF16))
    views, _ = pools.make("cuda")
    rows = to_cuda(make_rows(pools, 300, dtype=BF16))
    for call in (lambda: launch(case, pools, views), lambda: store_kv(**rows, page_view=views[0])):
        quietly(call)
        _, nodes = capture(call)
        assert nodes == [0]


@pytest.mark.parametrize("pools", [
    Pools(FP8, groups=(0, 1, 0), pages=(6, 9)),
    Pools(BF16, "HND", "transposed16", groups=(0, 0), pages=(6,), page_major=True),
], ids=["several pools", "page-major"])
def test_a_captured_graph_follows_inputs_that_change_in_place(pools):
    """Pitfalls 1, 3, 26, 33 (TensorRT-LLM PR 16548, test_dflash_dummy_slot, 16916; vLLM PR 47066).

    Values, positions and slots of a bucket of 40 rows change between replays, from full to all padded; padded
    rows hold what an earlier replay left.
    """
    n = 40
    inputs = to_cuda(make_case(pools, n, dtype=BF16))
    views, data = pools.make("cuda")
    graph, nodes = capture(lambda: launch(inputs, pools, views))
    assert nodes == [0]
    for seed, active in enumerate((40, 3, 0, 17, 1, 40, 0)):
        case = make_case(pools, n, seed + 1, dtype=BF16)
        case["slot_mapping"][:, active:] = -1
        for name in ("positions", "kv"):
            case[name][active:] = inputs[name][active:].cpu()
        for name, x in case.items():
            if isinstance(x, torch.Tensor):
                inputs[name].copy_(x)
        for pool in data:
            pool.fill_(CANARY)
        graph.replay()
        check_against_reference(pools, case, (views, data))


def check_against_reference(pools, case, got):
    """Pools that a replay has filled, against the reference's from the same canaries."""
    legal = {**case, "slot_mapping": allowed_slots(pools, case)}
    want = pools.make("cpu")
    launch_ref = lambda pages: store_draft_context_ref(pages=pages, layer_to_group=list(pools.groups), **legal)
    launch_ref(want[0])

    def quotients():
        pages = pools.make("cpu", F32)[0]
        launch_ref(pages)
        return pages

    return check_pages(pools, got, want, quotients)


def test_block_table_and_store_of_a_step_in_one_graph():
    """Pitfalls 1, 3, 4, 26 (TensorRT-LLM PR 16548, 19040; vLLM PR 47066): slots never leave the device.

    Row starts, rejects, page ids and lengths change in place; the store follows through the captured slots.
    """
    pools = Pools(FP8, "HND", "transposed16", tokens=16, groups=(0, 1, 1), pages=(12, 12))
    rng, reqs, rows = np.random.default_rng(3), 6, 60

    def new_inputs(active):
        case = random_draft_case(rng, reqs=reqs, groups=2, k=3, tokens_per_block=16, width=4, max_rows=9)
        for group in case["block_tables"]:  # distinct pages, so that no two rows share a slot; a few are bad
            group.copy_(torch.from_numpy(rng.permutation(24).astype(np.int32)).view(reqs, 4) - 2)
        starts = case["row_start_loc"]
        starts[active + 1 :] = starts[active]
        positions = torch.zeros(rows, dtype=torch.int64)
        positions[: int(starts[-1])] = case["row_positions"][: int(starts[-1])]
        return {**case, "row_positions": positions}

    case = new_inputs(reqs)
    stored = make_case(pools, rows, dtype=BF16, positions=64)
    inputs, rest = to_cuda(case), to_cuda(stored)
    out, _ = guarded(DraftInputs, *bucket_sizes(DraftInputs, case), device="cuda")
    views, data = pools.make("cuda")

    def step():
        build_draft_inputs(**inputs, out=out)
        launch({**rest, "positions": out.context_positions, "slot_mapping": out.context_slot_mapping}, pools, views)

    graph, nodes = capture(step)
    assert nodes == [0, 0]
    for active in (6, 2, 0, 5, 1, 6):
        case = new_inputs(active)
        for name, x in case.items():
            if isinstance(x, torch.Tensor):
                inputs[name].copy_(x)
        for pool in data:
            pool.fill_(CANARY)
        graph.replay()
        expected = build_draft_inputs_ref(**case)
        check_against_reference(pools, {
            **stored, "positions": expected.context_positions, "slot_mapping": expected.context_slot_mapping
        }, (views, data))


def test_nothing_is_compiled_after_warm_up():
    """Pitfall 40 (vLLM PR 49903): 1, multiples of 16 and other row, page and position counts share a variant."""
    pools = Pools(FP8, heads=4, dim=64, tokens=32, groups=(0, 1), pages=(70, 70), pad=0)
    views, _ = pools.make("cuda")

    def store_rows(n, positions, spare=0, offset=0, views=views):
        sized = replace(pools, pages=tuple(view.num_pages for view in views))
        case = make_case(sized, n, dtype=BF16, positions=positions)
        slots = torch.full((2, n + spare), -1)
        slots[:, offset : offset + n] = case["slot_mapping"]
        inputs = to_cuda(case)
        inputs["slot_mapping"] = slots.cuda()[:, offset : offset + n]
        inputs["positions"] = torch.cat([torch.zeros(offset).long(), case["positions"]]).cuda()[offset:]
        launch(inputs, pools, views)
        rows = to_cuda(make_rows(sized, n, dtype=BF16))
        store_kv(**rows, page_view=views[0])
        # As transformers lays them out: the stride from head to head is n rows.
        by_head = {name: rows[name].transpose(0, 1).contiguous().transpose(0, 1) for name in ("k", "v")}
        store_kv(**{**rows, **by_head}, page_view=views[0])

    store_rows(5, 100)
    store_rows(2000, 4096)
    compiled = num_compiled(store)
    for n in (1, 2, 15, 16, 17, 31, 32, 100, 1024, 1500):
        store_rows(n, 1 if n == 1 else 16 * n)
        store_rows(n, 1000 + n, spare=n, offset=1)
        store_rows(n, 33, spare=16, offset=16)
    case = make_case(pools, 32, dtype=BF16)
    for first in (0, 1, 16):  # rows of a bucket, from any of them on
        sliced = to_cuda(case)
        sliced |= {name: sliced[name][first:] for name in ("kv", "positions")}
        launch({**sliced, "slot_mapping": sliced["slot_mapping"][:, first:]}, pools, views)
    for pages in (1, 2, 16, 17, 64):  # a manager of another size
        other, _ = replace(pools, pages=(pages, pages)).make("cuda")
        store_rows(9, 50, views=other)
    assert num_compiled(store) == compiled


# ------------------------------------------------------------------ errors


def test_a_wrong_argument_on_cuda_is_named_and_nothing_is_written():
    """Each tensor left on the CPU, pages on the other device, another dtype, a strided last dimension."""
    pools = Pools(FP8, groups=(0, 0), pages=(4,))
    case, (views, data) = to_cuda(make_case(pools, 9)), pools.make("cuda")
    on_cpu, _ = pools.make("cpu")
    wrong = [(name, x.cpu()) for name, x in case.items() if isinstance(x, torch.Tensor)]
    wrong += [
        ("kv", case["kv"].double()), ("kv", case["kv"].repeat_interleave(2, -1)[..., ::2]),
        ("positions", case["positions"].int()), ("slot_mapping", case["slot_mapping"].int()),
        ("slot_mapping", case["slot_mapping"][:, :-1]), ("cos_sin", case["cos_sin"].half()),
        ("k_norm_weight", case["k_norm_weight"][:1]),
    ]
    for name, value in wrong:
        with pytest.raises(ValueError, match=r"^\w+(\[\d\])?: expected .*got "):
            launch({**case, name: value}, pools, views)
    for pages in ([views[0], on_cpu[1]], on_cpu, views[:1]):
        with pytest.raises(ValueError, match=r"^pages(\[\d\])?: expected .*got "):
            launch(case, pools, pages)
    rows = to_cuda(make_rows(pools, 9))
    for name, x in rows.items():
        for value in (x.cpu(), x.double(), x[:-1], x[None]):
            if name == "k" and value.shape == x[:-1].shape:
                continue  # k itself says how many rows there are
            with pytest.raises(ValueError, match=r"^\w+: expected .*got "):
                store_kv(**{**rows, name: value}, page_view=views[0])
    with pytest.raises(ValueError, match=r"^k: expected a tensor on cpu"):
        store_kv(**rows, page_view=on_cpu[0])
    assert all((pool == CANARY).all() for pool in data)


def test_values_are_checked_in_debug_mode_only(monkeypatch):
    """A slot past the pool or a position past the table is skipped; with DFLASH_PAGED_DEBUG=1 it raises."""
    pools = Pools(FP8, groups=(0, 0), pages=(4,))
    views, data = pools.make("cuda")
    slot, position = (make_case(pools, 9) for _ in range(2))
    slot["slot_mapping"] = torch.arange(9)[None] + pools.num_slots(0)
    position["slot_mapping"] = torch.arange(9)[None]
    position["positions"] += 64
    rows = {**make_rows(pools, 9), "slots": torch.arange(9) + pools.num_slots(0)}
    monkeypatch.delenv("DFLASH_PAGED_DEBUG", raising=False)
    for case in (slot, position):
        launch(to_cuda(case), pools, views)
    store_kv(**to_cuda(rows), page_view=views[0])
    torch.cuda.synchronize()
    monkeypatch.setenv("DFLASH_PAGED_DEBUG", "1")
    for name, case in (("slot_mapping", slot), ("positions", position)):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            launch(to_cuda(case), pools, views)
    with pytest.raises(ValueError, match="^slots: expected"):
        store_kv(**to_cuda(rows), page_view=views[0])
    assert all((pool == CANARY).all() for pool in data)
