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

_IN_FINISH_ANALYSIS = frozenset(
    {
        *ELIMINATE_ALIASES,
        f"{OPTIMIZER}.EliminateResolvedHint",
        f"{OPTIMIZER}.ReplaceExpressions",
        f"{OPTIMIZER}.PullOutGroupingExpressions",
        f"{OPTIMIZER}.ComputeCurrentTime",
        f"{OPTIMIZER}.SpecialDatetimeValues",
    }
)
"""Rules that Spark applies within its rule `FinishAnalysis`: to exclude them by name has no effect."""
_EXCLUDED = "spark.sql.optimizer.excludedRules"

MAX_PASSES = 100
"""Same as `spark.sql.optimizer.maxIterations`."""


def apply_rules(catalyst: Catalyst, rules: Sequence[str], java: Any, passes: int = 1) -> Any:
    """Apply rules in turn to a JVM plan, for at most `passes` passes or until nothing changes.

    Rules that the user excludes from Spark's optimiser are not applied.
    """
    objects = [catalyst.object(rule) for rule in _without_excluded(catalyst, rules)]
    for _ in range(passes):
        before = java
        for rule in objects:
            java = rule.apply(java)
        if java.fastEquals(before):
            break
    return java


def _without_excluded(catalyst: Catalyst, rules: Sequence[str]) -> Sequence[str]:
    """Leave out the rules that the session excludes."""
    setting = catalyst.spark.conf.get(_EXCLUDED, None)
    if not setting:
        return rules
    required = catalyst.spark._jsparkSession.sessionState().optimizer().nonExcludableRules()
    excluded = {name.strip() for name in setting.split(",")} - _IN_FINISH_ANALYSIS
    return [rule for rule in rules if rule not in excluded or required.contains(rule)]
