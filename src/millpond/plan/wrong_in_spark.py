"""Find query shapes for which Spark returns wrong rows without an error, and Millpond the same rows.

Later versions of Spark refuse some of them. Each shape is a predicate over the optimised plan. Spark's behaviour
depends on the places of filters, on join types, and on the columns with a watermark that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import WATERMARK_DELAY, Expression, Node
from millpond.plan.catalyst.optimiser.joins import EqualKeys, equal_keys, with_rest
from millpond.plan.decision.decision import WrongShape, describe
from millpond.plan.reading.aggregate import MAPS
from millpond.plan.reading.join import event_time_column, expiries_of, watermarked_key
from millpond.plan.reading.join_condition import LEFT, RIGHT
from millpond.plan.reading.processor import GROUP_STATES, PROCESSORS, by_event_time

_PRESERVED = {"LeftOuter": (LEFT,), "RightOuter": (RIGHT,), "FullOuter": (LEFT, RIGHT)}
"""Type of an outer join → the sides whose unmatched rows it shows."""


def wrong_in_spark(
    catalyst: Catalyst, analyzed: Node, optimized: Callable[[], Node], output_mode: str, *, maps_windows: bool
) -> tuple[WrongShape, ...]:
    """Find the shapes of a query for which Spark returns wrong rows.

    Args:
        catalyst: of the query's session.
        analyzed: the plan as the user wrote it; Spark may refuse it.
        optimized: returns it after Spark's optimiser.
        output_mode: `append`, `update` or `complete`.
        maps_windows: whether `applyInPandas` and `applyInArrow` are called with whole closed windows.
    """
    # Optimising takes about 100 ms; the analysed plan is enough to rule out most queries.
    if not any(node.joins_streams or _marks_struct(node) for node in analyzed.walk()):
        return ()
    query = _Query(catalyst, optimized(), output_mode, maps_windows)
    wrong = (
        WrongShape(code, describe(node), detail, shape.certain, shape.loss, shape.advice)
        for code, shape in SHAPES.items()
        for node, detail in shape.find(query)
    )
    return tuple(dict.fromkeys(wrong))  # a common table expression occurs in the plan once per reader


def _marks_struct(node: Node) -> bool:
    return node.kind == "EventTimeWatermark" and node.expression("eventTime").type.startswith("struct")


def _event_time_columns(columns: Sequence[Expression]) -> list[Expression]:
    return [
        column
        for column in columns
        if column.kind in ("AttributeReference", "Alias") and WATERMARK_DELAY in column.metadata
    ]


@dataclass(frozen=True)
class _Join:
    """A join of two streams.

    Attributes:
        node: the join in the plan.
        keys: its equal keys and the rest of its condition.
        by_key: the number of the key by which the state of both sides is removed; None if by no key.
        late: side → the column that defines lateness of its rows.
        removed: the sides whose state is removed as the watermark moves.
        capped: the sides whose state stays because the condition compares one of their columns with a constant.
    """

    node: Node
    keys: EqualKeys
    by_key: int | None
    late: dict[str, Expression | None]
    removed: frozenset[str]
    capped: frozenset[str]

    @property
    def preserved(self) -> tuple[str, ...]:
        """The sides whose unmatched rows are shown."""
        return _PRESERVED.get(self.node.join_type, ())


class _Query:
    """An optimised plan, with the properties that the shapes test."""

    def __init__(self, catalyst: Catalyst, plan: Node, output_mode: str, maps_windows: bool) -> None:
        self.catalyst = catalyst
        self.plan = plan
        self.output_mode = output_mode
        self.maps_windows = maps_windows

    @cached_property
    def joins(self) -> list[_Join]:
        """The joins of streams that Spark runs."""
        joins = (self._join(node) for node in self.plan.walk() if node.joins_streams)
        return [join for join in joins if join is not None]

    def _join(self, node: Node) -> _Join | None:
        keys = equal_keys(self.catalyst, node)
        columns = dict(zip((LEFT, RIGHT), (_event_time_columns(child.output) for child in node.children), strict=True))
        if keys is None or any(len({column.expr_id for column in side}) > 1 for side in columns.values()):
            return None  # Spark refuses it: at start, or in the first batch because of its several event times
        late = {side: event_time_column(marked) for side, marked in columns.items()}
        by_key = watermarked_key(keys)
        if by_key is not None:
            return _Join(node, keys, by_key, late, frozenset((LEFT, RIGHT)), frozenset())
        return _Join(node, keys, by_key, late, *self.expiring(node, keys, late))

    def expiring(
        self, node: Node, keys: EqualKeys, late: dict[str, Expression | None]
    ) -> tuple[frozenset[str], frozenset[str]]:
        """Return `removed` and `capped` of a join (see `_Join`) whose state is not removed by a key."""
        expiries = expiries_of(self.catalyst, node, keys)
        # A side without a watermark removes nothing, whatever the condition says.
        caps = {side: expiry.cap is not None for side, expiry in expiries.items() if expiry is not None and late[side]}
        return frozenset(side for side, cap in caps.items() if not cap), frozenset(
            side for side, cap in caps.items() if cap
        )

    def event_times(self, node: Node) -> list[Expression]:
        """Return the columns by which a node drops late rows and closes state."""
        if not node.streaming:
            return []
        if node.kind == "Aggregate":
            return [] if self.output_mode == "complete" else _event_time_columns(node.list("groupingExpressions"))
        if node.kind in MAPS:
            return _event_time_columns(node.list("groupingAttributes")) if self.maps_windows else []
        timed = node.joins_streams or node.kind in ("Deduplicate", "DeduplicateWithinWatermark")
        if timed or (node.kind in (*PROCESSORS, *GROUP_STATES) and by_event_time(node)):
            return [column for child in node.children for column in _event_time_columns(child.output)]
        return []

    @cached_property
    def sources(self) -> dict[int, set[int]]:
        """Identity of a computed column → identities of the columns in its expression."""
        inputs: dict[int, set[int]] = {}
        for node in self.plan.walk():
            for expression in node.expressions:
                if expression.kind == "Alias":
                    inputs.setdefault(expression.expr_id, set()).update(_references(expression))
            if node.kind == "Union":
                rows: Sequence[Sequence[Expression]] = [child.output for child in node.children]
            else:
                rows = node.rows("projections") if node.kind == "Expand" else []
            for row in rows:
                for column, value in zip(node.output, row, strict=True):
                    inputs.setdefault(column.expr_id, set()).update(_references(value))
        return inputs

    def origins(self, column: Expression) -> set[int]:
        """Return the identities of a column and of all columns that it is computed from."""
        seen: set[int] = set()
        pending = {column.expr_id}
        while pending:
            seen |= pending
            pending = {source for column_id in pending for source in self.sources.get(column_id, ())} - seen
        return seen


def _references(expression: Expression) -> set[int]:
    return {part.expr_id for part in expression.walk() if part.kind == "AttributeReference"}


Found = Iterator[tuple[Node, str]]
"""Nodes with wrong rows, each with the part of the query that causes them."""


def _one_sided(query: _Query, *, outer: bool) -> Found:
    """Find joins that remove state by a key that has a watermark on one side only.

    Rows of the other side are not late by it: they may arrive after the rows that they match were removed.
    """
    for join in query.joins:
        if join.by_key is None or outer != bool(join.preserved):
            continue
        left, right = join.keys.left[join.by_key], join.keys.right[join.by_key]
        sides = [side for side, key in ((LEFT, left), (RIGHT, right)) if event_time_column([key]) is not None]
        if len(sides) == 1:
            yield join.node, f"{left.name} = {right.name}, with a watermark on the {sides[0]} side only"


def _never_unmatched(query: _Query) -> Found:
    """Find outer joins that never remove the state of a side, and so never show its unmatched rows."""
    for join in query.joins:
        for side in join.preserved:
            if side not in join.removed | join.capped:
                yield join.node, f"the {side} side"


def _constant_bound(query: _Query) -> Found:
    """Find outer joins that never remove a side's state, since Spark takes a constant for a time bound."""
    for join in query.joins:
        for side in sorted(join.capped.intersection(join.preserved)):
            yield join.node, f"the {side} side"


