"""Sessions whose rows are kept until they close, against a slow model: restarts anywhere, merging, colliding hashes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
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

from millpond.errors import StateDamagedError
from millpond.files.formats.segment import decode_rows, encode_rows
from millpond.files.locations.opening import open_filesystem
from millpond.files.refs import TableManifest
from millpond.layout import RowLayout, Rows, TableSchema, Words
from millpond.operators.kinds.registry import open_operator, read_rows
from millpond.operators.protocol import MAIN, ROWS, TableKind, Times
from millpond.operators.sessions import buffered, closed
from millpond.operators.sessions.buffered import BufferedSessions
from millpond.spec.functions import SESSION_DISTINCT, WHOLE_WINDOWS
from millpond.spec.kinds.session import SessionSpec
from millpond.spec.operators import GLOBAL_HASH, AggregateCall
from millpond.spec.types import parse_type
from millpond.stores.append_files import AppendFiles
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.rmw.table import RmwTable
from millpond.stores.runs.run_set import RunSet
from millpond.stores.table_resources import TableResources
from millpond.stores.unaligned.table import UnalignedTable
from tests.operators.rig import fields, hash_of, normal
from tests.operators.test_buffered import comparable, percentile, result
from tests.operators.test_session import WINDOW
from tests.stores.shelf import Shelf
from tests.stores.test_rmw_model import Immediate
from tests.stores.test_unaligned import shrink

INPUTS = "v bigint; t string; b boolean"
CALLS = (
    percentile(0.5),
    percentile(0.1, 0.9),
    percentile(0.4, discrete=True, filter=2),
    AggregateCall("mode", (1,), "string"),
    AggregateCall("count", (), "bigint"),
    AggregateCall("max", (1,), "string"),
    AggregateCall("collect_list", (0,), "array<bigint>"),
    AggregateCall("count", (1,), "bigint", distinct=True),
    AggregateCall("rows", (0, 1), "array<struct<a:bigint,b:string>>"),
)
Row = tuple[Any, int, int, int]  # key, start, end (milliseconds), value
Session = tuple[int, int, list[int]]


def session_spec(mode: str = "append", keys: str = "k string", calls: Sequence[AggregateCall] = CALLS) -> SessionSpec:
    return SessionSpec(fields(keys), WINDOW, fields(INPUTS), tuple(calls), mode, 0)


def inputs(value: int) -> dict[str, Any]:
    text = None if value % 7 == 0 else f"{value % 5} " * (value % 9)
    return {"v": None if value % 11 == 0 else value, "t": text, "b": value % 3 > 0}


def record_batch(spec: SessionSpec, rows: Sequence[Row], bits: int) -> pa.RecordBatch:
    hashes = [hash_of((key,), bits) if spec.keys else GLOBAL_HASH for key, *_ in rows]
    columns: list[list[Any]] = [[key for key, *_ in rows]] if spec.keys else []
    columns += [[start * 1000 for _, start, _, _ in rows]]
    columns += [[end * 1000 for _, _, end, _ in rows]] if spec.gap is None else []
    columns += [[inputs(row[3])[name] for row in rows] for name in ("v", "t", "b")]
    arrays = [pa.array(hashes, pa.int64())]
    for column, one in zip(spec.input_fields, columns, strict=True):
        arrays.append(pa.array(one, parse_type(column.type).arrow))
    return pa.RecordBatch.from_arrays(arrays, names=["__hash", *(c.name for c in spec.input_fields)])


def shown(spec: SessionSpec, key: Any, start: int, end: int, values: list[int]) -> str:
    rows = [inputs(value) for value in values]
    found = [result(spec, call, rows) for call in spec.calls]
    return comparable((key, start, end, *map(_sorted, found)))


def _sorted(value: Any) -> Any:
    return sorted(value, key=repr) if isinstance(value, list) else value


def found(spec: SessionSpec, batches: Sequence[pa.RecordBatch]) -> list[str]:
    out = []
    for batch in batches:
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            key, window, *results = row if spec.keys else (None, *row)
            start, end = (round(window[bound].timestamp() * 1000) for bound in ("start", "end"))
            out.append(comparable((normal(key), start, end, *map(_sorted, results))))
    return sorted(out)


@dataclass
class Model:
    """Sessions by key, the slow way."""

    spec: SessionSpec
    sessions: dict[Any, list[Session]] = field(default_factory=dict)

    def batch(self, rows: Sequence[Row], times: Times) -> list[str]:
        for key, start, end, value in rows:
            if end > times.late:
                name = normal(key) if self.spec.keys else None
                self.sessions.setdefault(name, []).append((start, end, [value]))
        out = []
        for key, sessions in self.sessions.items():
            merged: list[Session] = []
            for start, end, values in sorted(sessions, key=lambda one: one[:2]):
                if merged and start <= merged[-1][1]:
                    before = merged[-1]
                    merged[-1] = (before[0], max(before[1], end), before[2] + values)
                else:
                    merged.append((start, end, values))
            closed = [one for one in merged if one[1] <= times.closed]
            out += [shown(self.spec, key, *one) for one in closed]
            self.sessions[key] = [one for one in merged if one not in closed]
        return sorted(out)

    @property
    def open(self) -> list[tuple[Any, int, int, int]]:
        return sorted(
            ((key, start, end, len(values)) for key, all_ in self.sessions.items() for start, end, values in all_),
            key=repr,
        )

    @property
    def values(self) -> list[Any]:
        kept = [inputs(v) for all_ in self.sessions.values() for _, _, values in all_ for v in values]
        return sorted(map(repr, kept))


class Rig:
    """Runs the operator as a slot would, and goes back to any version: files stay, deltas are kept."""

    def __init__(self, spec: SessionSpec, folder: str, budget: int = 64 << 20, ratio: float = 0.02) -> None:
        self.spec = spec
        self.version = 0
        self.shelf = Shelf(Path(folder))
        self.append_files = AppendFiles(open_filesystem(f"{folder}/store"), folder)
        self.folder, self.budget, self.ratio = folder, budget, ratio
        self.log: list[dict[str, bytes]] = []
        self.history = [{MAIN: TableManifest(), ROWS: TableManifest()}]
        self._open()

    def _open(self) -> None:
        budget = MemoryBudget(self.budget)
        manifests = self.history[self.version]

        def make(name: str, schema: TableSchema, initial: Words, *, kind: TableKind = "rmw") -> Any:
            if kind == "scratch":
                return RmwTable(schema, initial, RunSet(RowLayout(schema)), TableResources(budget, Immediate()))
            manifest = manifests[name]
            if kind == "unaligned":
                assert name == ROWS
                options: dict[str, Any] = {"directory": self.folder, "read_batch_ratio": self.ratio}
                return UnalignedTable(
                    schema, self.append_files, TableResources(budget, Immediate()), manifest, **options
                )
            runs = [self.shelf.written[ref.name] for ref in manifest.runs]
            for run in runs:
                run._due_stamp = None
            options = {"store": self.shelf, "flushed": manifest.flushed, "keys": manifest.keys}
            return RmwTable(
                schema, initial, RunSet(RowLayout(schema), runs), TableResources(budget, Immediate()), **options
            )

        self.operator = open_operator(self.spec, make)
        assert isinstance(self.operator, BufferedSessions)
        self.main: Any = self.operator.tables[MAIN]
        self.kept: Any = self.operator.tables[ROWS]
        table: Any
        for name, table in self.operator.tables.items():
            for delta in self.log[manifests[name].flushed : self.version]:
                for rows in decode_rows(delta[name], table.layout, "delta"):
                    table.load(rows)

    def batch(self, parts: Sequence[pa.RecordBatch], times: Times, between: Any = None) -> list[str]:
        self.operator.begin(self.version, times)
        for part in parts:
            self.operator.process(part)
            if between is not None:
                between(self)
        sealed = self.operator.finish()
        self.log.append({name: b"".join(bytes(piece) for piece in delta.pieces) for name, delta in sealed.items()})
        self.version += 1
        self.history.append({name: table.manifest() for name, table in self.operator.tables.items()})
        out = list(self.operator.output())
        assert str(out) == str(list(self.operator.output()))
        return found(self.spec, out)

    def restart(self, version: int) -> None:
        self.operator.close()
        self.version = version
        del self.history[version + 1 :]
        del self.log[version:]
        self._open()

    def check(self, model: Model) -> None:
        """Compare what is open."""
        read = [b for piece in self.main.scan() for b in read_rows(self.spec, MAIN, piece)]
        state = []
        for batch in read:
            for key, window, count in (
                zip(*(c.to_pylist() for c in batch.columns[-3:]), strict=True)
                if (self.spec.keys)
                else ((None, *row) for row in zip(*(c.to_pylist() for c in batch.columns), strict=True))
            ):
                bounds = (round(window[bound].timestamp() * 1000) for bound in ("start", "end"))
                state.append((normal(key), *bounds, count))
        assert sorted(state, key=repr) == model.open
        kept = [b for piece in self.kept.scan() for b in read_rows(self.spec, ROWS, piece)]
        values = [row for batch in kept for row in batch.select(["v", "t", "b"]).to_pylist()]
        assert sorted(map(repr, values)) == model.values


def freeze(rig: Rig) -> None:
    rig.kept._freeze()


def evict(rig: Rig) -> None:
    rig.kept._evict()
    rig.main._memory.evict(rig.main._eviction_buffer, 0.6)


def flush(rig: Rig) -> None:
    rig.main._flusher.backlog._flush_bytes = 0
    rig.kept._freeze()
    rig.kept._evict()


STEPS = {"": None, "freeze": freeze, "evict": evict, "flush": flush}
KEYS = st.sampled_from([None, "a", "a", "a", "c" * 20])
GAPS = st.integers(1, 12)


@st.composite
def batch_of(draw: st.DrawFn, gaps: st.SearchStrategy[int] = GAPS) -> tuple[list[Row], int, str, int | None]:
    rows = draw(st.lists(st.tuples(KEYS, st.integers(0, 60), gaps, st.integers(-9, 99)), max_size=14))
    made = [(key, start, start + gap, value) for key, start, gap, value in rows]
    back = draw(st.none() | st.none() | st.integers(0, 3))
    return made, draw(st.integers(0, 12)), draw(st.sampled_from(sorted(STEPS))), back


def run(spec: SessionSpec, batches: Sequence[tuple[list[Row], int, str, int | None]], bits: int, ratio: float) -> None:
    with TemporaryDirectory() as folder:
        rig, model, times = Rig(spec, folder, ratio=ratio), Model(spec), Times()
        past = [(copy.deepcopy(model), times)]
        for rows, step, what, back in batches:
            if back is not None:
                version = max(0, rig.version - back)
                rig.restart(version)
                del past[version + 1 :]
                model, times = copy.deepcopy(past[version])
            times = Times(times.closed, times.closed + step)
            cut = len(rows) // 2
            parts = [record_batch(spec, part, bits) for part in (rows[:cut], rows[cut:])]
            assert rig.batch(parts, times, STEPS[what]) == model.batch(rows, times)
            assert rig.operator.late_rows == sum(end <= times.late for _, _, end, _ in rows)
            rig.check(model)
            past.append((copy.deepcopy(model), times))
        rig.operator.close()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything small, so that a few rows make many blocks, segments, compactions and pieces."""
    shrink(monkeypatch)
    monkeypatch.setattr(buffered, "_SESSIONS_PER_READ", 3)
    monkeypatch.setattr(closed, "_BLOCK", 4)
    monkeypatch.setattr(UnalignedTable, "portion_bytes", 400)


