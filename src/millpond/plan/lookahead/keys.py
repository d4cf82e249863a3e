"""Prefetch sources for each operator: its key hash, expressed over the columns of a lookahead stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from pyspark.sql import functions as F

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node
from millpond.plan.catalyst.text import readable, subquery
from millpond.plan.lookahead.stages import columns_of, title
from millpond.plan.reading.aggregate import MAPS, prepared, rewrite
from millpond.plan.reading.decision import Decided, Operator, Stage, StageHints
from millpond.plan.reading.join import JoinReading
from millpond.plan.reading.join_input import hint_columns, joined_sides
from millpond.plan.reading.processor import GROUP_STATES, PROCESSORS
from millpond.plan.reading.reading import Reading

_FUNCTIONS = frozenset({*MAPS, *PROCESSORS, *GROUP_STATES, "MapInArrow", "PythonMapInArrow", "MapInPandas"})
"""Nodes with columns computed by a user function. A column with the name and type of a column below is taken for it,
as the user implies with a stage. If it differs, wrong keys are prefetched, but no result changes."""

_OPAQUE = frozenset({"PythonUDF", "PythonUDAF", "ScalaUDF", "AggregateExpression", "WindowExpression"})
"""Expressions that are not computed in advance: user functions, and expressions over several rows."""


@dataclass
class _Placement:
    """Stages between an operator and the sources.

    Attributes:
        places: the stages that can compute the operator's keys, latest first, with the columns to compute; a place has
            the stages of several branches that are in the same order.
        reasons: stage → why it cannot compute the keys.
    """

    places: list[list[tuple[Node, list[Expression]]]] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)


def with_stages(catalyst: Catalyst, root: Decided) -> tuple[Stage, ...]:
    """Return the stages of a plan, bottom up, with the operators that each can prefetch for."""
    stages = [Stage(decided.node, named) for decided in root.walk() if (named := columns_of(decided.node)) is not None]
    for decided in root.walk():
        operator = decided.operator
        if operator is None or not any(
            columns_of(descendant.node) for child in decided.children for descendant in child.walk()
        ):
            continue
        findings = _found(catalyst, decided, operator)
        for place, name in enumerate(_names(findings)):
            for node, columns in findings.places[-1 - place]:
                announces = StageHints(place, name, tuple(columns))
                stages = [_with_hints(stage, operator, announces) if stage.node is node else stage for stage in stages]
        stages = [
            replace(stage, reasons={**stage.reasons, operator.title: findings.reasons[id(stage.node)]})
            if id(stage.node) in findings.reasons
            else stage
            for stage in stages
        ]
    return tuple(stages)


def lost(plan: Node, stages: Sequence[Stage], why: str) -> tuple[Stage, ...]:
    """Return the plan's stages that are missing from `stages`, with a reason."""
    left = [stage.columns for stage in stages]
    lost_stages = []
    for node in plan.walk():
        columns = columns_of(node)
        if columns in left:
            left.remove(columns)
        elif columns is not None:
            lost_stages.append(Stage(node, columns, reasons={"the query": why}))
    return tuple(lost_stages)


def _with_hints(stage: Stage, operator: Operator, announces: StageHints) -> Stage:
    assert operator.index is not None
    return replace(stage, announces={**stage.announces, operator.index: announces})


def _names(found: _Placement) -> list[str]:
    """Return a distinct name for each place, in the order of the plan."""
    names: list[str] = []
    for places in reversed(found.places):
        name = " + ".join(sorted({title(columns_of(node) or ()) for node, _ in places}))
        before = sum(other == name or other.startswith(f"{name} #") for other in names)
        names.append(f"{name} #{before + 1}" if before else name)
    return names


def _found(catalyst: Catalyst, decided: Decided, operator: Operator) -> _Placement:
    spec = operator.spec
    if spec is None:
        return _none(decided.children, "it does not run on Millpond")
    if not (spec.located_by_hash or spec.hint_columns) or decided.node.kind in MAPS:
        return _none(decided.children, "its state is read as a whole, not key by key")
    reading = operator.reading
    below = decided.children
    needed = 1 + len(spec.hint_columns)
    if isinstance(reading, JoinReading):
        needed = 2  # without its time, a row could match rows of any time
        sides = zip(decided.node.children, joined_sides(catalyst, reading), strict=True)
        plans = [
            catalyst.analyzed(
                catalyst.dataframe(catalyst.project(aliases, child)).select(
                    *map(F.expr, hint_columns(reading, columns))
                )
            )
            for child, (aliases, columns) in sides
        ]
    else:
        assert isinstance(reading, Reading)
        # the operator itself assigns the windows of a row
        if reading.assigned is not None and reading.assigned.expanded:
            while below[0].node.kind != "Expand":
                below = below[0].children
            below = below[0].children
        hashed = prepared(catalyst, below[0].node, reading.raw, reading.columns, reading.hash)
        announced = [spec.input_fields[position].name for position in spec.hint_columns]
        plans = [catalyst.analyzed(hashed.select("__hash", *(F.col(f"`{name}`") for name in announced)))]
    branches = []
    for child, plan in zip(below, plans, strict=True):
        columns = _flat(catalyst, plan, child.node)
        columns = _told_or_null(catalyst, columns, needed, lambda column: _not_computed(column) is None)
        opaque = next((part for column in columns if (part := _not_computed(column)) is not None), None)
        if not any(True for column in columns for _ in _references(column)):
            branches.append(_none([child], "all its rows have one key"))
        elif opaque is not None:
            branches.append(_none([child], f"its key depends on {readable(opaque)}"))
        else:
            branches.append(_below(catalyst, child, columns, needed))
    return _merged(branches)