def _by_other_time(query: _Query) -> Found:
    """Find joins whose condition bounds another column than the one by which Spark removes a side's state."""
    for join in query.joins:
        for side in sorted(join.removed if join.by_key is None else ()):
            late = join.late[side]
            assert late is not None
            conjuncts = [] if join.keys.rest is None else join.keys.rest.conjuncts
            parts = [conjunct for conjunct in conjuncts if late.expr_id in _references(conjunct)]
            # With only the conjuncts on this column, Spark should remove the same state; if not, another column did it.
            keys = with_rest(query.catalyst, join.keys, parts)
            if side not in query.expiring(join.node, keys, join.late)[0]:
                yield join.node, f"the state of the {side} side, removed by {late.name}"


def _late_above_join(query: _Query) -> Found:
    """Find operators that drop late rows by a column of a join side whose state is never removed."""
    for node in query.plan.walk():
        below = {id(descendant) for child in node.children for descendant in child.walk()}
        joins = [join for join in query.joins if id(join.node) in below]
        for column in query.event_times(node) if joins else []:
            origins = query.origins(column)
            for join in joins:
                for side, late in join.late.items():
                    kept = side not in join.removed and not join.capped  # a cap holds back the watermark above the join
                    if late is not None and late.expr_id in origins and kept:
                        yield node, f"{late.name}, of the {side} side of the {describe(join.node)}"


