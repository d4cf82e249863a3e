"""What Spark evaluates between two operators where rows change, and above the last one if its changes are shown.

It is evaluated again for a row that is taken back, in a later batch, or in a later run. So it has to be `stable`, and
is pinned (docs/changes.md). It is read from the query as the user wrote it: a filter that moves below an operator by
Spark's rules still stands between two of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from millpond.checkpoint.pinned import PinnedBetween
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node
from millpond.plan.catalyst.text import Canonical, Cut, counting_settings, readable
from millpond.plan.changelog.stable import unstable
from millpond.plan.reading.decision import Decision, describe
from millpond.plan.reading.functions import replaced

_CHANGING = frozenset({"Aggregate", "Distinct", "Window"})
"""Nodes that may give out rows that change, and take such rows back."""

_STATEFUL = _CHANGING | {"Deduplicate", "DeduplicateWithinWatermark", "Join"}


@dataclass(frozen=True)
class Segment:
    """The way from one operator up to the next.

    Attributes:
        producer: the operator below. nodes: those between, bottom up.
        consumer: the operator above; None at the top of the query.
    """

    producer: Node
    nodes: tuple[Node, ...]
    consumer: Node | None

    def parts(self) -> Iterator[tuple[Node, list[Expression], Cut]]:
        """What is evaluated on the way, bottom up: of which node, which expressions, and what not to look into."""
        yield self.producer, _results(self.producer), _given(self.producer)
        for node in self.nodes:
            yield node, node.expressions, _nothing
        if self.consumer is not None:
            yield self.consumer, _inputs(self.consumer), _nothing


def segments(plan: Node) -> list[Segment]:
    """Every way from an operator that may give out rows that change to the next above it, or to the top; bottom up."""
    return list(_segments(plan, None, ()))


def _segments(node: Node, consumer: Node | None, above: tuple[Node, ...]) -> Iterator[Segment]:
    if not node.streaming:
        return
    if node.kind in _STATEFUL and (node.kind != "Join" or all(child.streaming for child in node.children)):
        for child in node.children:
            yield from _segments(child, node, ())
        if node.kind in _CHANGING and (consumer is None or consumer.kind in _CHANGING):
            yield Segment(node, tuple(reversed(above)), consumer)
        return
    for child in node.children:
        yield from _segments(child, consumer, (*above, node))


def unstable_between(plan: Node, *, top: bool = False) -> str | None:
    """What between two operators (`top`: above the last) may give something else for the same row later, if any."""
    for segment in segments(plan):
        if (segment.consumer is None) != top:
            continue
        for _, expressions, cut in segment.parts():
            said = unstable(expressions, cut)
            if said is not None:
                return said
    return None


def pinned_between(catalyst: Catalyst, decision: Decision) -> tuple[PinnedBetween, ...]:
    """What of a query must stay the same from run to run, since rows of earlier runs may be taken back."""
    retracts = any(spec.retracts for spec in decision.specs)
    wanted = [
        segment
        for segment in segments(decision.analyzed)
        if (decision.all_changes if segment.consumer is None else retracts)
    ]
    return tuple(_pinned(catalyst, segment) for segment in wanted)


def _pinned(catalyst: Catalyst, segment: Segment) -> PinnedBetween:
    canonical = Canonical(catalyst, segment.producer.output)
    shown, exact = [], []
    for node, expressions, cut in segment.parts():
        computed = [one for one in expressions if node.kind != "Project" or not canonical.passes(one)]
        exact.append(f"{node.kind}[{', '.join(canonical.expression(expression, cut) for expression in computed)}]")
        said = _functions(node) if node is segment.consumer else [one for one in expressions if not _mere(one, cut)]
        if said:
            shown.append(f"{node.kind}: {', '.join(readable(expression) for expression in said)}")
    exact += [f"{column.name} = {canonical.column(column)}" for column in _taken(segment)]
    return PinnedBetween(
        below=describe(segment.producer),
        above="the sink" if segment.consumer is None else describe(segment.consumer),
        computes=tuple(shown),
        functions=tuple(sorted(canonical.functions)),
        time_zones=tuple(sorted(canonical.zones)),
        settings={} if canonical.plain else counting_settings(catalyst),
        digest=hashlib.sha256("\n".join(exact).encode()).hexdigest()[:32],
    )


def _mere(result: Expression, cut: Cut) -> bool:
    """Whether it is a column, or what an operator has the value of, if under another name."""
    source = result.children[0] if result.kind == "Alias" else result
    return source.kind == "AttributeReference" or cut(source) is not None


def _nothing(expression: Expression) -> str | None:
    return None


def _results(producer: Node) -> list[Expression]:
    """What an operator's results are computed by, of what it has kept."""
    return producer.list("aggregateExpressions") if producer.kind == "Aggregate" else []


def _given(producer: Node) -> Cut:
    """Says of what expressions the operator has the values itself: its functions and what it groups by."""
    if producer.kind != "Aggregate":
        return _nothing
    groupings = producer.list("groupingExpressions")
    functions: list[Expression] = []

    def said(expression: Expression) -> str | None:
        for number, grouping in enumerate(groupings):
            if grouping.means(expression):
                return f"key {number}"
        if expression.kind != "AggregateExpression":
            return None
        for number, function in enumerate(functions):
            if function.means(expression):
                return f"function {number}"
        functions.append(expression)
        return f"function {len(functions) - 1}"

    return said


def _inputs(consumer: Node) -> list[Expression]:
    """What an operator is given of each row."""
    if consumer.kind == "Aggregate":
        return [*consumer.list("groupingExpressions"), *_arguments(consumer.list("aggregateExpressions"))]
    if consumer.kind == "Window":
        by = [*consumer.list("partitionSpec"), *consumer.list("orderSpec")]
        return [*by, *_arguments(consumer.list("windowExpressions"))]
    return []


def _taken(segment: Segment) -> list[Expression]:
    """The columns that go up as they are: rows of a window, of `DISTINCT`, those that the query shows."""
    if segment.consumer is not None and segment.consumer.kind == "Aggregate":
        return []
    return (segment.nodes[-1] if segment.nodes else segment.producer).output


def _arguments(results: list[Expression]) -> Iterator[Expression]:
    for call in _calls(results):
        function, *condition = call.children
        yield from [*replaced(function).children, *condition]


def _calls(results: list[Expression]) -> Iterator[Expression]:
    return (part for result in results for part in result.walk() if part.kind == "AggregateExpression")


def _functions(consumer: Node) -> list[Expression]:
    """What an operator groups by and computes, as people read it."""
    if consumer.kind == "Aggregate":
        return [*consumer.list("groupingExpressions"), *_calls(consumer.list("aggregateExpressions"))]
    return consumer.list("windowExpressions") if consumer.kind == "Window" else []
