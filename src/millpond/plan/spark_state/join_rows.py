"""Rows of a join of two streams in Spark's state, as rows that Millpond's join takes over.

Spark stores the columns of a side's plan; Millpond stores the keys and values that the join reads. So the query's own
expressions are evaluated over the stored columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node
from millpond.plan.decision.decision import Operator
from millpond.plan.reading.join import JoinReading
from millpond.plan.reading.join_input import side_projections
from millpond.plan.spark_state.checks import check_keys, check_rows, compare_times, end_and_checks, refused
from millpond.plan.spark_state.columns import ReadStore, field_list, fields_of, flattened, metadata_of
from millpond.plan.spark_state.contradictions import Times
from millpond.spec.kinds.join import JoinSpec
from millpond.spec.operators import Field

_ROWS = "-keyWithIndexToValue"
"""The name of the store with a side's rows, after the name of the side."""

_MATCHED = Field("matched", "boolean")
"""The last field of a stored value: whether the row has found a match. Spark's first join format does not have it."""


class _Side(NamedTuple):
    """One side of the query's join.

    Attributes:
        name: left or right.
        child: the query's plan below that side.
        keys: the join keys.
        projection: the expressions that the side's input is computed from (see `side_projections`).
        inputs: SQL over them for the input columns, the hash last.
    """

    name: str
    child: Node
    keys: list[Expression]
    projection: list[Expression]
    inputs: list[str]


class _StoredSide(NamedTuple):
    """One side of the join in Spark's state.

    Attributes:
        rows: its rows (see `flattened`); after the keys, they have the row's number within its key.
        keys: the join keys.
        values: the columns of the side's plan.
        metadata: the metadata of `values`.
        matched: whether a row has found a match; null if the state does not record it.
    """

    rows: DataFrame
    keys: list[Field]
    values: list[Field]
    metadata: list[dict[str, Any]]
    matched: Column


def joined_rows(
    catalyst: Catalyst,
    node: Node,
    operator: Operator,
    reading: JoinReading,
    stores: frozenset[str],
    read: ReadStore,
    times: Times,
) -> DataFrame:
    """Return the rows that a join takes over: its input columns, `__matched` (null if unknown), and the hash last.

    Args:
        catalyst: of the query's session.
        node, operator, reading: the join in the query.
        stores: the names of its stores in the checkpoint.
        read: reads a store of the join.
        times: the query's watermarks.

    Raises:
        StateIncompatibleError: the state is another query's, or cannot be taken over.
    """
    frames = []
    for side in _sides(catalyst, node, reading):
        store = side.name + _ROWS
        if store not in stores:
            raise refused(operator, f"its state is of a format that has no {store}")
        stored = _stored_side(operator, reading.spec, read(store))
        frames.append(_side_rows(catalyst, operator, reading.spec, side, stored, times))
    left, right = frames
    return left.union(right)


def _sides(catalyst: Catalyst, node: Node, reading: JoinReading) -> list[_Side]:
    left, right = node.children
    left_input, right_input = side_projections(catalyst, reading)
    return [
        _Side("left", left, reading.left.keys, *left_input),
        _Side("right", right, reading.right.keys, *right_input),
    ]


def _stored_side(operator: Operator, spec: JoinSpec, state: DataFrame) -> _StoredSide:
    """Return a side from the rows of its store.

    Raises:
        StateIncompatibleError: the join needs to know which rows have found a match, and the state does not record it.
    """
    key_fields, value_fields = fields_of(state, "key"), fields_of(state, "value")
    recorded = value_fields[-1:] == [_MATCHED]
    if not recorded and spec.kind != "inner":
        raise refused(operator, "its state has Spark's first join format, which does not record matched rows")
    values = value_fields[:-1] if recorded else value_fields
    return _StoredSide(
        rows=flattened(state, keys=key_fields, values=value_fields),
        keys=key_fields[:-1],
        values=values,
        metadata=metadata_of(state, "value")[: len(values)],
        matched=F.col(f"v{len(values)}") if recorded else F.lit(None).cast("boolean"),
    )


def _side_rows(
    catalyst: Catalyst, operator: Operator, spec: JoinSpec, side: _Side, stored: _StoredSide, times: Times
) -> DataFrame:
    """Return the rows of one side, after checks that the query can have stored them.

    Raises:
        StateIncompatibleError: another query has stored them.
    """
    columns = _stored_columns(operator, side, stored.values)
    compare_times(
        operator,
        [Field(column.name, column.type) for column, _ in columns],
        [column.metadata for column, _ in columns],
        [stored.metadata[position] for _, position in columns],
        times,
    )
    checks = [check for column, position in columns for check in end_and_checks(side.child, column, f"v{position}")[1]]
    check_rows(operator, stored.rows, checks)
    rows = _projected(catalyst, side, stored, columns)
    *inputs, hashed = side.inputs
    as_stored = [f"{column} as __{column}" for column in stored.rows.columns]
    check_keys(operator, side.keys, spec, side.name, rows.selectExpr(*as_stored, *inputs), stored.keys, stored.values)
    return rows.selectExpr(*inputs, "__matched", hashed)


def _stored_columns(operator: Operator, side: _Side, values: Sequence[Field]) -> list[tuple[Expression, int]]:
    """Return the columns of a side's plan that the state has, each with its position among the stored values.

    Raises:
        StateIncompatibleError: the join reads a column that the state lacks, or has twice.
    """
    parts = (part for expression in side.projection for part in expression.walk())
    needed = {part.expr_id for part in parts if part.kind == "AttributeReference"}
    columns: list[tuple[Expression, int]] = []
    for column in side.child.output:
        wanted = Field(column.name, column.type)
        positions = [position for position, field in enumerate(values) if field == wanted]
        if len(positions) == 1:
            columns.append((column, positions[0]))
        elif column.expr_id in needed:
            raise refused(
                operator,
                f"the query reads {field_list([wanted])} on its {side.name} side; its checkpoint has "
                f"{field_list(values)} there",
            )
    return columns


def _projected(
    catalyst: Catalyst, side: _Side, stored: _StoredSide, columns: Sequence[tuple[Expression, int]]
) -> DataFrame:
    """Return the stored rows with the projection of the side's input over them, and `__matched`.

    Args:
        catalyst: of the query's session.
        side, stored: the side in the query and in the state.
        columns: the columns of the side's plan, each with its position among the stored values.
    """
    analyzed = catalyst.analyzed(stored.rows.withColumn("__matched", stored.matched))
    values = analyzed.output[len(stored.keys) + 1 :]  # after the keys, and the number of a row within its key
    # Spark's columns take the identities of the query's, so that the query's own expressions apply to them.
    renamed = [catalyst.aliased_as(catalyst.cast_to(values[position], column), column) for column, position in columns]
    under = catalyst.project([*analyzed.output, *renamed], analyzed)
    return catalyst.dataframe(catalyst.project([*side.projection, *analyzed.output], under))