@pytest.mark.usefixtures("tiny")
@settings(max_examples=150, deadline=None)
@given(st.lists(batch_of(), min_size=1, max_size=7), st.sampled_from([0, 1, 3, 64]), st.sampled_from([0.0, 0.02, 1.0]))
def test_sessions_equal_the_model(
    batches: list[tuple[list[Row], int, str, int | None]], bits: int, ratio: float
) -> None:
    run(session_spec(), batches, bits, ratio)


@pytest.mark.usefixtures("tiny")
@settings(max_examples=50, deadline=None)
@given(st.lists(batch_of(gaps=st.just(7)), min_size=1, max_size=7), st.sampled_from([1, 64]))
def test_sessions_of_one_gap_equal_the_model(batches: list[tuple[list[Row], int, str, int | None]], bits: int) -> None:
    run(replace(session_spec(), gap=7_000), batches, bits, 0.02)


@settings(max_examples=30, deadline=None)
@given(st.lists(batch_of(), min_size=1, max_size=6))
def test_one_stream_of_sessions(batches: list[tuple[list[Row], int, str, int | None]]) -> None:
    run(session_spec(keys=""), batches, 64, 0.02)


def test_what_is_kept() -> None:
    count = AggregateCall("count", (0,), "bigint", distinct=True)
    plain = AggregateCall("sum", (0,), "bigint")
    for calls in ([percentile(0.5)], [count], [plain, percentile(0.5)]):
        assert session_spec(calls=calls).keeps_rows
        assert session_spec(calls=calls).unsupported is None
    assert not session_spec(calls=[plain]).keeps_rows
    assert session_spec("complete", calls=[percentile(0.5)]).unsupported == WHOLE_WINDOWS
    assert session_spec("complete", calls=[count]).unsupported == SESSION_DISTINCT


