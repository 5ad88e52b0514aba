"""Pools, views and tables: bytes and geometry, page copies, staging, what is sent. On a GPU: test_manager_cuda."""

import random

import numpy as np
import pytest
import torch

from dflash_paged.blocks import GroupSpec
from dflash_paged.manager import KVCacheManager
from dflash_paged.memory import LayerSpec
from dflash_paged.pools import BlockTables, LayerPages, LayerViews, Staging, has_passed, record_mark, wait_for
from dflash_paged.store import read_rows_ref, store_kv

CPU = torch.device("cpu")


def make_pools(specs: list[LayerSpec], num_blocks=(6,), kv_layout="NHD", size=16) -> LayerViews:
    windows = list(dict.fromkeys(s.sliding_window for s in specs))
    groups = [
        GroupSpec(w, tuple(i for i, s in enumerate(specs) if s.sliding_window == w), True, True, 1, 0, n)
        for w, n in zip(windows, num_blocks)
    ]
    return LayerViews(dict(enumerate(specs)), groups, size, kv_layout, CPU)


def test_layers_of_one_geometry_share_a_tensor_a_group_and_no_other():
    """Pitfall 25: target and draft pages that differ in bytes need no common page size, only common ids."""
    specs = [
        LayerSpec(2, 16), LayerSpec(2, 16), LayerSpec(1, 16), LayerSpec(2, 8), LayerSpec(2, 16, "float8_e4m3fn"),
        LayerSpec(2, 16, v_layout="transposed"), LayerSpec(1, 24, kv_factor=1), LayerSpec(2, 16, sliding_window=20),
    ]
    pools = make_pools(specs, (6, 4))
    assert [pools.place[i][0] for i in range(8)] == [0, 0, 1, 2, 3, 4, 5, 6]
    assert [len(t) for t in pools.group_tensors] == [6, 1]
    assert pools.buffer(0).shape[0] == 6 and pools.buffer(7).shape[0] == 4
    assert pools.num_bytes == 16 * (6 * sum(s.bytes_per_token for s in specs[:7]) + 4 * specs[7].bytes_per_token)
    for tensor in pools.tensors:
        assert tensor.is_contiguous()


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("v_layout", ["row", "transposed16"])
def test_a_copied_page_reads_the_same_rows_in_every_layer(kv_layout, dtype, v_layout):
    """Copy on write of whole pages, whatever lies where in them."""
    specs = [LayerSpec(2, 16, dtype), LayerSpec(1, 8, dtype, v_layout=v_layout), LayerSpec(3, 8, dtype)]
    pools = make_pools(specs, kv_layout=kv_layout)
    slots, copied = torch.arange(16, 32), torch.arange(64, 80)
    for i, spec in enumerate(specs):
        if dtype == "float8_e4m3fn":
            pools.set_scales(i, 0.5, 2.0)
        k, v = torch.randn(2, 16, spec.num_kv_heads, spec.head_dim)
        store_kv(k.to(torch.bfloat16), v.to(torch.bfloat16), slots, pools.view(i))
    before = [t.clone() for t in pools.tensors]
    pools.copy_pages(0, torch.tensor([1]), torch.tensor([4]))
    for i in range(3):
        for a, b in zip(read_rows_ref(pools.view(i), slots), read_rows_ref(pools.view(i), copied)):
            assert torch.equal(a, b)
    for tensor, old in zip(pools.tensors, before):
        others = [0, 1, 2, 3, 5]
        assert torch.equal(tensor[others].view(torch.uint8), old[others].view(torch.uint8))


def test_layer_pages_are_those_of_the_present_buffers():
    """Pitfall 9: the size-estimation probe's pages are swapped for the real ones; whoever kept the old would write
    where nobody reads."""
    manager = KVCacheManager(
        target_layers=[LayerSpec(1, 8)], draft_layers=[LayerSpec(1, 8)], tokens_per_block=8, num_blocks=2, max_seq_len=16,
        max_batch_size=1, num_lookahead_tokens=1,
    )
    pages, old = LayerPages(manager, [0, 1]), manager.page_view(1)
    assert len(pages) == 2 and pages[1].k.data_ptr() == old.k.data_ptr() and [p.layer_idx for p in pages] == [0, 1]
    manager.reallocate(num_blocks=50)
    assert pages[1].num_pages == 50 and pages[1].k.data_ptr() == manager.page_view(1).k.data_ptr()
    assert pages[1].k.data_ptr() != old.k.data_ptr()
    pages[1].k.fill_(3)
    assert (manager.get_buffers(1)[:, 0] == 3).all()


