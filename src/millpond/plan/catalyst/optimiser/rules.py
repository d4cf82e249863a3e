"""Application of Spark's optimiser rules to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpond.plan.catalyst.jvm import Catalyst

OPTIMIZER = "org.apache.spark.sql.catalyst.optimizer"
"""The package of most rules."""
ELIMINATE_ALIASES = (
    "org.apache.spark.sql.catalyst.analysis.EliminateSubqueryAliases",
    "org.apache.spark.sql.catalyst.analysis.EliminateView",
)
PRUNE_COLUMNS = (f"{OPTIMIZER}.ColumnPruning",)

MAX_PASSES = 100
"""Same as `spark.sql.optimizer.maxIterations`."""


def apply_rules(catalyst: Catalyst, rules: Sequence[str], java: Any, passes: int = 1) -> Any:
    """Apply rules in turn to a JVM plan, for at most `passes` passes or until nothing changes."""
    objects = [catalyst.object(rule) for rule in rules]
    for _ in range(passes):
        before = java
        for rule in objects:
            java = rule.apply(java)
        if java.fastEquals(before):
            break
    return java
