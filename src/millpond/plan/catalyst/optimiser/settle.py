"""A query's plan as Spark's optimiser would leave its conditions, its joins, and its groupings."""

from __future__ import annotations

from types import MappingProxyType

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Node
from millpond.plan.catalyst.optimiser.arguments import with_guarded_arguments
from millpond.plan.catalyst.optimiser.conditions import (
    with_settled_conditions,
    with_simplified_conditions,
    without_clock,
    without_repeated_groupings,
)
from millpond.plan.catalyst.optimiser.windows import Needed, needed_columns

_STATE = {"Aggregate", "Deduplicate", "DeduplicateWithinWatermark", "Distinct", "Window", "Join"}
"""Nodes below which a filter on their rows may be moved."""

_FILTERS = {"Filter", "Join", "LateralJoin", "Generate"}
"""Nodes that filter rows, or from which Spark infers filters."""


def settled(catalyst: Catalyst, plan: Node, *, shared: bool, stages: bool) -> tuple[Node, Needed]:
    """Settle what decides which rows reach which operator; plans that it cannot change are not optimised.

    Args:
        catalyst: of the query's session.
        plan: an analysed plan.
        shared: whether Spark evaluates a common table expression once for several readers; such a plan keeps its
            conditions.
        stages: whether the plan has lookahead stages. In the rewritten plan, no condition moves past the node that a
            stage becomes, so all of them are settled here.

    Returns:
        The plan, and the columns that its `Window` nodes need.
    """
    joins = any(node.joins_streams for node in plan.walk()) and not shared
    windows = any(node.kind == "Window" and node.streaming for node in plan.walk()) and not shared
    filters = stages or (any(_filters_state(node) for node in plan.walk()) and not shared)
    if joins or windows or filters:
        plan, with_clock = without_clock(catalyst, plan)
        plan = with_simplified_conditions(catalyst, plan)
        if joins or filters:
            semi_joins = not any(moves_below_state(node) for node in plan.walk())  # else the query stays on Spark
            plan = with_settled_conditions(catalyst, plan, pruned=joins, semi_joins=semi_joins)
        plan = with_clock(plan)
    plan = with_guarded_arguments(catalyst, without_repeated_groupings(catalyst, plan))
    return plan, needed_columns(catalyst, plan) if windows else MappingProxyType({})


def moves_below_state(node: Node) -> bool:
    """Whether this is a semi join of two streams that Spark moves below state, where rows match at other times."""
    if not node.joins_streams or node.join_type != "LeftSemi":
        return False
    return any(
        below.joins_streams or (below.streaming and below.kind in ("Aggregate", "Distinct", "Window"))
        for below in node.children[0].walk()
    )


def _filters_state(node: Node) -> bool:
    inner = (below for child in node.children for below in child.walk())
    return node.kind in _FILTERS and any(below.streaming and below.kind in _STATE for below in inner)
