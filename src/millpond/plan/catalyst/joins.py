"""What reading joins asks of Spark's own optimiser and operators; beside `catalyst`, what touches JVM objects."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node, items
from millpond.plan.catalyst.versions import join_state_watermarks


class EqualKeys(NamedTuple):
    """The condition of a join, split.

    Attributes:
        left, right: expressions over the sides that have to be equal, pair by pair.
        rest: the rest of the condition.
        java: the same as JVM objects.
    """

    left: list[Expression]
    right: list[Expression]
    rest: Expression | None
    java: tuple[Any, Any, Any]


def equal_keys(catalyst: Catalyst, join: Node) -> EqualKeys | None:
    """The keys by which a join compares its sides for equality, as Spark takes them out of its condition."""
    found = catalyst._class("org.apache.spark.sql.catalyst.planning.ExtractEquiJoinKeys").unapply(join.java)
    if not found.isDefined():
        return None
    parts = found.get()
    rest = parts._4()
    return EqualKeys(
        [Expression(key) for key in items(parts._2())],
        [Expression(key) for key in items(parts._3())],
        Expression(rest.get()) if rest.isDefined() else None,
        (parts._2(), parts._3(), rest),
    )


def with_rest(catalyst: Catalyst, keys: EqualKeys, conjuncts: Sequence[Expression]) -> EqualKeys:
    """The same keys, with these conjuncts as the rest of the condition."""
    if not conjuncts:
        none = catalyst._class("scala.Option").empty()
        return keys._replace(rest=None, java=(*keys.java[:2], none))
    conjunction = catalyst._class("org.apache.spark.sql.catalyst.expressions.And")
    rest = reduce(conjunction, (one.java for one in conjuncts))
    return keys._replace(rest=Expression(rest), java=(*keys.java[:2], catalyst._class("scala.Option").apply(rest)))


def state_watermarks(
    catalyst: Catalyst, join: Node, keys: EqualKeys, watermark_ms: int
) -> tuple[int | None, int | None]:
    """The watermarks (ms) of the state of both sides of a streaming join, given the input's (more than 2³¹)."""
    some = catalyst._class("scala.Option").apply(watermark_ms)
    java = join.java
    both = join_state_watermarks(catalyst._class, java.left().output(), java.right().output(), *keys.java, some)
    left, right = both._1(), both._2()
    return (left.get() if left.isDefined() else None), (right.get() if right.isDefined() else None)
