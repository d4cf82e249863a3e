"""Random programs of state operations: the operator and the code in Spark's worker, without Spark, against a model.

`MILLPOND_SCHEDULES=5000` (`make chaos`) runs as many of them, others each time.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.operators.kinds.registry import read_rows, read_whole
from millpond.operators.processors import input as processor_input
from millpond.operators.processors import operator as processor_operator
from millpond.operators.protocol import Times
from millpond.spec.kinds.processor import TIMERS, TimeMode
from millpond.spec.kinds.union import OperatorSpec
from millpond.spec.operators import EventTime
from millpond.tasks.user_processor import UserProcessor
from tests.chaos.programs import COLUMNS, SHOWN, Model, Operation, Programs, binary
from tests.operators.called import Called
from tests.operators.rig import Rig, as_rows, normal, record_batch
from tests.worker.processors.mini_slot import few_at_a_time, user_processor

EXAMPLES = int(os.environ.get("MILLPOND_SCHEDULES", "25"))
TIMES = [0, 1, 8, 9, 20, 21, 60]
NUMBERS = [None, 0, 1, -1, 256, 65_536]
READS = [
    *(["v", what] for what in ("get", "exists")),
    *(["l", what] for what in ("get", "exists")),
    *(["m", what] for what in ("items", "keys", "values", "exists")),
    *(["m", what, n] for what in ("get", "contains") for n in NUMBERS[:4]),
]
WRITES = [
    *(["v", "update", n, s] for n, s in ((None, "a"), (1, None), (-256, "ä" * 40), (7, ""))),
    *(["l", "append", n] for n in NUMBERS),
    *(["l", what, some] for what in ("extend", "put") for some in ([1], [None, 2, 2], [65_536])),
    *(["m", "update", n, x] for n in NUMBERS for x in (None, 5)),
    *(["m", "remove", n] for n in NUMBERS),
    *([name, "clear"] for name in "vlm"),
]


def operations(timed: bool, times: Sequence[Any] = TIMES) -> st.SearchStrategy[Operation]:
    """An operation."""
    timers = [["timers", what, at] for what in ("register", "register", "delete") for at in times]
    kinds = [READS, WRITES, WRITES, [*timers, ["timers", "list"]] if timed else READS]
    return st.one_of(*(st.sampled_from(kind) for kind in kinds))


class Batch(NamedTuple):
    """One batch.

    Attributes:
        rows: key, event time, operations. later: milliseconds since the batch before.
        restart: whether the partition is opened again before. lives: what lives how long from then on.
        fails: with which message to or from the user's code the first attempt ends; with none if there are fewer.
    """

    rows: list[tuple[Any, int, list[Operation]]]
    later: int
    restart: bool
    lives: tuple[int, ...]
    fails: int


@st.composite
def programs(draw: st.DrawFn, mode: TimeMode) -> tuple[str, bool, list[Operation], list[Batch]]:
    """The column that is the key, whether it is for pandas, what due timers do, and the batches."""
    column = draw(st.sampled_from(["k", "k", "f"]))
    pandas = draw(st.integers(0, 3)) == 0
    usual = st.sampled_from([None, "a", "a", "b", "c" * 20]) if column == "k" else st.sampled_from([0.0, -0.0, 1.5])
    odd = usual if column == "k" else st.one_of(usual, st.sampled_from([math.nan] if pandas else [None, math.nan]))
    lives = st.sampled_from([1, 7, 30]) if mode == "processing" else st.just(0)
    immortal = [mode != "processing" or draw(st.booleans()) for _ in range(3)]
    living = st.tuples(*(st.just(0) if one else lives for one in immortal))
    due = draw(st.lists(operations(mode != "none", ["at+0", "at+1", "at-1", "at+9", "at+1000"]), max_size=4))
    row = st.tuples(odd, st.sampled_from(TIMES), st.lists(operations(mode != "none"), min_size=2, max_size=5))
    batch = st.builds(
        Batch,
        st.one_of(st.just([]), *[st.lists(row, min_size=12, max_size=30)] * 4),
        st.sampled_from([0, 1, 1, 6, 7]),
        st.booleans(),
        living,
        st.sampled_from([0, 0, 0, 1, 2, 4]),
    )
    return column, pandas, due, draw(st.lists(batch, min_size=3, max_size=7))


class Died(Exception):
    """The user's code did."""


def dies(message: int) -> Any:
    left = [message]

    def before() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Died

    return before


def user(mode: TimeMode, column: str, pandas: bool, due: list[Operation], lives: tuple[int, ...]) -> UserProcessor:
    processor = Programs(lives, due, timed=mode != "none", pandas=pandas)
    key = {"k": 1, "f": 2}[column]
    made = user_processor(processor, columns=COLUMNS, keys=(key,), shown=SHOWN, mode=mode, pandas=pandas)
    if mode != "event":
        return made
    return dataclasses.replace(made, spec=msgspec.structs.replace(made.spec, time=EventTime(3), marked=True))


@pytest.fixture(autouse=True)
def few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_input, "MAX_KEYS", 3)
    monkeypatch.setattr(processor_operator, "MAX_KEYS", 3)


