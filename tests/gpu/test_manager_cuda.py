"""The manager on a CUDA device: tables sent while the host runs ahead, marks between streams, copies, graphs."""

import pytest
import torch

from dflash_paged.manager import KVCacheManager
from dflash_paged.memory import LayerSpec
from dflash_paged.pools import LayerPages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE, SIZE = "cuda", 8
LONG_NAP = 400_000_000  # clock cycles, about 0.2 s: the host is many steps ahead meanwhile


def make_manager(**changes) -> KVCacheManager:
    settings = dict(
        target_layers=[LayerSpec(2, 16, "bfloat16")] * 2,
        draft_layers=[LayerSpec(1, 8, "bfloat16"), LayerSpec(1, 8, "bfloat16", sliding_window=20)],
        tokens_per_block=SIZE, num_blocks=[64, 40], max_seq_len=128, max_batch_size=8, num_lookahead_tokens=4,
        device=DEVICE,
    )
    return KVCacheManager(**{**settings, **changes})


def run(m: KVCacheManager, request_id: int, tokens: list[int], **options):
    start = m.add_sequence(request_id, tokens, **options)
    m.prepare_resources([(request_id, len(tokens) - start.num_reused_tokens)])
    m.update_resources([(request_id, tokens[start.num_reused_tokens :])])
    return start


@pytest.fixture
def no_sync():
    """Any wait of the host for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_each_step_sees_its_own_tables_while_the_host_runs_ahead(no_sync):
    """Pitfall 34: a pinned buffer that is written again before its copy has run gives a mixture of steps."""
    m, seen, expected = make_manager(num_blocks=[100, 60]), [], []
    m.tables.staging.reserve(200)  # pinning memory may wait for the device, and so may a kernel's first launch
    torch.cuda.set_sync_debug_mode("default")
    for i in range(100, 110):
        run(m, i, [1] * (9 if i < 103 else 6))  # the later ones copy a part of the first one's block
        m.block_tables([i, None])
        m.free_resources(i)
    m.tables.flush()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    torch.cuda._sleep(5 * LONG_NAP)
    ids = list(range(8))
    for i in ids:
        m.add_sequence(i, [i] * 5)
    for step in range(40):
        if step == 20:
            m.free_resources(3)
            m.add_sequence(20, [3] * 9)
            ids[3] = 20
        m.prepare_resources([(i, 5 if m.num_tokens(i) == 0 else 0) for i in ids])
        seen.append(m.block_tables([*ids, None]))
        expected.append(torch.from_numpy(m.tables.host.copy())[:, m.table_rows([*ids, None])])
        m.update_resources([(i, [step] * (5 if m.num_tokens(i) == 0 else 1 + (i + step) % 3)) for i in ids])
    torch.cuda.set_sync_debug_mode("default")
    for got, want in zip(seen, expected):
        assert torch.equal(got.cpu(), want)
    in_flight = sum(mark is not None for _, mark in m.tables.staging._buffers)
    assert in_flight > 40, "the nap was too short to prove anything"
    m.check_invariants()


def test_tables_keep_their_address_and_a_graph_reads_the_present_ones():
    m = make_manager()
    for i in range(4):
        run(m, i, [i] * 9)
    out = torch.empty(m.num_groups, 4, m.max_blocks_per_seq, dtype=torch.int32, device=DEVICE)
    m.tables.flush()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(m.tables.device[:, m.table_rows([0])[0] : 4])
    for step in range(12):
        m.prepare_resources([(i, 0) for i in range(4)])
        graph.replay()
        assert torch.equal(out, m.block_tables([0, 1, 2, 3]))
        assert torch.equal(out.cpu(), torch.from_numpy(m.tables.host)[:, :4])
        m.update_resources([(i, [step] * 3) for i in range(4)])
    fixed = torch.empty_like(out)
    assert m.block_tables([3, 2, None, 0], out=fixed).data_ptr() == fixed.data_ptr()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_copied_pages_are_equal_in_every_layer(dtype, layout, no_sync):
    """A partial block and a fork's block, in target and draft, K and V, by bytes."""
    m = make_manager(
        target_layers=[LayerSpec(2, 16, dtype)] * 2, kv_layout=layout,
        draft_layers=[LayerSpec(1, 8, "bfloat16"), LayerSpec(1, 8, dtype, sliding_window=20)], draft_kv_dtype=dtype,
    )
    torch.cuda.set_sync_debug_mode("default")
    for pool in m.pools.tensors:
        pool.copy_(torch.randn(pool.shape, device=DEVICE).to(pool.dtype))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    run(m, 0, list(range(30)))
    start = m.add_sequence(1, [*range(19), 90, 91])
    assert start.num_copied_tokens == 3
    m.fork_sequence(0, 2)
    m.prepare_resources([(0, 0), (1, 2), (2, 0)])
    torch.cuda.set_sync_debug_mode("default")
    for layer_idx in range(4):
        a, b, c = (m.get_batch_cache_indices([i], layer_idx)[0] for i in range(3))
        pages = m.get_buffers(layer_idx).contiguous().view(torch.uint8)
        assert a[2] != b[2] and torch.equal(pages[a[2]], pages[b[2]])
        assert a[3] != c[3] and torch.equal(pages[a[3]], pages[c[3]])
    m.check_invariants()


