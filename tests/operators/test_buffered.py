"""Aggregates over whole windows against plain Python, batch by batch, with restarts; memory; and kernels."""

import math
import random
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millpond.errors import NumericRangeError, UsageError
from millpond.files.formats.append_file import ByteRange
from millpond.files.locations.opening import open_filesystem
from millpond.files.refs import TableManifest
from millpond.layout import RowLayout, Rows, TableSchema, Words
from millpond.operators.aggregate.buffered import BufferedAggregate
from millpond.operators.kinds.registry import open_operator
from millpond.operators.protocol import TableKind, Times
from millpond.operators.tables.input_rows import StoredRows
from millpond.spec.functions import WHOLE_WINDOWS
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.operators import AggregateCall, EventTime, Field, Windows
from millpond.spec.types import parse_type
from millpond.stores.aligned.table import AlignedStore, _ResidentSegment
from millpond.stores.append_files import AppendFiles
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.rmw.table import RmwTable
from millpond.stores.runs.run_set import RunSet
from millpond.stores.table_resources import TableResources
from tests.operators import model
from tests.operators.rig import Row, fields, hash_of, normal
from tests.stores.test_rmw_model import Immediate

WINDOW = "struct<start:timestamp,end:timestamp>"
SECOND = 1_000_000


def shape(
    calls: Sequence[AggregateCall], inputs: str, windows: Windows | None, keys: str = "k string"
) -> AggregateSpec:
    time = Field("window", WINDOW) if windows else Field("at", "timestamp")
    columns = fields(keys)
    return AggregateSpec((time, *columns), fields(inputs), tuple(calls), "append", EventTime(0, windows))


def percentile(*shares: float, inputs: tuple[int, ...] = (0,), **options: Any) -> AggregateCall:
    several = options.pop("array", len(shares) > 1)
    kind = "array<double>" if several else "double"
    names = {name: options.pop(name) for name in ("filter", "distinct") if name in options}
    return AggregateCall(
        "percentile", inputs, kind, options={"percentages": list(shares), "array": several, **options}, **names
    )


class Rig:
    """Runs the operator as a slot would: deltas in objects, tables opened from manifests."""

    def __init__(self, spec: AggregateSpec, folder: Path, budget: int = 64 << 20, *, bits: int = 64) -> None:
        self.spec = spec
        self.bits = bits
        self.version = 0
        self._budget = budget
        self._files = open_filesystem(str(folder / "store"))
        self._append_files = AppendFiles(self._files, str(folder))
        self._tables: dict[str, tuple[TableManifest, list[tuple[int, ByteRange]]]] = {}
        self._open()

    def _open(self) -> None:
        self.budget = MemoryBudget(self._budget)
        self.store: AlignedStore | None = None

        def make(name: str, schema: TableSchema, initial: Words, *, kind: TableKind = "rmw") -> Any:
            if kind == "scratch":
                return RmwTable(schema, initial, RunSet(RowLayout(schema)), TableResources(self.budget, Immediate()))
            assert kind == "aligned"
            if self.store is None:
                self.store = AlignedStore(schema, self._append_files, self.budget, Immediate())
            manifest, deltas = self._tables.get(name, (TableManifest(), []))
            return self.store.open(name, manifest, [at for version, at in deltas if version > manifest.flushed])

        self.operator = open_operator(self.spec, make, list(self._tables))
        assert isinstance(self.operator, BufferedAggregate)

    def restart(self) -> None:
        self.operator.close()
        assert self.budget.used == 0 or self.store is not None
        self._open()

    def hash(self, row: Row) -> int:
        return hash_of(tuple(row[field.name] for field in self.spec.keys[1:]), self.bits)

    def batch(self, rows: Sequence[Row], times: Times, size: int = 7) -> list[tuple[Any, ...]]:
        operator = self.operator
        operator.begin(self.version, times)
        for start in range(0, len(rows), size):
            operator.process(self.record_batch(rows[start : start + size]))
        sealed = operator.finish()
        self.version += 1
        tables = {}
        table: Any
        for name, table in operator.tables.items():
            deltas = self._tables.get(name, (TableManifest(), []))[1]
            if name in sealed:
                data = b"".join(bytes(piece) for piece in sealed[name].pieces)
                commit = f"commits/{self.version}-{name}"
                self._files.put(commit, [data])
                deltas = [*deltas, (self.version, ByteRange(commit, 0, len(data)))]
                table.adopt_sealed(data)
            tables[name] = table.manifest(), deltas
        self._tables = tables
        out = list(operator.output())
        assert str(out) == str(list(operator.output()))
        names = [field.name for field in self.spec.keys]
        found = [tuple(row.values()) for piece in out for row in piece.to_pylist()] if out else []
        assert all(piece.schema.names[: len(names)] == names for piece in out)
        return found

    def record_batch(self, rows: Sequence[Row]) -> pa.RecordBatch:
        columns = self.spec.input_fields
        arrays = [pa.array([self.hash(row) for row in rows], pa.int64())]
        for number, column in enumerate(columns):
            values = [row["time"] if number == 0 else row[column.name] for row in rows]
            windows = self.spec.time.windows if self.spec.time else None
            if number == 0 and windows:
                values = [v - (v - windows.offset) % windows.slide for v in values]
            arrays.append(pa.array(values, parse_type(column.type).arrow))
        return pa.RecordBatch.from_arrays(arrays, names=["__hash", *(c.name for c in columns)])


