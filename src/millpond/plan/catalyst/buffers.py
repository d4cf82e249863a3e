"""The buffers of Spark's aggregate functions: in its state store, with the keys, and as columns of partial results."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from millpond.ddl import quoted
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node, items
from millpond.spec.operators import Field


class Buffers(NamedTuple):
    """What is kept for a group.

    Attributes:
        keys: the grouping columns. metadata: of these. columns: of all buffers, in order.
        blocks: which of the columns each buffer has.
        calls: for each function that was asked for, which of the columns are its own; None where that is not known.
    """

    keys: list[Field]
    metadata: list[dict[str, Any]]
    columns: list[Field]
    calls: list[range | None]
    blocks: list[range]


def buffers_of(catalyst: Catalyst, node: Node, functions: Sequence[Expression]) -> Buffers:
    """What Spark keeps for an aggregate that computes these functions, as its optimiser and planner make it.

    The optimiser computes some by way of others (small decimals by their digits, a count of what is never null as one
    of rows), and the planner computes once what is the same.

    Args:
        catalyst: of the query's session. node: the analysed aggregate, or a `DISTINCT`.
        functions: its `AggregateExpression`s.
    """
    groupings = node.list("groupingExpressions")
    named = [one if one.kind in _NAMED else catalyst.alias(one, f"key{at}") for at, one in enumerate(groupings)]
    asked = [catalyst.alias(function, f"call{number}") for number, function in enumerate(functions)]
    java = catalyst.optimized(catalyst.aggregate(node, [*named, *asked]))
    aggregate = next(below for below in java.walk() if below.kind == "Aggregate")
    physical = catalyst.physical_aggregate(aggregate)
    keys = [Expression(key) for key in items(physical._1())]
    columns: list[Field] = []
    owned: dict[int, range] = {}
    for one in items(physical._2()):
        attributes = [Expression(column) for column in items(one.aggregateFunction().aggBufferAttributes())]
        result = Expression(one.resultAttribute()).expr_id
        owned[result] = range(len(columns), len(columns) + len(attributes))
        columns += [Field(column.name, column.type) for column in attributes]
    results = {result.expr_id: result for result in map(Expression, items(physical._3()))}
    calls: list[range | None] = []
    for alias in asked:
        shown = results.get(alias.expr_id)
        parts = [] if shown is None else [part.expr_id for part in shown.walk() if part.kind == "AttributeReference"]
        found = {owned[part] for part in parts if part in owned}
        calls.append(found.pop() if len(found) == 1 else None)
    fields = [Field(key.name, key.type) for key in keys]
    return Buffers(fields, [key.metadata for key in keys], columns, calls, list(owned.values()))


def count_min_options(aggregate: Expression) -> dict[str, Any]:
    """Return the width of a `CountMinSketchAgg`'s rows of counters and the multipliers that each row hashes with."""
    empty = bytes(aggregate.java.eval(aggregate.java.createAggregationBuffer()))
    depth, width = struct.unpack_from(">ii", empty, 12)
    return {"width": width, "multipliers": list(struct.unpack_from(f">{depth}q", empty, 20))}


def buffer_types(function: Expression) -> list[str]:
    """The types of an aggregate function's buffer columns, as DDL."""
    return [Expression(column).type for column in items(function.java.aggBufferAttributes())]


def bound(catalyst: Catalyst, types: Mapping[str, str], columns: Sequence[str]) -> list[Expression]:
    """SQL over nullable columns as expressions over bound references.

    Args:
        catalyst: of the session. types: of the columns, as DDL, by name. columns: SQL over the names.
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
        Expression(references.bindReference(_value(one).java, attributes, False)) for one in plan.list("projectList")
    ]


def _value(named: Expression) -> Expression:
    return named.children[0] if named.kind == "Alias" else named


_NAMED = ("AttributeReference", "Alias")
