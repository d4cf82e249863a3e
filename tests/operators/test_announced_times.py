"""Keys that are announced with their event time: what their slices have of them is read ahead, and no row differs."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millpond.layout import RowLayout, TableSchema, Words
from millpond.operators.kinds.registry import open_operator
from millpond.operators.protocol import KeyPrefetchable, MakeTable, Operator, Times
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.kinds.deduplicate import DeduplicateSpec
from millpond.spec.operators import AggregateCall, EventTime, Windows
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.rmw.table import RmwTable
from millpond.stores.runs.run_set import RunSet
from millpond.stores.table_resources import TableResources
from millpond.worker.hints import _distinct_positions
from tests.operators.rig import fields
from tests.stores.shelf import Shelf

pytestmark = pytest.mark.costly

SECOND = 1_000_000
WINDOWS = 6
KEYS = 8_000
COUNT = (AggregateCall("count", (), "bigint"),)
WINDOW = "w struct<start:timestamp,end:timestamp>; k bigint"


def counted(size: int, slide: int, mode: str) -> AggregateSpec:
    shared = size > slide and mode == "append"
    return AggregateSpec(fields(WINDOW), (), COUNT, mode, EventTime(0, Windows(size, slide, 0, shared=shared)))


SPECS = {
    "tumbling": counted(SECOND, SECOND, "update"),
    "sliding": counted(3 * SECOND, SECOND, "update"),
    "panes": counted(3 * SECOND, SECOND, "append"),
    "deduplicated": DeduplicateSpec(fields("t timestamp; k bigint"), (0, 1), EventTime(0)),
}


@contextmanager
def tables(folder: Path) -> Iterator[MakeTable]:
    """Makes tables with few MB of memory together, that read ahead what is announced."""
    budget = MemoryBudget(2 << 20)
    made: list[RmwTable] = []
    with ThreadPoolExecutor(1) as background, ThreadPoolExecutor(1) as writers, ThreadPoolExecutor(2) as readers:

        def make(name: str, schema: TableSchema, initial: Words) -> RmwTable:
            (folder / name).mkdir(parents=True)
            made.append(
                RmwTable(
                    schema,
                    initial,
                    RunSet(RowLayout(schema)),
                    TableResources(budget, background, writers=writers, readers=readers),
                    store=Shelf(folder / name),
                )
            )
            return made[-1]

        yield make
        for table in made:
            table.close()


def rows(shape: AggregateSpec | DeduplicateSpec, times: np.ndarray, keys: np.ndarray) -> pa.RecordBatch:
    """Input rows; hashes are of the key alone where a row is in several windows, else of both columns."""
    mixed = keys.astype(np.uint64)
    if isinstance(shape, DeduplicateSpec) or shape.time.windows.overlap == 1:  # type: ignore[union-attr]
        mixed = mixed * np.uint64(1 << 20) + (times // SECOND).astype(np.uint64)
    hashes = (mixed * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
    at = pa.array(times)
    if isinstance(shape, DeduplicateSpec):
        at = at.cast(pa.timestamp("us", tz="UTC"))
    return pa.record_batch([pa.array(hashes), at, pa.array(keys)], names=["__hash", "w", "k"])


def shown(operator: Operator) -> Counter[Any]:
    return Counter(str(row) for batch in operator.output() for row in batch.to_pylist())


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("hints", ["right", "wrong", "mixed"])
def test_rows_are_the_same(tmp_path: Path, kind: str, hints: str) -> None:
    shape, rng = SPECS[kind], np.random.default_rng(len(kind))
    read = used = 0.0
    with tables(tmp_path / "told") as make, tables(tmp_path / "plain") as other:
        told, plain = open_operator(shape, make), open_operator(shape, other)
        for version in range(3 * WINDOWS):
            if version < WINDOWS:  # each fills a window of its own
                keys, at = np.arange(KEYS), np.full(KEYS, version)
            else:  # some keys of any window, late ones and new ones among them
                keys, at = rng.integers(0, KEYS + 500, 600), rng.integers(0, WINDOWS + 2, 600)
            batch = rows(shape, at * SECOND, keys)
            seconds = max(0, version - 2 * WINDOWS)
            times = Times(1000 * max(0, seconds - 1), 1000 * seconds)
            assert isinstance(told, KeyPrefetchable)
            right = batch.select([0, 1])
            wrong = rows(shape, rng.integers(-3, WINDOWS + 5, 900) * SECOND, rng.integers(0, KEYS, 900)).select([0, 1])
            told.prefetch_keys({"right": right, "wrong": wrong}.get(hints, wrong), version)
            told.begin(version, times)
            plain.begin(version, times)
            if hints == "mixed":  # as hints come while the batch is under way
                told.prefetch_keys(right, version)
                told.prefetch_keys(wrong, version + 1)
            for start in range(0, batch.num_rows, 2000):
                told.process(batch.slice(start, 2000))
                plain.process(batch.slice(start, 2000))
            assert told.finish().keys() == plain.finish().keys()
            for table in told.tables.values():
                read += table.stats()["prefetched_keys"]
                used += table.stats()["prefetched_used"]
            assert shown(told) == shown(plain)
            assert told.late_rows == plain.late_rows
        assert read > 0
        if hints == "right":
            assert used == read
        told.close()
        plain.close()


def test_late_rows_and_slices_without_rows_are_not_read(tmp_path: Path) -> None:
    shape = SPECS["tumbling"]
    with tables(tmp_path) as make:
        operator = open_operator(shape, make)
        for version in range(WINDOWS):
            operator.begin(version, Times())
            operator.process(rows(shape, np.full(KEYS, version * SECOND), np.arange(KEYS)))
            operator.finish()
        before = set(operator.tables)
        operator.begin(WINDOWS, Times(3000, 3000))
        operator.finish()
        assert isinstance(operator, KeyPrefetchable)
        for window in (0, 1, 2, WINDOWS + 3):  # over; never there
            operator.prefetch_keys(rows(shape, np.full(KEYS, window * SECOND), np.arange(KEYS)).select([0, 1]), 7)
        operator.begin(WINDOWS + 1, Times(3000, 3000))
        operator.finish()
        assert len(before) == WINDOWS
        assert set(operator.tables) < before
        assert sum(table.stats()["prefetched_keys"] for table in operator.tables.values()) == 0
        operator.close()


def test_a_key_is_announced_once_for_each_time() -> None:
    hashes, times = np.array([5, 5, 3, 5, 3], np.uint64), [1, 2, 1, 1, None]
    keys = pa.record_batch([pa.array(hashes), pa.array(times, pa.int64())], names=["__hash", "t"])
    assert sorted(_distinct_positions(keys, hashes).tolist()) == [0, 1, 2, 4]
    sides = pa.array([True, False, True, None, True])
    both = pa.record_batch([pa.array(hashes), sides, pa.array(times, pa.int64())], names=["__hash", "right", "t"])
    assert sorted(_distinct_positions(both, hashes).tolist()) == [0, 1, 2, 3, 4]
    one = pa.record_batch([pa.array(hashes), pa.array([True, False, True, True, True])], names=["__hash", "right"])
    assert sorted(_distinct_positions(one, hashes).tolist()) == [0, 1, 2]
    named = pa.record_batch([pa.array(hashes), pa.array(list("ababc"))], names=["__hash", "name"])
    assert sorted(_distinct_positions(named, hashes).tolist()) == [0, 2]