class Truth:
    """The same, slowly."""

    def __init__(self, spec: AggregateSpec) -> None:
        self.spec = spec
        self.rows: dict[tuple[int, tuple[Any, ...]], list[Row]] = {}

    def batch(self, rows: Sequence[Row], times: Times) -> list[tuple[Any, ...]]:
        windows = self.spec.time.windows if self.spec.time else None
        names = [field.name for field in self.spec.keys[1:]]
        for row in rows:
            key = tuple(normal(row[name]) for name in names)
            begins = [row["time"]]
            if windows:
                last = row["time"] - (row["time"] - windows.offset) % windows.slide
                begins = [last - n * windows.slide for n in range(windows.overlap)]
            for begin in begins:
                if self.end(begin) > times.late * 1000:
                    self.rows.setdefault((begin, key), []).append(row)
        closed = [name for name in self.rows if self.end(name[0]) <= times.closed * 1000]
        out = []
        for begin, key in closed:
            group = self.rows.pop((begin, key))
            results = [result(self.spec, call, group) for call in self.spec.calls]
            out.append((begin, key, *results))
        return out

    def end(self, begin: int) -> int:
        windows = self.spec.time.windows if self.spec.time else None
        return begin + (windows.size if windows else 0)


def result(spec: AggregateSpec, call: AggregateCall, rows: list[Row]) -> Any:
    if call.filter is not None:
        rows = [row for row in rows if row[spec.inputs[call.filter].name]]
    names = [spec.inputs[position].name for position in call.inputs]
    if call.function == "percentile":
        pairs = [(row[names[0]], row[names[1]] if len(names) > 1 else 1) for row in rows]
        values = [v for v, n in pairs if v is not None and n for _ in range(n)]
        if call.distinct:
            values = list({normal(v): v for v in values}.values())
        return percentiles(values, call.options)
    if call.function == "mode":
        values = [row[names[0]] for row in rows if row[names[0]] is not None]
        counts: dict[Any, int] = {}
        for value in values:
            counts[_exactly(value)] = counts.get(_exactly(value), 0) + 1
        best = [value for value in values if counts[_exactly(value)] == max(counts.values())]
        return (max if call.options.get("greatest") else min)(best, key=_order) if values else None
    if call.function == "rows":
        return [dict(zip("abc", (row[name] for name in names), strict=False)) for row in rows]
    return model.call_result(spec, call, rows)


def _exactly(value: Any) -> Any:
    return repr(value + 0.0) if isinstance(value, float) else value


def _order(value: Any) -> Any:
    if isinstance(value, float):
        return (value != value, 0.0 if value != value else value, math.copysign(1, value))
    return value.encode() if isinstance(value, str) else value


