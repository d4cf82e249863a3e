"""Reads groupings by windows of event time.

How Spark assigns windows, so that the operator can do it, once a row instead of once a window; and session windows, of
which Spark computes each row's own, and the operator merges those that meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from millpond.plan.catalyst.nodes import TIME_WINDOW, Expression, Node
from millpond.spec.kinds.session import SessionSpec
from millpond.spec.operators import AggregateCall, Field, Windows


@dataclass(frozen=True)
class Assigned:
    """A window column that Spark computes right below an aggregate.

    Attributes:
        windows: the windows.
        time: the event time in microseconds, a bigint over columns that the aggregate's child has, too.
        type: of the window.
        expanded: whether Spark makes a row for each window of a row (an `Expand` below the filter).
    """

    windows: Windows
    time: Expression
    type: str
    expanded: bool

    @property
    def pane(self) -> str:
        """SQL for the beginning of the pane of time `{0}`.

        The end of its last window is computed on the way, as by Spark: in ANSI mode it is an error if there is none.
        """
        size = self.windows.size
        return f"{{0}} - pmod({{0}} - {self.windows.offset}L, {self.windows.slide}L) + {size}L - {size}L"


def assigned(aggregate: Node, window: Expression) -> Assigned | None:
    """How a grouping column is assigned, if it is a window as Spark's analyser makes them; None if it is anything else.

    A tumbling window is a struct projected right below the aggregate; sliding ones are an `Expand`, with a projection
    for each window of a row, below a filter of null times unless that was pushed below it.
    """
    if window.kind != "AttributeReference" or TIME_WINDOW not in window.metadata:
        return None
    (child,) = aggregate.children
    if child.kind == "Project":
        aliases = [one for one in child.list("projectList") if one.kind == "Alias" and one.expr_id == window.expr_id]
        return _read(aliases[0].children[0], 1, window.type) if aliases else None
    expand = child
    if child.kind == "Filter":
        (expand,) = child.children
    if expand.kind != "Expand" or (expand is not child and not _of_times(child.expression("condition"), expand)):
        return None  # windows that overlap by less than a whole one are filtered after they were assigned
    at = next((i for i, column in enumerate(expand.output) if column.expr_id == window.expr_id), None)
    if at is None:
        return None
    rows = expand.rows("projections")
    return _read(rows[0][at], len(rows), window.type)


def _of_times(condition: Expression | None, expand: Node) -> bool:
    """Whether a filter above windows leaves out rows without a time, and does not look at the windows."""
    if condition is None or condition.kind != "IsNotNull":
        return str(condition) == "true"  # no time is ever null
    (below,) = expand.children
    columns = {column.expr_id for column in below.output}
    return all(part.expr_id in columns for part in condition.walk() if part.kind == "AttributeReference")


def _read(struct: Expression, count: int, type_: str) -> Assigned | None:
    found = _windows(struct)
    if found is None or found[0].size != found[0].slide * count:
        return None
    return Assigned(*found, type_, expanded=count > 1)


def _windows(struct: Expression) -> tuple[Windows, Expression] | None:
    """The windows that an expression computes one of, and the event time in microseconds."""
    remainder = next((part for part in struct.walk() if part.kind == "Remainder"), None)
    sums = [part for part in struct.walk() if part.kind == "Add"]
    if remainder is None or struct.kind != "CreateNamedStruct":
        return None
    shifted, slide = remainder.children
    if shifted.kind != "Subtract" or slide.kind != "Literal":
        return None
    time, offset = shifted.children
    # end = start + size: of the additions, the one that is not the correction of a negative remainder.
    sizes = [part.children[1] for part in sums if part.children[1].kind == "Literal" and not _corrects(part)]
    if time.kind != "PreciseTimestampConversion" or offset.kind != "Literal" or not sizes:
        return None
    return Windows(int(str(sizes[0])), int(str(slide)), int(str(offset))), time


def windows_of(node: Node, column: Expression) -> Windows | None:
    """The windows that a column is one of, wherever below a node it is computed; None if that is not found.

    Args:
        node: what has the column in its input. column: a window of event time.
    """
    wanted = column.expr_id
    for below in node.walk():
        made = None
        if below.kind in ("Project", "Aggregate"):
            results = below.list("projectList" if below.kind == "Project" else "aggregateExpressions")
            made = next((one.children[0] for one in results if one.kind == "Alias" and one.expr_id == wanted), None)
        elif below.kind == "Expand":
            at = next((at for at, one in enumerate(below.output) if one.expr_id == wanted), None)
            made = None if at is None else below.rows("projections")[0][at]
        if made is None:
            continue
        if made.kind != "AttributeReference":
            found = _windows(made)
            return None if found is None else found[0]
        wanted = made.expr_id
    return None


def _corrects(addition: Expression) -> bool:
    return addition.children[0].kind == "Remainder"


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
