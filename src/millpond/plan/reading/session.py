"""Reads groupings by session windows: Spark computes each row's own window, the operator merges those that meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from millpond.plan.catalyst.nodes import Expression, Node
from millpond.spec.kinds.session import SessionSpec
from millpond.spec.operators import AggregateCall, Field


class Session(NamedTuple):
    """A grouping by session windows.

    Attributes:
        position: among the groupings.
        window: the column; below the aggregate it holds each row's own window.
        marked: whether its time has a watermark.
        gap: how long each row's own window is, in microseconds, if it is always the same.
    """

    position: int
    window: Field
    marked: bool
    gap: int | None

    @property
    def bounds(self) -> list[tuple[Field, str]]:
        """What the operator needs of a row's own window: columns of the pipe, and SQL over the window `{0}`."""
        columns = self.spec([], [], [], "").window_bounds
        return list(zip(columns, ("{0}.start", "{0}.end"), strict=False))

    def spec(
        self, keys: Sequence[Field], inputs: Sequence[Field], calls: Sequence[AggregateCall], output_mode: str
    ) -> SessionSpec:
        """The operator's plain description."""
        lag = 0 if self.marked else None
        return SessionSpec(tuple(keys), self.window, tuple(inputs), tuple(calls), output_mode, lag, gap=self.gap)


def constant_gap(node: Node, window: Expression) -> int | None:
    """The gap in microseconds of a column of session windows, if it is a constant without days and months.

    Spark adds an interval to a time by way of the calendar, even one of seconds: a fifth of the JVM's work for a row.

    Args:
        node: right above where Spark computes each row's own window. window: the column.
    """
    (child,) = node.children
    project = child.children[0] if child.kind == "Filter" else child
    made = project.list("projectList") if project.kind == "Project" else []
    struct = next((one.children[0] for one in made if one.kind == "Alias" and one.expr_id == window.expr_id), None)
    if struct is None or struct.kind != "CreateNamedStruct":
        return None
    start = struct.children[1]
    sums = [part for part in struct.walk() if [operand.type for operand in part.children[1:]] == ["interval"]]
    if len(sums) != 1 or not sums[0].children[1].foldable:
        return None
    time, gap = sums[0].children[0], sums[0].children[1].interval
    if gap is None or gap.months or gap.days or gap.microseconds <= 0 or time.type != start.type:
        return None
    return gap.microseconds if any(time.means(part) for part in start.walk()) else None
