"""Block table kernels on a CUDA device: random cases, one launch, graph replay, no sync, no late compilation."""

import ctypes
from dataclasses import fields

import numpy as np
import pytest
import torch
from test_block_table_kernel import (
    CANARY, as_lists, bucket_sizes, guarded, random_case, random_draft_case, random_verify_case,
)

from dflash_paged import block_table
from dflash_paged.block_table import (
    DraftInputs,
    VerifyInputs,
    build_draft_inputs,
    build_draft_inputs_ref,
    build_verify_inputs,
    build_verify_inputs_ref,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KINDS = pytest.mark.parametrize("kind", [DraftInputs, VerifyInputs], ids=["draft", "verify"])
BUILD = {DraftInputs: build_draft_inputs, VerifyInputs: build_verify_inputs}
REFERENCE = {DraftInputs: build_draft_inputs_ref, VerifyInputs: build_verify_inputs_ref}


# ------------------------------------------------------------------ shared with the store's tests


def to_cuda(case):
    """Tensors on the device, the rest as it is."""
    return {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in case.items()}


def capture(call):
    """Warm `call` up, capture it in a CUDA graph; returns the graph and the types of its nodes (0: a kernel)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    driver, raw, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t(0)
    assert driver.cuGraphGetNodes(raw, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert driver.cuGraphGetNodes(raw, nodes, ctypes.byref(count)) == 0
    kinds = []
    for node in nodes:
        kind = ctypes.c_int(-1)
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        kinds.append(kind.value)
    graph.instantiate()
    return graph, kinds


def num_compiled(module):
    """Variants of the module's kernels that this process has compiled or loaded."""
    kernels = [f for name, f in vars(module).items() if name.endswith("_kernel") and hasattr(f, "device_caches")]
    assert kernels, "no kernel whose compilations can be counted"
    return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())


def quietly(call):
    """Run `call` after a warm-up: a host sync raises, and no memory is allocated."""
    call()
    torch.cuda.synchronize()
    allocations = lambda: torch.cuda.memory_stats()["allocation.all.allocated"]
    before = allocations()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert allocations() == before


# ------------------------------------------------------------------ equality


def check_on_cuda(kind, case, more_reqs=0, more_rows=0):
    """The public launcher against the reference on the CPU, every byte of buffers with canaries between outputs."""
    sizes = bucket_sizes(kind, case, more_reqs, more_rows)
    want, want_buffers = guarded(kind, *sizes, device="cpu")
    REFERENCE[kind](**case, out=want)
    out, buffers = guarded(kind, *sizes, device="cuda")
    assert BUILD[kind](**to_cuda(case), out=out) is out
    for got, expected in zip(buffers, want_buffers):
        if not torch.equal(got.cpu(), expected):
            assert as_lists(out) == as_lists(want), case
            raise AssertionError("a canary outside the outputs was overwritten")


@KINDS
def test_ten_thousand_random_cases_equal_the_reference(kind):
    """Pitfalls 1, 3, 4, 5, 22, 26, 27 (TensorRT-LLM PR 16548, 19040; vLLM PR 47066, 53970).

    Row counts, rejects, paddings, widths, groups and bad page ids: no difference, no write past an output.
    """
    rng = np.random.default_rng(7)
    configurations = [(0, 1, 8), (1, 3, 16), (7, 1, 32), (7, 3, 8), (15, 1, 8)]  # K, groups, tokens a page
    for i in range(10_000):
        k, groups, tokens_per_block = configurations[i % len(configurations)]
        case = random_case(
            kind, rng, reqs=int(rng.integers(1, 40 if i % 10 == 0 else 8)), groups=groups, k=k,
            tokens_per_block=tokens_per_block, width=int(rng.integers(1, 7)), num_pages=int(rng.integers(1, 15)),
        )
        extra = {"more_rows": int(rng.integers(0, 9))} if kind is DraftInputs else {}
        check_on_cuda(kind, case, more_reqs=int(rng.integers(0, 4)), **extra)


@KINDS
@pytest.mark.parametrize("reqs, k, width", [(64, 15, 4096), (256, 7, 4096), (1, 0, 1), (1000, 3, 33)])
def test_large_batches_equal_the_reference(kind, reqs, k, width):
    """The sizes of a serving step, tables of 4,096 pages and three groups."""
    rng = np.random.default_rng(3)
    options = dict(reqs=reqs, groups=3, k=k, width=width, tokens_per_block=32)
    if kind is DraftInputs:
        options |= {"max_rows": 2 * k + 2, "trailing": 40}
    check_on_cuda(kind, random_case(kind, rng, **options), more_reqs=5)


