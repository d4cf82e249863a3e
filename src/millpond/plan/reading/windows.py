"""Read groupings by windows of event time.

For time windows, this module reads how Spark assigns them. The operator can then assign them itself: once per row
instead of once per window. For session windows, Spark computes each row's own window, and the operator merges windows
that overlap or touch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from millpond.plan.catalyst.nodes import SESSION_WINDOW, TIME_WINDOW, Expression, Node, items
from millpond.spec.kinds.session import SessionSpec
from millpond.spec.operators import AggregateCall, Field, Windows


@dataclass(frozen=True)
class WindowAssignment:
    """A window column that Spark computes directly below an aggregate.

    Attributes:
        windows: the windows.
        time: the event time in microseconds, a bigint over columns that the aggregate's child has, too.
        type: the type of the window column.
        expanded: whether Spark makes a row for each window of a row (an `Expand` below the filter).
    """

    windows: Windows
    time: Expression
    type: str
    expanded: bool

    @property
    def pane(self) -> str:
        """SQL for the start of the pane of time `{0}`.

        It also computes the end of the pane's last window, as Spark does: in ANSI mode, an overflow is then an error.
        """
        size = self.windows.size
        return f"{{0}} - pmod({{0}} - {self.windows.offset}L, {self.windows.slide}L) + {size}L - {size}L"


def window_assignment(aggregate: Node, window: Expression) -> WindowAssignment | None:
    """Return the assignment of a window column by Spark's analyser; None for other grouping columns.

    A tumbling window is a struct projected directly below the aggregate. Sliding windows are an `Expand` with a
    projection for each window of a row. It is below a filter of null times, unless that filter was pushed below it.
    """
    if window.kind != "AttributeReference" or TIME_WINDOW not in window.metadata:
        return None
    (child,) = aggregate.children
    if child.kind == "Project":
        assigned = child.computed().get(window.expr_id)
        return None if assigned is None else _assignment(assigned, 1, window.type)
    expand = child
    if child.kind == "Filter":
        (expand,) = child.children
    if expand.kind != "Expand" or (expand is not child and not _of_times(child.expression("condition"), expand)):
        return None  # if the size is not a multiple of the slide, windows are filtered after their assignment
    position = expand.position(window.expr_id)
    if position is None:
        return None
    rows = expand.rows("projections")
    return _assignment(rows[0][position], len(rows), window.type)


def reads_windows(aggregate: Node, assignment: WindowAssignment, expressions: Sequence[Expression]) -> bool:
    """Whether expressions over the aggregate's child read windows for which Spark makes a row each."""
    if not assignment.expanded:
        return False
    (child,) = aggregate.children
    expand = child if child.kind == "Expand" else child.children[0]
    columns = {column.expr_id for column in expand.children[0].output}
    parts = (part for expression in expressions for part in expression.walk())
    return any(part.kind == "AttributeReference" and part.expr_id not in columns for part in parts)


def _of_times(condition: Expression | None, expand: Node) -> bool:
    """Whether a filter above windows only drops rows without a time, and does not read the windows."""
    if condition is None or condition.kind != "IsNotNull":
        return str(condition) == "true"  # the time is never null
    (below,) = expand.children
    columns = {column.expr_id for column in below.output}
    return all(part.expr_id in columns for part in condition.walk() if part.kind == "AttributeReference")


def _assignment(struct: Expression, count: int, type_: str) -> WindowAssignment | None:
    read = _windows(struct)
    if read is None or read[0].size != read[0].slide * count:
        return None
    return WindowAssignment(*read, type_, expanded=count > 1)


def _windows(struct: Expression) -> tuple[Windows, Expression] | None:
    """Return the windows that an expression assigns, and the event time in microseconds; None for others."""
    remainder = next((part for part in struct.walk() if part.kind == "Remainder"), None)
    sums = [part for part in struct.walk() if part.kind == "Add"]
    if remainder is None or struct.kind != "CreateNamedStruct":
        return None
    shifted, slide = remainder.children
    if shifted.kind != "Subtract" or slide.kind != "Literal":
        return None
    time, offset = shifted.children
    # end = start + size: the addition that is not the correction of a negative remainder has the size.
    sizes = [part.children[1] for part in sums if part.children[1].kind == "Literal" and not _corrects(part)]
    if time.kind != "PreciseTimestampConversion" or offset.kind != "Literal" or not sizes:
        return None
    return Windows(int(str(sizes[0])), int(str(slide)), int(str(offset))), time


def windows_of(node: Node, column: Expression) -> Windows | None:
    """Return the windows of a column, wherever below a node it is computed; None if that is not found.

    Args:
        node: a node with the column in its input.
        column: a window of event time.
    """
    source = None if column.kind == "GetStructField" else next(_sources_of(node, column.expr_id), None)
    read = None if source is None else _windows(source)
    return None if read is None else read[0]


