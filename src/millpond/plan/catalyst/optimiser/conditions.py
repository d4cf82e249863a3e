"""Conditions and groupings as Spark's own optimiser leaves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import (
    BATCH_TIMES,
    CLOCKS,
    SESSION_WINDOW,
    TIME_WINDOW,
    WATERMARK_DELAY,
    Expression,
    Node,
    items,
)
from millpond.plan.catalyst.optimiser.rules import ELIMINATE_ALIASES, MAX_PASSES, OPTIMIZER, PRUNE_COLUMNS, apply_rules
from millpond.plan.catalyst.stable import is_special_time
from millpond.plan.catalyst.text import subquery

_LOCAL = "org.apache.spark.sql.catalyst.plans.logical.LocalRelation"
_EXPRESSIONS = "org.apache.spark.sql.catalyst.expressions"
_PATTERNS = "org.apache.spark.sql.catalyst.trees.TreePattern"
_SIMPLIFYING = tuple(
    f"{OPTIMIZER}.{rule}"
    for rule in (
        "NullPropagation",
        "ConstantFolding",
        "BooleanSimplification",
        "SimplifyConditionals",
        "SimplifyBinaryComparison",
        "SimplifyCasts",  # a cast would hide the watermark of a join's key
        "ReplaceNullWithFalseInPredicate",
    )
)
_SIMPLIFYING_FILTERS = (*_SIMPLIFYING, f"{OPTIMIZER}.ConstantPropagation")
_UNALIASED = (*ELIMINATE_ALIASES, f"{OPTIMIZER}.EliminateResolvedHint")
_MOVING_SEMI_JOINS = (f"{OPTIMIZER}.PushDownLeftSemiAntiJoin", f"{OPTIMIZER}.PushLeftSemiLeftAntiThroughJoin")
_DECORRELATING = (
    f"{OPTIMIZER}.OptimizeOneRowRelationSubquery",
    f"{OPTIMIZER}.PullOutNestedDataOuterRefExpressions",
    f"{OPTIMIZER}.PullupCorrelatedPredicates",
)
_PULLING_OUT_GROUPINGS = (f"{OPTIMIZER}.PullOutGroupingExpressions",)
_SETTLING = (
    f"{OPTIMIZER}.ReorderJoin",
    f"{OPTIMIZER}.PushDownPredicates",
    f"{OPTIMIZER}.ReplaceNullWithFalseInPredicate",
    f"{OPTIMIZER}.BooleanSimplification",
    f"{OPTIMIZER}.EliminateOuterJoin",
    # After the pushdown: a condition that has become a join of its subquery would stay above state.
    f"{OPTIMIZER}.RewriteCorrelatedScalarSubquery",
    f"{OPTIMIZER}.RewriteLateralSubquery",
)
_INLINING = (f"{OPTIMIZER}.CollapseProject", f"{OPTIMIZER}.SimplifyExtractValueOps")
_INFERRING = (f"{OPTIMIZER}.InferFiltersFromGenerate", f"{OPTIMIZER}.InferFiltersFromConstraints")
_EXTRA = (f"{OPTIMIZER}.PushExtraPredicateThroughJoin", f"{OPTIMIZER}.PushDownPredicates")
_REPLACING = (f"{OPTIMIZER}.ReplaceDistinctWithAggregate",)
_REPETITION = (f"{OPTIMIZER}.RemoveRepetitionFromGroupExpressions",)
_COMPUTING_ONCE = (f"{OPTIMIZER}.RewriteWithExpression",)
_SPECIAL_TIMES = (f"{OPTIMIZER}.SpecialDatetimeValues",)
_COMPUTING_TIMES = (f"{OPTIMIZER}.ComputeCurrentTime",)


def without_clock(catalyst: Catalyst, plan: Node) -> tuple[Node, Callable[[Node], Node]]:
    """Replace expressions that read the clock by placeholders, which are not constants for Spark's rules.

    The time of the micro-batch becomes an expression that is not deterministic, as in Spark. A condition with it stays
    above stateful operators, and compares with the time of the batch that shows a row. Other clocks (`now()`), and
    times that nothing reads, do not keep a condition in its place.

    Returns:
        The plan, and a function that puts the expressions back.
    """
    current = catalyst.object(_PATTERNS).CURRENT_LIKE()
    if not plan.java.containsPattern(current):
        return plan, lambda settled: settled
    parts = list(_parts(plan))
    # Constants: each clock as rules may move it. Placeholders: what each clock becomes. Originals: the way back.
    constants, placeholders, originals = (catalyst.new("java.util.HashMap") for _ in range(3))
    for position, clock in enumerate(part for part in parts if part.kind in CLOCKS):
        if constants.containsKey(clock.java):
            continue
        constant = _constant_time(catalyst, clock)
        placeholder = _batch_time(catalyst, clock, position) if clock.kind in BATCH_TIMES else constant
        constants.put(clock.java, constant)
        placeholders.put(clock.java, placeholder)
        originals.put(constant, clock.java)
        originals.put(placeholder, clock.java)
    # The same clock may be read elsewhere, and has to stay there. So an unread result gets a replacement of its own.
    for result in _unread_batch_times(catalyst, plan, parts):
        placeholders.put(result.java, result.java.transform(_partial_function(catalyst, constants)))
    return _replaced(catalyst, plan, placeholders), lambda settled: _replaced(catalyst, settled, originals)


def _parts(plan: Node) -> Iterator[Expression]:
    return (part for node in plan.walk() for part in _own_parts(node))


def _own_parts(node: Node) -> Iterator[Expression]:
    return (part for expression in node.expressions for part in expression.walk())


def _constant_time(catalyst: Catalyst, clock: Expression) -> Any:
    """Return a placeholder with the current time that Spark's rules move like a constant, but do not fold.

    It is a lambda function: Spark never folds one, and finds no columns in it. A bare lambda variable would count as a
    column. The variable makes it unique. The body has a value, because rules evaluate conditions for a row of nulls.
    """
    alone = catalyst.project([catalyst.alias(clock, "now")], no_rows(catalyst, []))
    now = Node(apply_rules(catalyst, _COMPUTING_TIMES, alone.java)).list("projectList")[0].children[0]
    identity = catalyst.object(f"{_EXPRESSIONS}.NamedExpression").newExprId()
    unset = catalyst.new("java.util.concurrent.atomic.AtomicReference")
    unique = catalyst.new(f"{_EXPRESSIONS}.NamedLambdaVariable", "clock", now.java.dataType(), False, identity, unset)
    return catalyst.new(f"{_EXPRESSIONS}.LambdaFunction", now.java, catalyst.seq([unique]), False)


def _batch_time(catalyst: Catalyst, clock: Expression, position: int) -> Any:
    """Return Spark's expression for the batch's time. The position stands for the time, to make it unique."""
    zone = catalyst.object("scala.Option").apply("UTC")
    return catalyst.new(f"{_EXPRESSIONS}.CurrentBatchTimestamp", position, clock.java.dataType(), zone)


def _unread_batch_times(catalyst: Catalyst, plan: Node, parts: Sequence[Expression]) -> Iterator[Expression]:
    """Find the named results with the time of the batch that Spark's column pruning removes.

    Args:
        catalyst: of the query's session.
        plan: the plan with its clocks.
        parts: all its expressions.
    """
    java = apply_rules(catalyst, (*_UNALIASED, *_REPLACING), plan.java)
    pruned = Node(apply_rules(catalyst, PRUNE_COLUMNS, java, MAX_PASSES))
    read = {part.expr_id for part in _parts(pruned) if part.kind == "Alias"}
    unread = (part for part in parts if part.kind == "Alias" and part.expr_id not in read)
    return (result for result in unread if any(part.kind in BATCH_TIMES for part in result.walk()))


def _replaced(catalyst: Catalyst, plan: Node, replacements: Any) -> Node:
    """Replace expressions by others, given as a Java map."""
    return Node(plan.java.transformAllExpressions(_partial_function(catalyst, replacements)))


def _partial_function(catalyst: Catalyst, replacements: Any) -> Any:
    """Return a Java map as a Scala one, which is a partial function."""
    return catalyst.object("scala.jdk.javaapi.CollectionConverters").asScala(replacements)


def with_settled_conditions(catalyst: Catalyst, plan: Node, *, pruned: bool, semi_joins: bool) -> Node:
    """Return the plan with conditions placed, and joins rewritten, as by Spark's optimiser.

    The place of a condition decides which rows reach the nodes that watch their event time, and so which rows are late.
    On Spark, a filter on one key above an aggregate is moved below the watermark. The behaviour of a stream join
    follows from its type, condition and columns. Predicates above it become part of its condition, and unused columns
    are pruned, with their watermarks. Semi and anti joins with tables are moved below state, too: what enters the state
    was known to the table of its batch.

    The columns that a subquery takes from outside are pulled out of its plan first. A condition that moves gets other
    columns, which the rules do not replace within the subquery's plan. Lateral joins and correlated scalar subqueries
    become joins with tables.

    Args:
        catalyst: of the query's session.
        plan: a plan with plain conditions.
        pruned: whether unused columns are pruned.
        semi_joins: whether semi and anti joins are moved.
    """
    settling = (*_SETTLING, *_MOVING_SEMI_JOINS) if semi_joins else _SETTLING
    # The order of Spark's optimiser: filters are inferred once, and the inferred filters are then moved in turn.
    java = apply_rules(catalyst, _UNALIASED, plan.java)
    if plan.java.containsPattern(catalyst.object(_PATTERNS).PLAN_EXPRESSION()) and any(
        node.kind == "Aggregate" and any(map(_is_correlated, _own_parts(node))) for node in plan.walk()
    ):
        # Decorrelated, a subquery among the keys would no longer equal the same subquery among the results.
        java = apply_rules(catalyst, _PULLING_OUT_GROUPINGS, java)
    java = apply_rules(catalyst, _DECORRELATING, java)
    java = apply_rules(catalyst, settling, java, MAX_PASSES)
    java = apply_rules(catalyst, _INFERRING, java)
    java = apply_rules(catalyst, settling, java, MAX_PASSES)
    settled = Node(apply_rules(catalyst, _EXTRA, java, MAX_PASSES))
    return _pruned(catalyst, settled) if pruned else settled


def _is_correlated(expression: Expression) -> bool:
    # The children of a subquery expression are the columns that it takes from outside.
    return bool(expression.children) and subquery(expression) is not None


def pruned_deduplications(catalyst: Catalyst, plan: Node) -> list[frozenset[int]]:
    """Return for each `Deduplicate` its column identities after column pruning, in walk order.

    The pruned plan is only read, and not used further (see `windows.needed_columns`).

    Args:
        catalyst: of the query's session.
        plan: a plan with settled conditions.
    """
    pruned = _pruned(catalyst, Node(apply_rules(catalyst, (*_UNALIASED, *_REPLACING), plan.java)))
    deduplications = [node for node in pruned.walk() if node.kind == "Deduplicate"]
    return [frozenset(column.expr_id for column in node.output) for node in deduplications]


def _pruned(catalyst: Catalyst, plan: Node) -> Node:
    """Prune unused columns, and unused fields of structs that the plan itself makes."""
    pruned = Node(apply_rules(catalyst, PRUNE_COLUMNS, plan.java, MAX_PASSES))
    inlined = _with_inlined_structs(catalyst, pruned)
    return pruned if inlined is pruned else _pruned(catalyst, inlined)


def _with_inlined_structs(catalyst: Catalyst, plan: Node) -> Node:
    """Merge each projection that reads fields of a struct into the one below, if that makes the struct.

    Other projections stay apart. Merged, they would hide how event-time windows are assigned.
    """
    plan = catalyst.with_children(plan, [_with_inlined_structs(catalyst, child) for child in plan.children])
    if plan.kind != "Project" or plan.children[0].kind != "Project":
        return plan
    (below,) = plan.children
    # Windows are such structs, too. They stay: their operator has to see how they are assigned.
    structs = {
        result.expr_id
        for result in below.list("projectList")
        if result.kind == "Alias"
        and result.children[0].kind == "CreateNamedStruct"
        and not result.metadata.keys() & {TIME_WINDOW, SESSION_WINDOW, WATERMARK_DELAY}
    }
    fields = (part.children[0] for part in _own_parts(plan) if part.kind == "GetStructField") if structs else ()
    if not any(struct.kind == "AttributeReference" and struct.expr_id in structs for struct in fields):
        return plan
    pair = catalyst.with_children(plan, [catalyst.with_children(below, [no_rows(catalyst, below.children)])])
    merged = Node(apply_rules(catalyst, _INLINING, pair.java))
    return plan if merged.children[0].kind == "Project" else catalyst.with_children(merged, below.children)


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
    # Not simplified here: Spark plans each batch by itself, and reads 'today' and '09:00' as times of that batch's day.
    # 'epoch' stays as well: Spark replaces it before it simplifies; without ANSI mode these rules would make it null.
    if any(is_special_time(part) for part in condition.walk()) or not apply_rules(
        catalyst, _SPECIAL_TIMES, alone
    ).fastEquals(alone):
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
