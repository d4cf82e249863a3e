"""State that follows a changed query, over flushes, compactions, restarts with other partitions, and crashes.

What the slot gives out, and what is read back of every version, is compared with a model: each function over the rows
since it came.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from millpond.checkpoint.generation import claim
from millpond.checkpoint.recovery import Recovery
from millpond.checkpoint.state_schema import OperatorSchema, StateSchema, plain
from millpond.conf import OnChangedState
from millpond.errors import StateIncompatibleError, TransientError
from millpond.layout import HashRange
from millpond.operators.kinds.registry import state_tables
from millpond.query.schema.matching import check_schema, write_evolved_schema
from millpond.query.starting.recovery_point import recovery_version, write_base_and_find_replays
from millpond.slot.process.messages import RunBatch
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.operators import AggregateCall, Field
from millpond.spec.types import parse_type
from millpond.state_reader.reader import StateReader
from millpond.stores import delta_backlog
from tests.support.application import Application

from .conftest import hashes_in
from .test_damage import Counts

Row = dict[str, Any]
Types = dict[str, str]
Functions = Sequence[str]

TYPES: Types = {"v": "int", "o": "smallint", "d": "decimal(10,2)", "f": "float", "s": "string"}
WIDER = {
    "int": "bigint",
    "smallint": "int",
    "decimal(10,2)": "decimal(16,2)",
    "decimal(16,2)": "decimal(24,2)",
    "float": "double",
}


def _by(choose: Callable[..., Any]) -> Callable[[list[Row]], Any]:
    """`min_by(s, o)`, `max_by(s, o)`: of rows that are alike, any will do, so orders of a key are never alike."""

    def compute(rows: list[Row]) -> Any:
        rows = [row for row in rows if row["o"] is not None]
        return choose(rows, key=lambda row: row["o"])["s"] if rows else None

    return compute


def _over(column: str, compute: Callable[[list[Any]], Any]) -> Callable[[list[Row]], Any]:
    """A function of the values of a column; null without any."""

    def computed(rows: list[Row]) -> Any:
        values = [row[column] for row in rows if row[column] is not None]
        return compute(values) if values else None

    return computed


def _folded(operation: Callable[[int, int], int]) -> Callable[[list[int]], int]:
    def fold(values: list[int]) -> int:
        found = values[0]
        for value in values[1:]:
            found = operation(found, value)
        return found

    return fold


MODEL: dict[str, Callable[[list[Row]], Any]] = {
    "count(1)": len,
    "count(v)": lambda rows: sum(row["v"] is not None for row in rows),
    "sum(v)": _over("v", sum),
    "avg(v)": _over("v", lambda values: sum(values) / len(values)),
    "min(v)": _over("v", min),
    "max(v)": _over("v", max),
    "first(v)": lambda rows: rows[0]["v"] if rows else None,
    "last(v)": lambda rows: rows[-1]["v"] if rows else None,
    "bit_and(v)": _over("v", _folded(lambda a, b: a & b)),
    "bit_or(v)": _over("v", _folded(lambda a, b: a | b)),
    "bit_xor(v)": _over("v", _folded(lambda a, b: a ^ b)),
    "sum(d)": _over("d", sum),
    "avg(d)": _over("d", lambda values: sum(values) / len(values)),
    "min(d)": _over("d", min),
    "max(d)": _over("d", max),
    "first(d)": lambda rows: rows[0]["d"] if rows else None,
    "sum(f)": _over("f", sum),
    "avg(f)": _over("f", lambda values: sum(values) / len(values)),
    "min(f)": _over("f", min),
    "max(f)": _over("f", max),
    "last(f)": lambda rows: rows[-1]["f"] if rows else None,
    "min(s)": _over("s", min),
    "max(s)": _over("s", max),
    "min_by(s, o)": _by(min),
    "max_by(s, o)": _by(max),
    "max_by(d, o)": lambda rows: max(
        (r for r in rows if r["o"] is not None), key=lambda r: r["o"], default={"d": None}
    )["d"],
}
COUNTS = ("count(1)", "count(v)")


def _result(function: str, inputs: list[str]) -> str:
    """The type that Spark gives a function."""
    first = parse_type(inputs[0]) if inputs else None
    if first is not None and first.name == "decimal" and function in ("sum", "avg"):
        more = (10, 0) if function == "sum" else (4, 4)
        return f"decimal({first.precision + more[0]},{first.scale + more[1]})"
    if function == "count" or (function == "sum" and first is not None and first.machine == "int"):
        return "bigint"
    return "double" if function in ("avg", "sum") else inputs[0]


def spec_of(functions: Functions, types: Types) -> AggregateSpec:
    inputs: list[str] = []
    calls = []
    for text in functions:
        name, _, rest = text.removesuffix(")").partition("(")
        columns = [column for column in rest.split(", ") if column != "1"]
        inputs += [column for column in columns if column not in inputs]
        options = {"ignore_nulls": False} if name in ("first", "last") else {}
        type_ = _result(name, [types[column] for column in columns])
        calls.append(AggregateCall(name, tuple(map(inputs.index, columns)), type_, options=options))
    fields = tuple(Field(column, types[column]) for column in inputs)
    return AggregateSpec((Field("k", "bigint"),), fields, tuple(calls), "update")


def pinned(spec: AggregateSpec, functions: Functions) -> StateSchema:
    tables = {name: plain(table.schema) for name, table in state_tables(spec).items()}
    return StateSchema(1 << 15, (OperatorSchema("aggregate by k", plain(spec), tables, tuple(functions)),))


def rows_of(seed: int, batch: int) -> list[Row]:
    """Rows of a batch: some keys come in every one, others in one, some values are null."""
    rng = random.Random(seed * 1000 + batch)
    keys = [*range(30), *(1000 * batch + n for n in range(40))]
    rows = []
    for place, key in enumerate(keys * 2):
        maybe = lambda value: None if rng.random() < 0.2 else value  # noqa: E731
        rows.append(
            {
                "k": key,
                "v": maybe(rng.randint(-1000, 1000)),
                "o": maybe(batch * 200 + place - 1000),
                "d": maybe(Decimal(rng.randint(-10_000, 10_000)).scaleb(-2)),
                "f": maybe(rng.randint(-1000, 1000) / 4),
                "s": maybe("x" * rng.randint(0, 3) + str(rng.randint(0, 99)) * rng.randint(1, 9)),
            }
        )
    return rows


class Life(NamedTuple):
    """The query in one run: its functions, each with the batch that it came with, and its types."""

    births: dict[str, int]
    types: Types


class Job(Application):
    """Aggregates by key that change from run to run; `seen` is what each version is made of."""

    def __init__(
        self,
        folder: Path,
        functions: Functions,
        types: Types,
        partitions: int,
        seen: dict[int, Life],
        changed: OnChangedState = "evolve",
        seed: int = 0,
    ) -> None:
        super().__init__(folder, spec_of(functions, types), partitions)
        self.functions = tuple(functions)
        self.types = types
        self.seen = seen
        self.changed = changed
        self.seed = seed
        self.output: dict[int, list[Any]] = {}

    def planned(self, batch: int) -> bytes:
        return b"offsets %d" % batch

    def pin(self) -> None:
        self.query = pinned(self.spec, self.functions)
        found = check_schema(
            self.files, self.query_logs, self.checkpoint, self.query, [self.spec], changed=self.changed
        )
        self.pinned = found

    def schema_number(self, recovery: Recovery) -> int:
        version = recovery_version(recovery, self.query_logs)
        self.pinned = write_evolved_schema(self.files, recovery, version, self.pinned, [self.spec], self.changed)
        self.spec = self.pinned.specs([self.spec])[0]
        before = self.seen[version].births if version else {}
        self.life = Life({text: before.get(text, version) for text in self.functions}, self.types)
        return self.pinned.number or 0

    def run(self, batch: int) -> None:
        assert self.server is not None
        rows, self.output = rows_of(self.seed, batch), {}
        hashes = hashes_in(0, 1, np.array([row["k"] for row in rows], np.int64))
        for number in range(self.partitions):
            low, high = self.task.hash_range(number)
            inside = HashRange(low, high).covers(hashes.view(np.uint64)).tolist()
            own = [{}, *(row for row, fits in zip(rows, inside, strict=True) if fits)]
            mark = np.uint64(low + batch).astype(np.int64)
            columns = {
                "__hash": pa.array(np.append(mark, hashes[np.array(inside, bool)]), pa.int64()),
                "__mark": pa.array([True] + [False] * (len(own) - 1)),
            }
            for field in self.spec.input_fields:
                columns[field.name] = pa.array([row.get(field.name) for row in own], parse_type(field.type).arrow)
            piece = pa.RecordBatch.from_pydict(columns)
            self.output |= table_of(self.server.run(RunBatch(self.task, number, batch, 0), iter([piece])))
        self.seen[batch + 1] = self.life
        wanted = expected(self.seed, self.life, batch + 1)
        checked(self.output, {key: wanted[key] for key in {row["k"] for row in rows}}, self.functions)

    def done(self, batches: int) -> None:
        """Start, run batches, and end by `stop()`."""
        try:
            self.start()
            self.go(batches)
            assert self.server is not None
            self.server.drain(self.task.key, 10)
        finally:
            self.close()


def table_of(batches: Any) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for batch in batches:
        for key, *values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            assert key not in found
            found[key] = values
    return found


def expected(seed: int, life: Life, version: int) -> dict[int, list[Any]]:
    by_key: dict[int, list[tuple[int, Row]]] = {}
    for batch in range(version):
        for row in rows_of(seed, batch):
            by_key.setdefault(row["k"], []).append((batch, row))
    return {
        key: [MODEL[text]([row for batch, row in rows if batch >= birth]) for text, birth in life.births.items()]
        for key, rows in by_key.items()
    }


def checked(found: dict[int, list[Any]], wanted: dict[int, list[Any]], functions: Functions) -> None:
    assert found.keys() == wanted.keys()
    for key, values in found.items():
        for text, value, want in zip(functions, values, wanted[key], strict=True):
            near = pytest.approx(want, abs=Decimal("1e-6")) if isinstance(want, Decimal) else pytest.approx(want)
            assert value == (None if want is None else near if not isinstance(want, str) else want), (text, key)


def check_versions(folder: Path, seen: dict[int, Life], seed: int) -> None:
    """Each version that there is shows what it was made of, by the query that made it."""
    reader = StateReader(str(folder))
    versions = reader.versions()
    assert versions == list(range(1, versions[-1] + 1))
    for version in versions:
        rows: dict[int, list[Any]] = {}
        for number in range(reader.partitions_at(version)):
            rows |= table_of(reader.read(0, number, version))
        checked(rows, expected(seed, seen[version], version), list(seen[version].births))


@pytest.mark.parametrize("seed", range(12))
def test_functions_follow_through_flushes_compactions_and_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(delta_backlog, "_MAX_DELTAS", rng.choice([2, 3, 64]))
    functions, types = rng.sample(list(MODEL), rng.randint(1, 6)), dict(TYPES)
    seen: dict[int, Life] = {}
    batches = 0
    for _ in range(7):
        batches += rng.randint(1, 3)
        job = Job(tmp_path, functions, types, rng.choice([1, 2, 3, 5]), seen, seed=seed)
        job.done(batches)
        check_versions(tmp_path, seen, seed)
        kept = [text for text in functions if rng.random() < 0.7]
        functions = kept + rng.sample([text for text in MODEL if text not in functions], rng.randint(not kept, 4))
        rng.shuffle(functions)
        for column in types:
            if rng.random() < 0.3:
                types = {**types, column: WIDER.get(types[column], types[column])}
    assert any((tmp_path / "millpond" / "files").glob("*.run")) or delta_backlog._MAX_DELTAS == 64


@pytest.mark.parametrize("text", [text for text in MODEL if not text.startswith("count")])
def test_wider_inputs_keep_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(delta_backlog, "_MAX_DELTAS", 2)
    seen: dict[int, Life] = {}
    types = dict(TYPES)
    for step in range(3):
        Job(tmp_path, [text], types, 1 + step % 2, seen).done(3 * step + 3)
        check_versions(tmp_path, seen, 0)
        types = {column: WIDER.get(type_, type_) for column, type_ in types.items()}


def crash(job: Job, batches: int, point: str) -> None:
    """Start a run that ends at a point: before its first batch, within it, when it is made, or when it is committed."""
    try:
        job.start()
        job.go(batches - 1)
        if point == "begun":
            return
        job.query_logs.put("offsets", batches - 1, job.planned(batches - 1))
        if point == "planned":
            return
        job.run(batches - 1)
        assert job.server is not None
        job.server.drain(job.task.key, 10)
        if point in ("committed", "lost"):  # of what Spark has committed, the state may lag behind
            job.query_logs.put("commits", batches - 1, b"commit")
    finally:
        job.close()
    if point in ("ran", "lost"):
        for path in (job.folder / "millpond" / "commits").glob(f"{batches:012d}-*"):
            path.unlink()


POINTS = ("begun", "planned", "ran", "made", "committed", "lost")


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("back", [True, False], ids=["back", "on"])
def test_a_crash_of_the_changed_query(tmp_path: Path, point: str, back: bool) -> None:
    """The code may be taken back, or not; each function counts the rows since it came, whichever query ran a batch."""
    old, new = ["sum(v)", "min(s)"], ["max(d)", "sum(v)", "avg(f)"]
    seen: dict[int, Life] = {}
    Job(tmp_path, old, TYPES, 2, seen).done(3)
    types = {**TYPES, "v": "bigint"}
    crash(Job(tmp_path, new, types, 3, seen), 4, point)
    if back and point == "committed":
        with pytest.raises(StateIncompatibleError, match="is of int; its checkpoint's of bigint"):
            Job(tmp_path, old, TYPES, 2, seen).done(6)
        Job(tmp_path, ["min(s)", "sum(v)"], types, 2, seen).done(6)
        assert seen[6].births == {"min(s)": 4, "sum(v)": 0}
        return
    functions, types = (old, TYPES) if back else (new, types)
    Job(tmp_path, functions, types, 2, seen).done(6)
    assert seen[6].births == ({"sum(v)": 0, "min(s)": 0} if back else {"max(d)": 3, "sum(v)": 0, "avg(f)": 3})
    check_versions(tmp_path, seen, 0)
    Job(tmp_path, functions, types, 2, seen, "error").done(7)


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_of_the_query_before_it_was_changed(tmp_path: Path, point: str) -> None:
    """A batch that the old query has planned, and not committed, is the new query's."""
    seen: dict[int, Life] = {}
    crash(Job(tmp_path, ["sum(v)", "min(s)"], TYPES, 2, seen), 4, point)
    Job(tmp_path, ["min(s)", "count(1)", "sum(v)"], TYPES, 3, seen).done(6)
    check_versions(tmp_path, seen, 0)
    assert seen[6].births == {"min(s)": 0, "count(1)": 4 if point == "committed" else 3, "sum(v)": 0}


