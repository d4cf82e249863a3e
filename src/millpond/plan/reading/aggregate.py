"""Read an `Aggregate` node, or one that maps groups to rows: columns to project, calls, and result columns.

Millpond can call `applyInPandas` and `applyInArrow` functions over event-time windows once per closed window. Spark
calls them in each micro-batch with the group's rows of this batch. So a setting has to request whole windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructField

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import SESSION_WINDOW, WATERMARK_DELAY, Expression, Node, items
from millpond.plan.catalyst.text import subquery
from millpond.plan.reading.functions import read_function
from millpond.plan.reading.reading import (
    InputColumn,
    Reading,
    calls_user_function,
    check_key,
    check_one_time,
    unique_name,
)
from millpond.plan.reading.reasons import Reason, Unsupported
from millpond.plan.reading.windows import Session, constant_gap, expanded, reads_windows, window_assignment
from millpond.spec.kinds.aggregate import PANE_TYPE
from millpond.spec.operators import EventTime, Field
from millpond.tasks.ddl import quoted


def read_aggregate(catalyst: Catalyst, node: Node, *, closing: bool) -> Reading:
    """Read an `Aggregate`.

    Args:
        catalyst: of the query's session.
        node: the aggregate.
        closing: whether the watermark closes groups (in complete mode it does not).

    Raises:
        Unsupported: it stays on Spark, for the given reason.
    """
    reading = _read_aggregate(catalyst, node, closing=closing, assigns=True)
    if reading.assignment is not None and reads_windows(node, reading.assignment, reading.raw):
        return _read_aggregate(catalyst, node, closing=closing, assigns=False)
    return reading


def _read_aggregate(catalyst: Catalyst, node: Node, *, closing: bool, assigns: bool) -> Reading:
    reading = Reading(column_numbers=node.column_numbers)
    groupings = [(_label(node, grouping), grouping) for grouping in node.list("groupingExpressions")]
    read_groupings(reading, node, groupings, closing=closing, assigns=assigns)
    for result in node.list("aggregateExpressions"):
        _refuse_subqueries(result, [grouping for _, grouping in groupings])
        for expression in result.walk():
            if expression.kind == "AggregateExpression" and not any(
                expression.semantic_equals(a) for a in reading.aggregates
            ):
                reading.aggregates.append(expression)
                _read_call(catalyst, reading, expression)
    if reading.user_calls.functions:
        reading.calls.append(reading.user_calls.rows([column.field for column in reading.inputs]))
    if not (reading.keys or reading.session or reading.calls):
        raise Unsupported(Reason("MP-OPERATOR", "an aggregate without keys and functions"))
    return reading


def _refuse_subqueries(expression: Expression, groupings: Sequence[Expression]) -> None:
    """Refuse a subquery that refers to groups; those in groupings and in arguments are computed below the exchange."""
    if expression.kind == "AggregateExpression" or any(grouping.semantic_equals(expression) for grouping in groupings):
        return
    if expression.children and subquery(expression) is not None:
        raise Unsupported(Reason("MP-OPERATOR", "a subquery in its results that refers to its groups"))
    for child in expression.children:
        _refuse_subqueries(child, groupings)


def read_groupings(
    reading: Reading, node: Node, groupings: list[tuple[str, Expression]], *, closing: bool, assigns: bool = True
) -> None:
    """Read a node's named grouping expressions, and hash them.

    Args:
        reading: the reading to extend.
        node: the node directly above the assignment of windows.
        groupings: names and expressions.
        closing: as for `read_aggregate`.
        assigns: whether the operator assigns windows where it can, instead of Spark.

    Raises:
        Unsupported: it stays on Spark, for the given reason.
    """
    if closing:
        check_one_time([grouping for _, grouping in groupings if WATERMARK_DELAY in grouping.metadata])
    names: set[str] = set()
    hashed: list[str] = []
    for position, (label, grouping) in enumerate(groupings):
        check_key(grouping)
        name = unique_name(label, names)
        if SESSION_WINDOW in grouping.metadata:
            if grouping.kind == "GetStructField":
                raise Unsupported(Reason("MP-OPERATOR", "a session window in a struct"))
            marked = WATERMARK_DELAY in grouping.metadata
            reading.session = Session(position, Field(name, grouping.type), marked, constant_gap(node, grouping))
            raw = (reading.add_raw(grouping),)
            # Each row travels with its own window; the operator merges windows that touch.
            reading.bounds = [InputColumn(bound, raw, sql) for bound, sql in reading.session.bounds]
            continue
        if not (closing and WATERMARK_DELAY in grouping.metadata):
            reading.keys.append(InputColumn(Field(name, grouping.type), (reading.add_raw(grouping),), "{0}"))
            hashed.append(name)
            continue
        assignment = window_assignment(node, grouping) if assigns else None
        reading.time = EventTime(position, None if assignment is None else assignment.windows)
        reading.assignment = assignment
        if assignment is None:
            reading.keys.append(InputColumn(Field(name, grouping.type), (reading.add_raw(grouping),), "{0}"))
            hashed.append(name)
            continue
        reading.keys.append(InputColumn(Field(name, PANE_TYPE), (reading.add_raw(assignment.time),), assignment.pane))
        if assignment.windows.overlap == 1:  # otherwise all windows of a pane have to be in one partition
            hashed.append(name)
    reading.set_hash(hashed)
    # Groups close by one time; the ends of a session and of a window would be two. In complete mode, where no group
    # closes, Spark still drops late rows of sessions by both.
    times = (grouping for _, grouping in groupings if WATERMARK_DELAY in grouping.metadata)
    if reading.session is not None and any(SESSION_WINDOW not in grouping.metadata for grouping in times):
        raise Unsupported(Reason("MP-EVENT-TIME", "sessions beside other event times"))


_GROUPING_ID = "spark_grouping_id"
"""Spark's grouping column after those of grouping sets. From its highest bit on, it marks columns that a set lacks."""


