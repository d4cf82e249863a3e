"""Session windows against a slow model: rows in any order, restarts, colliding hashes, too little memory."""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from millpond.errors import ArithmeticOverflowError
from millpond.files.formats.segment import decode_rows
from millpond.layout import HashRange, RowLayout, TableSchema, Words
from millpond.operators.columns import encode
from millpond.operators.kinds.registry import open_operator, read_rows
from millpond.operators.protocol import Times
from millpond.operators.sessions.operator import SessionOperator
from millpond.spec.functions import SESSION_DISTINCT
from millpond.spec.kinds.session import SessionSpec
from millpond.spec.operators import GLOBAL_HASH, AggregateCall, Field
from millpond.spec.types import parse_type
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.rmw.table import RmwTable
from millpond.stores.runs.run_set import RunSet
from millpond.stores.table_resources import TableResources
from tests.operators.rig import fields, hash_of, normal
from tests.stores.shelf import Shelf
from tests.stores.test_rmw_model import Immediate

WINDOW = Field("session_window", "struct<start:timestamp,end:timestamp>")
CALLS = (
    AggregateCall("count", (), "bigint"),
    AggregateCall("sum", (0,), "bigint"),
    AggregateCall("min", (1,), "string"),
    AggregateCall("collect_list", (0,), "array<bigint>", filter=2),
    AggregateCall("max_by", (1, 0), "string"),
)
INPUTS = "v bigint; t string; b boolean"
Row = tuple[Any, int, int, int]  # key, start, end (milliseconds), value
Found = set[tuple[Any, ...]]


def session_spec(mode: str = "append", keys: str = "k string", calls: tuple[AggregateCall, ...] = CALLS) -> SessionSpec:
    return SessionSpec(fields(keys), WINDOW, fields(INPUTS), calls, mode, 0, pattern="rmw")  # one row per session


def text(value: int) -> str | None:
    return None if value % 7 == 0 else f"{value % 5} " * (value % 9)


def record_batch(spec: SessionSpec, rows: list[Row], bits: int) -> pa.RecordBatch:
    hashes = [hash_of((key,), bits) if spec.keys else GLOBAL_HASH for key, *_ in rows]
    columns: list[list[Any]] = [[key for key, *_ in rows]] if spec.keys else []
    columns += [[start * 1000 for _, start, _, _ in rows]]
    columns += [[end * 1000 for _, _, end, _ in rows]] if spec.gap is None else []
    values = [row[3] for row in rows]
    columns += [values, [text(value) for value in values], [value % 3 > 0 for value in values]]
    arrays = [pa.array(hashes, pa.int64())]
    for column, one in zip(spec.input_fields, columns, strict=True):
        arrays.append(pa.array(one, parse_type(column.type).arrow))
    batch = pa.RecordBatch.from_arrays(arrays, names=["__hash", *(c.name for c in spec.input_fields)])
    sink = pa.BufferOutputStream()  # as it arrives: in memory that cannot be written to
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return pa.ipc.open_stream(pa.py_buffer(sink.getvalue().to_pybytes())).read_next_batch()


def shown(key: Any, start: int, end: int, values: list[int]) -> tuple[Any, ...]:
    texts = [text(value) for value in values if text(value) is not None]
    best = max(values)
    listed = tuple(sorted(value for value in values if value % 3 > 0))
    return (normal(key), start, end, len(values), sum(values), min(texts, default=None), listed, text(best))  # type: ignore[type-var]


def found(batches: list[pa.RecordBatch]) -> Found:
    rows = [tuple(one) for b in batches for one in zip(*(c.to_pylist() for c in b.columns), strict=True)]
    result = set()
    for row in rows:
        key, window, count, total, least, listed, best = row if len(row) == 7 else (None, *row)
        start, end = (round(window[bound].timestamp() * 1000) for bound in ("start", "end"))
        result.add((normal(key), start, end, count, total, least, tuple(sorted(listed)), best))
    assert len(result) == len(rows)
    return result


@dataclass
class Model:
    """Sessions by key, the slow way."""

    complete: bool
    keyed: bool = True
    sessions: dict[Any, list[tuple[int, int, list[int]]]] = field(default_factory=dict)

    def batch(self, rows: list[Row], times: Times) -> Found:
        for key, start, end, value in rows:
            if end > times.late:
                self.sessions.setdefault(normal(key) if self.keyed else None, []).append((start, end, [value]))
        out: Found = set()
        for key, sessions in self.sessions.items():
            merged: list[tuple[int, int, list[int]]] = []
            for start, end, values in sorted(sessions, key=lambda one: one[:2]):
                if merged and start <= merged[-1][1]:
                    before = merged[-1]
                    merged[-1] = (before[0], max(before[1], end), before[2] + values)
                else:
                    merged.append((start, end, values))
            closed = [one for one in merged if self.complete or one[1] <= times.closed]
            out |= {shown(key, *one) for one in closed}
            self.sessions[key] = merged if self.complete else [one for one in merged if one not in closed]
        return out


