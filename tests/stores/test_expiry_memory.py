"""Expiry of a state larger than memory: what is due is found, runs are read seldom, memory stays within its budget."""

from pathlib import Path

import numpy as np
import pytest

from millpond.layout import Column, HashRange, RowLayout, Rows, TableSchema
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.rmw.expiry import Expiry
from millpond.stores.rmw.table import RmwTable
from millpond.stores.runs.run_set import RunSet
from millpond.stores.table_resources import TableResources
from tests.stores.shelf import Shelf
from tests.stores.test_rmw_model import Immediate

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
