"""What reading joins asks of Spark's own optimiser and operators; beside `catalyst`, what touches JVM objects."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

from py4j.protocol import Py4JError

from millpond.errors import UsageError
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node, items

_JOIN_HELPERS = (
    "org.apache.spark.sql.execution.streaming.operators.stateful.join.StreamingSymmetricHashJoinHelper",
    "org.apache.spark.sql.execution.streaming.StreamingSymmetricHashJoinHelper",
)
"""Where the versions of Spark have it."""


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
    arguments = (java.left().output(), java.right().output(), *keys.java, some)
    for name in _JOIN_HELPERS:
        helper = catalyst._class(name)
        for flags in ([False], []):  # whether a side may have several columns of event time
            try:
                both = helper.getStateWatermark(*arguments, *flags)
            except (Py4JError, TypeError) as error:
                if isinstance(error, Py4JError) and "does not exist" not in str(error):
                    raise
                continue
            left, right = both._1(), both._2()
            return (left.get() if left.isDefined() else None), (right.get() if right.isDefined() else None)
    raise UsageError("This version of Spark does not tell state watermarks.", action="Use a tested version.")


def is_before_43(catalyst: Catalyst) -> bool:
    """Whether this is a version before 4.3."""
    return tuple(int(part) for part in catalyst.spark.version.split(".")[:2]) < (4, 3)