def test_a_hit_on_another_stream_waits_for_the_rows_to_be_stored(no_sync):
    """The host publishes while the store still runs; a reader elsewhere is ordered behind it by the mark."""
    m, prompt = make_manager(), list(range(30))
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    m.add_sequence(0, prompt)
    m.prepare_resources([(0, 30)])
    blocks = [m.get_batch_cache_indices([0], layer)[0] for layer in range(4)]
    pages = [torch.tensor(b[:3]) for b in blocks]
    torch.cuda.set_sync_debug_mode("default")
    pages = [p.to(DEVICE) for p in pages]
    values = torch.full((), 7.0, device=DEVICE, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    with torch.cuda.stream(writer):
        torch.cuda._sleep(LONG_NAP)
        for layer, ids in enumerate(pages):
            m.get_buffers(layer)[ids] = values
        m.update_resources([(0, prompt)])
    with torch.cuda.stream(reader):
        assert m.add_sequence(1, [*prompt[:25], 99]).num_reused_tokens == 24
        read = [m.get_buffers(layer)[ids].clone() for layer, ids in enumerate(pages)]
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert all((x == 7).all() for x in read)
    assert all(node.mark is not None for node in m._ledger.tree.nodes.values())
    m.prepare_resources([(1, 2)])
    m.update_resources([(1, [24, 99])])
    assert all(node.mark is None for node in m._ledger.tree.nodes.values()), "marks that have passed are forgotten"


def test_a_copys_source_is_given_away_only_behind_the_copy():
    """Reader's stream copies late; the next allocation, on another stream, waits for it before it may write."""
    m, prompt = make_manager(num_blocks=[5, 5]), list(range(16))
    run(m, 0, prompt)
    source = [m.get_batch_cache_indices([0], layer)[0][1] for layer in range(4)]
    for pool in m.pools.tensors:
        pool.fill_(3.0)
    m.free_resources(0)
    torch.cuda.synchronize()
    copier, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(copier):
        torch.cuda._sleep(LONG_NAP)
        assert m.add_sequence(1, [*prompt[:12], 50]).num_copied_tokens == 4
    assert m._ledger.pools[0].ref_counts[source[0]] == 1, "referenced until the mark"
    with torch.cuda.stream(other):
        m.add_sequence(2, [9] * 20)
        m.prepare_resources([(2, 20)])  # all that is left, the source among it
        tables = [m.get_batch_cache_indices([2], layer)[0] for layer in range(4)]
        assert all(s in t for s, t in zip(source, tables))
        for layer, table in enumerate(tables):
            m.get_buffers(layer)[table] = 5.0
    torch.cuda.synchronize()
    for layer in range(4):
        own = m.get_batch_cache_indices([1], layer)[0][1]
        assert (m.get_buffers(layer)[own] == 3).all(), "overwritten before it was copied"


def test_views_follow_the_managers_buffers():
    """Pitfall 9: the probe's buffers are replaced by the real ones."""
    m = make_manager(num_blocks=[4, 4])
    pages = LayerPages(m, [2, 3])
    old = pages[0].k.data_ptr()
    m.reallocate(num_blocks=[128, 64])
    assert pages[0].num_pages == 128 and pages[1].num_pages == 64 and pages[0].k.data_ptr() != old
    assert pages[0].k.data_ptr() == m.page_view(2).k.data_ptr()


def test_long_random_decoding_keeps_tables_and_blocks_right():
    """500 steps with arrivals, ends, forks and preemptions, checked at the end of every tenth."""
    import random

    rng, m, live, gone, next_id = random.Random(0), make_manager(num_blocks=[200, 80]), [], [], 0
    for step in range(500):
        if len(live) < 8 and rng.random() < 0.5:
            if gone and rng.random() < 0.5:
                i = gone.pop()
                m.resume(i, [rng.randrange(2) for _ in range(rng.randrange(1, 60))])
            elif live and rng.random() < 0.3:
                i, next_id = next_id, next_id + 1
                m.fork_sequence(rng.choice(live), i)
            else:
                i, next_id = next_id, next_id + 1
                m.add_sequence(i, [rng.randrange(2) for _ in range(rng.randrange(1, 60))])
            live.append(i)
        plan = [(i, rng.choice([0, 0, 5])) for i in live if m.num_tokens(i) < 110]
        if not m.can_prepare(plan) or (live and rng.random() < 0.05):
            i = live.pop(rng.randrange(len(live)))
            if rng.random() < 0.5:
                m.preempt(i)
                gone.append(i)
            else:
                m.free_resources(i)
            continue
        m.prepare_resources(plan)
        m.update_resources([(i, [rng.randrange(2)] * rng.randrange(0, 4)) for i, _ in plan])
        for i in [i for i in live if m.num_tokens(i) >= 110]:
            m.free_resources(i)
            live.remove(i)
        if step % 10 == 0:
            m.check_invariants()
    for i in live + gone:
        m.free_resources(i)
    m.check_invariants()
    m.clear_prefix_index()
    assert all(g.num_free == g.num_blocks for g in m.stats().groups)