@pytest.mark.parametrize("at_once", [None, 0, 200], ids=["whole", "piece by piece", "parts"])
@pytest.mark.parametrize("mode", ["none", "event", "processing"])
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), bits=st.sampled_from([64, 64, 2, 0]))
def test_programs_do_as_the_model_says(mode: TimeMode, at_once: int | None, data: st.DataObject, bits: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if at_once is not None:
            few_at_a_time(patch, at_once)
        run(mode, data, bits)


def run(mode: TimeMode, data: st.DataObject, bits: int) -> None:
    """Run any program, and compare its output and its state with the model."""
    column, pandas, due, batches = data.draw(programs(mode))
    made = user(mode, column, pandas, due, batches[0].lives)
    rig, model = Rig(made.spec), Model()
    now = late = closed = 0
    for number, batch in enumerate(batches):
        now += batch.later
        if batch.restart and number:
            made = user(mode, column, pandas, due, batch.lives)
            rig.spec = made.spec
            rig.restart()
        lives = tuple(one.ttl_ms for name in "vlm" for one in made.spec.variables if one.name == name)
        times = Times(late, closed, now) if mode != "none" else Times()
        rows = [
            {"n": n, column: key, "t": at * 1000, "do": json.dumps(do), ("k" if column == "f" else "f"): None}
            for n, (key, at, do) in enumerate(batch.rows)
        ]
        if batch.fails:
            rig.operator.caller = Called(made, dies(batch.fails))  # type: ignore[attr-defined]
            try:
                rig.operator.begin(rig.version, times)
                rig.operator.process(record_batch(made.spec, rows, [column], bits))
                rig.operator.finish()
            except Died:
                pass
            rig.restart()
        rig.operator.caller = Called(made)  # type: ignore[attr-defined]
        out = as_rows(rig.batch(record_batch(made.spec, rows, [column], bits), times=times))
        taken = called([(key, n, do) for n, (key, at, do) in enumerate(batch.rows) if mode != "event" or at > late])
        limit = {"none": None, "event": closed, "processing": now}[mode]
        wanted = model.batch(taken, due, lives, now if mode == "processing" else 0, limit)
        by_row = {n: key for key, n, _ in taken}
        check(out, wanted, by_row)
        for name in ("v", "l", "m", *([TIMERS] if mode != "none" else [])):
            assert state(rig, name, lives) == model.of(name), f"{name} after batch {number}"
        late, closed = closed, max(closed, max((at for _, at, _ in batch.rows), default=0) - 5)
    rig.close()


def check(out: list[tuple[Any, ...]], wanted: dict[Any, list[tuple[Any, ...]]], by_row: dict[int, Any]) -> None:
    """Rows key by key, in order; what timers tell, all keys together, as it does not say of which key it is."""
    found: dict[Any, list[tuple[Any, ...]]] = {}
    for n, said in out:
        if n >= 0:
            found.setdefault(by_row[n], []).append((n, said))
    assert found == {key: rows for key, told in wanted.items() if (rows := [one for one in told if one[0] >= 0])}
    assert sorted(one for one in out if one[0] < 0) == sorted(
        one for told in wanted.values() for one in told if one[0] < 0
    )


def state(rig: Rig, name: str, lives: tuple[int, ...]) -> dict[Any, Any]:
    """Rows of a variable, or of timers, in the operator's table."""
    found: dict[Any, Any] = {}
    table = name if name == TIMERS else f"variable.{name}"
    tables = rig.operator.tables
    for batch in scanned(rig.spec, tables, table, f"parts.{name}"):
        keys, values = (column.to_pylist() for column in batch.columns)
        for key, value in zip(keys, values, strict=True):
            found[told_apart(key)] = plain(name, value, name != TIMERS and bool(lives["vlm".index(name)]))
    return found


def scanned(spec: OperatorSpec, tables: Any, table: str, beside: str) -> Iterator[pa.RecordBatch]:
    """A table's rows as a user reads them, with the parts that are beside them."""
    if beside in tables:
        yield from read_whole(spec, table, tables[table].scan(), tables[beside].scan())
        return
    for rows in tables[table].scan():
        yield from read_rows(spec, table, rows)


def plain(name: str, value: Any, lives: bool) -> Any:
    """A stored value as the model has it."""
    if name == "v":
        return tuple((value["value"] if lives else value).values())
    if name == "l":
        return [(one["value"] if lives else one)["n"] for one in value]
    if name == "m":
        return sorted(((one["key"]["n"], one["value"]["x"]) for one in value), key=lambda entry: binary(entry[0]))
    return value


def called(rows: list[tuple[Any, int, list[Operation]]]) -> list[tuple[Any, int, list[Operation]]]:
    """Rows with the key under which each finds its state: that of the first of those that are equal in Python."""
    firsts: dict[Any, Any] = {}
    return [(firsts.setdefault(normal(key), told_apart(key)), n, do) for key, n, do in rows]


def told_apart(key: Any) -> Any:
    """A key such that only equal ones are equal, to the bit."""
    return struct.pack("<d", key) if isinstance(key, float) else key