def test_a_long_prefill_equals_the_reference():
    """One chunk of 8,192 rows beside decode rows."""
    rng = np.random.default_rng(5)
    case = random_draft_case(rng, reqs=9, k=7, width=400, tokens_per_block=32, max_rows=8192, num_pages=None)
    check_on_cuda(DraftInputs, case)


@KINDS
def test_cuda_tensors_run_the_kernel_and_cpu_tensors_the_reference(kind, monkeypatch):
    """Nothing falls back in silence."""
    case = random_case(kind, np.random.default_rng(0), reqs=3)
    expected = as_lists(BUILD[kind](**case))

    def refuse(*args, **kwargs):
        raise AssertionError("the reference ran")

    monkeypatch.setattr(block_table, REFERENCE[kind].__name__, refuse)
    assert as_lists(BUILD[kind](**to_cuda(case))) == expected
    with pytest.raises(AssertionError, match="the reference ran"):
        BUILD[kind](**case)


def test_slots_past_two_to_the_31_are_exact():
    """Pitfall 39 (vLLM PR 47671): page times tokens is an int64 product on the device too."""
    for page in (2**23, 2**27 + 1, 2**31 - 2):
        case = random_draft_case(np.random.default_rng(1), reqs=1, tokens_per_block=256, idle=0.0, num_pages=None)
        case["row_positions"] = torch.arange(case["row_positions"].numel()) + 250
        case["block_tables"].fill_(page)
        check_on_cuda(DraftInputs, case)


# ------------------------------------------------------------------ one launch, captured and replayed


@KINDS
@pytest.mark.parametrize("groups", [1, 3])
def test_one_launch_without_sync_or_allocation(kind, groups):
    """One kernel for all requests and groups; nothing waits for the device, nothing is allocated."""
    case = to_cuda(random_case(kind, np.random.default_rng(2), reqs=64, groups=groups, k=7, width=64))
    out, _ = guarded(kind, *bucket_sizes(kind, case, 3), device="cuda")
    call = lambda: BUILD[kind](**case, out=out)
    quietly(call)
    _, nodes = capture(call)
    assert nodes == [0]


@KINDS
@pytest.mark.parametrize("groups", [1, 3])
def test_a_captured_graph_follows_inputs_that_change_in_place(kind, groups):
    """Pitfalls 1, 2, 3, 26, 33 (TensorRT-LLM PR 16548, 17154, test_dflash_dummy_slot, 16916; vLLM PR 47066).

    Lengths, page ids, rejects and row starts of a bucket of 16 requests change between replays, from full to
    all padded: outputs equal the reference each time, and no slot of an earlier replay stays.
    """
    rng, bucket, k = np.random.default_rng(4), 16, 7
    rows = bucket * 6 + 5

    def new_case(active):
        case = random_case(kind, rng, reqs=bucket, groups=groups, k=k, width=5)
        if kind is VerifyInputs:
            case["bonus_token_ids"][active:] = -1
            return case
        starts = case["row_start_loc"]
        starts[active + 1 :] = starts[active]  # the rest of the bucket is padded
        positions = torch.from_numpy(rng.integers(-5, 10**9, rows))  # rows that are nobody's hold anything
        positions[: int(starts[-1])] = case["row_positions"][: int(starts[-1])]
        return {**case, "row_positions": positions}

    case = new_case(bucket)
    inputs = to_cuda(case)
    out, buffers = guarded(kind, *bucket_sizes(kind, case, 2), device="cuda")
    graph, nodes = capture(lambda: BUILD[kind](**inputs, out=out))
    assert nodes == [0]
    for active in (16, 3, 0, 9, 1, 16, 0, 15, 8, 2):
        case = new_case(active)
        for name, x in case.items():
            if isinstance(x, torch.Tensor):
                inputs[name].copy_(x)
        graph.replay()
        want, want_buffers = guarded(kind, *bucket_sizes(kind, case, 2), device="cpu")
        REFERENCE[kind](**case, out=want)
        for got, expected in zip(buffers, want_buffers):
            assert torch.equal(got.cpu(), expected), (active, as_lists(out), as_lists(want))
        assert (out.ctx_lens[active:] == 0).all()