def grouping_sets(node: Node) -> str | None:
    """Describe the grouping sets of an `Aggregate` (`ROLLUP`, `CUBE`, `GROUPING SETS`); None if it has none."""
    groupings = node.list("groupingExpressions")
    keys = list(takewhile(lambda grouping: grouping.name != _GROUPING_ID, groupings))
    if len(keys) == len(groupings):
        return None
    mask_id = groupings[len(keys)].expr_id
    expand = next(
        (below for below in node.walk() if below.kind == "Expand" and below.position(mask_id) is not None), None
    )
    if expand is None:  # a column of the user's, under this name
        return None
    computed: dict[int, Expression] = {}
    for below in expand.walk():
        computed |= below.computed() if below.kind == "Project" else {}
    names = []
    for key in keys:
        column = expanded(expand, key.expr_id) or key  # a column may be in no set
        names.append(computed.get(column.expr_id, column).sql(node.column_numbers))
    place = expand.position(mask_id)
    sets = []
    for row in items(expand.java.projections()):
        mask = int(str(row.apply(place).toString()))
        present = (name for bit, name in enumerate(names, 1) if not mask >> (len(names) - bit) & 1)
        sets.append(f"({', '.join(present)})")
    return f"grouping sets ({', '.join(sets)})"


def project_input(
    catalyst: Catalyst,
    child: Node,
    raw: Sequence[Expression],
    columns: Sequence[InputColumn],
    hash_: str,
    extra: Sequence[Expression] = (),
) -> DataFrame:
    """Project an operator's input: Spark evaluates the expressions, then the key hash over their values.

    The columns `__argument0`… of `extra` follow the operator's columns; the hash comes last. Spark's optimiser derives
    constraints from a projection's aliases in their order. Each alias doubles the constraints on expressions that came
    before: a hash of 17 columns before them made 2¹⁷ constraints.
    """
    expressions = [*raw, *(argument for argument in extra if not any(argument.semantic_equals(other) for other in raw))]
    aliases = [catalyst.alias(expression, f"raw{index}") for index, expression in enumerate(expressions)]
    projected = catalyst.dataframe(catalyst.project(aliases, child))
    positions = [
        next(place for place, other in enumerate(expressions) if argument.semantic_equals(other)) for argument in extra
    ]
    named = projected.select(
        *(F.expr(c.sql.format(*(f"raw{r}" for r in c.raw))).alias(c.field.name) for c in columns),
        *(F.col(f"raw{place}").alias(f"__argument{number}") for number, place in enumerate(positions)),
    )
    columns_ = [quoted(name) for name in named.columns]
    return named.select(*columns_, F.expr(hash_).alias("__hash"))