# Tables


def test_a_flush_sends_what_changed_and_only_that():
    tables = BlockTables(2, 3, 8, CPU)
    tables.put(0, 1, 2, 7)
    tables.put_run(1, 0, 3, [4, 5, 6])
    tables.flush()
    assert (tables.num_copies, tables.num_entries_sent) == (1, 4)
    tables.flush()
    assert tables.num_copies == 1, "nothing changed"
    tables.erase(1, 0, 4, 4)
    tables.put_run(1, 0, 4, [])
    tables.flush()
    assert tables.num_copies == 1, "an empty run is no change"
    assert tables.device[0, 1].tolist() == [-1, -1, 7, -1, -1, -1, -1, -1]
    assert tables.device[1, 0].tolist() == [-1, -1, -1, 4, 5, 6, -1, -1]


def test_many_changes_are_sent_as_the_tables_as_a_whole():
    """What piles up between two flushes is bounded by the tables' size."""
    tables = BlockTables(1, 4, 100, CPU)
    for i in range(500):
        tables.put_run(0, i % 4, 0, list(range(i, i + 90)))
        tables.erase(0, (i + 1) % 4, 10, 90)
    assert len(tables._runs) + len(tables._single) <= 500
    tables.flush()
    assert (tables.device.numpy() == tables.host).all() and tables.num_copies == 1
    tables.put(0, 2, 3, 5)
    tables.flush()
    assert (tables.device.numpy() == tables.host).all() and tables.num_entries_sent == 500 + 1


def test_an_entry_that_changed_twice_has_its_last_value():
    for seed in range(50):
        rng, tables = random.Random(seed), BlockTables(2, 4, 8, CPU)
        for _ in range(60):
            group, row, index = rng.randrange(2), rng.randrange(4), rng.randrange(8)
            if rng.random() < 0.5:
                tables.put(group, row, index, rng.randrange(99))
            elif rng.random() < 0.5:
                tables.put_run(group, row, index, list(range(rng.randrange(9 - index))))
            else:
                tables.erase(group, row, index, 8)
        tables.flush()
        assert (tables.device.numpy() == tables.host).all()


def test_gathered_tables_have_an_empty_row_for_padded_requests_and_may_land_in_place():
    tables = BlockTables(2, 3, 4, CPU)
    tables.put_run(0, 2, 0, [1, 2, 3])
    got = tables.gather([2, tables.padded_row, 0])
    assert got[0].tolist() == [[1, 2, 3, -1], [-1] * 4, [-1] * 4]
    out = torch.zeros(2, 3, 4, dtype=torch.int32)
    assert tables.gather([2, 3, 0], out) is out and torch.equal(out, got)
    assert tables.gather([]).shape == (2, 0, 4)
    for wrong in (torch.zeros(2, 2, 4, dtype=torch.int32), torch.zeros(2, 3, 4)):
        with pytest.raises(ValueError, match="^out: expected"):
            tables.gather([2, 3, 0], wrong)


def test_staged_values_are_not_those_of_later():
    """The array that was sent may be changed by its owner at once."""
    values = np.arange(6, dtype=np.int64).reshape(2, 3)
    sent = Staging(CPU).send(values)
    values[:] = -1
    assert sent.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert Staging(CPU).send(np.array([], np.int64)).shape == (0,)


class FakeMark:
    """A mark whose passing a test decides."""

    def __init__(self):
        self.passed = False

    def query(self):
        return self.passed


def test_a_pinned_buffer_is_written_again_only_behind_its_mark(monkeypatch):
    """Pitfall 34: while a copy is in flight its buffer stays as it is; another one is taken."""
    marks = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    staging = Staging(torch.device("cuda"), lambda device: marks.append(FakeMark()) or marks[-1])
    assert len(staging._buffers) == 4, "pinned ahead"
    staging._buffers.clear()
    used = []
    for step in range(6):
        if step == 4:
            for mark in marks:
                mark.passed = True
        entry = staging._entry(100)
        entry[1] = staging._mark(staging.device)
        used.append(entry[0].data_ptr())
    assert len(set(used[:4])) == 4, "no buffer comes twice while its copy runs"
    assert used[4] in used[:4] and len(staging._buffers) <= 5
    big = staging._entry(10_000)
    assert big[0].numel() >= 10_000


def test_a_cpu_needs_no_marks():
    assert record_mark(CPU) is None and has_passed(None)
    wait_for(None, CPU)
