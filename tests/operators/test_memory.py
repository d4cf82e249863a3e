"""Operators whose state does not fit the tables' memory."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from millpond.layout import RowLayout, TableSchema, Words
from millpond.operators.kinds.registry import open_operator
from millpond.operators.protocol import MakeTable, Times
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.kinds.deduplicate import DeduplicateSpec
from millpond.spec.operators import AggregateCall, EventTime, Windows
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.rmw.table import RmwTable
from millpond.stores.runs.run_set import RunSet
from millpond.stores.table_resources import TableResources
from tests.operators.rig import fields, hash_of, spec
from tests.stores.shelf import Shelf

CALLS = (
    AggregateCall("count", (), "bigint"),
    AggregateCall("sum", (0,), "bigint"),
    AggregateCall("max", (1,), "string"),
    AggregateCall("last", (1,), "string"),
    AggregateCall("count", (0,), "bigint", distinct=True),
    AggregateCall("count", (0,), "bigint", distinct=True, filter=2),
    AggregateCall("collect_list", (1,), "array<string>"),
)
SECOND = 1_000_000
COUNTED = AggregateSpec(
    fields("w struct<start:timestamp,end:timestamp>; k bigint"),
    (),
    (AggregateCall("count", (), "bigint"),),
    "append",
    EventTime(0, Windows(SECOND, SECOND, 0)),
)


@contextmanager
def small_tables(folder: Path, budget: MemoryBudget | None = None) -> Iterator[MakeTable]:
    """Makes tables with 1 MB of memory together, unless a budget says otherwise."""
    budget = budget or MemoryBudget(1 << 20)
    made: list[RmwTable] = []
    with ThreadPoolExecutor(1) as background, ThreadPoolExecutor(1) as writers:

        def make(name: str, schema: TableSchema, initial: Words) -> RmwTable:
            (folder / name).mkdir()
            store = Shelf(folder / name)
            runs = RunSet(RowLayout(schema))
            made.append(
                RmwTable(schema, initial, runs, TableResources(budget, background, writers=writers), store=store)
            )
            return made[-1]

        yield make
        for table in made:
            table.close()


def test_results_do_not_depend_on_memory(tmp_path: Path) -> None:
    """A budget of 1 MB for a state of several: rows with long values and lists are evicted and come back."""
    keys, rng = 4000, np.random.default_rng(5)
    shape = spec("k string", "n int; s string; ok boolean", CALLS, "complete")
    names = [f"key {k}" * (k % 4) + str(k) for k in range(keys)]
    hashes = np.array([hash_of((name,), 64) for name in names])
    with small_tables(tmp_path) as make:
        operator = open_operator(shape, make)
        truth: dict[str, list[tuple[int, str, bool]]] = {}
        for version in range(6):
            operator.begin(version, Times())
            for _ in range(3):
                picked = rng.integers(0, keys, 5000)
                numbers = rng.integers(0, 5, len(picked))
                texts = [f"{k * 7919 % 1000}" * int(n + 1) for k, n in zip(picked, numbers, strict=True)]
                passed = rng.random(len(picked)) < 0.3  # so that many values pass the filter later than they came
                for k, *row in zip(picked.tolist(), numbers.tolist(), texts, passed.tolist(), strict=True):
                    truth.setdefault(names[k], []).append((row[0], row[1], row[2]))
                columns: list[Any] = [
                    hashes[picked],
                    [names[k] for k in picked],
                    numbers.astype(np.int32),
                    texts,
                    passed,
                ]
                names_of = ["__hash", "k", "n", "s", "ok"]
                operator.process(pa.record_batch([pa.array(c) for c in columns], names=names_of))
            operator.finish()
        out = pa.Table.from_batches(list(operator.output()))
        assert sum(table.stats()["run_rows"] for table in operator.tables.values()) > keys
    assert len(out) == len(truth)
    for key, *results in zip(*(column.to_pylist() for column in out.columns), strict=True):
        rows = truth[key]
        texts = [text for _, text, _ in rows]
        different = [len({n for n, _, _ in rows}), len({n for n, _, ok in rows if ok})]
        wanted = [len(rows), sum(n for n, _, _ in rows), max(texts), texts[-1], *different, texts]
        assert results == wanted, key


def test_a_key_passes_once_though_it_was_evicted(tmp_path: Path) -> None:
    shape, rng = DeduplicateSpec(fields("k string; n int"), (0,)), np.random.default_rng(6)
    names = [f"a long key, number {k}" for k in range(60_000)]
    hashes = np.array([hash_of((name,), 64) for name in names])
    with small_tables(tmp_path) as make:
        operator = open_operator(shape, make)
        seen: set[int] = set()
        for version in range(12):
            operator.begin(version, Times())
            wanted: list[tuple[str, int]] = []
            for _ in range(2):
                picked = rng.integers(0, len(names), 4000).tolist()
                numbers = list(range(len(picked)))
                for k, n in zip(picked, numbers, strict=True):
                    if k not in seen:
                        seen.add(k)
                        wanted.append((names[k], n))
                columns = [
                    pa.array(hashes[picked]),
                    pa.array([names[k] for k in picked]),
                    pa.array(numbers, pa.int32()),
                ]
                operator.process(pa.record_batch(columns, names=["__hash", "k", "n"]))
            operator.finish()
            out = [row for piece in operator.output() for row in zip(*piece.to_pydict().values(), strict=True)]
            assert out == wanted
        figures = operator.tables["main"].stats()
        assert figures["run_rows"] > 10_000
        assert figures["keys"] == len(seen)
        assert figures["bytes"] > figures["run_rows"] * 8 * 5
        assert figures["cache_misses"] > 0
        assert figures["cache_hits"] + figures["cache_misses"] >= 8000


def test_windows_without_rows_give_memory_back(tmp_path: Path) -> None:
    """Each batch fills a window of its own with more than its share; the others get no more rows."""
    rows, windows = 30_000, 10
    budget = MemoryBudget(12 << 20)
    keys = np.arange(rows)
    hashes = (keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
    with small_tables(tmp_path, budget) as make:
        operator = open_operator(COUNTED, make)
        for version in range(2 * windows):
            operator.begin(version, Times())
            for part in np.array_split(np.arange(rows if version < windows else 0), 10):
                begins = pa.array(np.full(len(part), version * SECOND))
                columns = [pa.array(hashes[part]), begins, pa.array(keys[part])]
                operator.process(pa.record_batch(columns, names=["__hash", "w", "k"]))
            sealed = operator.finish()
            assert len(sealed) == (version < windows), "nothing is written for a window without rows"
        assert budget.used <= budget.tables
        operator.begin(2 * windows, Times(0, (windows + 1) * 1000))
        operator.finish()
        out = pa.Table.from_batches(list(operator.output()))
        assert len(out) == windows * rows


def test_files_of_windows_without_rows_are_taken_over(tmp_path: Path) -> None:
    """A window's written files get into its manifest with the next batch, though no rows come."""
    rows, windows, found = 20_000, 12, 0
    hashes = (np.arange(rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
    with small_tables(tmp_path, MemoryBudget(8 << 20)) as make:
        operator = open_operator(COUNTED, make)
        for version in range(3 * windows):
            tables: dict[str, Any] = dict(operator.tables)
            waiting = {name: table._eviction_buffer.waiting for name, table in tables.items() if table.in_flight}
            wait([frozen.file for each in waiting.values() for frozen in each])
            operator.begin(version, Times())
            for name, before in waiting.items():
                assert tables[name]._eviction_buffer.written(before)
                found += f"{(version - 1) * SECOND}:" not in name
            some = np.arange(rows if version < windows else 0)
            columns = [hashes[some], np.full(len(some), version * SECOND), some]
            operator.process(pa.record_batch([pa.array(column) for column in columns], names=["__hash", "w", "k"]))
            operator.finish()
    assert found > windows
