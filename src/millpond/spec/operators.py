"""Parts of operator specs: columns, aggregate calls, orders, event time."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from millpond.humanize import duration


class Field(msgspec.Struct, frozen=True):
    """One column: its name and its Spark type as DDL (`bigint`, `decimal(10,2)`, `struct<a:int>`)."""

    name: str
    type: str


class AggregateCall(msgspec.Struct, frozen=True):
    """One aggregate function over columns of the slot stage's input.

    Attributes:
        function: Spark's name in lower case, e.g. `sum`, `count`, `max_by`.
        inputs: positions in `AggregateSpec.inputs`; empty for `count(*)`.
        type: the result type from Spark's analysis, as DDL.
        filter: position of the boolean column of `FILTER (WHERE …)`.
        distinct: whether only distinct, non-null inputs count.
        field: the number that names the call's state columns for as long as the query has the call. None means its
            position, as in a query that was never changed.
        options: the function's further parameters: `ignore_nulls` (first, last, any_value); `eval_mode` = legacy | ansi
            | try (sum, avg, and functions that divide); `null_on_divide_by_zero` (statistics of one value, or of equal
            ones; true unless Spark's legacy flag asks for NaN); `relative_sd`, `raw_estimates`, `biases`, `threshold`
            (approx_count_distinct: the last three are Spark's tables for the precision, see
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
    """Event-time windows of one size; one starts at `offset` and at every `slide` before and after (microseconds).

    Attributes:
        shared: whether state is kept by pane, a stretch of `slide`; windows are merged from panes when they close.
            Otherwise state is kept by window.
    """

    size: int
    slide: int
    offset: int
    shared: bool = False

    @property
    def description(self) -> str:
        """The windows in words, e.g. `windows of 10 minutes every 5 minutes`."""
        slide = "" if self.size == self.slide else f" every {duration(self.slide)}"
        start = f" (startTime {duration(self.offset)})" if self.offset else ""
        return f"windows of {duration(self.size)}{slide}{start}"

    @property
    def overlap(self) -> int:
        """The number of windows that share a pane."""
        return self.size // self.slide


class EventTime(msgspec.Struct, frozen=True):
    """The column by whose time state is closed.

    Attributes:
        column: its position among an aggregate's keys, or a deduplication's columns. A timestamp, or a struct whose
            last field is the end of a window.
        windows: the windows, if the operator assigns them. The column then arrives as the start of a pane, a bigint in
            microseconds.
        lag_ms: lag of the operator's watermark behind the query's.
    """

    column: int
    windows: Windows | None = None
    lag_ms: int = 0


Pattern = Literal["auto", "append", "rmw"]
"""How groups that are shown once are kept: `append` keeps rows until they close, `rmw` updates partial results with
each row (read-modify-write), `auto` lets the functions decide."""


class Order(msgspec.Struct, frozen=True):
    """One column of an ORDER BY: its position among the columns, its direction, and the place of nulls."""

    column: int
    descending: bool = False
    nulls_last: bool = False


GLOBAL_HASH = 0
"""`__hash` of every row of an aggregate without keys: its only group is in the first partition."""


OP = Field("__op", "tinyint")
"""Kind of a change: 1 insert, 2 new row of an update, −1 delete, −2 old row of an update."""


VALUE_SET = Field("__set", "int")
"""Number of the value set (see `AggregateSpec.value_sets`) of a combined row, if there are value sets. Partial
results and the row count belong to rows of the first set."""

COMBINED_ROWS = Field("__rows", "bigint")
"""Number of input rows that one combined row stands for; the last of its columns."""
