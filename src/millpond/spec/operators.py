"""What an operator computes, as plain data: made by the planner, pinned in `query.json`, run in the slot."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Field(msgspec.Struct, frozen=True):
    """One column: its name and its Spark type as DDL (`bigint`, `decimal(10,2)`, `struct<a:int>`)."""

    name: str
    type: str


class AggregateCall(msgspec.Struct, frozen=True):
    """One aggregate function over columns of the pipe's input.

    Attributes:
        function: Spark's name in lower case, e.g. `sum`, `count`, `max_by`.
        inputs: positions in `AggregateSpec.inputs`; empty for `count(*)`.
        type: the result type, Spark's own analysis, as DDL.
        filter: position of the boolean column of `FILTER (WHERE …)`.
        distinct: whether only distinct, non-null inputs count.
        options: what else the function's semantics depend on: `ignore_nulls` (first, last, any_value); `eval_mode` =
            legacy | ansi | try (sum, avg); `null_on_divide_by_zero` (sample variance of one value; true unless Spark's
            legacy flag asks for NaN); `relative_sd`, `raw_estimates`, `biases`, `threshold` (approx_count_distinct: the
            last three are Spark's tables for the precision, see `catalogue.sketch_precision`).
    """

    function: str
    inputs: tuple[int, ...]
    type: str
    filter: int | None = None
    distinct: bool = False
    options: dict[str, Any] = {}


class Windows(msgspec.Struct, frozen=True):
    """Event-time windows of one size: one begins at `offset` and every `slide` before and after; in microseconds.

    Attributes:
        shared: whether state is kept by pane, a stretch of `slide`, and windows are put together from it when they
            close; else by window.
    """

    size: int
    slide: int
    offset: int
    shared: bool = False

    @property
    def overlap(self) -> int:
        """How many windows share a pane."""
        return self.size // self.slide


class EventTime(msgspec.Struct, frozen=True):
    """The column by whose time state is closed.

    Attributes:
        column: its position: among an aggregate's keys, or a deduplication's columns. A timestamp, or a struct whose
            last field is the end of a window.
        windows: if the column is a window that the operator assigns: it arrives as the beginning of a pane, a bigint in
            microseconds.
        lag_ms: how far the watermark that reaches the operator lags behind the query's.
    """

    column: int
    windows: Windows | None = None
    lag_ms: int = 0


Pattern = Literal["auto", "append", "rmw"]
"""How groups that are shown once are kept: as rows until they close (append), as partial results that each row changes
(read-modify-write), or as the functions suggest."""


class AggregateSpec(msgspec.Struct, frozen=True, tag="aggregate"):
    """Grouping by `keys`; the pipe's input columns are `keys` then `inputs`, its output `keys` then one per call.

    With `time`, which in append mode there has to be, late rows are dropped and groups are closed by the watermark.
    `retracts` and `changes` are as for `RankSpec`, and not with `time`.
    """

    keys: tuple[Field, ...]
    inputs: tuple[Field, ...]
    calls: tuple[AggregateCall, ...]
    output_mode: str  # "append" | "update" | "complete"
    time: EventTime | None = None
    retracts: bool = False
    changes: bool = False
    pattern: Pattern = "auto"


class DeduplicateSpec(msgspec.Struct, frozen=True, tag="deduplicate"):
    """The first row of each key; input and output columns are `columns`, the key those at positions `keys`.

    With `time`, late rows are dropped; keys are forgotten when the watermark passes it, if it is one of them.
    """

    columns: tuple[Field, ...]
    keys: tuple[int, ...]
    time: EventTime | None = None


FROM_TIME = -(1 << 16)
"""Where a side's column that is its event time comes from (see `JoinSide.places`)."""


class JoinSide(msgspec.Struct, frozen=True):
    """One input of a join.

    Attributes:
        columns: the side's columns in the output.
        places: where each of them is kept: as value number *n* ≥ 0, as key −1 − *n*, or as the time (`FROM_TIME`).
        values: the stored columns beside the key and the time.
        keeps: whether rows that find no partner come out, with nulls for the other side (outer joins).
        late: the input column by which rows are late: `time`, `late` (one of its own) or `none`.
        expiry_ms: the watermark of the side's state minus the input's (mostly negative); None: state is kept for ever.
        expiry_cap_ms: what the watermark of the side's state does not exceed, if there is such a bound.
        filtered: whether the input's column `__able` says which rows may find a partner at all.
    """

    columns: tuple[Field, ...]
    places: tuple[int, ...]
    values: tuple[Field, ...]
    keeps: bool = False
    late: str = "none"
    expiry_ms: int | None = None
    expiry_cap_ms: int | None = None
    filtered: bool = False


class JoinSpec(msgspec.Struct, frozen=True, tag="join"):
    """Two streams joined by equal keys, and perhaps a range of time and further conditions.

    The pipe's input is the union of both sides: `__right` (which side a row is of), `__time` (microseconds since the
    epoch), `__late` (the same, if a side's rows are late by another column), `__able` (if a side is filtered), the
    keys, the values of the left side (null in rows of the right one), then those of the right side.

    Attributes:
        kind: inner | left_outer | right_outer | full_outer | left_semi.
        keys: the key columns, of the same types on both sides.
        null_safe: for each key, whether null equals null.
        left, right: the sides.
        earliest, latest: bounds, both included, of the left time minus the right one, in microseconds.
        condition: what else pairs have to fulfil: `["<", a, b]` (`=`, `<=>`, `<`, `<=`, `>`, `>=`), `["and", …]`,
            `["or", …]`, `["not", a]`, `["isnull", a]`; operands `["left", n]` and `["right", n]` are stored values.
        right_first: for left_semi, whether new right rows meet the left ones before new left rows come (Spark 4.3):
            then a right row that expires in its own batch is not seen by left rows of that batch.
        lag_ms: how far the watermark that reaches the operator lags behind the query's.
    """

    kind: str
    keys: tuple[Field, ...]
    null_safe: tuple[bool, ...]
    left: JoinSide
    right: JoinSide
    earliest: int | None = None
    latest: int | None = None
    condition: list[Any] | None = None
    right_first: bool = False
    lag_ms: int = 0

    @property
    def expires(self) -> bool:
        """Whether the watermark takes rows out of the state."""
        return any(side.expiry_ms is not None for side in (self.left, self.right))


class SessionSpec(msgspec.Struct, frozen=True, tag="session"):
    """Grouping by `keys` and sessions: windows that rows of a key are in together whose own windows meet.

    The pipe's input columns are `keys`, then the start of the row's own window and, without `gap`, its end, both
    timestamps, then `inputs`; its output `keys`, `window`, then one per call.

    Attributes:
        window: the column of sessions, a struct of two timestamps.
        lag_ms: how far the watermark that reaches the operator lags behind the query's; None if it has none.
        gap: the length of every row's own window in microseconds, if it is always the same.
    """

    keys: tuple[Field, ...]
    window: Field
    inputs: tuple[Field, ...]
    calls: tuple[AggregateCall, ...]
    output_mode: str  # "append" | "complete"
    lag_ms: int | None = None
    pattern: Pattern = "auto"
    gap: int | None = None


class WithinSpec(msgspec.Struct, frozen=True, tag="within"):
    """The first row of each key; a key is forgotten when the watermark reaches that row's time and `delay_ms`.

    Input and output columns are `columns`, the key those at positions `keys`. Rows that are late by `time` are dropped.
    """

    columns: tuple[Field, ...]
    keys: tuple[int, ...]
    time: EventTime
    delay_ms: int


class Order(msgspec.Struct, frozen=True):
    """One column of an ORDER BY: its position among the columns, and how its values stand."""

    column: int
    descending: bool = False
    nulls_last: bool = False


class RankSpec(msgspec.Struct, frozen=True, tag="rank"):
    """The rows of each key whose rank in an order is at most `limit`.

    Attributes:
        columns: of a row; the pipe's input, and its output but for the rank.
        keys: positions of the columns that rows are partitioned by.
        order: what they are ordered by within a key.
        function: `row_number`, `rank` or `dense_rank`.
        limit: the last rank that is wanted.
        retracts: whether the input is a changelog, with `OP` as its last column.
        changes: whether the output is one, with images that are gone and `OP` as its last column.
    """

    columns: tuple[Field, ...]
    keys: tuple[int, ...]
    order: tuple[Order, ...]
    function: str
    limit: int
    retracts: bool = False
    changes: bool = False


class OverSpec(msgspec.Struct, frozen=True, tag="over"):
    """Aggregates over the last rows of each key: of every row, its result over itself and the rows before it.

    Attributes:
        columns: of a row; the pipe's input, and its output but for the results.
        keys: positions of the columns that rows are partitioned by.
        order: what rows that come in one batch are ordered by; with `retracts`, all rows of a key.
        calls: the aggregates, their inputs being positions in `columns`.
        preceding: for each call, how many rows before the current one count.
        retracts, changes: as for `RankSpec`; `changes` only with `retracts`, since else no row ever changes.
    """

    columns: tuple[Field, ...]
    keys: tuple[int, ...]
    order: tuple[Order, ...]
    calls: tuple[AggregateCall, ...]
    preceding: tuple[int, ...]
    retracts: bool = False
    changes: bool = False


OperatorSpec = AggregateSpec | DeduplicateSpec | SessionSpec | WithinSpec | JoinSpec | RankSpec | OverSpec

GLOBAL_HASH = 0
"""The `__hash` of every row of an aggregate without keys: its one group lives in the first partition."""


OP = Field("__op", "tinyint")
"""The kind of a change: 1 a new row, 2 a row's new image, −1 a row that is gone, −2 an image before its new one."""
RANK = Field("__rank", "int")
PANE_TYPE = "bigint"
"""The type in which a window that the operator assigns arrives and is stored: the beginning of its pane."""


def lag_of(spec: OperatorSpec) -> int | None:
    """How far the operator's watermark lags behind the query's, in milliseconds; None if it asks for none."""
    if isinstance(spec, JoinSpec):
        timed = spec.expires or any(side.late != "none" for side in (spec.left, spec.right))
        return spec.lag_ms if timed else None
    if isinstance(spec, SessionSpec):
        return spec.lag_ms
    if isinstance(spec, RankSpec | OverSpec):
        return None
    return None if spec.time is None else spec.time.lag_ms


def with_lag(spec: OperatorSpec, lag_ms: int) -> OperatorSpec:
    """The same, reached by a watermark that lags behind the query's."""
    if isinstance(spec, JoinSpec | SessionSpec):
        return spec if spec.lag_ms is None else msgspec.structs.replace(spec, lag_ms=lag_ms)
    if isinstance(spec, RankSpec | OverSpec) or spec.time is None:
        return spec
    return msgspec.structs.replace(spec, time=msgspec.structs.replace(spec.time, lag_ms=lag_ms))


def closes(spec: OperatorSpec) -> bool:
    """Whether the watermark closes state of the operator, so that batches without rows have something to do."""
    if isinstance(spec, JoinSpec):
        return spec.expires
    complete = isinstance(spec, SessionSpec) and spec.output_mode == "complete"
    return lag_of(spec) is not None and not complete


def output_fields(spec: OperatorSpec) -> tuple[Field, ...]:
    """The columns of the operator's output."""
    if isinstance(spec, DeduplicateSpec | WithinSpec):
        return spec.columns
    if isinstance(spec, JoinSpec):
        return spec.left.columns + (() if spec.kind == "left_semi" else spec.right.columns)
    if isinstance(spec, RankSpec):
        return (*spec.columns, RANK, *([OP] if spec.changes else []))
    results = tuple(Field(f"{call.function}_{number}", call.type) for number, call in enumerate(spec.calls))
    if isinstance(spec, OverSpec):
        return (*spec.columns, *results, *([OP] if spec.changes else []))
    if isinstance(spec, SessionSpec):
        return (*spec.keys, spec.window, *results)
    return (*spec.keys, *results, *([OP] if spec.changes else []))


def input_fields(spec: OperatorSpec) -> tuple[Field, ...]:
    """The columns of the operator's input, after `__hash`."""
    if isinstance(spec, JoinSpec):
        return join_header(spec) + spec.keys + spec.left.values + spec.right.values
    if isinstance(spec, DeduplicateSpec | WithinSpec):
        return spec.columns
    if isinstance(spec, SessionSpec):
        return key_fields(spec) + window_bounds(spec) + spec.inputs
    columns = spec.columns if isinstance(spec, RankSpec | OverSpec) else key_fields(spec) + spec.inputs
    return (*columns, *([OP] if spec.retracts else []))


def window_bounds(spec: SessionSpec) -> tuple[Field, ...]:
    """The columns of a row's own window: its start and, unless the spec tells how long it is, its end."""
    kind = "timestamp_ntz" if "timestamp_ntz" in spec.window.type else "timestamp"
    start, end = Field("__start", kind), Field("__end", kind)
    return (start, end) if spec.gap is None else (start,)


def join_header(spec: JoinSpec) -> tuple[Field, ...]:
    """The columns of a join's input before its keys."""
    sides = (spec.left, spec.right)
    header = [Field("__right", "boolean"), Field("__time", "bigint")]
    if any(side.late == "late" for side in sides):
        header.append(Field("__late", "bigint"))
    if any(side.filtered for side in sides):
        header.append(Field("__able", "boolean"))
    return tuple(header)


def key_fields(spec: OperatorSpec) -> tuple[Field, ...]:
    """The columns that make up an operator's key, as they arrive and are stored (of sessions, without an ordinal)."""
    if isinstance(spec, DeduplicateSpec | WithinSpec | RankSpec | OverSpec):
        return tuple(spec.columns[k] for k in spec.keys)
    if isinstance(spec, JoinSpec | SessionSpec) or spec.time is None or spec.time.windows is None:
        return spec.keys
    at = spec.time.column
    return (*spec.keys[:at], Field(spec.keys[at].name, PANE_TYPE), *spec.keys[at + 1 :])
