"""Read groupings by windows of event time.

For time windows, this module reads how Spark assigns them. The operator can then assign them itself: once per row
instead of once per window. For session windows, Spark computes each row's own window, and the operator merges windows
that overlap or touch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from millpond.plan.catalyst.nodes import TIME_WINDOW, Expression, Node
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
        aliases = [
            result
            for result in child.list("projectList")
            if result.kind == "Alias" and result.expr_id == window.expr_id
        ]
        return _assignment(aliases[0].children[0], 1, window.type) if aliases else None
    expand = child
    if child.kind == "Filter":
        (expand,) = child.children
    if expand.kind != "Expand" or (expand is not child and not _of_times(child.expression("condition"), expand)):
        return None  # if the size is not a multiple of the slide, windows are filtered after their assignment
    position = next((i for i, column in enumerate(expand.output) if column.expr_id == window.expr_id), None)
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
    if column.kind == "GetStructField":
        return None
    column_id = column.expr_id
    for below in node.walk():
        source = None
        if below.kind in ("Project", "Aggregate"):
            results = below.list("projectList" if below.kind == "Project" else "aggregateExpressions")
            source = next(
                (result.children[0] for result in results if result.kind == "Alias" and result.expr_id == column_id),
                None,
            )
        elif below.kind == "Expand":
            position = next(
                (position for position, output in enumerate(below.output) if output.expr_id == column_id), None
            )
            source = None if position is None else below.rows("projections")[0][position]
        if source is None:
            continue
        if source.kind != "AttributeReference":
            windows = _windows(source)
            return None if windows is None else windows[0]
        column_id = source.expr_id
    return None


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
    results = project.list("projectList") if project.kind == "Project" else []
    struct = next(
        (result.children[0] for result in results if result.kind == "Alias" and result.expr_id == window.expr_id), None
    )
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
