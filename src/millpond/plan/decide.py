"""Decide for each stateful operator of a query whether it runs on Millpond or stays on Spark, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import MappingProxyType

from pyspark.sql import DataFrame

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Node
from millpond.plan.catalyst.optimiser.settle import settled
from millpond.plan.catalyst.session import in_session
from millpond.plan.changelog.between import unstable_between
from millpond.plan.changelog.changes import shows_changes, with_changelog_inputs, with_changelog_output
from millpond.plan.decision.decision import Decided, Decision
from millpond.plan.decision.reader import OperatorReader
from millpond.plan.lookahead.keys import find_stages, missing_stages
from millpond.plan.lookahead.stages import with_stage_projections, without_stages
from millpond.plan.merged_in_spark import merged_in_spark
from millpond.plan.reading.ranking import Limits, limits_of
from millpond.plan.reading.reasons import Reason
from millpond.plan.reconcile import reconciled, with_indexes
from millpond.plan.wrong_in_spark import wrong_in_spark
from millpond.spec.operators import Pattern


@in_session
def decide(
    df: DataFrame,
    output_mode: str = "append",
    changes: str = "upsert",
    pattern: Pattern = "auto",
    map_groups: str = "batch",
) -> Decision:
    """Decide where each stateful operator of a streaming DataFrame runs.

    Args:
        df: a streaming DataFrame.
        output_mode: `append`, `update` or `complete`.
        changes: the changes shown in update mode: `upsert` shows new versions of rows, `all` also deletions.
        pattern: the store pattern of groups that are shown once, where there is a choice.
        map_groups: the input of `applyInPandas` and `applyInArrow` functions. `batch` is a group's rows in one
            micro-batch, as in Spark; `window` is all its rows, once its window has closed.

    Returns:
        The decision for every operator, with the plan with lookahead stages, if there are any.

    Raises:
        UnsupportedError: all changes are requested, but the query cannot emit all of them. Or functions are to be
            called with whole closed windows, which is not possible here.
    """
    catalyst = Catalyst(df.sparkSession)
    marked = catalyst.analyzed(df)
    # Operators are decided without stages, so that a stage never changes where an operator runs.
    analyzed = without_stages(catalyst, marked)
    mode = output_mode.lower()
    # After inlining, only expressions are left that Spark evaluates once for several readers.
    shared = any(node.kind == "WithCTE" for node in analyzed.walk())
    optimized = cache(lambda: catalyst.optimized(analyzed))
    root = _decided(catalyst, analyzed, analyzed, optimized, mode, pattern, map_groups, shared=shared)
    all_changes = changes == "all" and mode == "update" and shows_changes(root, analyzed)

    def with_output(root: Decided) -> Decided:
        return with_indexes(with_changelog_output(root) if all_changes else root)

    wrong = wrong_in_spark(catalyst, analyzed, optimized, mode, maps_windows=map_groups == "window")
    decision = Decision(with_output(root), mode, analyzed, all_changes, wrong=wrong)
    # Without stages, with a common table expression, or without operators here, there is nothing to prefetch.
    if marked is analyzed or shared or not decision.on_millpond:
        return decision
    plan = with_stage_projections(catalyst, marked)
    staged = with_output(_decided(catalyst, analyzed, plan, optimized, mode, pattern, map_groups, stages=True))
    # Stages must not change the decision: the plan with them must give the same operators.
    if [(operator.title, operator.spec) for operator in staged.operators()] != [
        (operator.title, operator.spec) for operator in decision.operators
    ]:
        return replace(
            decision, stages=missing_stages(plan, (), "they would keep a rule of Spark's from its conditions")
        )
    stages = find_stages(catalyst, staged)
    return replace(
        decision, staged=staged, stages=stages + missing_stages(plan, stages, "nothing reads what they name")
    )


def _decided(
    catalyst: Catalyst,
    analyzed: Node,
    plan: Node,
    optimized: Callable[[], Node],
    mode: str,
    pattern: Pattern,
    map_groups: str,
    *,
    shared: bool = False,
    stages: bool = False,
) -> Decided:
    """Decide about the operators of a plan: the analysed one, or the same with lookahead stages."""
    plan, needed = settled(catalyst, plan, shared=shared, stages=stages)
    reader = OperatorReader(catalyst, plan, mode, map_groups, needed, shared=shared)
    unstable = cache(lambda: unstable_between(analyzed))

    def visit(node: Node, limits: Limits) -> Decided:
        below = limits_of(node, limits)
        children = tuple(visit(child, below) for child in node.children)
        operator = reader.read(node, limits) if node.streaming else None
        if operator is not None:
            operator, children = with_changelog_inputs(operator, children, mode, unstable)
        return Decided(node, children, operator)

    root = visit(plan, MappingProxyType({}))
    # In a shared common table expression, all operators stay on Spark.
    if not shared and (merged := merged_in_spark(catalyst, analyzed, plan, optimized, mode)):
        root = root.with_ours(lambda operator: operator.left_to_spark(Reason("MP-MERGED", merged)))
    return reconciled(root, mode, pattern)