def percentiles(values: list[Any], options: dict[str, Any]) -> Any:
    if not values:
        return None
    values = sorted(values, key=_order, reverse=bool(options.get("reverse")))
    out = []
    for share in options["percentages"]:
        position = (len(values) - 1) * share
        low, high = math.floor(position), math.ceil(position)
        if options.get("discrete"):
            low = high = math.floor(position) if options.get("legacy") else max(math.ceil(len(values) * share), 1) - 1
        if low == high or _exactly(values[low]) == _exactly(values[high]):
            out.append(float(values[low]))
        elif options.get("weighted"):
            out.append((high - position) * float(values[low]) + (position - low) * float(values[high]))
        else:
            out.append(float(values[low]) + (position - low) * (float(values[high]) - float(values[low])))
    return out if options["array"] else out[0]


def check(rig: Rig, truth: Truth, rows: Sequence[Row], times: Times, **options: Any) -> int:
    got, want = rig.batch(rows, times, **options), truth.batch(rows, times)
    windows = rig.spec.time.windows if rig.spec.time else None

    def shown(row: tuple[Any, ...]) -> tuple[Any, ...]:
        begin = row[0]["start"] if windows else row[0]
        if windows:
            assert (row[0]["end"] - row[0]["start"]).total_seconds() * SECOND == windows.size
        keys = len(rig.spec.keys)
        return (round(begin.timestamp() * SECOND), tuple(normal(k) for k in row[1:keys]), *row[keys:])

    assert sorted(map(comparable, map(shown, got))) == sorted(map(comparable, want))
    return len(got)


def comparable(row: Any) -> str:
    return repr([_rounded(value) for value in row])


def _rounded(value: Any) -> Any:
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.12g}")
    if isinstance(value, list):
        return sorted(map(repr, value)) if value and isinstance(value[0], dict) else [_rounded(one) for one in value]
    return value


NUMBERS = "n bigint; x double; d decimal(20,3); e decimal(9,2); w int; ok boolean; s string"
CALLS = (
    percentile(0.5),
    percentile(0.1, 0.5, 0.99, inputs=(1,)),
    percentile(0.37, inputs=(2,)),
    percentile(0.37, inputs=(3,), reverse=True),
    percentile(0.1, 0.5, 0.9, inputs=(1,), weighted=True),
    percentile(0.25, 0.75, inputs=(0, 4)),
    percentile(0.4, inputs=(1,), discrete=True),
    percentile(0.4, inputs=(0,), discrete=True, reverse=True),
    percentile(0.4, inputs=(0,), discrete=True, legacy=True),
    percentile(0.5, filter=5),
    percentile(0.5, distinct=True),
    AggregateCall("mode", (0,), "bigint"),
    AggregateCall("mode", (6,), "string", options={"greatest": True}),
    AggregateCall("mode", (2,), "decimal(20,3)"),
    AggregateCall("mode", (1,), "double"),
    AggregateCall("count", (), "bigint"),
    AggregateCall("sum", (0,), "bigint"),
    AggregateCall("max", (6,), "string"),
    AggregateCall("count", (6,), "bigint", distinct=True),
    AggregateCall("rows", (6, 0, 1), "array<struct<a:string,b:bigint,c:double>>"),
)


