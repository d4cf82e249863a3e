"""Operators whose state does not fit the tables' memory."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from millpond.layout import RowLayout, TableSchema, Words
from millpond.operators.open import open_operator
from millpond.operators.protocol import MakeTable, Times
from millpond.operators.spec import AggregateCall, DeduplicateSpec
from millpond.stores.budget import MemoryBudget
from millpond.stores.rmw import RmwTable
from millpond.stores.runs import RunSet
from tests.operators.rig import fields, hash_of, spec
from tests.stores.shelf import Shelf

CALLS = (
    AggregateCall("count", (), "bigint"),
    AggregateCall("sum", (0,), "bigint"),
    AggregateCall("max", (1,), "string"),
    AggregateCall("last", (1,), "string"),
    AggregateCall("count", (0,), "bigint", distinct=True),
    AggregateCall("collect_list", (1,), "array<string>"),
)


@contextmanager
def small_tables(folder: Path) -> Iterator[MakeTable]:
    """Makes tables with 1 MB of memory together."""
    budget = MemoryBudget(1 << 20)
    made: list[RmwTable] = []
    with ThreadPoolExecutor(1) as background, ThreadPoolExecutor(1) as writers:

        def make(name: str, schema: TableSchema, initial: Words) -> RmwTable:
            (folder / name).mkdir()
            store = Shelf(folder / name)
            runs = RunSet(RowLayout(schema))
            made.append(RmwTable(schema, initial, runs, budget, background, store=store, writers=writers))
            return made[-1]

        yield make
        for table in made:
            table.close()


def test_results_do_not_depend_on_memory(tmp_path: Path) -> None:
    """A budget of 1 MB for a state of several: rows with long values and lists are evicted and come back."""
    keys, rng = 4000, np.random.default_rng(5)
    shape = spec("k string", "n int; s string", CALLS, "complete")
    names = [f"key {k}" * (k % 4) + str(k) for k in range(keys)]
    hashes = np.array([hash_of((name,), 64) for name in names])
    with small_tables(tmp_path) as make:
        operator = open_operator(shape, make)
        truth: dict[str, list[tuple[int, str]]] = {}
        for version in range(6):
            operator.begin(version, Times())
            for _ in range(3):
                picked = rng.integers(0, keys, 5000)
                numbers = rng.integers(0, 5, len(picked))
                texts = [f"{k * 7919 % 1000}" * int(n + 1) for k, n in zip(picked, numbers, strict=True)]
                for k, n, text in zip(picked.tolist(), numbers.tolist(), texts, strict=True):
                    truth.setdefault(names[k], []).append((n, text))
                columns: list[Any] = [hashes[picked], [names[k] for k in picked], numbers.astype(np.int32), texts]
                operator.process(pa.record_batch([pa.array(c) for c in columns], names=["__hash", "k", "n", "s"]))
            operator.finish()
        out = pa.Table.from_batches(list(operator.output()))
        assert sum(table.stats()["run_rows"] for table in operator.tables.values()) > keys
    assert len(out) == len(truth)
    for key, *results in zip(*(column.to_pylist() for column in out.columns), strict=True):
        rows = truth[key]
        texts = [text for _, text in rows]
        wanted = [len(rows), sum(n for n, _ in rows), max(texts), texts[-1], len({n for n, _ in rows}), texts]
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
