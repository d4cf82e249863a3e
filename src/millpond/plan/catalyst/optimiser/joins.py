"""Join properties computed by Spark's own optimiser and operators."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node, items
from millpond.plan.catalyst.versions import join_state_watermarks


class EqualKeys(NamedTuple):
    """A join condition, split into equal keys and the rest.

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
    """Extract the equal keys from a join's condition, as Spark does; None if there are none."""
    extracted = catalyst.object("org.apache.spark.sql.catalyst.planning.ExtractEquiJoinKeys").unapply(join.java)
    if not extracted.isDefined():
        return None
    parts = extracted.get()
    rest = parts._4()
    return EqualKeys(
        [Expression(key) for key in items(parts._2())],
        [Expression(key) for key in items(parts._3())],
        Expression(rest.get()) if rest.isDefined() else None,
        (parts._2(), parts._3(), rest),
    )


def with_rest(catalyst: Catalyst, keys: EqualKeys, conjuncts: Sequence[Expression]) -> EqualKeys:
    """Return the keys with these conjuncts as the rest of the condition."""
    if not conjuncts:
        no_rest = catalyst.object("scala.Option").empty()
        return keys._replace(rest=None, java=(*keys.java[:2], no_rest))
    conjunction = catalyst.object("org.apache.spark.sql.catalyst.expressions.And")
    rest = reduce(conjunction, (conjunct.java for conjunct in conjuncts))
    return keys._replace(rest=Expression(rest), java=(*keys.java[:2], catalyst.object("scala.Option").apply(rest)))


def state_watermarks(
    catalyst: Catalyst, join: Node, keys: EqualKeys, watermark_ms: int
) -> tuple[int | None, int | None]:
    """Return the state watermarks (ms) of both sides of a streaming join, for an input watermark above 2³¹ ms.

    The input watermark has to exceed 2³¹, so that py4j sends it as a long.
    """
    watermark = catalyst.object("scala.Option").apply(watermark_ms)
    java = join.java
    both = join_state_watermarks(catalyst.object, java.left().output(), java.right().output(), *keys.java, watermark)
    left, right = both._1(), both._2()
    return (left.get() if left.isDefined() else None), (right.get() if right.isDefined() else None)