class Rig:
    """A session operator on a table of its own."""

    def __init__(self, spec: SessionSpec, folder: str, budget: int = 64 << 20) -> None:
        self.spec = spec
        self.version = 0
        self.shelf = Shelf(Path(folder))
        self.budget = budget
        self.log: list[tuple[int, bytes]] = []
        self.background: Executor = Immediate()
        self._open([], 0, 0)

    def _open(self, runs: list[Any], flushed: int, keys: int) -> None:
        def make(name: str, schema: TableSchema, initial: Words) -> RmwTable:
            found = RunSet(RowLayout(schema), runs)
            resources = TableResources(MemoryBudget(self.budget), self.background)
            return RmwTable(schema, initial, found, resources, store=self.shelf, flushed=flushed, keys=keys)

        operator = open_operator(self.spec, make)
        assert isinstance(operator, SessionOperator)
        self.operator = operator
        self.table: Any = operator.tables["main"]

    def batch(self, pieces: list[pa.RecordBatch], times: Times) -> list[pa.RecordBatch]:
        self.operator.begin(self.version, times)
        for piece in pieces:
            self.operator.process(piece)
        (delta,) = self.operator.finish().values()
        self.version += 1
        self.log.append((self.version, b"".join(bytes(piece) for piece in delta.pieces)))
        out = list(self.operator.output())
        assert str(list(self.operator.output())) == str(out)
        return out

    def restart(self) -> None:
        manifest = self.table.manifest()
        self.operator.close()
        runs = [self.shelf.written[ref.name] for ref in manifest.runs]
        for run in runs:
            run._due_stamp = None
        self._open(runs, manifest.flushed, manifest.keys)
        for version, data in self.log:
            if version > manifest.flushed:
                for rows in decode_rows(data, self.table.layout, "delta"):
                    self.table.load(rows)


KEYS = st.sampled_from([None, "a", "b", "c" * 20, "d" * 30])
TIMES = st.integers(0, 60)
GAPS = st.integers(1, 12)


@st.composite
def batch_of(draw: st.DrawFn, gaps: st.SearchStrategy[int] = GAPS) -> tuple[list[Row], int, str]:
    rows = draw(st.lists(st.tuples(KEYS, TIMES, gaps, st.integers(-9, 99)), max_size=14))
    made = [(key, start, start + gap, value) for key, start, gap, value in rows]
    return made, draw(st.integers(0, 12)), draw(st.sampled_from(["", "", "restart", "evict", "flush"]))


def run(spec: SessionSpec, batches: list[tuple[list[Row], int, str]], bits: int, *, keyed: bool = True) -> None:
    model = Model(spec.output_mode == "complete", keyed)
    with TemporaryDirectory() as folder:
        rig = Rig(spec, folder)
        times = Times()
        for rows, step, what in batches:
            if what == "restart":
                rig.restart()
            if what == "flush":
                rig.table._flusher.backlog._flush_bytes = 0
            # values differ, so that every extreme is that of one row
            rows = [(key, start, end, value * 1000 + number) for number, (key, start, end, value) in enumerate(rows)]
            times = Times(times.closed, times.closed + step)
            cut = len(rows) // 2
            wanted = model.batch(rows, times)
            rig.operator.begin(rig.version, times)
            for part in (rows[:cut], rows[cut:]):
                rig.operator.process(record_batch(spec, part, bits))
                if what == "evict":
                    rig.table._memory.evict(rig.table._eviction_buffer, 0.6)
            (delta,) = rig.operator.finish().values()
            rig.version += 1
            rig.log.append((rig.version, b"".join(bytes(piece) for piece in delta.pieces)))
            assert found(list(rig.operator.output())) == wanted
            open_ = {shown(key, *one) for key, all_ in model.sessions.items() for one in all_}
            read = [b for piece in rig.table.scan() for b in read_rows(spec, "main", piece)]
            assert found(read) == open_
            assert rig.operator.late_rows == sum(end <= times.late for _, _, end, _ in rows)
        rig.operator.close()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(batch_of(), min_size=1, max_size=7), st.sampled_from([1, 3, 64]), st.sampled_from(["append", "complete"])
)
def test_sessions_equal_the_model(batches: list[tuple[list[Row], int, str]], bits: int, mode: str) -> None:
    run(session_spec(mode), batches, bits)


