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
    """Grouping by `keys`; the pipe's input columns are `keys` then `inputs`, its output `keys` then one per call."""

    keys: tuple[Field, ...]
    inputs: tuple[Field, ...]
    calls: tuple[AggregateCall, ...]
    output_mode: str  # "update" | "complete"


class DeduplicateSpec(msgspec.Struct, frozen=True, tag="deduplicate"):
    """The first row of each key; input and output columns are `columns`, the key those at positions `keys`."""

    columns: tuple[Field, ...]
    keys: tuple[int, ...]


OperatorSpec = AggregateSpec | DeduplicateSpec

GLOBAL_HASH = 0
"""The `__hash` of every row of an aggregate without keys: its one group lives in the first partition."""


def output_fields(spec: OperatorSpec) -> tuple[Field, ...]:
    """The columns of the operator's output."""
    if isinstance(spec, DeduplicateSpec):
        return spec.columns
    return spec.keys + tuple(Field(f"{call.function}_{number}", call.type) for number, call in enumerate(spec.calls))


def input_fields(spec: OperatorSpec) -> tuple[Field, ...]:
    """The columns of the operator's input, after `__hash`."""
    return spec.columns if isinstance(spec, DeduplicateSpec) else spec.keys + spec.inputs
