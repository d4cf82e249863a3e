"""The hot table's kernels through the table that calls them: index, arena, eviction, packing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.kernels.hot_table import state as hs
from millpond.kernels.hot_table.upsert import TOUCH_ALL, TOUCH_CREATED
from millpond.layout import HashRange, RowLayout, Rows
from millpond.stores.rmw.hot.table import HotTable
from tests.support.rows import Entry, decode, encode, layout

NUMBERS = layout("w", "w")
TEXTS = layout("b", "b")


def table_of(shape: RowLayout, range_: HashRange = HashRange()) -> HotTable:  # noqa: B008
    return HotTable(shape, np.zeros(shape.width, np.uint64), range_, 8 << 20)


def upsert(table: HotTable, rows: Rows, stamp: int = 0, touch: int = TOUCH_ALL) -> np.ndarray:
    if len(rows.words) > table.index.room:
        table.index.grow(len(rows.words))
    return table.upsert(rows, stamp, touch, False)[0].rows


def hashes_in_order(table: HotTable) -> list[int]:
    return [int(table.words[row, 0]) for ids in table.walk(5) for row in ids]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 300), max_size=90), max_size=8),
    st.sampled_from([(0, 2**64), (2**63, 2**64), (3 << 60, 5 << 60), (1 << 49, 3 << 49)]),
    st.integers(1, 60),
)
def test_rows_replacement_hash_order_while_the_index_grows(
    groups: list[list[int]], bounds: tuple[int, int], steps: int
) -> None:
    low, high = bounds
    table = table_of(NUMBERS, HashRange(low, high))
    where: dict[int, int] = {}
    for number, group in enumerate(groups):
        group = [low + h % (high - low) for h in group]
        ids = upsert(table, encode([Entry(h, (h,), (None,)) for h in group], NUMBERS))
        for h, row in zip(group, ids.tolist(), strict=True):
            assert where.setdefault(h, row) == row
        table.index.grow(64 * number)  # begin to grow, and move only some entries
        if table.index._next is not None:
            table.index._move(steps)
    assert hashes_in_order(table) == sorted(where)
    assert table.count == len(where)
    table.close()


def test_keys_of_one_hash_are_told_apart() -> None:
    table = table_of(NUMBERS)
    entries = [Entry(2**64 - 1, (n,), (None,)) for n in range(300)]
    first = upsert(table, encode(entries, NUMBERS))
    assert len(set(first.tolist())) == 300
    assert (upsert(table, encode(entries[::-1], NUMBERS)) == first[::-1]).all()
    table.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5000)), max_size=60))
def test_long_values_never_overlap(writes: list[tuple[int, int]]) -> None:
    table = table_of(TEXTS)
    keys = [Entry(n, (b"a key of more than twelve bytes %d" % n,), (None,)) for n in range(6)]
    rows = upsert(table, encode(keys, TEXTS))
    want: dict[int, bytes] = {}
    for number, (row, size) in enumerate(writes):
        want[row] = bytes([number % 251 + 1]) * size
        value = encode([Entry(0, (None,), (want[row],))], TEXTS)
        table.heap.put(rows[row : row + 1], TEXTS.offsets[1], value.words[:, TEXTS.offsets[1] :], value.heap)
        if number % 17 == 16:
            table.pack_values()
    copies = decode(table.copy(rows.astype(np.uint32)), TEXTS)
    assert [entry.value[0] for entry in copies] == [want.get(n, b"") for n in range(6)]
    assert [entry.key for entry in copies] == [entry.key for entry in keys]
    table.close()


def test_freed_chunks_serve_values_of_like_length() -> None:
    table = table_of(TEXTS)
    rows = upsert(table, encode([Entry(1, (b"k",), (None,))], TEXTS))
    at = TEXTS.offsets[1]
    for size in range(2000, 2040):
        value = encode([Entry(0, (None,), (b"v" * size,))], TEXTS)
        table.heap.put(rows, at, value.words[:, at:], value.heap)
    assert table.heap.used < 3 * 2560
    table.close()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_oldest_rows_leave_first_and_changed_ones_last(share: float) -> None:
    table = table_of(NUMBERS)
    spread = np.uint64(0x9E3779B97F4A7C15)
    hashes = (np.arange(20_000, dtype=np.uint64) * spread).tolist()
    entries = [Entry(h, (n,), (None,)) for n, h in enumerate(hashes)]
    for part in range(4):  # stamps 0 to 3, dirty
        upsert(table, encode(entries[part * 4000 : part * 4000 + 4000], NUMBERS), part)
    for ids in table.walk(1000, hs.TOUCHED):
        table.copy(ids, clear=hs.TOUCHED)
    table.reset_touched()
    upsert(table, encode(entries[16_000:], NUMBERS), 0)  # an old stamp, but of this batch
    gone = [entry for rows in table.evict(share, 700) for entry in decode(rows, NUMBERS)]
    assert abs(len(gone) / 20_000 - share) < 0.05
    assert table.count == table.dirty == 20_000 - len(gone)
    assert [e.hash for e in gone] == sorted(e.hash for e in gone)
    if share < 0.75:
        assert not {e.hash for e in gone} & set(hashes[16_000:])
        assert max(e.stamp for e in gone) <= int(share * 20_000 / 4000 + 0.3)
    left = hashes_in_order(table)
    assert sorted(left + [e.hash for e in gone]) == sorted(hashes)
    assert set(table.words[table.touched_ids(), 0].tolist()) == set(left) & set(hashes[16_000:])
    assert (upsert(table, encode(entries, NUMBERS), 9) >= 0).all()
    assert hashes_in_order(table) == sorted(hashes)
    table.close()


def test_clean_rows_leave_without_a_copy() -> None:
    table = table_of(TEXTS)
    entries = [Entry(n << 50, (b"a rather long key %d" % n,), (b"v" * 100,)) for n in range(500)]
    upsert(table, encode(entries, TEXTS), touch=TOUCH_CREATED)
    for ids in table.walk(100):
        table.copy(ids, clear=hs.DIRTY | hs.TOUCHED)
    table.reset_touched()
    assert list(table.evict(1.0, 64)) == []
    assert (table.count, table.dirty, table.free_rows) == (0, 0, 500)
    assert table.heap.free == table.heap.used
    table.close()


def test_packing_gives_memory_back_and_keeps_every_row() -> None:
    table = table_of(TEXTS)
    entries = [Entry(n * 0x9E3779B97F4A7C15 % 2**64, (b"a rather long key %d" % n,), (None,)) for n in range(3000)]
    upsert(table, encode(entries, TEXTS))
    for ids in table.walk(1000):
        table.copy(ids, clear=hs.TOUCHED)
    table.reset_touched()
    gone = {entry.hash for rows in table.evict(0.8, 500) for entry in decode(rows, TEXTS)}
    before = table.memory
    table.pack_rows()
    table.pack_values()
    assert table.memory < before / 2
    kept = [entry for entry in entries if entry.hash not in gone]
    copies = [entry for ids in table.walk(100) for entry in decode(table.copy(ids), TEXTS)]
    assert [(e.hash, e.key) for e in copies] == sorted((e.hash, e.key) for e in kept)
    assert len(set(upsert(table, encode(entries, TEXTS)).tolist())) == 3000
    table.close()