@settings(max_examples=60, deadline=None)
@given(st.lists(batch_of(gaps=st.just(7)), min_size=1, max_size=7), st.sampled_from([1, 64]))
def test_sessions_of_one_gap_equal_the_model(batches: list[tuple[list[Row], int, str]], bits: int) -> None:
    run(replace(session_spec(), gap=7_000), batches, bits)


ORDERED = (
    AggregateCall("first", (0,), "bigint"),
    AggregateCall("last", (0,), "bigint"),
    AggregateCall("collect_list", (0,), "array<bigint>"),
)


@dataclass
class OrderedModel:
    """Sessions by key with their values in order: as on Spark, whose merge sorts rows and stored sessions by start."""

    complete: bool
    sessions: dict[Any, list[tuple[int, int, list[int]]]] = field(default_factory=dict)

    def batch(self, rows: list[Row], times: Times) -> Found:
        for key, start, end, value in sorted(rows, key=lambda row: row[1:3]):
            if end > times.late:
                self.sessions.setdefault(normal(key), []).append((start, end, [value]))
        out: Found = set()
        for key, parts in self.sessions.items():
            merged: list[tuple[int, int, list[int]]] = []
            for start, end, values in sorted(parts, key=lambda part: part[0]):  # stored sessions come first
                if merged and start <= merged[-1][1]:
                    before = merged[-1]
                    merged[-1] = (before[0], max(before[1], end), before[2] + values)
                else:
                    merged.append((start, end, values))
            closed = [part for part in merged if self.complete or part[1] <= times.closed]
            out |= {(key, start, end, values[0], values[-1], *values) for start, end, values in closed}
            self.sessions[key] = merged if self.complete else [part for part in merged if part not in closed]
        return out


def found_in_order(batches: list[pa.RecordBatch]) -> Found:
    result = set()
    for batch in batches:
        for key, window, first, last, listed in zip(*(c.to_pylist() for c in batch.columns), strict=True):
            bounds = (round(window[bound].timestamp() * 1000) for bound in ("start", "end"))
            result.add((normal(key), *bounds, first, last, *listed))
    return result


@settings(max_examples=150, deadline=None)
@given(
    *(st.lists(batch_of(), min_size=1, max_size=7), st.sampled_from([1, 64]), st.sampled_from(["append", "complete"])),
    st.sampled_from([None, 8]),
)
def test_rows_and_sessions_count_in_the_order_of_their_starts(
    batches: list[tuple[list[Row], int, str]], bits: int, mode: str, portion: int | None
) -> None:
    spec = session_spec(mode, calls=ORDERED)
    model = OrderedModel(mode == "complete")
    number = 0
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if portion is not None:
            patch.setattr(RmwTable, "portion_bytes", property(lambda _: portion))  # one key is merged at a time
        rig = Rig(spec, folder)
        times = Times()
        for rows, step, what in batches:
            if what == "restart":
                rig.restart()
            if what == "flush":
                rig.table._flusher.backlog._flush_bytes = 0
            times = Times(times.closed, times.closed + step)
            numbered: list[Row] = []
            for key, start, end, _ in rows:
                number += 1
                numbered.append((key, start, end, number))
            got = found_in_order(rig.batch([record_batch(spec, numbered, bits)] if numbered else [], times))
            assert got == model.batch(numbered, times)
        rig.operator.close()


def extended(key: str, sessions: int, late: set[int]) -> list[Row]:
    """Rows of which each extends one of a key's sessions (`20 * n` to `20 * n + 5`), the late ones at its start."""
    return [
        (key, 20 * n - 3 if n in late else 20 * n + 3, 20 * n + 2 if n in late else 20 * n + 8, -n)
        for n in range(1, sessions)
    ]


