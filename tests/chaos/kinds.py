"""Every kind of operator, each with a stream of batches that makes all of its state come, change and go."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from millpond.operators.protocol import Times
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.kinds.deduplicate import DeduplicateSpec, WithinSpec
from millpond.spec.kinds.join import JoinSpec
from millpond.spec.kinds.over import OverSpec
from millpond.spec.kinds.processor import TimeMode
from millpond.spec.kinds.rank import RankSpec
from millpond.spec.kinds.session import SessionSpec
from millpond.spec.kinds.union import OperatorSpec
from millpond.spec.operators import AggregateCall, EventTime, Field, Order, Windows
from millpond.spec.types import parse_type
from millpond.tasks.user_processor import UserProcessor
from tests.chaos.processors import Keeping
from tests.operators.join_rig import side
from tests.operators.rig import fields, hash_of
from tests.worker.processors.mini_slot import user_processor

SECOND = 1_000_000
STEP = 4
"""Seconds of event time from one batch to the next."""
DELAY = 8
"""Seconds by which the watermark lags: some rows are late, and windows live for some batches."""
KEYS = (None, "a", "b", "c", "the key of more than twelve bytes", "and another one of those", "g", "h")
WINDOW = "struct<start:timestamp,end:timestamp>"

Row = dict[str, Any]
Rows = list[tuple[Any, ...]]


class Batch(NamedTuple):
    """Input of one batch: rows without markers, and the times that the operator gets."""

    rows: pa.RecordBatch
    times: Times


@dataclass(frozen=True)
class Kind:
    """One operator.

    Attributes:
        name: for messages. spec: what it computes.
        given: a row of the stream as the operator's input columns. key: what its hash is made of.
        ordered: whether its output depends on the order of rows within a batch.
        least: bytes of memory with which it has to get by.
        user: the user's processor, where it is one.
    """

    name: str
    spec: OperatorSpec
    given: Callable[[Row], Row] = field(repr=False)
    key: Callable[[Row], tuple[Any, ...]] = field(default=lambda row: (row["k"],), repr=False)
    ordered: bool = False
    least: int = 1 << 15
    user: UserProcessor | None = field(default=None, repr=False)

    def stream(self, seed: int, batches: int, bits: int = 64) -> list[Batch]:
        """Draw a stream of batches, some without rows; `bits` bits of the keys' hashes vary."""
        choice = random.Random(seed)
        out, late, closed, latest = [], 0, 0, 0
        for number in range(batches):
            rows = self._rows(choice, number)
            out.append(Batch(self._encode(rows, bits), Times(late, closed, number * 1000 + 1)))
            latest = max([latest, *(row["time"] // 1000 for row in rows)])
            late, closed = closed, max(closed, latest - DELAY * 1000)
        return out

    def _rows(self, choice: random.Random, number: int) -> list[Row]:
        if number and choice.random() < 0.15:
            return []
        now = (1_000 + number * STEP) * SECOND
        return [
            {
                "time": now + choice.randrange(-14 * SECOND, STEP * SECOND, 500_000),
                "k": choice.choice(KEYS),
                "v": choice.choice([None, *range(-3, 9)]),
                "s": choice.choice([None, "x", "yy", "a text of more than twelve bytes"]),
                "right": choice.random() < 0.5,
            }
            for _ in range(choice.randrange(1, 40))
        ]

    def _encode(self, rows: list[Row], bits: int) -> pa.RecordBatch:
        columns = self.spec.input_fields
        given = [self.given(row) for row in rows]
        arrays = [pa.array([hash_of(self.key(row), bits) for row in rows], pa.int64())]
        arrays += [pa.array([row[c.name] for row in given], parse_type(c.type).arrow) for c in columns]
        return pa.RecordBatch.from_arrays(arrays, names=["__hash", *(column.name for column in columns)])


def part_of(rows: pa.RecordBatch, partition: int, partitions: int) -> pa.RecordBatch:
    """The rows of a batch that fall into one of `partitions` partitions."""
    groups = rows.column(0).to_numpy(zero_copy_only=False).astype(np.int64).view(np.uint64) >> np.uint64(49)
    return rows.filter(pa.array((groups * np.uint64(partitions)) >> np.uint64(15) == np.uint64(partition)))


def shown(batches: list[pa.RecordBatch]) -> Rows:
    """Output rows in an order of their own; the order within collected lists does not count."""
    return ordered(
        row for batch in batches for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)
    )


def ordered(rows: Iterable[tuple[Any, ...]]) -> Rows:
    """Rows in an order of their own."""
    return sorted((tuple(_plain(value) for value in row) for row in rows), key=repr)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return sorted((_plain(part) for part in value), key=repr)
    if isinstance(value, dict):
        return tuple(_plain(part) for part in value.values())
    return value


CALLS = (
    AggregateCall("count", (), "bigint"),
    AggregateCall("sum", (0,), "bigint"),
    AggregateCall("max", (1,), "string"),
    AggregateCall("collect_list", (0,), "array<bigint>"),
)
INPUTS = "v bigint; s string"
OBSERVED = (
    *CALLS[:3],
    AggregateCall("count", (0,), "bigint", distinct=True),
    AggregateCall("count", (0,), "bigint", distinct=True, filter=2),
    AggregateCall("collect_set", (1,), "array<string>", filter=2),
)
HOLISTIC = (
    AggregateCall("count", (), "bigint"),
    AggregateCall("percentile", (0,), "double", options={"percentages": [0.5], "array": False}),
)
ALL_ROWS = (
    AggregateCall("max", (1,), "string"),
    AggregateCall("rows", (0, 1), "array<struct<v:bigint,s:string>>"),
)
"""What functions of the user are called with."""


def _plainly(row: Row) -> Row:
    return row | {"t": row["time"]}


def _paned(windows: Windows) -> Callable[[Row], Row]:
    def given(row: Row) -> Row:
        return row | {"window": row["time"] - (row["time"] - windows.offset) % windows.slide}

    return given


def _now_and_then(windows: Windows) -> Callable[[Row], Row]:
    """Values that are new with nearly every row for some time, and then the same for some time."""

    def given(row: Row) -> Row:
        new = not 1_012 * SECOND < row["time"] < 1_044 * SECOND
        v = row["time"] // 500_000 if new else row["v"] and 1
        return _paned(windows)(row) | {"v": v, "s": f"a text that is new: {v}" if new else "x", "ok": row["right"]}

    return given


def _windowed(
    name: str, windows: Windows, mode: str = "append", calls: tuple[AggregateCall, ...] = CALLS, inputs: str = INPUTS
) -> Kind:
    keys = (Field("window", WINDOW), *fields("k string"))
    return Kind(name, AggregateSpec(keys, fields(inputs), calls, mode, EventTime(0, windows)), _paned(windows))


def _session(row: Row) -> Row:
    return row | {"__start": row["time"], "__end": row["time"] + 4 * SECOND}


def _join(kind: str, *, right_first: bool = False) -> Kind:
    expiry = {"left": -14_000, "right": -11_000}
    left = side(INPUTS, of="l", keeps=kind in ("left_outer", "full_outer"), expiry_ms=expiry["left"])
    right = side("w bigint", of="r", keeps=kind in ("right_outer", "full_outer"), expiry_ms=expiry["right"])
    spec = JoinSpec(
        kind,
        (Field("a", "string"), Field("b", "int")),
        (True, True),
        left,
        right,
        earliest=-4 * SECOND,
        latest=5 * SECOND,
        right_first=right_first,
    )

    def given(row: Row) -> Row:
        own = {"v": None, "s": None, "w": row["v"]} if row["right"] else {"v": row["v"], "s": row["s"], "w": None}
        return {"__right": row["right"], "__time": row["time"], "a": row["k"], "b": 1} | own

    return Kind(f"join {kind}", spec, given, lambda row: (row["k"], 1))


def _processor(name: str, processor: Keeping) -> Kind:
    mode: TimeMode = "none" if not processor.waits else "processing" if processor.lives else "event"
    columns = "k string, t timestamp, ms bigint, v bigint, s string"
    shown = "k string, at bigint, said string"
    user = user_processor(processor, columns=columns, shown=shown, mode=mode, pandas=processor.pandas)
    if mode == "event":
        user = replace(user, spec=msgspec.structs.replace(user.spec, time=EventTime(1), marked=True))

    def given(row: Row) -> Row:
        return _plainly(row) | {"ms": row["time"] // 1000}

    return Kind(name, user.spec, given, user=user)


COLUMNS = fields("k string; t timestamp; v bigint; s string")
_BY_TIME = (Order(1, True), Order(2), Order(3))

_KINDS = (
    Kind(
        "aggregate",
        AggregateSpec(
            fields("k string"),
            fields(INPUTS),
            (*CALLS, AggregateCall("count", (0,), "bigint", distinct=True)),
            "update",
        ),
        _plainly,
    ),
    Kind("changes", AggregateSpec(fields("k string"), fields(INPUTS), CALLS[:2], "update", changes=True), _plainly),
    Kind(
        "by time",
        AggregateSpec(fields("k string; t timestamp"), fields(INPUTS), CALLS, "append", EventTime(1)),
        _plainly,
        lambda row: (row["k"], row["time"]),
    ),
    _windowed("tumbling", Windows(12 * SECOND, 12 * SECOND, 0)),
    _windowed("panes", Windows(12 * SECOND, 4 * SECOND, SECOND, shared=True)),
    _windowed("sliding", Windows(12 * SECOND, 4 * SECOND, 0), "update"),
    replace(
        _windowed("observed", Windows(12 * SECOND, 12 * SECOND, 0), calls=OBSERVED, inputs=f"{INPUTS}; ok boolean"),
        given=_now_and_then(Windows(12 * SECOND, 12 * SECOND, 0)),
    ),
    _windowed("holistic", Windows(12 * SECOND, 12 * SECOND, 0), calls=HOLISTIC),
    _windowed("holistic panes", Windows(12 * SECOND, 4 * SECOND, 0, shared=True), calls=HOLISTIC),
    Kind(
        "sessions",
        SessionSpec(
            fields("k string"), Field("session_window", WINDOW), fields(INPUTS), CALLS, "append", 0, pattern="rmw"
        ),
        _session,
    ),
    Kind(
        "all sessions",
        SessionSpec(fields("k string"), Field("session_window", WINDOW), fields(INPUTS), CALLS[:3], "complete", None),
        _session,
    ),
    Kind("distinct", DeduplicateSpec(fields("k string; v bigint"), (0, 1)), _plainly, lambda row: (row["k"], row["v"])),
    Kind(
        "distinct by time",
        DeduplicateSpec(fields("k string; t timestamp"), (0, 1), EventTime(1)),
        _plainly,
        lambda row: (row["k"], row["time"]),
    ),
    Kind("within", WithinSpec(COLUMNS, (0,), EventTime(1), 3000), _plainly, ordered=True),
    _join("inner"),
    _join("left_outer"),
    _join("full_outer"),
    _join("left_semi", right_first=True),
    Kind("top-n", RankSpec(COLUMNS, (0,), _BY_TIME, "row_number", 3), _plainly),
    Kind("first", RankSpec(COLUMNS, (0,), _BY_TIME, "row_number", 1), _plainly),
    Kind("ranks", RankSpec(COLUMNS, (0,), _BY_TIME[:1], "dense_rank", 2, changes=True), _plainly),
    Kind(
        "over",
        OverSpec(
            COLUMNS,
            (0,),
            _BY_TIME,
            (AggregateCall("count", (), "bigint"), AggregateCall("sum", (2,), "bigint")),
            (2, 4),
        ),
        _plainly,
    ),
    _windowed("user functions", Windows(12 * SECOND, 4 * SECOND, 0, shared=True), calls=ALL_ROWS),
    Kind(
        "user functions of sessions",
        SessionSpec(fields("k string"), Field("session_window", WINDOW), fields(INPUTS), ALL_ROWS, "append", 0),
        _session,
        least=1 << 20,  # what is known of each open session stays in memory
    ),
    _processor("processor", Keeping()),
    _processor("processor by event time", Keeping(waits=9_000, pandas=True)),
    _processor("processor by the clock", Keeping(waits=2_500, lives=3_000)),
)

KINDS = {kind.name: kind for kind in _KINDS}
