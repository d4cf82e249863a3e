"""Deduplication within the watermark against a dictionary: late rows, nulls, restarts, too little memory."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.operators.dedup.within_watermark import WithinWatermarkOperator
from millpond.operators.kinds.registry import open_operator
from millpond.operators.protocol import Times
from millpond.spec.kinds.deduplicate import WithinSpec
from millpond.spec.operators import EventTime
from millpond.spec.types import parse_type
from tests.operators.rig import fields, hash_of
from tests.operators.test_session import Rig

SPEC = WithinSpec(fields("t timestamp; k string; n bigint"), (1,), EventTime(0), 20)
Row = tuple[int | None, str | None]


class WithinRig(Rig):
    memory = 64  # so little that the new rows of a batch are in a file

    def _open(self, runs: list[Any], flushed: int, keys: int) -> None:
        from millpond.layout import RowLayout, TableSchema, Words
        from millpond.stores.memory.budget import MemoryBudget
        from millpond.stores.rmw.table import RmwTable
        from millpond.stores.runs.run_set import RunSet
        from millpond.stores.table_resources import TableResources

        def make(name: str, schema: TableSchema, initial: Words) -> RmwTable:
            place = RunSet(RowLayout(schema), runs), TableResources(MemoryBudget(self.budget), self.background)
            return RmwTable(schema, initial, *place, store=self.shelf, flushed=flushed, keys=keys)

        operator = open_operator(SPEC, make, memory=self.memory)
        assert isinstance(operator, WithinWatermarkOperator)
        self.operator = operator  # type: ignore[assignment]
        self.table: Any = operator.tables["main"]


def record_batch(rows: list[Row], bits: int) -> pa.RecordBatch:
    times = [None if time is None else time * 500 for time, _ in rows]  # half milliseconds
    columns = [
        pa.array([hash_of((key,), bits) for _, key in rows], pa.int64()),
        pa.array(times, parse_type("timestamp").arrow),
        pa.array([key for _, key in rows], pa.string()),
        pa.array(range(len(rows)), pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(columns, names=["__hash", "t", "k", "n"])


ROWS = st.lists(
    st.tuples(st.none() | st.integers(-20, 250), st.sampled_from([None, "a", "b", "c" * 20, "d", "e" * 15])), max_size=9
)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.tuples(ROWS, st.integers(0, 30), st.sampled_from(["", "restart", "evict", "flush"])), max_size=8),
    st.sampled_from([1, 64]),
)
def test_rows_equal_the_model(batches: list[tuple[list[Row], int, str]], bits: int) -> None:
    seen: dict[str | None, float] = {}
    with TemporaryDirectory() as folder:
        rig = WithinRig(SPEC, folder)  # type: ignore[arg-type]
        times = Times()
        for rows, step, what in batches:
            times = Times(times.closed, times.closed + step)
            if what == "restart":
                rig.restart()
            if what == "flush":
                rig.table._flusher.backlog._flush_bytes = 0
            wanted = []
            for number, (time, key) in enumerate(rows):
                if (time is None or time / 2 > times.late) and key not in seen:
                    seen[key] = (time or 0) / 2 + SPEC.delay_ms
                    wanted.append(number)
            seen = {key: expiry for key, expiry in seen.items() if expiry > times.closed}
            rig.operator.begin(rig.version, times)
            rig.operator.process(record_batch(rows, bits))
            if what == "evict":
                rig.table._memory.evict(rig.table._eviction_buffer, 0.6)
            (delta,) = rig.operator.finish().values()
            rig.version += 1
            rig.log.append((rig.version, b"".join(bytes(piece) for piece in delta.pieces)))
            for _ in range(2):
                assert [n for batch in rig.operator.output() for n in batch["n"].to_pylist()] == wanted
            assert rig.table.stats()["keys"] == len(seen)
        rig.operator.close()


def test_many_keys(tmp_path: Path) -> None:
    rig = WithinRig(SPEC, str(tmp_path), budget=6 << 20)  # type: ignore[arg-type]
    seen: dict[str | None, float] = {}
    for number in range(8):
        base, times = number * 15_000, Times(100 * number, 100 * number + 40)
        rows: list[Row] = [(200 * number + n % 70 + 2, f"key number {base + n % 20_000}") for n in range(25_000)]
        fresh = {key for _, key in rows} - seen.keys()
        for time, key in rows:
            assert time is not None
            seen.setdefault(key, time / 2 + SPEC.delay_ms)
        seen = {key: expiry for key, expiry in seen.items() if expiry > times.closed}
        out = rig.batch([record_batch(rows, 64)], times)
        assert sum(batch.num_rows for batch in out) == len(fresh)
        assert rig.table.stats()["keys"] == len(seen)
    assert rig.table.stats()["run_rows"] > 0
    rig.operator.close()


@pytest.mark.parametrize("restart", [False, True])
def test_a_duplicate_does_not_keep_its_key_for_longer(tmp_path: Path, restart: bool) -> None:
    """Neither in memory nor in what a flush has written: looking for a key says nothing of when it expires."""
    rig = WithinRig(SPEC, str(tmp_path))
    rig.batch([record_batch([(20, "a")], 64)], Times(0, 0))  # expires 20 ms after 10 ms
    rig.batch([record_batch([(2000, "a")], 64)], Times(0, 0))
    rig.table._flusher.backlog._flush_bytes = 0
    for _ in range(4):
        rig.batch([record_batch([], 64)], Times(0, 0))
    assert rig.table.stats()["run_rows"] == 1
    if restart:
        rig.restart()
    rig.batch([record_batch([], 64)], Times(0, 100))
    assert rig.table.stats()["keys"] == 0
    out = rig.batch([record_batch([(400, "a")], 64)], Times(100, 100))
    assert sum(batch.num_rows for batch in out) == 1
    rig.operator.close()