@pytest.mark.parametrize("mode", ["append", "complete"])
@pytest.mark.parametrize("portion", [None, 8])
def test_only_sessions_that_rows_extend_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, portion: int | None
) -> None:
    """Keys have several sessions; rows come in order, out of order, or join two sessions."""
    if portion is not None:
        monkeypatch.setattr(RmwTable, "portion_bytes", property(lambda _: portion))
    spec = session_spec(mode, calls=ORDERED)
    rig = Rig(spec, str(tmp_path))
    model = OrderedModel(mode == "complete")
    keys = [f"key number {key}" for key in range(40)]

    def changed(rows: list[Row]) -> int:
        rig.operator.begin(rig.version, Times())
        rig.operator.process(record_batch(spec, rows, 64))
        (delta,) = rig.operator.finish().values()
        rig.version += 1
        got = found_in_order([b for piece in rig.table.scan() for b in read_rows(spec, "main", piece)])
        model.batch(rows, Times())
        assert got == {
            (key, start, end, values[0], values[-1], *values)
            for key, sessions in model.sessions.items()
            for start, end, values in sessions
        }
        return delta.rows

    assert changed([(key, 20 * n, 20 * n + 5, n) for key in keys for n in range(30)]) == 1200
    assert changed([row for key in keys for row in extended(key, 9, set())]) == 320
    assert changed([row for key in keys[::2] for row in extended(key, 9, {2, 5})]) == 160
    mixed = [row for number, key in enumerate(keys) for row in extended(key, 9, {3, 4} if number % 3 else set())]
    assert changed(mixed) == 320
    # A row that joins two sessions changes the one, and removes the other; the last session gets its ordinal.
    joining: list[Row] = [(keys[0], 410, 419, 1), (keys[0], 403, 412, 2), (keys[0], 418, 425, 3)]
    assert changed(joining) <= 4
    rig.operator.close()


@pytest.fixture(params=[1, 3])
def portion_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut each batch into portions of this number of rows."""
    monkeypatch.setattr(encode, "_MIN_ROWS", request.param)
    monkeypatch.setattr(RmwTable, "portion_keys", property(lambda _: request.param))


@pytest.mark.usefixtures("portion_rows")
def test_rows_of_a_whole_batch_count_in_the_order_of_their_times(tmp_path: Path) -> None:
    """Rows that start together count in the order of their ends."""
    spec = session_spec(calls=ORDERED)
    for number, gap in enumerate([None, 9_000]):
        rig = Rig(replace(spec, gap=gap), str(tmp_path / str(number)))
        rows: list[Row] = [("a", 40 - n // 2, 49 - n // 2 + (n % 2 == 0 and gap is None), n) for n in range(20)]
        ((_, _, _, first, last, *listed),) = found_in_order(
            [*rig.batch([record_batch(rig.spec, rows, 64)], Times()), *rig.batch([], Times(0, 10**6))]
        )
        pairs = [(n, n + 1) if gap else (n + 1, n) for n in range(18, -1, -2)]
        assert listed == [n for pair in pairs for n in pair]
        assert (first, last) == (listed[0], listed[-1])
        rig.operator.close()


@pytest.mark.usefixtures("portion_rows")
def test_rows_of_several_portions_count_before_a_stored_session(tmp_path: Path) -> None:
    rig = Rig(replace(session_spec(calls=ORDERED), gap=None), str(tmp_path))
    rig.batch([record_batch(rig.spec, [("a", 15, 40, 1)], 64)], Times())
    rows: list[Row] = [("a", 10, 30, 2), ("b", 5, 6, 0), ("a", 12, 22, 3)]
    rig.batch([record_batch(rig.spec, rows, 64)], Times())
    found = {
        key: (first, last, *listed)
        for key, _, _, first, last, *listed in found_in_order(rig.batch([], Times(0, 10**6)))
    }
    assert found == {"a": (2, 1, 2, 3, 1), "b": (0, 0, 0)}
    rig.operator.close()


def test_order_of_rows_matters() -> None:
    """Not to a list of texts that are sorted by themselves, nor where rows are kept."""

    def depends_on_row_order(function: str, **options: Any) -> bool:
        call = AggregateCall(function, (1,), "string", options=options)
        return session_spec(calls=(call,)).depends_on_row_order

    assert not depends_on_row_order("listagg", order=[[False, False]])
    assert depends_on_row_order("listagg")
    assert depends_on_row_order("last")
    assert not depends_on_row_order("max")
    assert not replace(session_spec(calls=ORDERED), pattern="append").depends_on_row_order


def test_a_window_beyond_the_last_timestamp_is_an_error(tmp_path: Path) -> None:
    spec = replace(session_spec(), gap=10_000_000)
    rig = Rig(spec, str(tmp_path))
    last = (2**63 - 1) // 1000
    with pytest.raises(ArithmeticOverflowError, match="after the last timestamp"):
        rig.batch([record_batch(spec, [("a", 5, 0, 1), ("b", last, 0, 1)], 64)], Times())
    rig.operator.close()


@settings(max_examples=40, deadline=None)
@given(st.lists(batch_of(), min_size=1, max_size=6))
def test_one_stream_of_sessions(batches: list[tuple[list[Row], int, str]]) -> None:
    run(session_spec(keys=""), batches, 64, keyed=False)


@pytest.mark.parametrize("bits", [3, 64])
def test_rows_that_reach_back_after_sessions_were_closed(tmp_path: Path, bits: int) -> None:
    """A batch's first rows let its closed sessions go at once; later ones extend some of them after all."""
    spec = session_spec()
    rig = Rig(spec, str(tmp_path))
    model = Model(False)
    keys = [f"key number {key}" for key in range(300)]
    rows: list[Row] = [(key, 20 * n, 20 * n + 5, n) for key in keys for n in range(1 + len(key) % 3)]
    assert found(rig.batch([record_batch(spec, rows, bits)], Times())) == model.batch(rows, Times())
    ahead: list[Row] = [(key, 200, 205, 50) for key in keys[::2]]
    back: list[Row] = [(key, 23, 30, 60) for key in keys[::3]] + [(key, 100, 103, 70) for key in keys[::5]]
    times = Times(0, 150)
    out = rig.batch([record_batch(spec, some, bits) for some in (ahead, back, ahead, back[:9])], times)
    assert found(out) == model.batch([*ahead, *back, *ahead, *back[:9]], times)
    times = Times(150, 10**6)
    assert found(rig.batch([], times)) == model.batch([], times)
    assert not rig.table.stats()["keys"]
    rig.operator.close()


