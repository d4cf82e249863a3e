"""Read `Window` nodes: top-N by rank with a filter on it, and aggregates over each key's last rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import INTEGERS, WATERMARK_DELAY, Expression, Node
from millpond.plan.catalyst.optimiser.windows import Needed
from millpond.plan.reading.functions import read_function
from millpond.plan.reading.reading import InputColumn, Reading, check_key, check_value, unique_name
from millpond.plan.reading.reasons import Reason, Unsupported
from millpond.spec.functions import FUNCTIONS, unsupported_key
from millpond.spec.kinds.over import OverSpec
from millpond.spec.kinds.rank import RankSpec
from millpond.spec.operators import AggregateCall, Field, Order
from millpond.spec.types import parse_type

RANKS = {"RowNumber": "row_number", "Rank": "rank", "DenseRank": "dense_rank"}
"""Catalyst's class of each ranking function → its name."""

_FLIPPED = {
    "GreaterThan": "LessThan",
    "GreaterThanOrEqual": "LessThanOrEqual",
    "LessThan": "GreaterThan",
    "LessThanOrEqual": "GreaterThanOrEqual",
    "EqualTo": "EqualTo",
}

Limits = Mapping[int, int]
"""Identity of a column → the greatest value that the filters above let pass."""


def limits_of(node: Node, known: Limits) -> dict[int, int]:
    """Return the limits that hold below a node: those from above, and those of the node itself."""
    if node.kind == "Filter":
        limits = dict(known)
        for part in node.expression("condition").conjuncts:
            bound = bound_of(part)
            if bound is not None:
                column, most = bound
                limits[column] = min(most, limits.get(column, most))
        return limits
    if node.kind == "Project":
        below: dict[int, int] = {}
        for result in node.list("projectList"):
            source = result.children[0] if result.kind == "Alias" else result
            if source.kind == "AttributeReference" and result.expr_id in known:
                below[source.expr_id] = min(known[result.expr_id], below.get(source.expr_id, known[result.expr_id]))
        return below
    # Other nodes may merge or multiply rows, so a bound above them says nothing about rows below.
    return dict(known) if node.kind in ("SubqueryAlias", "View") else {}


def bound_of(condition: Expression) -> tuple[int, int] | None:
    """Return the column and its greatest passing value, for a comparison of a column with a constant."""
    comparison = _comparison(condition)
    if comparison is None or comparison[0].startswith("Greater"):
        return None
    kind, column, value = comparison
    return column, value - 1 if kind == "LessThan" else value


def lets_pass(condition: Expression, column: int, most: int) -> bool:
    """Whether a comparison of a column with a constant holds for all values from 1 to `most`."""
    comparison = _comparison(condition)
    if comparison is None or comparison[1] != column:
        return False
    kind, _, value = comparison
    return {
        "GreaterThan": value < 1,
        "GreaterThanOrEqual": value <= 1,
        "LessThan": value > most,
        "LessThanOrEqual": value >= most,
        "EqualTo": value == most == 1,
    }[kind]


def _comparison(condition: Expression) -> tuple[str, int, int] | None:
    """Return the comparison of a column with a constant, with the column on the left; None for other conditions."""
    if condition.kind not in _FLIPPED:
        return None
    left, right = (_bare(child) for child in condition.children)
    kind = condition.kind
    if left.foldable:
        left, right, kind = right, left, _FLIPPED[kind]
    if left.kind != "AttributeReference" or not right.foldable:
        return None
    value = right.constant_or_none if right.type in INTEGERS else None
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return kind, left.expr_id, value


def _bare(expression: Expression) -> Expression:
    """Strip a comparison's cast of an int column to bigint."""
    if expression.kind == "Cast" and expression.type == "bigint" and expression.children[0].type == "int":
        return expression.children[0]
    return expression


def read_rank(node: Node, limits: Limits, needed: Needed) -> tuple[Reading, RankSpec]:
    """Read a `Window` of one ranking function.

    Raises:
        Unsupported: it cannot run here, for the given reason.
    """
    function = _functions(node)
    if len(function) != 1 or function[0].kind not in RANKS:
        raise Unsupported(Reason("MP-WINDOW", ", ".join(ranking.name for ranking in function)))
    name = RANKS[function[0].kind]
    most = limits.get(node.list("windowExpressions")[0].expr_id)
    if most is None or most < 1:
        raise Unsupported(Reason("MP-UNBOUNDED", name))
    reading, columns, keys, order = _read_rows(node, needed)
    return reading, RankSpec(columns, keys, order, name, most)


