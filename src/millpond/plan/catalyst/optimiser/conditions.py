"""Conditions and groupings as Spark's own optimiser leaves them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import BATCH_TIMES, CLOCKS, Expression, Node, items
from millpond.plan.catalyst.optimiser.rules import ELIMINATE_ALIASES, MAX_PASSES, OPTIMIZER, PRUNE_COLUMNS, apply_rules

_LOCAL = "org.apache.spark.sql.catalyst.plans.logical.LocalRelation"
_EXPRESSIONS = "org.apache.spark.sql.catalyst.expressions"
_SIMPLIFYING = tuple(
    f"{OPTIMIZER}.{rule}"
    for rule in (
        "NullPropagation",
        "ConstantFolding",
        "BooleanSimplification",
        "SimplifyConditionals",
        "SimplifyBinaryComparison",
        "ReplaceNullWithFalseInPredicate",
    )
)
_SIMPLIFYING_FILTERS = (*_SIMPLIFYING, f"{OPTIMIZER}.ConstantPropagation")
_UNALIASED = (*ELIMINATE_ALIASES, f"{OPTIMIZER}.EliminateResolvedHint")
_MOVING_SEMI_JOINS = (f"{OPTIMIZER}.PushDownLeftSemiAntiJoin", f"{OPTIMIZER}.PushLeftSemiLeftAntiThroughJoin")
_SETTLING = (
    f"{OPTIMIZER}.PushDownPredicates",
    f"{OPTIMIZER}.ReplaceNullWithFalseInPredicate",
    f"{OPTIMIZER}.BooleanSimplification",
    f"{OPTIMIZER}.EliminateOuterJoin",
)
_INFERRING = (f"{OPTIMIZER}.InferFiltersFromGenerate", f"{OPTIMIZER}.InferFiltersFromConstraints")
_EXTRA = (f"{OPTIMIZER}.PushExtraPredicateThroughJoin", f"{OPTIMIZER}.PushDownPredicates")
_REPLACING = (f"{OPTIMIZER}.ReplaceDistinctWithAggregate",)
_REPETITION = (f"{OPTIMIZER}.RemoveRepetitionFromGroupExpressions",)
_COMPUTING_ONCE = (f"{OPTIMIZER}.RewriteWithExpression",)
_SPECIAL_TIMES = (f"{OPTIMIZER}.SpecialDatetimeValues",)


def without_clock(catalyst: Catalyst, plan: Node) -> tuple[Node, Callable[[Node], Node]]:
    """Replace expressions that read the clock by placeholders, which are not constants for Spark's rules.

    The time of the micro-batch becomes an expression that is not deterministic, as in Spark: a condition with it stays
    above stateful operators, and compares with the time of the batch that shows a row. Other clocks (`now()`), and
    times that nothing reads, do not keep a condition in its place.

    Returns:
        The plan, and a function that puts the expressions back.
    """
    current = catalyst.object("org.apache.spark.sql.catalyst.trees.TreePattern").CURRENT_LIKE()
    if not plan.java.containsPattern(current):
        return plan, lambda settled: settled
    clocks = [part for part in _parts(plan) if part.kind in CLOCKS]
    as_if_all_were_read = _replaced(catalyst, plan, _placeholders(catalyst, clocks, range(len(clocks))))
    pruned = Node(apply_rules(catalyst, (*_UNALIASED, *PRUNE_COLUMNS), as_if_all_were_read.java, MAX_PASSES))
    read = {part.java.timestampMs() for part in _parts(pruned) if part.kind == "CurrentBatchTimestamp"}
    placeholders, originals = _placeholders(catalyst, clocks, read), catalyst.new("java.util.HashMap")
    for clock in clocks:
        originals.put(placeholders.get(clock.java), clock.java)
    return _replaced(catalyst, plan, placeholders), lambda settled: _replaced(catalyst, settled, originals)


def _parts(plan: Node) -> Iterator[Expression]:
    return (part for node in plan.walk() for expression in node.expressions for part in expression.walk())


def _placeholders(catalyst: Catalyst, clocks: Sequence[Expression], read: Container[int]) -> Any:
    """Return a Java map of clocks to placeholders.

    Args:
        catalyst: of the query's session.
        clocks: expressions, perhaps repeated.
        read: the positions of clocks whose value the query reads.
    """
    placeholders = catalyst.new("java.util.HashMap")
    zone = catalyst.object("scala.Option").apply("UTC")
    fresh = catalyst.object(f"{_EXPRESSIONS}.NamedExpression")
    for position, clock in enumerate(clocks):
        if placeholders.containsKey(clock.java):
            continue
        type_ = clock.java.dataType()
        if clock.kind in BATCH_TIMES and position in read:
            # The position is not a time: it makes each placeholder different.
            placeholder = catalyst.new(f"{_EXPRESSIONS}.CurrentBatchTimestamp", position, type_, zone)
        else:
            # A leaf without columns that is not folded. Rules evaluate conditions with it for a row of nulls.
            value = catalyst.new("java.util.concurrent.atomic.AtomicReference", _time_now(clock))
            name, identity = f"clock{position}", fresh.newExprId()
            placeholder = catalyst.new(f"{_EXPRESSIONS}.NamedLambdaVariable", name, type_, False, identity, value)
        placeholders.put(clock.java, placeholder)
    return placeholders


def _time_now(clock: Expression) -> Any:
    try:
        return clock.constant
    except (Py4JJavaError, PySparkException):  # versions of Spark differ in whether a clock can be evaluated alone
        return None


def _replaced(catalyst: Catalyst, plan: Node, replacements: Any) -> Node:
    """Replace expressions by others, given as a Java map."""
    partial = catalyst.object("scala.jdk.javaapi.CollectionConverters").asScala(replacements)
    return Node(plan.java.transformAllExpressions(partial))


def with_settled_conditions(catalyst: Catalyst, plan: Node, *, pruned: bool, semi_joins: bool) -> Node:
    """Return the plan with conditions placed, and joins rewritten, as by Spark's optimiser.

    The place of a condition decides which rows reach the nodes that watch their event time, and so which rows are late.
    On Spark, a filter on one key above an aggregate is moved below the watermark. The behaviour of a stream join
    follows from its type, condition and columns: predicates above it become part of its condition, and unused columns
    are pruned, with their watermarks. Semi and anti joins with tables are moved below state, too: what enters the state
    was known to the table of its batch.

    Args:
        catalyst: of the query's session.
        plan: a plan with plain conditions.
        pruned: whether unused columns are pruned.
        semi_joins: whether semi and anti joins are moved.
    """
    settling = (*_SETTLING, *_MOVING_SEMI_JOINS) if semi_joins else _SETTLING
    # The order of Spark's optimiser: filters are inferred once, and the inferred filters are then moved in turn.
    java = apply_rules(catalyst, _UNALIASED, plan.java)
    java = apply_rules(catalyst, settling, java, MAX_PASSES)
    java = apply_rules(catalyst, _INFERRING, java)
    java = apply_rules(catalyst, settling, java, MAX_PASSES)
    java = apply_rules(catalyst, _EXTRA, java, MAX_PASSES)
    return Node(apply_rules(catalyst, PRUNE_COLUMNS, java) if pruned else java)


def pruned_deduplications(catalyst: Catalyst, plan: Node) -> list[frozenset[int]]:
    """Return for each `Deduplicate` its column identities after column pruning, in walk order.

    The pruned plan is only read, and not used further (see `windows.needed_columns`).

    Args:
        catalyst: of the query's session.
        plan: a plan with settled conditions.
    """
    java = apply_rules(catalyst, (*_UNALIASED, *_REPLACING), plan.java)
    java = apply_rules(catalyst, PRUNE_COLUMNS, java, MAX_PASSES)
    deduplications = [node for node in Node(java).walk() if node.kind == "Deduplicate"]
    return [frozenset(column.expr_id for column in node.output) for node in deduplications]


def without_repeated_groupings(catalyst: Catalyst, plan: Node) -> Node:
    """Remove repeated groupings of aggregates, e.g. one window under two names."""
    java = apply_rules(catalyst, _REPETITION, plan.java)
    return plan if java.fastEquals(plan.java) else Node(java)


def with_simplified_conditions(catalyst: Catalyst, plan: Node) -> Node:
    """Return the plan with filters and join conditions simplified as by Spark's optimiser.

    Runtime-replaceable expressions (`BETWEEN`) are replaced. Only conditions are changed: the assignment of event-time
    windows is read from the plan as the analyser made it.
    """
    plan = catalyst.with_children(plan, [with_simplified_conditions(catalyst, child) for child in plan.children])
    java = plan.java
    if plan.kind == "Filter":
        old = Expression(java.condition())
        plain = without_replaceables(catalyst, old)
        if any(part.kind == "With" for part in plain.walk()):
            return _computed_once(catalyst, plain, plan.children[0])
        new = _simplified(catalyst, plain, plan, _SIMPLIFYING_FILTERS)
        return plan if new is old else Node(java.copy(new.java, java.child()))
    if plan.kind == "Join" and java.condition().isDefined():
        old = Expression(java.condition().get())
        new = _simplified(catalyst, without_replaceables(catalyst, old), plan, _SIMPLIFYING)
        condition = catalyst.object("scala.Option").apply(new.java)
        return (
            plan if new is old else Node(java.copy(java.left(), java.right(), java.joinType(), condition, java.hint()))
        )
    return plan


def _computed_once(catalyst: Catalyst, condition: Expression, child: Node) -> Node:
    """Return a filter whose `With` expressions are projected below it, as Spark does before it moves conditions."""
    alone = catalyst.filter(condition, no_rows(catalyst, [child]))

    def over_child(node: Node) -> Node:
        return catalyst.with_children(node, [over_child(below) for below in node.children]) if node.children else child

    return over_child(Node(apply_rules(catalyst, _COMPUTING_ONCE, alone.java)))


def no_rows(catalyst: Catalyst, like: Sequence[Node]) -> Node:
    """Return a relation without rows that has the columns of some nodes."""
    columns = catalyst.seq([column.java for node in like for column in node.output])
    return Node(catalyst.new(_LOCAL, columns, catalyst.seq([]), False, catalyst.object("scala.Option").empty()))


def _simplified(catalyst: Catalyst, condition: Expression, node: Node, rules: Sequence[str]) -> Expression:
    """Simplify a condition over the columns of the node's children by optimiser rules."""
    alone = catalyst.filter(condition, no_rows(catalyst, node.children)).java
    # Spark reads 'today' as the day of each batch before it simplifies; without ANSI mode, its cast would be null here.
    if not apply_rules(catalyst, _SPECIAL_TIMES, alone).fastEquals(alone):
        return condition
    try:
        simplified = Expression(apply_rules(catalyst, rules, alone, MAX_PASSES).condition())
    except (Py4JJavaError, PySparkException):  # a constant that fails
        return condition
    return condition if simplified.java.fastEquals(condition.java) else simplified


def without_replaceables(catalyst: Catalyst, expression: Expression) -> Expression:
    """Replace runtime-replaceable expressions (`BETWEEN`) by their replacements."""
    if expression.kind == "With":
        if not expression.deterministic:  # `With` computes it once; inlined, two copies would differ
            return expression
        known = [(java.id(), Expression(java.child())) for java in items(expression.java.defs())]
        body = _inlined(catalyst, Expression(expression.java.child()), known)
        return without_replaceables(catalyst, body)
    replacement = expression.expression("replacement")
    if replacement is not None:
        return without_replaceables(catalyst, replacement)
    return catalyst.with_operands(
        expression, [without_replaceables(catalyst, operand) for operand in expression.children]
    )


def _inlined(catalyst: Catalyst, expression: Expression, known: Sequence[tuple[Any, Expression]]) -> Expression:
    if expression.kind == "CommonExpressionRef":
        return next(value for name, value in known if name.equals(expression.java.id()))
    return catalyst.with_operands(expression, [_inlined(catalyst, operand, known) for operand in expression.children])