def test_distinct_inputs_are_refused() -> None:
    call = AggregateCall("count", (0,), "bigint", distinct=True)
    assert session_spec("complete", calls=(call,)).unsupported == SESSION_DISTINCT
    assert session_spec().unsupported is None


def test_a_key_with_thousands_of_sessions(tmp_path: Path) -> None:
    spec = session_spec()
    rig = Rig(spec, str(tmp_path))
    model = Model(False)
    rows: list[Row] = [("a", 10 * n, 10 * n + 5, n) for n in range(20_000)]
    assert found(rig.batch([record_batch(spec, rows, 64)], Times())) == model.batch(rows, Times())
    rows = [("a", 10 * n, 10 * n + 10, n) for n in range(0, 20_000, 3)]
    times = Times(0, 100_000)
    assert found(rig.batch([record_batch(spec, rows, 64)], times)) == model.batch(rows, times)
    times = Times(100_000, 10**6)
    assert found(rig.batch([], times)) == model.batch([], times)
    assert rig.table.stats()["keys"] == 0
    rig.operator.close()


def test_a_state_larger_than_memory(tmp_path: Path) -> None:
    spec = session_spec()
    rig = Rig(spec, str(tmp_path), budget=6 << 20)
    model = Model(False)
    draw = np.random.default_rng(1)
    times = Times()
    number = 0
    for step in range(12):
        starts = step * 1000 + draw.integers(-3000, 1000, 6000)
        keys = draw.integers(0, 20_000, 6000)
        rows: list[Row] = []
        for key, start in zip(keys.tolist(), starts.tolist(), strict=True):
            number += 1
            rows.append((f"key number {key}", start, start + 400 + key % 3, number))
        times = Times(times.closed, max(0, step * 1000 - 4000))
        assert found(rig.batch([record_batch(spec, rows, 64)], times)) == model.batch(rows, times)
    assert rig.table.stats()["run_rows"] > 0
    times = Times(times.closed, 10**6)
    assert found(rig.batch([], times)) == model.batch([], times)
    assert rig.table.stats()["keys"] == 0
    rig.operator.close()


@pytest.mark.parametrize("order", [sorted, reversed])
def test_passes_over_ranges(tmp_path: Path, order: Callable[[Any], Any]) -> None:
    spec = session_spec()
    rig = Rig(spec, str(tmp_path))
    model = Model(False)
    for step in range(4):
        rows: list[Row] = [(f"{n % 50}", 7 * n + 100 * step, 7 * n + 100 * step + 20, n) for n in range(100)]
        times = Times(100 * step, 100 * step + 100)
        rig.operator.begin(rig.version, times)
        for half in order([0, 1]):
            part = [row for row in rows if (hash_of((row[0],), 64) < 0) == bool(half)]
            rig.operator.restrict(HashRange(half << 63, (half + 1) << 63))
            rig.operator.process(record_batch(spec, part, 64))
        rig.operator.finish()
        rig.version += 1
        assert found(list(rig.operator.output())) == model.batch(rows, times)
    rig.operator.close()
