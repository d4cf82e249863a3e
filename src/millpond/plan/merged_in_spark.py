"""Find stateful operators that Spark's optimiser removes from a query, or merges with others.

Spark removes an outer join, for example, if only a `max` of its preserved side is read. Millpond applies just the rules
of Spark's optimiser that decide which rows reach which operator (`catalyst.optimiser.settle`). With an operator that
Spark does not run, other rows would be late, and watermarks of removed branches would count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Node
from millpond.plan.catalyst.session import STREAMING_CHECK, is_on
from millpond.plan.decision.decision import describe

_KINDS = {
    "Aggregate": "aggregate",
    "Distinct": "aggregate",  # as in Spark's optimised plan
    "Deduplicate": "deduplication",
    "DeduplicateWithinWatermark": "deduplication within the watermark",
}
"""Kinds of nodes → their names. Spark's optimiser keeps processors, and Spark runs no `Window` on streams."""


def merged_in_spark(
    catalyst: Catalyst, analyzed: Node, settled: Node, optimized: Callable[[], Node], output_mode: str
) -> str:
    """Name the stateful operators that Spark's optimised plan lacks; empty if it lacks none.

    A query that Spark refuses has no rows on Spark to differ from: it keeps its operators.

    Args:
        catalyst: of the query's session.
        analyzed: the plan as the user wrote it.
        settled: the plan whose operators are decided.
        optimized: returns the analysed plan after Spark's optimiser, which takes about 100 ms.
        output_mode: `append`, `update` or `complete`.
    """
    ours = _stateful(settled)
    # Spark merges an operator with another, or removes it because one above does not need it.
    if ours.total() < 2:
        return ""
    checked = is_on(catalyst.spark, STREAMING_CHECK, True)
    if checked and not catalyst.passes_streaming_check(analyzed, output_mode):
        return ""
    try:
        return ", ".join(ours - _stateful(optimized()))
    except (Py4JJavaError, PySparkException):  # a constant has no value (`1 / 0`): a batch fails with Spark's error
        return ""


def _stateful(plan: Node) -> Counter[str]:
    """Count the stateful nodes of each kind; joins of streams by their type."""
    names = (describe(node) if node.joins_streams else _KINDS.get(node.kind) for node in plan.walk() if node.streaming)
    return Counter(name for name in names if name is not None)
