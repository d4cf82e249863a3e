"""What the specs of operators are made of: columns, calls of functions, orders, event time."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from millpond.words import length


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
        field: what the columns of its state are named by, as long as the query has the call; None for its position,
            which is what it has in a query that was not changed.
        options: what else the function's semantics depend on: `ignore_nulls` (first, last, any_value); `eval_mode` =
            legacy | ansi | try (sum, avg, and what divides); `null_on_divide_by_zero` (statistics of one value, or of
            equal ones; true unless Spark's legacy flag asks for NaN); `relative_sd`, `raw_estimates`, `biases`,
            `threshold` (approx_count_distinct: the last three are Spark's tables for the precision, see
            `functions.sketch_precision`); `delimiter`, `order` (listagg, see `operators.functions.listagg`);
            `percentages`, `accuracy`, `array` (percentile_approx); `weighted` (percentile, see
            `operators.functions.order_statistics`); `merges_empty` (statistics, see `operators.functions.moments`);
            `multipliers`, `width` (count_min_sketch).
    """

    function: str
    inputs: tuple[int, ...]
    type: str
    filter: int | None = None
    distinct: bool = False
    options: dict[str, Any] = {}
    field: int | None = None


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
    def description(self) -> str:
        """The windows in words, e.g. `windows of 10 minutes every 5 minutes`."""
        slide = "" if self.size == self.slide else f" every {length(self.slide)}"
        start = f" (startTime {length(self.offset)})" if self.offset else ""
        return f"windows of {length(self.size)}{slide}{start}"

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


class Order(msgspec.Struct, frozen=True):
    """One column of an ORDER BY: its position among the columns, and how its values stand."""

    column: int
    descending: bool = False
    nulls_last: bool = False


GLOBAL_HASH = 0
"""The `__hash` of every row of an aggregate without keys: its one group lives in the first partition."""


OP = Field("__op", "tinyint")
"""The kind of a change: 1 a new row, 2 a row's new image, −1 a row that is gone, −2 an image before its new one."""


VALUE_SET = Field("__set", "int")
"""Number of the set of values (see `AggregateSpec.value_sets`) that a combined row has, where there are such. Partial
results, and the number of rows, come with those of the first set."""

COMBINED_ROWS = Field("__rows", "bigint")
"""How many rows one row stands for that was combined of them before the exchange; the last of its columns."""