def _marked_structs(query: _Query) -> Found:
    """Find the topmost operator that waits for a watermark which never moves."""
    timed = next((node for node in query.plan.walk() if query.event_times(node)), None)
    for node in query.plan.walk() if timed is not None else ():
        if _marks_struct(node):
            assert timed is not None
            yield timed, f"withWatermark('{node.expression('eventTime').name}', …)"


@dataclass(frozen=True)
class Shape:
    """A query shape for which Spark returns wrong rows.

    Attributes:
        certain: whether rows are wrong for any data; otherwise only for an unfavourable order of rows.
        loss: the effect on the result.
        advice: the remedy.
        find: the function that finds the shape in a query.
    """

    certain: bool
    loss: str
    advice: str
    find: Callable[[_Query], Found]


SHAPES = {
    "MP-OUTER-WATERMARK": Shape(
        True,
        "a row is shown without a match as soon as the watermark passes it, and a match that comes later is lost",
        "Give both sides a watermark on the time by which they are joined",
        lambda query: _one_sided(query, outer=True),
    ),
    "MP-OUTER-UNMATCHED": Shape(
        True,
        "rows without a match are never shown, since nothing removes the state of their side",
        "Give both sides a watermark, and bound the time of this side from below by that of the other, as in "
        "l.time >= r.time - interval 1 hour",
        _never_unmatched,
    ),
    "MP-OUTER-CONSTANT": Shape(
        True,
        "rows without a match are never shown, since Spark takes a comparison of a column of their side with a "
        "constant for a bound of their time",
        "Compare with the constant below the join, as in select *, v > 2 as wanted, and join on wanted",
        _constant_bound,
    ),
    "MP-STRUCT-WATERMARK": Shape(
        True,
        "the watermark never moves, since Spark reads a window's place in memory as its time: state is kept for ever, "
        "and no window closes",
        "Call withWatermark on the timestamp of which the window is made",
        _marked_structs,
    ),
    "MP-JOIN-WATERMARK": Shape(
        False,
        "rows leave the state as soon as the watermark passes them, and a match that comes later is lost",
        "Give both sides a watermark on the time by which they are joined",
        lambda query: _one_sided(query, outer=False),
    ),
    "MP-JOIN-TIME": Shape(
        False,
        "state is removed by another time than the one that the condition bounds, and a match that comes later is lost",
        "Bound the column that has the watermark, or call withWatermark on the column that is bounded",
        _by_other_time,
    ),
    "MP-LATE-ROWS": Shape(
        False,
        "the join's state keeps rows for ever, and those that match when they are older than the watermark are dropped "
        "as late",
        "Bound this time from below by that of the other side, as in l.time >= r.time - interval 1 hour, or use that "
        "of the other side",
        _late_above_join,
    ),
}
"""All shapes, by code."""