def describe_windows(node: Node, column: Expression, *, lengths: bool) -> str | None:
    """Describe the windows of event time, or sessions, in a column by their time; None for other columns.

    The gap of sessions may change between starts, so it is left out. So is a time that is not deterministic: PySpark
    draws a seed for each call of `rand`.

    Args:
        node: a node with the column in its input.
        column: a column.
        lengths: whether to describe lengths, slides and starts of windows, too.
    """
    if not column.metadata.keys() & {TIME_WINDOW, SESSION_WINDOW}:
        return None
    texts = []
    for source in _sources_of(node, column.expr_id):
        if source.kind != "CreateNamedStruct":
            continue
        if SESSION_WINDOW in column.metadata:
            title, time = "sessions", source.children[1]
        elif (read := _windows(source)) is None:
            continue
        else:
            title, time = read[0].description if lengths else "windows", read[1]
        while time.kind == "PreciseTimestampConversion":
            (time,) = time.children
        texts.append(f"{title} of {time.sql(node.column_numbers)}" if time.deterministic else title)
    return " and ".join(dict.fromkeys(texts)) or None


def _sources_of(node: Node, column_id: int) -> Iterator[Expression]:
    """Yield the expressions that compute a column of a node or below: several, if it comes from a union."""
    columns = [column_id] * len(node.children)
    source = _source_in(node, column_id)
    if source is not None and source.kind != "AttributeReference":
        yield source
        return
    if source is not None:
        columns = [source.expr_id] * len(node.children)
    elif node.kind == "Union" and (position := node.position(column_id)) is not None:
        columns = [child.output[position].expr_id for child in node.children]
    for child, column in zip(node.children, columns, strict=True):
        yield from _sources_of(child, column)


def _source_in(node: Node, column_id: int) -> Expression | None:
    """Return what a node computes as a column; None if it computes no such column."""
    if node.kind == "Project":
        return node.computed().get(column_id)
    if node.kind == "Aggregate":
        return node.computed("aggregateExpressions").get(column_id)
    return expanded(node, column_id) if node.kind == "Expand" else None


def expanded(expand: Node, column_id: int) -> Expression | None:
    """Return what an `Expand` makes a column of; None if all rows have a constant there, or it has no such column."""
    position = expand.position(column_id)
    if position is None:
        return None
    values = (Expression(row.apply(position)) for row in items(expand.java.projections()))
    # Grouping sets without the column have a null there.
    return next((value for value in values if value.kind != "Literal"), None)


def _corrects(addition: Expression) -> bool:
    return addition.children[0].kind == "Remainder"


class Session(NamedTuple):
    """A grouping by session windows.

    Attributes:
        position: its position among the groupings.
        window: the column; below the aggregate it holds each row's own window.
        marked: whether its time has a watermark.
        gap: the length of each row's own window in microseconds, if it is constant.
    """

    position: int
    window: Field
    marked: bool
    gap: int | None

    @property
    def bounds(self) -> list[tuple[Field, str]]:
        """The slot stage's columns of a row's own window, each with SQL over the window `{0}`."""
        columns = self.spec([], [], [], "").window_bounds
        return list(zip(columns, ("{0}.start", "{0}.end"), strict=False))

    def spec(
        self, keys: Sequence[Field], inputs: Sequence[Field], calls: Sequence[AggregateCall], output_mode: str
    ) -> SessionSpec:
        """Return the operator's spec."""
        lag = 0 if self.marked else None
        return SessionSpec(tuple(keys), self.window, tuple(inputs), tuple(calls), output_mode, lag, gap=self.gap)


def constant_gap(node: Node, window: Expression) -> int | None:
    """Return the gap of session windows in microseconds, if it is a constant without days and months.

    Spark adds every interval to a time through the calendar, even seconds: a fifth of the JVM's work per row.

    Args:
        node: the node directly above the projection of each row's own window.
        window: the session column.
    """
    (child,) = node.children
    project = child.children[0] if child.kind == "Filter" else child
    struct = project.computed().get(window.expr_id) if project.kind == "Project" else None
    if struct is None or struct.kind != "CreateNamedStruct":
        return None
    start = struct.children[1]
    sums = [part for part in struct.walk() if [operand.type for operand in part.children[1:]] == ["interval"]]
    if len(sums) != 1 or not sums[0].children[1].foldable:
        return None
    time, gap = sums[0].children[0], sums[0].children[1].interval
    # Spark adds months and days by the calendar, so that their length depends on the row.
    if gap is None or gap.months or gap.days or gap.microseconds <= 0 or time.type != start.type:
        return None
    return gap.microseconds if any(time.semantic_equals(part) for part in start.walk()) else None
