"""Adjust the decided operators of a query to each other: output modes, patterns, watermark lags."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import msgspec

from millpond.errors import UnsupportedError
from millpond.plan.catalyst.nodes import Node
from millpond.plan.changelog.changes import leave_updates_to_spark
from millpond.plan.decision.decision import Decided, Operator
from millpond.plan.reading.aggregate import MAPS
from millpond.plan.reading.join import JoinReading
from millpond.plan.reading.processor import EVENT_TIME_NODE, GROUP_STATES, PROCESSORS, passes_watermark
from millpond.plan.reading.reasons import Reason
from millpond.spec.kinds.processor import ProcessorSpec
from millpond.spec.operators import Pattern
from millpond.spec.protocol import NO_WATERMARK


def reconciled(root: Decided, output_mode: str, pattern: Pattern) -> Decided:
    """Leave operators to Spark that conflict with others, and apply patterns and watermark lags.

    Args:
        root: a plan whose operators were decided independently.
        output_mode: `append`, `update` or `complete`.
        pattern: the store pattern of groups that are shown once, where there is a choice.

    Raises:
        UnsupportedError: an operator would be left to Spark, where it has another meaning.
    """
    root = _in_complete_mode(_with_emitted_times(root), output_mode)
    operators = list(root.operators())
    if any(operator.needs_no_data_batches for operator in operators) and any(
        operator.spec is None for operator in operators
    ):
        # A Spark operator would not see the watermark that passes ours.
        root = root.with_ours(lambda operator: operator.left_to_spark(Reason("MP-BESIDE")))
    _check_whole_windows(root)
    return _with_lags(root.with_ours(lambda operator: _with_pattern(operator, pattern)))[0]


def _with_emitted_times(decided: Decided) -> Decided:
    """Set the output columns of processors whose event time closes state in operators above."""
    children = tuple(_with_emitted_times(child) for child in decided.children)
    if decided.node.kind == EVENT_TIME_NODE:
        children = tuple(_with_emitted_time(decided.node, child) for child in children)
    return replace(decided, children=children)


def _with_emitted_time(node: Node, below: Decided) -> Decided:
    """Set the processor's output column whose event time closes state in operators above."""
    operator = below.operator
    if operator is None or not isinstance(operator.spec, ProcessorSpec):
        return below
    if operator.spec.time_mode != "event":  # on Spark, no watermark passes the processor in other time modes
        return replace(
            below, operator=operator.left_to_spark(Reason("MP-PROCESSOR", "an event time in another time mode"))
        )
    column = node.expression("eventTime").expr_id
    position = next(number for number, output in enumerate(below.node.output) if output.expr_id == column)
    return replace(below, operator=replace(operator, spec=msgspec.structs.replace(operator.spec, emitted=position)))


def with_indexes(root: Decided) -> Decided:
    """Return the plan with the Millpond operators numbered bottom up, left to right."""
    numbers = count()
    return root.with_ours(lambda operator: replace(operator, index=next(numbers)))


def _in_complete_mode(decided: Decided, output_mode: str) -> Decided:
    """Leave operators to Spark that cannot show all their rows again in each batch of complete mode."""
    if output_mode != "complete":
        return decided
    children = tuple(_in_complete_mode(child, output_mode) for child in decided.children)
    operator = decided.operator
    spec = operator.spec if operator is not None else None
    if (
        operator is not None
        and spec is not None
        and spec.emits_updates
        and not spec.changes
        and not spec.facts.supports_complete
    ):
        operator = operator.left_to_spark(Reason("MP-MODE", output_mode))
        children = tuple(leave_updates_to_spark(child) for child in children)
    return Decided(decided.node, children, operator)


def _check_whole_windows(root: Decided) -> None:
    """Refuse to leave an operator to Spark that would call its function with other rows there."""
    for decided in root.walk():
        operator = decided.operator
        if decided.node.kind in MAPS and operator is not None and operator.spec is None:
            raise UnsupportedError(
                f"The operator '{operator.title}' cannot be called with whole closed windows. {operator.reason}.",
                action="Change the query, or set spark.millpond.mapGroups to 'batch', which is what Spark does.",
            )


def _with_pattern(operator: Operator, pattern: Pattern) -> Operator:
    return operator if operator.spec is None else replace(operator, spec=operator.spec.with_pattern(pattern))


def _with_lags(decided: Decided) -> tuple[Decided, int | None]:
    """Set each operator's watermark lag; return the plan and the lag of its output in milliseconds.

    The lag is None if no watermark passes: the input has none, or went through a processor that Spark lets none pass.
    A join's output may be as old as the oldest rows in its state.
    """
    below = [_with_lags(child) for child in decided.children]
    # The input that lags most decides: rows of that age may still come.
    lag = max((lag for _, lag in below if lag is not None), default=None)
    node, operator = decided.node, decided.operator
    if node.kind == "EventTimeWatermark":
        lag = lag or 0
    if operator is not None and operator.spec is not None:
        operator = replace(operator, spec=operator.spec.with_lag(NO_WATERMARK if lag is None else lag))
        if lag is not None and isinstance(operator.reading, JoinReading):
            lag += operator.reading.output_lag_ms
    if node.kind in (*PROCESSORS, *GROUP_STATES) and not passes_watermark(node):
        lag = None
    return Decided(node, tuple(child for child, _ in below), operator), lag