def rewrite_expression(
    catalyst: Catalyst, expression: Expression, replace: Callable[[Expression], Expression | None]
) -> Expression:
    """Copy an expression; replace every subtree for which `replace` returns an expression, outermost first."""
    new = replace(expression)
    if new is not None:
        return new
    return catalyst.with_operands(
        expression, [rewrite_expression(catalyst, child, replace) for child in expression.children]
    )


def _label(node: Node, grouping: Expression) -> str:
    """Return the name under which the query shows a grouping expression, else its SQL."""
    for result in node.list("aggregateExpressions"):
        if result.kind == "Alias" and result.children[0].semantic_equals(grouping):
            return result.name
    return grouping.name


def _read_call(catalyst: Catalyst, reading: Reading, expression: Expression) -> None:
    """Read one `AggregateExpression` of a Spark function or a user function."""
    function = expression.expression("aggregateFunction")
    assert function is not None
    if not calls_user_function(expression):
        shown = len(reading.keys) + (reading.session is not None)
        reading.user_calls.order.append(shown + len(reading.calls))
        reading.calls.append(read_function(reading, expression))
        return
    if expression.get("isDistinct") or expression.expression("filter") is not None:
        raise Unsupported(Reason("MP-PYTHON", str(function.get("name"))))
    reading.user_calls.order.append(-1 - len(reading.user_calls.functions))
    reading.user_calls.add(catalyst, function, lambda operand: reading.add_input([operand]))


MAPS = {"FlatMapGroupsInPandas": "applyInPandas", "FlatMapGroupsInArrow": "applyInArrow"}
"""Nodes that map groups to rows → their titles."""


def map_title(node: Node) -> str:
    """Return the operator's title."""
    (projection,) = node.children
    return f"{MAPS[node.kind]} by {', '.join(key.label(projection.column_numbers) for key in _map_groupings(node))}"


def read_map_groups(catalyst: Catalyst, node: Node, output_mode: str) -> Reading:
    """Read a node that maps groups to rows.

    Its child is a projection of the groupings, then all columns of its own child, which the function sees.

    Raises:
        Unsupported: it cannot be called once for each group of a closed window.
    """
    # A function over a whole group can be called only once, when its window has closed.
    if output_mode != "append":
        raise Unsupported(Reason("MP-MAP", "append mode"))
    (projection,) = node.children
    groupings = _map_groupings(node)
    reading = Reading()
    read_groupings(reading, projection, [(grouping.name, grouping) for grouping in groupings], closing=True)
    if reading.session is not None:
        raise Unsupported(Reason("MP-MAP", "windows that do not merge; session windows do"))
    if reading.time is None:
        raise Unsupported(Reason("MP-MAP", "a grouping by windows of time, or times, that have a watermark"))
    user_calls = reading.user_calls
    user_calls.keys = len(groupings)
    user_calls.columns = [
        StructField(attribute.name, attribute.data_type) for attribute in node.list("groupingAttributes")
    ]
    user_calls.add(catalyst, node.expression("functionExpr"), lambda operand: reading.add_input([operand]))
    reading.calls.append(user_calls.rows([column.field for column in reading.inputs]))
    return reading


def _map_groupings(node: Node) -> list[Expression]:
    """Return the grouping expressions, over the columns of the projection's child."""
    (projection,) = node.children
    named = projection.list("projectList")[: len(node.list("groupingAttributes"))]
    return [grouping.children[0] if grouping.kind == "Alias" else grouping for grouping in named]