def _flat(catalyst: Catalyst, plan: Node, below: Node) -> list[Expression]:
    """Return the expressions of nested projections over the columns of the node below them."""
    known = {column.expr_id for column in below.output}
    columns: list[Expression] = list(plan.list("projectList"))
    while not all(reference.expr_id in known for column in columns for reference in _references(column)):
        plan = plan.children[0]
        columns = _replaced(catalyst, columns, plan.list("projectList"))
    return [column.children[0] if column.kind == "Alias" else column for column in columns]


def _below(catalyst: Catalyst, decided: Decided, columns: list[Expression], needed: int) -> _Placement:
    """Return the stages at or below a node that can compute `columns` of its output.

    The first `needed` columns are required; the remaining ones are null where a stage cannot compute them.
    """
    node = decided.node
    named = columns_of(node)
    if named is not None:
        others = {reference.name for column in columns[:needed] for reference in _references(column)} - set(named)
        findings = _below(catalyst, decided.children[0], columns, needed)
        if others:
            findings.reasons[id(node)] = (
                f"its key depends on {', '.join(sorted(others))}, which the stage does not name"
            )
        else:
            computed_columns = _told_or_null(
                catalyst,
                columns,
                needed,
                lambda column: all(reference.name in named for reference in _references(column)),
            )
            findings.places.insert(0, [(node, computed_columns)])
        return findings
    computed: list[Expression] = []
    if node.kind == "Project":
        computed = node.list("projectList")
    elif node.kind == "Aggregate":
        computed = node.list("aggregateExpressions")
    elif node.kind == "Union":
        return _merged(
            [
                _below(catalyst, child, _renamed(catalyst, columns, node.output, child.node.output), needed)
                for child in decided.children
            ]
        )
    opaque = {
        result.expr_id
        for result in computed
        if result.kind == "Alias" and _not_computed(result.children[0]) is not None
    }
    columns = _told_or_null(
        catalyst,
        columns,
        needed,
        lambda column: all(reference.expr_id not in opaque for reference in _references(column)),
    )
    wanted = {reference.expr_id for column in columns for reference in _references(column)}
    for result in computed:
        if result.expr_id in wanted & opaque:
            return _none(decided.children, f"its key depends on {result.name}, which is {readable(result.children[0])}")
    columns = _replaced(catalyst, columns, computed)
    if node.kind in _FUNCTIONS:
        columns = _by_name(catalyst, columns, node)
    branches = []
    for child in decided.children:
        missing = _missing(columns[:needed], child.node)
        branches.append(
            _none([child], f"its key depends on {', '.join(missing)}, made by {node.kind}")
            if missing
            else _below(catalyst, child, _there(catalyst, columns, needed, child.node), needed)
        )
    return _merged(branches)


def _told_or_null(
    catalyst: Catalyst, columns: Sequence[Expression], needed: int, told: Callable[[Expression], bool]
) -> list[Expression]:
    """Return columns, with null for columns after the first `needed` that the predicate rejects."""
    return [
        column if position < needed or told(column) else catalyst.unknown(column)
        for position, column in enumerate(columns)
    ]


def _there(catalyst: Catalyst, columns: Sequence[Expression], needed: int, node: Node) -> list[Expression]:
    return _told_or_null(catalyst, columns, needed, lambda column: not _missing([column], node))


def _replaced(catalyst: Catalyst, columns: Sequence[Expression], computed: Sequence[Expression]) -> list[Expression]:
    """Replace references to results of a projection by the results' expressions."""
    known = {result.expr_id: result.children[0] for result in computed if result.kind == "Alias"}

    def replace_(expression: Expression) -> Expression | None:
        return known.get(expression.expr_id) if expression.kind == "AttributeReference" else None

    return [rewrite(catalyst, column, replace_) for column in columns] if known else list(columns)


def _renamed(
    catalyst: Catalyst, columns: Sequence[Expression], new: Sequence[Expression], old: Sequence[Expression]
) -> list[Expression]:
    pairs = {column.expr_id: replacement for column, replacement in zip(new, old, strict=True)}

    def replace_(expression: Expression) -> Expression | None:
        return pairs.get(expression.expr_id) if expression.kind == "AttributeReference" else None

    return [rewrite(catalyst, column, replace_) for column in columns]


def _by_name(catalyst: Catalyst, columns: Sequence[Expression], node: Node) -> list[Expression]:
    below = node.children[0].output
    pairs = [
        (new, old)
        for new in node.output
        for old in below
        if new.name == old.name and new.type == old.type and sum(same.name == new.name for same in below) == 1
    ]
    return _renamed(catalyst, columns, [new for new, _ in pairs], [old for _, old in pairs])


def _not_computed(expression: Expression) -> Expression | None:
    """Return the part of an expression that cannot be computed in advance; None if there is none."""
    opaque = (part for part in expression.walk() if part.kind in _OPAQUE or subquery(part) is not None)
    return next(opaque, None if expression.deterministic else expression)


def _references(expression: Expression) -> Iterator[Expression]:
    return (part for part in expression.walk() if part.kind == "AttributeReference")


def _missing(columns: Sequence[Expression], node: Node) -> list[str]:
    known = {column.expr_id for column in node.output}
    return sorted(
        {reference.name for column in columns for reference in _references(column) if reference.expr_id not in known}
    )


def _none(below: Sequence[Decided], why: str) -> _Placement:
    stages = (
        descendant.node for child in below for descendant in child.walk() if columns_of(descendant.node) is not None
    )
    return _Placement(reasons={id(node): why for node in stages})


def _merged(branches: Sequence[_Placement]) -> _Placement:
    together = zip_longest(*(branch.places for branch in branches), fillvalue=[])
    places = [[place for stages in row for place in stages] for row in together]
    return _Placement(places, {node: why for branch in branches for node, why in branch.reasons.items()})