def test_two_keys_of_one_hash_share_lists(tmp_path: Path) -> None:
    spec = session_spec()
    rig, model = Rig(spec, str(tmp_path)), Model(spec)
    first: list[Row] = [("a", 10, 20, 1), ("b", 10, 50, 2), ("c", 10, 20, 3), ("b", 11, 14, 4)]
    for rows, times in [(first, Times()), ([], Times(0, 30)), ([("b", 12, 60, 5)], Times(30, 40)), ([], Times(40, 99))]:
        parts = [record_batch(spec, rows, 0)]
        assert rig.batch(parts, times, freeze) == model.batch(rows, times)
        rig.check(model)
        rig.restart(rig.version)
    assert rig.kept.stats()["keys"] == 0
    rig.operator.close()


def test_what_is_merged_is_expected_when_the_session_ends(tmp_path: Path) -> None:
    spec = session_spec()
    rig, model = Rig(spec, str(tmp_path), ratio=1.0), Model(spec)
    batches: list[list[Row]] = [
        [("a", 10, 20, 1), ("a", 30, 40, 2), ("b", 10, 20, 3), ("c", 10, 90, 4)],
        [("a", 18, 33, 5)],
        [("a", 35, 70, 6)],
        [],
    ]
    for number, rows in enumerate(batches):
        times = Times(0, 25 * (number == 3))
        assert rig.batch([record_batch(spec, rows, 64)], times, freeze) == model.batch(rows, times)
        rig.check(model)
        rig.kept._evict()
    records = rig.kept._stat.table[rig.kept._stat.table["id"] != 0]
    assert sorted(records["time"]) == [70, 70, 90]
    rig.operator.close()


