"""Query shapes for which Spark gives wrong rows without an error, and Millpond the same rows.

Later versions of Spark refuse some of them. Each shape is a predicate over the plan as Spark's optimiser leaves it:
what Spark does depends on where filters stand, on the types of joins, and on which columns with a watermark are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from millpond.plan.catalyst.joins import EqualKeys, equal_keys, with_rest
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import WATERMARK_DELAY, Expression, Node
from millpond.plan.catalyst.text import nameless
from millpond.plan.reading.decision import Wrong, describe
from millpond.plan.reading.join import expiries_of, tagged, watermarked_key
from millpond.plan.reading.join_condition import LEFT, RIGHT, conjuncts
from millpond.plan.reading.map_groups import MAPS
from millpond.plan.reading.processor import GROUP_STATES, PROCESSORS, by_event_time

_PRESERVED = {"LeftOuter": (LEFT,), "RightOuter": (RIGHT,), "FullOuter": (LEFT, RIGHT)}
"""Type of an outer join → the sides whose rows it shows without a match, too."""


def wrong_in_spark(catalyst: Catalyst, analyzed: Node, output_mode: str, *, maps_windows: bool) -> tuple[Wrong, ...]:
    """Find the shapes of a query for which Spark gives wrong rows.

    Args:
        catalyst: of the query's session.
        analyzed: the plan as the user wrote it. It may be one that Spark refuses.
        output_mode: `append`, `update` or `complete`.
        maps_windows: whether `applyInPandas` and `applyInArrow` are called with whole closed windows.
    """
    # Optimising takes some 100 ms: most queries are told by their analysed plan.
    if not any(_joins_streams(node) or _marks_struct(node) for node in analyzed.walk()):
        return ()
    query = _Query(catalyst, catalyst.optimized(analyzed), output_mode, maps_windows)
    found = (
        Wrong(code, describe(node), nameless(detail), shape.certain, shape.loss, shape.advice)
        for code, shape in SHAPES.items()
        for node, detail in shape.find(query)
    )
    return tuple(dict.fromkeys(found))  # a common table expression stands in the plan once for each reader


def _joins_streams(node: Node) -> bool:
    return node.kind == "Join" and all(child.streaming for child in node.children)


def _marks_struct(node: Node) -> bool:
    return node.kind == "EventTimeWatermark" and node.expression("eventTime").type.startswith("struct")


def _tagged(columns: Sequence[Expression]) -> list[Expression]:
    return [one for one in columns if one.kind in ("AttributeReference", "Alias") and WATERMARK_DELAY in one.metadata]


@dataclass(frozen=True)
class _Join:
    """A join of two streams.

    Attributes:
        node: of the plan. keys: its equal keys and the rest of its condition.
        by_key: the number of the key by which the state of both sides is removed, if it is.
        late: by side, the column by which its rows are late.
        removed: the sides whose state is removed as the watermark moves.
        capped: the sides whose state stays because the condition compares a column of theirs with a constant.
    """

    node: Node
    keys: EqualKeys
    by_key: int | None
    late: dict[str, Expression | None]
    removed: frozenset[str]
    capped: frozenset[str]

    @property
    def preserved(self) -> tuple[str, ...]:
        """The sides whose rows are shown without a match, too."""
        return _PRESERVED.get(self.node.join_type, ())


class _Query:
    """An optimised plan, and what the shapes ask of it."""

    def __init__(self, catalyst: Catalyst, plan: Node, output_mode: str, maps_windows: bool) -> None:
        self.catalyst = catalyst
        self.plan = plan
        self.output_mode = output_mode
        self.maps_windows = maps_windows

    @cached_property
    def joins(self) -> list[_Join]:
        """The joins of streams that Spark runs."""
        found = (self._join(node) for node in self.plan.walk() if _joins_streams(node))
        return [join for join in found if join is not None]

    def _join(self, node: Node) -> _Join | None:
        keys = equal_keys(self.catalyst, node)
        columns = dict(zip((LEFT, RIGHT), (_tagged(child.output) for child in node.children), strict=True))
        if keys is None or any(len({one.expr_id for one in side}) > 1 for side in columns.values()):
            return None  # Spark refuses it: at start, or in the first batch for its several event times
        late = {side: tagged(marked) for side, marked in columns.items()}
        by_key = watermarked_key(keys)
        if by_key is not None:
            return _Join(node, keys, by_key, late, frozenset((LEFT, RIGHT)), frozenset())
        return _Join(node, keys, by_key, late, *self.expiring(node, keys, late))

    def expiring(
        self, node: Node, keys: EqualKeys, late: dict[str, Expression | None]
    ) -> tuple[frozenset[str], frozenset[str]]:
        """`removed` and `capped` of a join (see `_Join`) whose state is not removed by a key."""
        expiries = expiries_of(self.catalyst, node, keys)
        caps = {side: one.cap is not None for side, one in expiries.items() if one is not None and late[side]}
        return frozenset(one for one, cap in caps.items() if not cap), frozenset(
            one for one, cap in caps.items() if cap
        )

    def event_times(self, node: Node) -> list[Expression]:
        """The columns by which a node drops late rows and closes state."""
        if not node.streaming:
            return []
        if node.kind == "Aggregate":
            return [] if self.output_mode == "complete" else _tagged(node.list("groupingExpressions"))
        if node.kind in MAPS:
            return _tagged(node.list("groupingAttributes")) if self.maps_windows else []
        timed = _joins_streams(node) or node.kind in ("Deduplicate", "DeduplicateWithinWatermark")
        if timed or (node.kind in (*PROCESSORS, *GROUP_STATES) and by_event_time(node)):
            return [one for child in node.children for one in _tagged(child.output)]
        return []

    @cached_property
    def sources(self) -> dict[int, set[int]]:
        """Identities of computed columns → those of the columns that they are computed of."""
        found: dict[int, set[int]] = {}
        for node in self.plan.walk():
            for one in node.expressions:
                if one.kind == "Alias":
                    found.setdefault(one.expr_id, set()).update(_references(one))
            if node.kind == "Union":
                rows: Sequence[Sequence[Expression]] = [child.output for child in node.children]
            else:
                rows = node.rows("projections") if node.kind == "Expand" else []
            for row in rows:
                for column, value in zip(node.output, row, strict=True):
                    found.setdefault(column.expr_id, set()).update(_references(value))
        return found

    def origins(self, column: Expression) -> set[int]:
        """Identities of all columns that a column is made of, and its own."""
        seen: set[int] = set()
        waiting = {column.expr_id}
        while waiting:
            seen |= waiting
            waiting = {source for one in waiting for source in self.sources.get(one, ())} - seen
        return seen


def _references(expression: Expression) -> set[int]:
    return {part.expr_id for part in expression.walk() if part.kind == "AttributeReference"}


Found = Iterator[tuple[Node, str]]
"""Nodes whose rows are wrong, each with the part of the query that it is about."""


def _one_sided(query: _Query, *, outer: bool) -> Found:
    """Joins that remove state by a key that has a watermark on one side only.

    Rows of the other side are not late by it: they come when the rows that they match are gone.
    """
    for join in query.joins:
        if join.by_key is None or outer != bool(join.preserved):
            continue
        left, right = join.keys.left[join.by_key], join.keys.right[join.by_key]
        sides = [side for side, key in ((LEFT, left), (RIGHT, right)) if tagged([key]) is not None]
        if len(sides) == 1:
            yield join.node, f"{left.name} = {right.name}, with a watermark on the {sides[0]} side only"


def _never_unmatched(query: _Query) -> Found:
    """Outer joins that never remove the state of a side whose unmatched rows they show when it is removed."""
    for join in query.joins:
        for side in join.preserved:
            if side not in join.removed | join.capped:
                yield join.node, f"the {side} side"


def _constant_bound(query: _Query) -> Found:
    """Outer joins that never remove the state of a side, since Spark takes a constant for a bound of its time."""
    for join in query.joins:
        for side in sorted(join.capped.intersection(join.preserved)):
            yield join.node, f"the {side} side"


def _by_other_time(query: _Query) -> Found:
    """Joins whose condition bounds another column than the one by which Spark removes a side's state."""
    for join in query.joins:
        for side in sorted(join.removed if join.by_key is None else ()):
            late = join.late[side]
            assert late is not None
            parts = [one for one in conjuncts(join.keys.rest) if late.expr_id in _references(one)]
            keys = with_rest(query.catalyst, join.keys, parts)
            if side not in query.expiring(join.node, keys, join.late)[0]:
                yield join.node, f"the state of the {side} side, removed by {late.name}"