def test_the_query_as_it_was_is_refused_without_the_setting(tmp_path: Path) -> None:
    seen: dict[int, Life] = {}
    Job(tmp_path, ["sum(v)"], TYPES, 2, seen).done(3)
    crash(Job(tmp_path, ["max(d)", "sum(v)"], TYPES, 2, seen), 4, "planned")
    with pytest.raises(StateIncompatibleError, match=r"the query does not compute max\(d\); its checkpoint does"):
        Job(tmp_path, ["sum(v)"], TYPES, 2, seen, "error").done(4)
    Job(tmp_path, ["sum(v)"], TYPES, 2, seen).done(4)
    Job(tmp_path, ["sum(v)"], TYPES, 2, seen, "error").done(5)
    assert seen[5].births == {"sum(v)": 0}


def test_what_a_ledger_is_taken_back_to_is_followed_from_there(tmp_path: Path) -> None:
    seen: dict[int, Life] = {}
    Job(tmp_path, ["sum(v)", "min(v)"], TYPES, 2, seen).done(3)
    Job(tmp_path, ["min(v)", "count(1)"], TYPES, 3, seen).done(6)
    job = Job(tmp_path, ["count(1)", "sum(v)", "min(v)"], TYPES, 1, seen)
    for batch in (5, 4, 3, 2):
        for log in ("commits", "offsets"):
            job.query_logs.remove(log, batch)  # type: ignore[arg-type]
    job.done(5)
    assert seen[5].births == {"count(1)": 2, "sum(v)": 0, "min(v)": 0}
    check_versions(tmp_path, seen, 0)


