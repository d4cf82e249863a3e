"""Expressions that Spark evaluates between two operators where rows change, or above the last one.

They matter above the last operator if the query shows its changes. Spark evaluates them again for a retracted row, in a
later batch or a later run. So they have to be `stable`, and are recorded with the state: see
docs/architecture/11-changelog.md. They are read from the query as the user wrote it. A filter that Spark's rules move
below an operator is therefore still between two operators.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from millpond.checkpoint.state_schema import BetweenSchema
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node
from millpond.plan.catalyst.stable import unstable_part
from millpond.plan.catalyst.text import Canonical, Cut, readable, semantic_settings
from millpond.plan.decision.decision import Decision, describe
from millpond.plan.reading.functions import resolve_replacement
from millpond.plan.reading.join import JoinReading
from millpond.plan.reading.join_condition import LEFT, RIGHT

_CHANGELOG_NODES = frozenset({"Aggregate", "Distinct", "Window"})
"""Nodes that may emit rows that change, and may retract rows."""

_ANSI = "spark.sql.ansi.enabled"
# Spark passes the mode to expressions as a field: a name, or whether errors fail.
_MODES = frozenset({"ANSI", "LEGACY", "True", "False"})
_NUMERIC_MODE = re.compile(r"(?<=^NumericEvalContext\()(ANSI|LEGACY)\b")
_CONSTANTS = frozenset({"Literal", "VariableReference"})
_STATEFUL = _CHANGELOG_NODES | {"Deduplicate", "DeduplicateWithinWatermark", "Join"}


class _WithoutModes(Canonical):
    """Describes expressions without their evaluation mode, which decides only whether an error becomes null."""

    def _fields(self, expression: Expression) -> Iterator[str]:
        for field in super()._fields(expression):
            if expression.kind in _CONSTANTS:
                yield field
            elif field not in _MODES:
                yield _NUMERIC_MODE.sub("", field)


@dataclass(frozen=True)
class ChangelogPath:
    """The path from one operator up to the next.

    Attributes:
        producer: the operator below.
        nodes: the nodes between, bottom up.
        consumer: the operator above; None at the top of the query.
    """

    producer: Node
    nodes: tuple[Node, ...]
    consumer: Node | None

    def parts(self) -> Iterator[tuple[Node, list[Expression], Cut]]:
        """Yield what is evaluated on the path, bottom up: the node, its expressions, and what not to look into."""
        yield self.producer, _results(self.producer), _known_values(self.producer)
        for node in self.nodes:
            yield node, node.expressions, _no_cut
        if self.consumer is not None:
            yield self.consumer, _inputs(self.consumer), _no_cut


def paths(plan: Node) -> list[ChangelogPath]:
    """Return every path from an operator whose rows may change to the next above, or to the top; bottom up."""
    return list(_paths(plan, None, ()))


def _paths(node: Node, consumer: Node | None, above: tuple[Node, ...]) -> Iterator[ChangelogPath]:
    if not node.streaming:
        return
    if node.kind in _STATEFUL and (node.kind != "Join" or all(child.streaming for child in node.children)):
        for child in node.children:
            yield from _paths(child, node, ())
        # Only these consumers take rows back; before others, no expression is evaluated a second time.
        if node.kind in _CHANGELOG_NODES and (consumer is None or consumer.kind in _CHANGELOG_NODES):
            yield ChangelogPath(node, tuple(reversed(above)), consumer)
        return
    for child in node.children:
        yield from _paths(child, consumer, (*above, node))


def unstable_between(plan: Node, *, top: bool = False) -> str | None:
    """Return an expression between two operators whose value for a row may differ later; None if there is none.

    Args:
        plan: the plan as the user wrote it.
        top: whether to look above the last operator instead.
    """
    for path in paths(plan):
        if (path.consumer is None) != top:
            continue
        for _, expressions, cut in path.parts():
            part = unstable_part(expressions, cut)
            if part is not None:
                return part
    return None


def between_schemas(catalyst: Catalyst, decision: Decision) -> tuple[BetweenSchema, ...]:
    """Return the expressions that must not change between runs: rows of earlier runs may be retracted or matched."""
    retracts = any(spec.retracts for spec in decision.specs)
    wanted = [
        path
        for path in paths(decision.analyzed)
        # Above the last operator, rows are evaluated again only if the query shows deletions.
        if (decision.all_changes if path.consumer is None else retracts)
    ]
    return (*(_between_schema(catalyst, path) for path in wanted), *_stored_by_joins(catalyst, decision))


def _stored_by_joins(catalyst: Catalyst, decision: Decision) -> Iterator[BetweenSchema]:
    """Yield what joins store of their rows besides columns: the keys and the operands of conditions that are computed.

    Rows of earlier runs keep the values that these had then.
    """
    for decided in decision.root.walk():
        operator = decided.operator
        if operator is None or not isinstance(operator.reading, JoinReading):
            continue
        sides = (LEFT, operator.reading.left), (RIGHT, operator.reading.right)
        for (side_name, side), child in zip(sides, decided.children, strict=True):
            computed = [value for value in (*side.keys, *side.values) if value.kind != "AttributeReference"]
            if computed:
                by_mode = any(_differs_by_mode(part) for expression in computed for part in expression.walk())
                canonical = (Canonical if by_mode else _WithoutModes)(catalyst, child.node.output)
                described = ", ".join(canonical.expression(expression, _no_cut) for expression in computed)
                shown = [readable(expression) for expression in computed]
                ends = f"the {side_name} side", operator.title
                # With their place, so that equal values of two sides have digests of their own.
                exact = f"{operator.index} {side_name}[{described}]"
                schema = _schema(catalyst, canonical, ends, shown, [exact])
                settings = schema.settings
                if not by_mode:
                    settings = {name: value for name, value in settings.items() if name != _ANSI}
                yield replace(schema, settings=settings)


def _differs_by_mode(expression: Expression) -> bool:
    """Whether ANSI mode changes values. Of most expressions, it changes only whether an error is null."""
    if expression.kind == "Cast":  # ANSI mode never writes a decimal with an exponent
        return "string" in expression.type and "decimal" in expression.children[0].type
    return expression.kind == "Size"  # of null: null in ANSI mode, else -1


def _between_schema(catalyst: Catalyst, path: ChangelogPath) -> BetweenSchema:
    canonical = Canonical(catalyst, path.producer.output)
    shown, exact = [], []
    for node, expressions, cut in path.parts():
        computed = [
            # Renaming a column is no change: `passes` gives the new name the label of the column below.
            expression
            for expression in expressions
            if node.kind != "Project" or not canonical.passes(expression)
        ]
        exact.append(f"{node.kind}[{', '.join(canonical.expression(expression, cut) for expression in computed)}]")
        shown_parts = (
            _functions(node)
            if node is path.consumer
            else [expression for expression in expressions if not _is_passed_on(expression, cut)]
        )
        if shown_parts:
            shown.append(f"{node.kind}: {', '.join(readable(expression) for expression in shown_parts)}")
    exact += [f"{column.name} = {canonical.column(column)}" for column in _passed_columns(path)]
    ends = describe(path.producer), "the sink" if path.consumer is None else describe(path.consumer)
    return _schema(catalyst, canonical, ends, shown, exact)


def _schema(
    catalyst: Catalyst, canonical: Canonical, ends: tuple[str, str], shown: list[str], exact: list[str]
) -> BetweenSchema:
    return BetweenSchema(
        *ends,
        computes=tuple(shown),
        functions=tuple(sorted(canonical.functions)),
        time_zones=tuple(sorted(canonical.zones)),
        settings={} if canonical.setting_free else semantic_settings(catalyst),
        digest=hashlib.sha256("\n".join(exact).encode()).hexdigest()[:32],
    )


def _is_passed_on(result: Expression, cut: Cut) -> bool:
    """Whether a result is just a column, or a value that the operator has, perhaps under another name."""
    source = result.children[0] if result.kind == "Alias" else result
    return source.kind == "AttributeReference" or cut(source) is not None


def _no_cut(expression: Expression) -> str | None:
    return None


def _results(producer: Node) -> list[Expression]:
    """Return the expressions that compute an operator's results from its state."""
    return producer.list("aggregateExpressions") if producer.kind == "Aggregate" else []