def _late_above_join(query: _Query) -> Found:
    """Operators that drop late rows, by a column of a side of a join whose state is never removed."""
    for node in query.plan.walk():
        below = {id(one) for child in node.children for one in child.walk()}
        joins = [join for join in query.joins if id(join.node) in below]
        for column in query.event_times(node) if joins else []:
            origins = query.origins(column)
            for join in joins:
                for side, late in join.late.items():
                    kept = side not in join.removed and not join.capped  # a cap holds the watermark above the join
                    if late is not None and late.expr_id in origins and kept:
                        yield node, f"{late.name}, of the {side} side of the {describe(join.node)}"


def _marked_structs(query: _Query) -> Found:
    """The topmost operator that waits for a watermark which never moves."""
    timed = next((node for node in query.plan.walk() if query.event_times(node)), None)
    for node in query.plan.walk() if timed is not None else ():
        if _marks_struct(node):
            assert timed is not None
            yield timed, f"withWatermark('{node.expression('eventTime').name}', …)"


@dataclass(frozen=True)
class Shape:
    """A query shape for which Spark gives wrong rows.

    Attributes:
        certain: whether rows are wrong whatever the data; otherwise only if rows come in an unfavourable order.
        loss: what goes wrong. advice: what to do.
        find: finds it in a query.
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
"""Every shape that is found, by its code."""
