"""Operators whose state does not fit the tables' memory."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from millpond.layout import RowLayout, TableSchema, Words
from millpond.operators.open import open_operator
from millpond.operators.spec import AggregateCall
from millpond.stores.budget import MemoryBudget
from millpond.stores.rmw import RmwTable
from millpond.stores.runs import RunSet
from tests.operators.rig import hash_of, spec
from tests.stores.shelf import Shelf

CALLS = (
    AggregateCall("count", (), "bigint"),
    AggregateCall("sum", (0,), "bigint"),
    AggregateCall("max", (1,), "string"),
    AggregateCall("last", (1,), "string"),
    AggregateCall("count", (0,), "bigint", distinct=True),
    AggregateCall("collect_list", (1,), "array<string>"),
)


def test_results_do_not_depend_on_memory(tmp_path: Path) -> None:
    """A budget of 1 MB for a state of several: rows with long values and lists are evicted and come back."""
    keys, rng = 4000, np.random.default_rng(5)
    shape = spec("k string", "n int; s string", CALLS, "complete")
    names = [f"key {k}" * (k % 4) + str(k) for k in range(keys)]
    hashes = np.array([hash_of((name,), 64) for name in names])
    budget = MemoryBudget(1 << 20)
    made: list[RmwTable] = []
    with ThreadPoolExecutor(1) as background, ThreadPoolExecutor(1) as writers:

        def make(name: str, schema: TableSchema, initial: Words) -> RmwTable:
            (tmp_path / name).mkdir()
            store = Shelf(tmp_path / name)
            runs = RunSet(RowLayout(schema))
            made.append(RmwTable(schema, initial, runs, budget, background, store=store, writers=writers))
            return made[-1]

        operator = open_operator(shape, make)
        truth: dict[str, list[tuple[int, str]]] = {}
        for version in range(6):
            operator.begin(version)
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
        assert sum(table.stats()["run_rows"] for table in made) > keys
        for table in made:
            table.close()
    assert len(out) == len(truth)
    for key, *results in zip(*(column.to_pylist() for column in out.columns), strict=True):
        rows = truth[key]
        texts = [text for _, text in rows]
        wanted = [len(rows), sum(n for n, _ in rows), max(texts), texts[-1], len({n for n, _ in rows}), texts]
        assert results == wanted, key