def _known_values(producer: Node) -> Cut:
    """Return a `Cut` that replaces expressions whose values the operator has: its functions and grouping keys."""
    if producer.kind != "Aggregate":
        return _no_cut
    groupings = producer.list("groupingExpressions")
    functions: list[Expression] = []

    # Functions are numbered in the order in which they are met, so the numbers are the same in each run.
    def replacement(expression: Expression) -> str | None:
        for number, grouping in enumerate(groupings):
            if grouping.semantic_equals(expression):
                return f"key {number}"
        if expression.kind != "AggregateExpression":
            return None
        for number, function in enumerate(functions):
            if function.semantic_equals(expression):
                return f"function {number}"
        functions.append(expression)
        return f"function {len(functions) - 1}"

    return replacement


def _inputs(consumer: Node) -> list[Expression]:
    """Return the expressions that an operator receives for each row."""
    if consumer.kind == "Aggregate":
        return [*consumer.list("groupingExpressions"), *_arguments(consumer.list("aggregateExpressions"))]
    if consumer.kind == "Window":
        by = [*consumer.list("partitionSpec"), *consumer.list("orderSpec")]
        return [*by, *_arguments(consumer.list("windowExpressions"))]
    return []


def _passed_columns(path: ChangelogPath) -> list[Expression]:
    """Return the columns passed up unchanged: rows of a window, of `DISTINCT`, columns that the query shows."""
    if path.consumer is not None and path.consumer.kind == "Aggregate":
        return []
    return (path.nodes[-1] if path.nodes else path.producer).output


def _arguments(results: list[Expression]) -> Iterator[Expression]:
    for call in _calls(results):
        function, *condition = call.children
        yield from [*resolve_replacement(function).children, *condition]


def _calls(results: list[Expression]) -> Iterator[Expression]:
    return (part for result in results for part in result.walk() if part.kind == "AggregateExpression")


def _functions(consumer: Node) -> list[Expression]:
    """Return an operator's groupings and functions, for people."""
    if consumer.kind == "Aggregate":
        return [*consumer.list("groupingExpressions"), *_calls(consumer.list("aggregateExpressions"))]
    return consumer.list("windowExpressions") if consumer.kind == "Window" else []