def test_merged_sessions_merge_again(tmp_path: Path) -> None:
    spec = session_spec()
    rig, model = Rig(spec, str(tmp_path)), Model(spec)
    batches: list[list[Row]] = [
        [("a", 20 * n, 20 * n + 5, n) for n in range(8)],
        [("a", 40 * n, 40 * n + 25, 10 + n) for n in range(4)],  # pairs, which move to lower ordinals
        [("a", 80 * n + 22, 80 * n + 45, 20 + n) for n in range(2)],
        [("a", 62, 83, 30), ("a", 500, 600, 31)],
        [],
    ]
    for number, rows in enumerate(batches):
        times = Times(0, 300 * (number == 4))
        assert rig.batch([record_batch(spec, rows, 64)], times, freeze) == model.batch(rows, times)
        rig.check(model)
        assert rig.kept.stats()["keys"] == [8, 8, 8, 9, 1][number]
    rig.operator.close()


def test_a_session_of_thousands_that_merge(tmp_path: Path) -> None:
    spec = session_spec()
    rig, model = Rig(spec, str(tmp_path)), Model(spec)
    rows: list[Row] = [("a", 10 * n, 10 * n + 5, n) for n in range(5_000)]
    assert rig.batch([record_batch(spec, rows, 64)], Times()) == model.batch(rows, Times())
    rig.check(model)
    rows = [("a", 10 * n, 10 * n + 10, n) for n in range(5_000)]
    assert rig.batch([record_batch(spec, rows, 64)], Times()) == model.batch(rows, Times())
    rig.check(model)
    rig.restart(2)
    times = Times(0, 10**6)
    assert rig.batch([], times) == model.batch([], times)
    assert rig.main.stats()["keys"] == rig.kept.stats()["keys"] == 0
    rig.operator.close()