def read_over(catalyst: Catalyst, node: Node, needed: Needed) -> tuple[Reading, OverSpec]:
    """Read a `Window` of aggregates over frames of preceding rows up to the current row.

    Raises:
        Unsupported: it cannot run here, for the given reason.
    """
    reading, _, keys, order = _read_rows(node, needed)
    calls: list[AggregateCall] = []
    preceding = []
    for result in node.list("windowExpressions"):
        window = result.children[0]
        aggregate, specification = window.children
        before = _preceding(specification)
        if window.kind != "WindowExpression" or aggregate.kind != "AggregateExpression" or before is None:
            raise Unsupported(Reason("MP-WINDOW", window.name))
        call = read_function(reading, aggregate)
        types = [parse_type(reading.inputs[position].field.type) for position in call.inputs]
        if call.distinct or not FUNCTIONS[call.function].over or any(dtype.kind == "bytes" for dtype in types):
            raise Unsupported(Reason("MP-FUNCTION", f"{call.function} over rows"))
        calls.append(call)
        reading.aggregates.append(aggregate)
        preceding.append(before)
    columns = tuple(column.field for column in reading.inputs)
    return reading, OverSpec(columns, keys, order, tuple(calls), tuple(preceding))


def _preceding(specification: Expression) -> int | None:
    """Return the number of preceding rows in a frame that ends with the current row; None for other frames."""
    frame = specification.expression("frameSpecification")
    if frame is None or str(frame.get("frameType").toString()) != "RowFrame":
        return None
    lower, upper = frame.children
    if upper.kind != "CurrentRow":
        return None
    if lower.kind == "CurrentRow":
        return 0
    rows = lower.constant if lower.foldable else None
    return -rows if isinstance(rows, int) and rows <= 0 else None


def _functions(node: Node) -> list[Expression]:
    return [result.children[0].children[0] for result in node.list("windowExpressions")]


def _read_rows(node: Node, needed: Needed) -> tuple[Reading, tuple[Field, ...], tuple[int, ...], tuple[Order, ...]]:
    """Return the reading, the columns, and the positions and orders of partitioning and sorting."""
    reading = Reading(column_numbers=node.column_numbers)
    names: set[str] = set()
    columns = _carried(node, needed)
    for attribute in columns:
        reading.raw.append(attribute)
        column = Field(unique_name(attribute.name, names), attribute.type)
        reading.inputs.append(InputColumn(column, (len(reading.raw) - 1,), "{0}"))
        check_value(attribute)
    keys = []
    for key in partitioned_by(node):
        check_key(key)
        keys.append(_position(columns, key))
    order: list[Order] = []
    for sort in node.list("orderSpec"):
        by = sort.children[0]
        if by.foldable:  # a constant orders no rows
            continue
        if unsupported_key(by.type):
            raise Unsupported(Reason("MP-INPUT-TYPE", f"{by.name} ({by.type})"))
        descending = str(sort.get("direction").toString()) == "Descending"
        nulls_last = str(sort.get("nullOrdering").toString()) == "NullsLast"
        position = _position(columns, by)
        # A column that sorts a second time decides nothing.
        if all(known.column != position for known in order):
            order.append(Order(position, descending, nulls_last))
    reading.set_hash([reading.inputs[position].field.name for position in keys])
    return reading, tuple(column.field for column in reading.inputs), tuple(keys), tuple(order)


def computed_columns(node: Node) -> list[str]:
    """Describe the columns that Spark's analyser computes below a `Window`: it gives expressions names like `_w0`."""
    (below,) = node.children
    while below.kind in ("Window", "Filter"):  # windows over several keys or orders share one projection
        (below,) = below.children
    computed = below.computed() if below.kind == "Project" else {}
    clauses = {
        "PARTITION BY": node.list("partitionSpec"),
        "ORDER BY": node.list("orderSpec"),
        "a function of": _functions(node),
    }
    return [
        f"{clause} {computed[part.expr_id].sql(node.column_numbers)}"
        for clause, expressions in clauses.items()
        for expression in expressions
        for part in expression.walk()
        if part.kind == "AttributeReference"
        and part.expr_id in computed
        # PySpark draws a seed for each call of `rand`.
        and computed[part.expr_id].deterministic
    ]


def partitioned_by(node: Node) -> list[Expression]:
    """Return the partitioning columns of a window, without constants: Spark keeps them, but they separate no rows."""
    return [key for key in node.list("partitionSpec") if not key.foldable]


def _carried(node: Node, needed: Needed) -> list[Expression]:
    """Return the columns below a window that the window, or a node above it, uses."""
    (child,) = node.children
    known = [needed[result.expr_id] for result in node.list("windowExpressions") if result.expr_id in needed]
    if not known:
        return child.output
    used = frozenset[int]().union(*known)
    # Operators above need columns with a watermark, even if the query does not read them.
    columns = [column for column in child.output if column.expr_id in used or WATERMARK_DELAY in column.metadata]
    return columns or child.output[:1]


def _position(columns: Sequence[Expression], column: Expression) -> int:
    for position, attribute in enumerate(columns):
        if column.kind == "AttributeReference" and attribute.expr_id == column.expr_id:
            return position
    raise Unsupported(Reason("MP-WINDOW", column.name))
