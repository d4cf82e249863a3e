"""Expiry of a state larger than memory: what is due is found, runs are read seldom, memory stays within its budget."""

from pathlib import Path

import numpy as np
import pytest

from millpond.files.locations.opening import open_filesystem
from millpond.layout import Column, HashRange, RowLayout, Rows, TableSchema
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.rmw.expiry import Expiry
from millpond.stores.rmw.table import RmwTable
from millpond.stores.runs.run_set import RunSet
from millpond.stores.runs.run_store import RunStore
from millpond.stores.table_resources import TableResources
from tests.stores.shelf import Shelf
from tests.stores.test_rmw_model import Immediate
from tests.support.rows import Entry, encode, layout

LAYOUT = RowLayout(TableSchema((Column("k", "word"),), tuple(Column(f"v{i}", "word") for i in range(9))))
TIME = LAYOUT.offsets[1]
BATCH, KEYS = 5_000, 100_000


def test_a_state_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total = 1 << 20
    budget = MemoryBudget(total)
    runs = RunSet(LAYOUT)
    initial = np.zeros(LAYOUT.width, np.uint64)
    table = RmwTable(
        LAYOUT.schema, initial, runs, TableResources(budget, Immediate()), HashRange(), store=Shelf(tmp_path)
    )
    expiry = table.expire_by(TIME)
    sweeps = []
    sweep = Expiry._sweep
    monkeypatch.setattr(Expiry, "_sweep", lambda *args: (sweeps.append(1), sweep(*args))[1])
    draw = np.random.default_rng(3)
    never = 1 << 62
    times = np.full(KEYS, never)
    searched = 0
    for batch in range(120):
        table.begin(batch)
        keys = draw.integers(0, KEYS, BATCH)
        now = 1000 * batch
        ends = now + 30_000 + draw.integers(0, 1000, BATCH)
        words = np.zeros((BATCH, LAYOUT.width), np.uint64)
        words[:, 0] = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        words[:, LAYOUT.offsets[0]] = keys
        for start in range(0, BATCH, 2048):
            block = Rows(words[start : start + 2048], np.empty(0, np.uint8))
            later = ends[start : start + 2048]
            rows = table.upsert(block, Expiry.stamps(later)).rows
            np.maximum.at(table.words[:, TIME].view(np.int64), rows, later)
            expiry.file(rows)
        times[keys] = np.where(times[keys] == never, 0, times[keys])
        np.maximum.at(times, keys, ends)
        found = np.full(KEYS, never)
        for rows in expiry.due(now):
            found[table.words[rows, LAYOUT.offsets[0]]] = table.words[rows, TIME]
            table.remove(rows)
        assert np.array_equal(found, np.where(times <= now, times, never))
        times[times <= now] = never
        table.seal()
        searched += len(runs.runs)
        assert table.stats()["keys"] == (times < never).sum()
        assert table.stats()["hot_bytes"] + table.stats()["buffer_bytes"] < total
    assert runs.rows > 2 * table.stats()["hot_rows"]
    assert len(sweeps) < searched // 2, (len(sweeps), searched)
    print(len(sweeps), searched, table.stats())
    table.close()


@pytest.mark.parametrize("first", [1_700_000_000_000, 253_402_214_400_000])
def test_a_state_larger_than_memory_whatever_its_times(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times from the year 8659 on have one stamp, so that rows that are evicted again look like due ones."""
    initial = np.zeros(LAYOUT.width, np.uint64)
    resources = TableResources(MemoryBudget(1 << 20), Immediate())
    table = RmwTable(LAYOUT.schema, initial, RunSet(LAYOUT), resources, HashRange(), store=Shelf(tmp_path))
    expiry = table.expire_by(TIME)
    sweeps = []
    sweep = Expiry._sweep
    monkeypatch.setattr(Expiry, "_sweep", lambda *args: (sweeps.append(1), sweep(*args))[1])
    count = 20_000
    times = first + np.random.default_rng(5).permutation(count)
    table.begin(0)
    for start in range(0, count, 2000):
        words = np.zeros((2000, LAYOUT.width), np.uint64)
        keys = np.arange(start, start + 2000, dtype=np.uint64)
        words[:, 0] = keys * np.uint64(0x9E3779B97F4A7C15)
        words[:, LAYOUT.offsets[0]] = keys
        block = times[start : start + 2000]
        rows = table.upsert(Rows(words, np.empty(0, np.uint8)), Expiry.stamps(block)).rows
        table.words[rows, TIME] = block.view(np.uint64)
        expiry.file(rows)
    table.seal()
    assert table.stats()["hot_rows"] < count // 4
    before = first - 1
    for batch in range(1, 8):
        table.begin(batch)
        limit = first + 3000 * batch
        found: list[int] = []
        for rows in expiry.due(limit):
            found += table.words[rows, TIME].tolist()
            table.remove(rows)
        table.seal()
        assert sorted(found) == list(range(before + 1, min(limit + 1, first + count)))
        before = limit
    assert table.stats()["keys"] == 0
    assert len(sweeps) < 60
    table.close()


def test_large_rows_are_read_in_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = layout("w", "wb")
    value = b"a long value " * 160
    count, due = 4000, 40
    entries = [
        Entry(number << 52, (number,), (time, value), stamp=int(Expiry.stamps(np.array([time]))[0]))
        for number, time in enumerate(np.random.default_rng(5).permutation(count).tolist())
    ]
    store = RunStore(open_filesystem(f"file://{tmp_path}/state"), f"{tmp_path}/local", disk=0, memory=1 << 20)
    run = store.write(encode(entries, shape), shape)
    budget = MemoryBudget(16 << 20)
    initial = np.zeros(shape.width, np.uint64)
    # As after a restart: no row is in memory that could tell how large rows are.
    table = RmwTable(
        shape.schema, initial, RunSet(shape, [run]), TableResources(budget, Immediate()), store=store, keys=count
    )
    expiry = table.expire_by(shape.offsets[1])
    pieces: list[int] = []
    make_room = table._memory.make_room
    monkeypatch.setattr(
        table._memory, "make_room", lambda keys, size: (pieces.append(keys * len(value)), make_room(keys, size))
    )
    table.begin(0)
    found: list[int] = []
    for rows in expiry.due(due - 1):
        found += table.words[rows, shape.offsets[1]].tolist()
        table.remove(rows)
    assert sorted(found) == list(range(due))
    assert max(pieces) < 3 * budget.piece
    # Rows that are due soon are read ahead, in a small part of the memory.
    assert due < table.stats()["hot_rows"] < count // 8
    table.close()
    store.close()


def test_large_rows_in_memory_are_due_in_small_pieces() -> None:
    shape = layout("w", "wb")
    value = b"a long value " * 160
    budget = MemoryBudget(64 << 20)
    table = RmwTable(shape.schema, np.zeros(shape.width, np.uint64), RunSet(shape), TableResources(budget, Immediate()))
    expiry = table.expire_by(shape.offsets[1])
    table.load(encode([Entry(number << 52, (number,), (number, value)) for number in range(4000)], shape))
    table.begin(0)
    found: list[int] = []
    for rows in expiry.due(4000):
        assert len(rows) * len(value) < 3 * budget.piece
        found += table.words[rows, shape.offsets[1]].tolist()
        table.remove(rows)
    assert sorted(found) == list(range(4000))
    table.close()