def many(step: int) -> list[Row]:
    draw = np.random.default_rng(step)
    starts = step * 1000 + draw.integers(-3000, 1000, 6000)
    keys = draw.integers(0, 3_000, 6000)
    named = enumerate(zip(keys.tolist(), starts.tolist(), strict=True))
    return [(f"key number {key}", start, start + 400 + key % 3, 6000 * step + n) for n, (key, start) in named]


def test_rows_are_read_ahead(tmp_path: Path) -> None:
    spec = session_spec(calls=(percentile(0.5),))
    rig, model, times = Rig(spec, str(tmp_path), ratio=0.5), Model(spec), Times()
    for step in range(9):
        rows, times = many(step), Times(times.closed, max(0, step * 1000 - 4000))
        assert rig.batch([record_batch(spec, rows, 64)], times, freeze) == model.batch(rows, times)
    stats = rig.kept.stats()
    assert stats["prefetch_hit_ratio"] > 0.4
    assert stats["read_amplification"] < 2.0
    rig.operator.close()


def test_rows_larger_than_memory(tmp_path: Path) -> None:
    spec = session_spec(calls=(percentile(0.5), AggregateCall("mode", (1,), "string")))
    rig, model = Rig(spec, str(tmp_path), budget=12 << 20), Model(spec)
    times = Times()
    for step in range(12):
        rows, times = many(step), Times(times.closed, max(0, step * 1000 - 4000))
        assert rig.batch([record_batch(spec, rows, 64)], times) == model.batch(rows, times)
        if step == 7:
            rig.restart(rig.version)
    assert rig.kept._segments.segments
    assert rig.kept.stats()["batch_reads"] > 0
    rig.check(model)
    times = Times(times.closed, 10**6)
    assert rig.batch([], times) == model.batch([], times)
    assert rig.kept.stats()["keys"] == 0
    rig.operator.close()


def test_rows_that_are_missing_are_noticed(tmp_path: Path) -> None:
    spec = session_spec()
    rig = Rig(spec, str(tmp_path))
    rig.batch([record_batch(spec, [("a", 10, 20, 1), ("a", 12, 22, 2)], 64)], Times())
    rows = next(decode_rows(rig.log[0][ROWS], rig.kept.layout, "delta"))
    less = encode_rows(Rows(np.ascontiguousarray(rows.words[:1]), rows.heap), rig.kept.layout, False)
    rig.log[0][ROWS] = b"".join(map(bytes, less))
    rig.restart(1)
    with pytest.raises(StateDamagedError, match="rows of all sessions"):
        rig.batch([], Times(0, 10**6))
    rig.operator.close()