def test_of_two_starts_at_once_one_goes_on(tmp_path: Path) -> None:
    """The last claim has the state; the schema that the other has recorded has no owner."""
    seen: dict[int, Life] = {}
    Job(tmp_path, ["sum(v)"], TYPES, 2, seen).done(3)
    one, other = (Job(tmp_path, [text, "sum(v)"], TYPES, 2, seen) for text in ("max(d)", "min(s)"))
    one.pin()
    other.pin()
    other.pin, pin = lambda: None, other.pin  # type: ignore[method-assign]
    one.pin = lambda: None  # type: ignore[method-assign]
    one.done(4)
    other.done(5)
    assert seen[5].births == {"min(s)": 4, "sum(v)": 0}
    check_versions(tmp_path, seen, 0)
    pin()
    assert other.pinned.number is not None, "it is what is pinned"


def test_a_start_that_pinned_what_was_changed_meanwhile_is_refused(tmp_path: Path) -> None:
    seen: dict[int, Life] = {}
    Job(tmp_path, ["sum(v)"], TYPES, 2, seen).done(3)
    late = Job(tmp_path, ["sum(v)"], TYPES, 2, seen, "error")
    late.pin()
    late.pin = lambda: None  # type: ignore[method-assign]
    Job(tmp_path, ["max(d)", "sum(v)"], TYPES, 2, seen).done(4)
    with pytest.raises(StateIncompatibleError, match="as it was changed to at another time"):
        late.done(5)


def test_a_run_that_still_goes_on_is_noticed_after_the_shape_was_made(tmp_path: Path) -> None:
    """Else the base would name a shape that its version was not made by."""
    counted = Counts(tmp_path)
    counted.through(4)
    generation = claim(counted.files, run="late", partitions=2)
    with pytest.raises(TransientError, match="still going on"):
        write_base_and_find_replays(Recovery(counted.files, generation, 1), counted.query_logs, version=3)
    write_base_and_find_replays(Recovery(counted.files, generation, 1), counted.query_logs, version=4)
    counted.through(6)