def random_row(rng: random.Random, time: int) -> Row:
    def maybe(value: Any) -> Any:
        return None if rng.random() < 0.15 else value

    return {
        "time": time,
        "k": maybe(rng.choice(["a", "b", "a long name of a key", ""])),
        "n": maybe(rng.choice([0, 1, 2, 3, -7, 2**53 + 1, -(2**60)])),
        "x": maybe(rng.choice([0.0, 1.5, -2.25, math.nan, math.inf, -math.inf, 1e308, -1e308])),
        "d": maybe(Decimal(rng.randrange(-(10**17), 10**17)).scaleb(-3)),
        "e": maybe(Decimal(rng.randrange(-(10**9) + 1, 10**9)).scaleb(-2)),
        "w": maybe(rng.randrange(4)),
        "ok": maybe(rng.random() < 0.5),
        "s": maybe(rng.choice(["", "x", "a text of more than twelve bytes", "a text of more than twelve bytez"])),
    }


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "windows",
    [Windows(10 * SECOND, 10 * SECOND, 0), Windows(10 * SECOND, 5 * SECOND, SECOND), None],
    ids=["tumbling", "sliding", "times"],
)
def test_windows_equal_the_model(windows: Windows | None, seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    spec = shape(CALLS, NUMBERS, windows)
    assert spec.unsupported is None
    rig, truth = Rig(spec, tmp_path, bits=rng.choice([64, 2])), Truth(spec)
    late = closed = shown = 0
    for _ in range(12):
        late, closed = closed, closed + rng.choice([0, 1000, 4000, 15000])
        times = [max(0, late * 1000 + rng.randrange(-5, 25) * SECOND + rng.randrange(3)) for _ in range(40)]
        if windows is None:
            times = [t // SECOND * SECOND for t in times]
        rows = [random_row(rng, t) for t in times][: rng.choice([0, 40, 40])]
        shown += check(rig, truth, rows, Times(late, closed))
        if rng.random() < 0.4:
            rig.restart()
    shown += check(rig, truth, [], Times(closed, 10**9))
    assert shown > 15
    assert rig.operator.tables == {}
    rig.operator.close()


def test_what_closes_with_a_whole_second_goes_with_the_batch(tmp_path: Path) -> None:
    """As windows of a chain do: they come when the watermark has passed their end, and are not kept for the next."""
    rig = Rig(shape([percentile(0.5)], NUMBERS, None), tmp_path)
    rng = random.Random(1)
    for end in (10, 12):
        rows = [random_row(rng, end * SECOND) for _ in range(20)]
        assert rig.batch(rows, Times((end - 2) * 1000 + 999, end * 1000 + 999))
        assert rig.operator.tables == {}
    rig.operator.close()


@pytest.mark.parametrize("kind", ["double", "float"])
def test_the_mode_of_zeros_has_no_sign(kind: str, tmp_path: Path) -> None:
    """0.0 and −0.0 count as one value, which Spark shows as 0.0, whichever came first."""
    rig = Rig(shape([AggregateCall("mode", (0,), kind)], f"x {kind}", None), tmp_path)
    values = {"a": (-0.0, 0.0, 1.5), "b": (0.0, -0.0, 1.5), "c": (-1.5, -0.0, -1.5)}
    rows = [{"time": SECOND, "k": key, "x": x} for key, several in values.items() for x in several]
    assert rig.batch(rows, Times()) == []
    found = {row[1]: row[2] for row in rig.batch([], Times(0, 2000))}
    assert {key: (value, math.copysign(1, value)) for key, value in found.items()} == {
        "a": (0.0, 1.0),
        "b": (0.0, 1.0),
        "c": (-1.5, -1.0),
    }
    rig.operator.close()


def test_lists_and_columns_of_all_types(tmp_path: Path) -> None:
    inputs = "f float; day date; at timestamp; raw binary; flag boolean; tiny tinyint; st struct<a:int,b:string>"
    calls = [
        AggregateCall("collect_list", (number,), f"array<{field.type}>")
        for number, field in enumerate(fields(inputs)[:6])
    ]
    calls += [AggregateCall("mode", (number,), field.type) for number, field in enumerate(fields(inputs)[:6])]
    calls.append(AggregateCall("count", (6,), "bigint", distinct=True))
    spec = shape(calls, inputs, Windows(SECOND, SECOND, 0), keys="k struct<a:bigint,b:double>; z decimal(38,2)")
    rig = Rig(spec, tmp_path)
    row: Row = {
        "time": 5,
        "k": {"a": 1, "b": -0.0},
        "z": Decimal("-123456789012345678901234567890.12"),
        "f": -0.0,
        "day": 3,
        "at": 77,
        "raw": b"\x00\xff" * 10,
        "flag": True,
        "tiny": -3,
        "st": {"a": None, "b": "x"},
    }
    empty = row | dict.fromkeys(["f", "day", "at", "raw", "flag", "tiny", "st"])
    other = row | {"k": None, "z": None}
    shown = {found[1] is None: found for found in rig.batch([row, empty, row, other], Times(0, 1000))}
    values = shown[False][3:]
    assert str(values[0]) == "[-0.0, -0.0]"
    # Of floats, `mode` shows 0.0 for -0.0.
    assert [str(value) for value in values[6:]] == ["0.0", *(str(one[0]) for one in values[1:6]), "1"]
    assert [len(one) for one in values[:6]] == [2] * 6
    assert shown[False][1] == {"a": 1, "b": 0.0}
    assert shown[False][2] == row["z"]
    assert shown[True][2] is None
    assert [len(one) for one in shown[True][3:9]] == [1] * 6
    assert rig.batch([], Times(1000, 2000)) == []
    rig.operator.close()


def test_modes_of_distinct_nested_values(tmp_path: Path) -> None:
    inputs = "st struct<x:double,y:string>; l array<double>"
    calls = [AggregateCall("mode", (number,), field.type, distinct=True) for number, field in enumerate(fields(inputs))]
    rig = Rig(shape(calls, inputs, Windows(SECOND, SECOND, 0)), tmp_path)
    values: list[tuple[Any, Any]] = [({"x": 2.0, "y": "a"}, [2.0]), (None, None)]
    values += [({"x": zero, "y": "a longer text"}, [zero, math.inf]) for zero in (-0.0, 0.0)]
    rows = [{"time": 5, "k": "a", "st": structure, "l": numbers} for structure, numbers in values]
    ((_, _, structure, numbers),) = rig.batch(rows, Times(0, 1000), size=2)
    assert str((structure, numbers)) == str(({"x": 0.0, "y": "a longer text"}, [0.0, math.inf]))
    rig.operator.close()


def test_a_batch_and_a_state_larger_than_memory(tmp_path: Path) -> None:
    spec = shape(
        [
            percentile(0.5),
            AggregateCall("count", (), "bigint"),
            AggregateCall("rows", (0, 1), "array<struct<n:bigint,s:string>>"),
        ],
        "n bigint; s string",
        Windows(SECOND, SECOND, 0),
        "k bigint",
    )
    rig = Rig(spec, tmp_path, 5 << 19)  # the window has ten times as much
    rng = np.random.default_rng(2)
    keys, values = rng.integers(0, 3000, 300_000), rng.integers(0, 10**6, 300_000)
    hashes = (np.arange(3000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
    text = pa.array(["a text of more than twelve bytes"] * 5000)
    spooled = 0
    for version in range(3):
        rig.operator.begin(version, Times())
        for start in range(version * 100_000, (version + 1) * 100_000, 5000):
            part = slice(start, start + 5000)
            columns = [pa.array(hashes[keys[part]]), pa.array(np.zeros(5000, np.int64)), pa.array(keys[part])]
            columns += [pa.array(values[part]), text]
            rig.operator.process(pa.RecordBatch.from_arrays(columns, ["__hash", "window", "k", "n", "s"]))
        tables: list[Any] = list(rig.operator.tables.values())
        files = [file for table in tables for file in table._fresh]
        spooled += sum(not isinstance(file.data, _ResidentSegment) for file in files)
        for name, delta in rig.operator.finish().items():
            table: Any = rig.operator.tables[name]
            table.adopt_sealed(b"".join(bytes(piece) for piece in delta.pieces))
    assert spooled > 0
    rig.operator.begin(3, Times(0, 1000))
    rig.operator.finish()
    pieces = list(rig.operator.output())
    assert len(pieces) > 20
    assert sum(piece.nbytes for piece in pieces) > 10 * (1 << 20)
    assert max(piece.nbytes for piece in pieces) < 1 << 20
    out = pa.Table.from_batches(pieces)
    assert sorted(out["k"].to_pylist()) == list(range(3000))
    for key, median, count, group in zip(*(out.column(i).to_pylist() for i in (1, 2, 3, 4)), strict=True):
        mine = values[keys == key]
        assert sorted(row["n"] for row in group) == sorted(mine.tolist())
        assert {row["s"] for row in group} == {"a text of more than twelve bytes"}
        assert count == len(mine)
        assert median == float(np.median(mine))
    rig.operator.close()


def test_many_windows_that_close_at_once(tmp_path: Path) -> None:
    """Each row is in 40 windows: no more rows are aggregated together than came in a piece."""
    windows = Windows(40 * SECOND, SECOND, 0, shared=True)
    rig = Rig(shape([percentile(0.5)], "n bigint", windows, "k bigint"), tmp_path, 8 << 20)
    keys = np.arange(3000)
    hashes = (keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
    columns = [pa.array(hashes), pa.array(np.full(3000, 100 * SECOND)), pa.array(keys), pa.array(keys)]
    rig.operator.begin(0, Times())
    rig.operator.process(pa.RecordBatch.from_arrays(columns, ["__hash", "window", "k", "n"]))
    rig.operator.finish()
    rig.operator.begin(1, Times(0, 10**6))
    rig.operator.finish()
    before, used, rows = rig.budget.used, 0, 0
    for piece in rig.operator.output():
        used, rows = max(used, rig.budget.used - before), rows + piece.num_rows
        assert [int(median) for median in piece.column(2).to_pylist()] == piece.column("k").to_pylist()
    assert rows == 40 * 3000
    assert used < 3 << 20
    rig.operator.close()


def test_a_negative_frequency_is_an_error(tmp_path: Path) -> None:
    spec = shape([percentile(0.5, inputs=(0, 1))], "n bigint; w int", Windows(SECOND, SECOND, 0))
    rig = Rig(spec, tmp_path)
    with pytest.raises(NumericRangeError, match="negative"):
        rig.batch([{"time": 0, "k": "a", "n": 1, "w": -1}], Times(0, 1000))


def test_what_is_not_kept_whole_stays_on_spark() -> None:
    spec = shape([percentile(0.5)], "n bigint", Windows(SECOND, SECOND, 0))
    assert spec.keeps_rows
    for other in ("update", "complete"):
        changed = AggregateSpec(spec.keys, spec.inputs, spec.calls, other, spec.time)
        assert changed.unsupported == WHOLE_WINDOWS
    assert AggregateSpec(spec.keys[1:], spec.inputs, spec.calls, "update").unsupported == WHOLE_WINDOWS
    assert shape([percentile(0.5)], "n string", None).unsupported == "MP-INPUT-TYPE"
    assert shape([percentile(0.5, inputs=(0, 0, 0))], "n bigint", None).unsupported == "MP-FUNCTION"


def test_order_statistics_have_no_partial_states() -> None:
    from millpond.operators.functions.registry import accumulator

    one = accumulator(percentile(0.5), [parse_type("bigint")], whole=True)
    source = Rows(np.zeros((1, 4), np.uint64), np.empty(0, np.uint8))
    with pytest.raises(UsageError, match="all rows"):
        one.combine(None, np.zeros(1, np.int64), source)  # type: ignore[arg-type]


def test_rows_come_back_as_they_were() -> None:
    spec = shape([percentile(0.5)], NUMBERS, Windows(SECOND, SECOND, 0))
    stored = StoredRows(spec.key_fields, spec.inputs)
    rng = random.Random(4)
    rows = [random_row(rng, t) for t in range(100)]
    columns = spec.input_fields
    arrays = [pa.array(range(100), pa.int64()), pa.array([r["time"] for r in rows])]
    arrays += [pa.array([r[c.name] for r in rows], parse_type(c.type).arrow) for c in columns[1:]]
    batch = pa.RecordBatch.from_arrays(arrays, names=["__hash", *(c.name for c in columns)])
    assert str(stored.decode(stored.encode(batch)).to_pylist()) == str(batch.to_pylist())


def test_percentiles_are_exact_where_doubles_are_not() -> None:
    value = Fraction(12345678901234567890123, 10**3)
    from millpond.operators.functions.order_statistics import doubles

    pair = np.array([[int(value * 1000) & (2**64 - 1), int(value * 1000) >> 64]], np.uint64)
    assert doubles(pair, parse_type("decimal(30,3)"))[0] == float(value)
    odd = np.array([2**53 + 1, -(2**53) - 3, 123456789], np.int64)
    want = [float(Fraction(int(v), 10**4)) for v in odd]
    assert doubles(odd, parse_type("decimal(18,4)")).tolist() == want
