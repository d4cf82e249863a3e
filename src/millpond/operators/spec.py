"""What an operator computes, as plain data: made by the planner, pinned in `query.json`, run in the slot."""

from __future__ import annotations

from typing import Any

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


class AggregateSpec(msgspec.Struct, frozen=True, tag="aggregate"):
    """Grouping by `keys`; the pipe's input columns are `keys` then `inputs`, its output `keys` then one per call.

    `retracts` and `changes` are as for `RankSpec`.
    """

    keys: tuple[Field, ...]
    inputs: tuple[Field, ...]
    calls: tuple[AggregateCall, ...]
    output_mode: str  # "update" | "complete"
    retracts: bool = False
    changes: bool = False


class DeduplicateSpec(msgspec.Struct, frozen=True, tag="deduplicate"):
    """The first row of each key; input and output columns are `columns`, the key those at positions `keys`."""

    columns: tuple[Field, ...]
    keys: tuple[int, ...]


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
        order: what rows that come in one batch are ordered by.
        calls: the aggregates, their inputs being positions in `columns`.
        preceding: for each call, how many rows before the current one count.
    """

    columns: tuple[Field, ...]
    keys: tuple[int, ...]
    order: tuple[Order, ...]
    calls: tuple[AggregateCall, ...]
    preceding: tuple[int, ...]


OperatorSpec = AggregateSpec | DeduplicateSpec | RankSpec | OverSpec

GLOBAL_HASH = 0
"""The `__hash` of every row of an aggregate without keys: its one group lives in the first partition."""


OP = Field("__op", "tinyint")
"""The kind of a change: 1 a new row, 2 a row's new image, −1 a row that is gone, −2 an image before its new one."""
RANK = Field("__rank", "int")


def output_fields(spec: OperatorSpec) -> tuple[Field, ...]:
    """The columns of the operator's output."""
    if isinstance(spec, DeduplicateSpec):
        return spec.columns
    if isinstance(spec, RankSpec):
        return (*spec.columns, RANK, *([OP] if spec.changes else []))
    results = tuple(Field(f"{call.function}_{number}", call.type) for number, call in enumerate(spec.calls))
    if isinstance(spec, OverSpec):
        return spec.columns + results
    return (*spec.keys, *results, *([OP] if spec.changes else []))


def input_fields(spec: OperatorSpec) -> tuple[Field, ...]:
    """The columns of the operator's input, after `__hash`."""
    if isinstance(spec, DeduplicateSpec | OverSpec):
        return spec.columns
    columns = spec.columns if isinstance(spec, RankSpec) else spec.keys + spec.inputs
    return (*columns, *([OP] if spec.retracts else []))