def test_a_draft_and_a_verify_pass_in_one_graph():
    """The step that an engine captures: the verify pass reads the lengths that the draft pass has built."""
    rng, reqs, k = np.random.default_rng(6), 8, 3
    draft, verify = (maker(rng, reqs=reqs, k=k, width=5) for maker in (random_draft_case, random_verify_case))
    draft_out = guarded(DraftInputs, *bucket_sizes(DraftInputs, draft), device="cuda")[0]
    verify_out = guarded(VerifyInputs, *bucket_sizes(VerifyInputs, verify), device="cuda")[0]
    draft_in, verify_in = to_cuda(draft), {**to_cuda(verify), "ctx_lens": draft_out.ctx_lens}

    def step():
        build_draft_inputs(**draft_in, out=draft_out)
        build_verify_inputs(**verify_in, out=verify_out)

    graph, nodes = capture(step)
    assert nodes == [0, 0]
    for rejected in range(4):
        draft["num_rejected"].fill_(rejected)
        draft_in["num_rejected"].fill_(rejected)
        graph.replay()
        expected = build_draft_inputs_ref(**draft)
        assert as_lists(draft_out) == as_lists(expected)
        verify["ctx_lens"] = expected.ctx_lens
        assert as_lists(verify_out) == as_lists(build_verify_inputs_ref(**verify))


@KINDS
def test_nothing_is_compiled_after_warm_up(kind):
    """Pitfall 40 (vLLM PR 49903): 1, multiples of 16 and the rest share a variant."""
    rng = np.random.default_rng(8)
    options = dict(k=7, groups=2, tokens_per_block=32)
    check_on_cuda(kind, random_case(kind, rng, reqs=5, width=5, **options), more_reqs=1)
    compiled = num_compiled(block_table)
    sizes = [(1, 1, 1), (2, 16, 16), (16, 17, 17), (17, 1, 2), (64, 32, 1024), (100, 4096, 5), (1, 48, 3)]
    for reqs, width, pages in sizes:
        for more_reqs in (0, 1, 16 - reqs % 16):
            case = random_case(kind, rng, reqs=reqs, width=width, num_pages=pages, **options)
            if kind is DraftInputs:
                case["mask_token_id"] = int(rng.choice([0, 1, 16, 151_669]))
            check_on_cuda(kind, case, more_reqs=more_reqs)
    for idle, trailing in ((1.0, 0), (0.0, 0), (0.0, 40)):  # no rows at all, only rows of requests, spare rows
        case = random_case(kind, rng, reqs=16, **options) if kind is VerifyInputs else random_draft_case(
            rng, reqs=16, idle=idle, trailing=trailing, **options
        )
        check_on_cuda(kind, case)
    case = to_cuda(random_case(kind, rng, reqs=16, width=16, **options))
    for offset in (1, 4, 16):  # slices of larger buffers, wherever they begin
        tables = torch.full((3, 40, 67), -1, dtype=torch.int32, device="cuda")[1:, offset : offset + 16]
        tables = tables[..., offset : offset + 16].copy_(case["block_tables"])
        sliced = {**case, "block_tables": tables}
        for name, x in case.items():
            if isinstance(x, torch.Tensor) and x.dim() == 1:
                sliced[name] = torch.cat([x.new_zeros(offset), x])[offset:]
        assert as_lists(BUILD[kind](**sliced)) == as_lists(BUILD[kind](**case))
    assert num_compiled(block_table) == compiled


# ------------------------------------------------------------------ errors


@KINDS
def test_a_wrong_argument_on_cuda_is_named_and_nothing_is_written(kind):
    """Each tensor left on the CPU, of another dtype, strided in its last dimension: before the launch."""
    case = to_cuda(random_case(kind, np.random.default_rng(9), reqs=4, groups=2))
    out, buffers = guarded(kind, *bucket_sizes(kind, case), device="cuda")
    for name, x in case.items():
        if not isinstance(x, torch.Tensor):
            continue
        for value in (x.cpu(), x.float(), x[None], x.repeat_interleave(2, -1)[..., ::2]):
            with pytest.raises(ValueError, match=r"^\w+(\.\w+)?: expected .*got "):
                BUILD[kind](**{**case, name: value}, out=out)
    for field in fields(kind):
        moved = kind(**{f.name: getattr(out, f.name) for f in fields(kind)})
        setattr(moved, field.name, getattr(out, field.name).cpu())
        with pytest.raises(ValueError, match=rf"^out\.{field.name}: expected a tensor on cuda"):
            BUILD[kind](**case, out=moved)
    assert all((buffer == CANARY).all() for buffer in buffers)


@KINDS
def test_debug_checks_raise_on_cuda_too(kind, monkeypatch):
    """DFLASH_PAGED_DEBUG=1 pays a sync for the checks of values."""
    case = to_cuda(random_case(kind, np.random.default_rng(10), reqs=4))
    name = "num_rejected" if kind is DraftInputs else "ctx_lens"
    case["next_token_ids" if kind is DraftInputs else "bonus_token_ids"].fill_(7)
    case[name].fill_(-5)
    BUILD[kind](**case)
    monkeypatch.setenv("DFLASH_PAGED_DEBUG", "1")
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        BUILD[kind](**case)
