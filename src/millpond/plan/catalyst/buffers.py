"""Buffers of Spark's aggregate functions: in its state store, with the keys, and as partial results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node, items
from millpond.spec.operators import Field
from millpond.tasks.ddl import quoted


class Buffers(NamedTuple):
    """Layout of the aggregation buffers that Spark keeps for a group.

    Attributes:
        keys: the grouping columns.
        metadata: the metadata of the grouping columns.
        columns: the columns of all buffers, in order.
        calls: for each requested function, the range of its own columns; None if it cannot be determined.
        blocks: the range of columns of each buffer.
    """

    keys: list[Field]
    metadata: list[dict[str, Any]]
    columns: list[Field]
    calls: list[range | None]
    blocks: list[range]


def buffers_of(catalyst: Catalyst, node: Node, functions: Sequence[Expression]) -> Buffers:
    """Return the buffers of an aggregate with these functions, as Spark's optimiser and planner make it.

    The optimiser rewrites some functions (small decimals by their digits, a count of a never-null column as a count of
    rows). The planner computes equal functions once.

    Args:
        catalyst: of the query's session.
        node: the analysed aggregate, or a `DISTINCT`.
        functions: its `AggregateExpression`s.
    """
    groupings = node.list("groupingExpressions")
    named = [
        grouping if grouping.kind in _NAMED else catalyst.alias(grouping, f"key{number}")
        for number, grouping in enumerate(groupings)
    ]
    requested = [catalyst.alias(function, f"call{number}") for number, function in enumerate(functions)]
    java = catalyst.optimized(catalyst.aggregate(node, [*named, *requested]))
    aggregate = next(below for below in java.walk() if below.kind == "Aggregate")
    physical = catalyst.physical_aggregate(aggregate)
    keys = [Expression(key) for key in items(physical._1())]
    columns: list[Field] = []
    owned: dict[int, range] = {}
    for expression in items(physical._2()):
        attributes = [Expression(column) for column in items(expression.aggregateFunction().aggBufferAttributes())]
        result = Expression(expression.resultAttribute()).expr_id
        owned[result] = range(len(columns), len(columns) + len(attributes))
        columns += [Field(column.name, column.type) for column in attributes]
    results = {result.expr_id: result for result in map(Expression, items(physical._3()))}
    calls: list[range | None] = []
    for alias in requested:
        shown = results.get(alias.expr_id)
        parts = [] if shown is None else [part.expr_id for part in shown.walk() if part.kind == "AttributeReference"]
        ranges = {owned[part] for part in parts if part in owned}
        calls.append(ranges.pop() if len(ranges) == 1 else None)
    fields = [Field(key.name, key.type) for key in keys]
    return Buffers(fields, [key.metadata for key in keys], columns, calls, list(owned.values()))


def buffer_types(function: Expression) -> list[str]:
    """Return the types of an aggregate function's buffer columns, as DDL."""
    return [Expression(column).type for column in items(function.java.aggBufferAttributes())]


def bound(catalyst: Catalyst, types: Mapping[str, str], columns: Sequence[str]) -> list[Expression]:
    """Bind SQL over nullable columns to expressions over bound references.

    Args:
        catalyst: of the session.
        types: column name → its type, as DDL.
        columns: SQL over the names.
    """
    empty = catalyst.spark.range(0).selectExpr(
        *(f"cast(null as {type_}) as {quoted(name)}" for name, type_ in types.items())
    )
    plan = catalyst.analyzed(empty.selectExpr(*columns))
    below = plan.children[0].java.output()
    package = "org.apache.spark.sql.catalyst.expressions"
    attributes = catalyst.new(f"{package}.package$AttributeSeq", below)
    references = catalyst.object(f"{package}.BindReferences")
    return [
        Expression(references.bindReference(_value(result).java, attributes, False))
        for result in plan.list("projectList")
    ]


def _value(named: Expression) -> Expression:
    return named.children[0] if named.kind == "Alias" else named


_NAMED = ("AttributeReference", "Alias")
