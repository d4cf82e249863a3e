"""Prefetch sources for each operator: its key hash, expressed over the columns of a lookahead stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from pyspark.sql import functions as F

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node
from millpond.plan.catalyst.text import readable, subquery
from millpond.plan.decision.decision import Decided, Operator, Stage, StageHints
from millpond.plan.lookahead.stages import stage_columns, stage_title
from millpond.plan.reading.aggregate import MAPS, project_input, rewrite_expression
from millpond.plan.reading.join import JoinReading
from millpond.plan.reading.join_input import hint_columns, side_projections
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
        places: the stages that can compute the operator's keys, latest first, with the columns to compute. Stages of
            several branches share a place if they are in the same order.
        reasons: stage → why it cannot compute the keys.
    """

    places: list[list[tuple[Node, list[Expression]]]] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)


def find_stages(catalyst: Catalyst, root: Decided) -> tuple[Stage, ...]:
    """Return the stages of a plan, bottom up, with the operators that each can prefetch for."""
    stages = [
        Stage(decided.node, named) for decided in root.walk() if (named := stage_columns(decided.node)) is not None
    ]
    for decided in root.walk():
        operator = decided.operator
        if operator is None or not any(
            stage_columns(descendant.node) for child in decided.children for descendant in child.walk()
        ):
            continue
        placement = _place_stages(catalyst, decided, operator)
        for place, name in enumerate(_names(placement)):
            for node, columns in placement.places[-1 - place]:
                hints = StageHints(place, name, tuple(columns))
                stages = [_with_hints(stage, operator, hints) if stage.node is node else stage for stage in stages]
        stages = [
            replace(stage, reasons={**stage.reasons, operator.title: placement.reasons[id(stage.node)]})
            if id(stage.node) in placement.reasons
            else stage
            for stage in stages
        ]
    return tuple(stages)


def missing_stages(plan: Node, stages: Sequence[Stage], why: str) -> tuple[Stage, ...]:
    """Return the plan's stages that are missing from `stages`, with a reason."""
    left = [stage.columns for stage in stages]
    missing = []
    for node in plan.walk():
        columns = stage_columns(node)
        if columns in left:
            left.remove(columns)
        elif columns is not None:
            missing.append(Stage(node, columns, reasons={"the query": why}))
    return tuple(missing)


def _with_hints(stage: Stage, operator: Operator, hints: StageHints) -> Stage:
    assert operator.index is not None
    return replace(stage, hints={**stage.hints, operator.index: hints})


def _names(placement: _Placement) -> list[str]:
    """Return a distinct name for each place, in the order of the plan."""
    names: list[str] = []
    for places in reversed(placement.places):
        name = " + ".join(sorted({stage_title(stage_columns(node) or ()) for node, _ in places}))
        before = sum(other == name or other.startswith(f"{name} #") for other in names)
        names.append(f"{name} #{before + 1}" if before else name)
    return names


def _place_stages(catalyst: Catalyst, decided: Decided, operator: Operator) -> _Placement:
    spec = operator.spec
    if spec is None:
        return _unreachable(decided.children, "it does not run on Millpond")
    if not (spec.located_by_hash or spec.hint_columns) or decided.node.kind in MAPS:
        return _unreachable(decided.children, "its state is read as a whole, not key by key")
    reading = operator.reading
    below = decided.children
    needed = 1 + len(spec.hint_columns)
    if isinstance(reading, JoinReading):
        needed = 2  # without its time, a row could match rows of any time
        sides = zip(decided.node.children, side_projections(catalyst, reading), strict=True)
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
        if reading.assignment is not None and reading.assignment.expanded:
            while below[0].node.kind != "Expand":
                below = below[0].children
            below = below[0].children
        hashed = project_input(catalyst, below[0].node, reading.raw, reading.columns, reading.hash)
        hint_names = [spec.input_fields[position].name for position in spec.hint_columns]
        plans = [catalyst.analyzed(hashed.select("__hash", *(F.col(f"`{name}`") for name in hint_names)))]
    branches = []
    for child, plan in zip(below, plans, strict=True):
        columns = _inlined(catalyst, plan, child.node)
        columns = _computable_or_null(catalyst, columns, needed, lambda column: _opaque_part(column) is None)
        opaque = next((part for column in columns if (part := _opaque_part(column)) is not None), None)
        if not any(True for column in columns for _ in _references(column)):
            branches.append(_unreachable([child], "all its rows have one key"))
        elif opaque is not None:
            branches.append(_unreachable([child], f"its key depends on {readable(opaque)}"))
        else:
            branches.append(_place_below(catalyst, child, columns, needed))
    return _merged(branches)


def _inlined(catalyst: Catalyst, plan: Node, below: Node) -> list[Expression]:
    """Return the expressions of nested projections over the columns of the node below them."""
    known = {column.expr_id for column in below.output}
    columns: list[Expression] = list(plan.list("projectList"))
    while not all(reference.expr_id in known for column in columns for reference in _references(column)):
        plan = plan.children[0]
        columns = _substituted(catalyst, columns, plan.list("projectList"))
    return [column.children[0] if column.kind == "Alias" else column for column in columns]


def _place_below(catalyst: Catalyst, decided: Decided, columns: list[Expression], needed: int) -> _Placement:
    """Return the stages at or below a node that can compute `columns` of its output.

    The first `needed` columns are required; the remaining ones are null where a stage cannot compute them.
    """
    node = decided.node
    named = stage_columns(node)
    if named is not None:
        return _place_at_stage(catalyst, decided, named, columns, needed)
    if node.kind == "Union":
        return _merged(
            [
                _place_below(catalyst, child, _renamed(catalyst, columns, node.output, child.node.output), needed)
                for child in decided.children
            ]
        )
    results = {"Project": "projectList", "Aggregate": "aggregateExpressions"}.get(node.kind)
    computed: list[Expression] = [] if results is None else node.list(results)
    opaque = {
        result.expr_id for result in computed if result.kind == "Alias" and _opaque_part(result.children[0]) is not None
    }
    columns = _computable_or_null(
        catalyst,
        columns,
        needed,
        lambda column: all(reference.expr_id not in opaque for reference in _references(column)),
    )
    wanted = {reference.expr_id for column in columns for reference in _references(column)}
    for result in computed:
        if result.expr_id in wanted & opaque:
            return _unreachable(
                decided.children, f"its key depends on {result.name}, which is {readable(result.children[0])}"
            )
    columns = _substituted(catalyst, columns, computed)
    if node.kind in _FUNCTIONS:
        columns = _by_name(catalyst, columns, node)
    branches = []
    for child in decided.children:
        missing = _missing_columns(columns[:needed], child.node)
        branches.append(
            _unreachable([child], f"its key depends on {', '.join(missing)}, made by {node.kind}")
            if missing
            else _place_below(catalyst, child, _available(catalyst, columns, needed, child.node), needed)
        )
    return _merged(branches)


def _place_at_stage(
    catalyst: Catalyst, decided: Decided, named: Sequence[str], columns: list[Expression], needed: int
) -> _Placement:
    """Return the stages below a stage, and the stage itself if it names the columns that are required."""
    node = decided.node
    placement = _place_below(catalyst, decided.children[0], columns, needed)
    others = {reference.name for column in columns[:needed] for reference in _references(column)} - set(named)
    if others:
        placement.reasons[id(node)] = f"its key depends on {', '.join(sorted(others))}, which the stage does not name"
        return placement

    def is_named(column: Expression) -> bool:
        return all(reference.name in named for reference in _references(column))

    placement.places.insert(0, [(node, _computable_or_null(catalyst, columns, needed, is_named))])
    return placement


def _computable_or_null(
    catalyst: Catalyst, columns: Sequence[Expression], needed: int, computable: Callable[[Expression], bool]
) -> list[Expression]:
    """Return columns, with null for columns after the first `needed` that the predicate rejects."""
    return [
        column if position < needed or computable(column) else catalyst.null_of_type(column)
        for position, column in enumerate(columns)
    ]


def _available(catalyst: Catalyst, columns: Sequence[Expression], needed: int, node: Node) -> list[Expression]:
    return _computable_or_null(catalyst, columns, needed, lambda column: not _missing_columns([column], node))


def _substituted(catalyst: Catalyst, columns: Sequence[Expression], computed: Sequence[Expression]) -> list[Expression]:
    """Replace references to results of a projection by the results' expressions."""
    known = {result.expr_id: result.children[0] for result in computed if result.kind == "Alias"}

    def replace_(expression: Expression) -> Expression | None:
        return known.get(expression.expr_id) if expression.kind == "AttributeReference" else None

    return [rewrite_expression(catalyst, column, replace_) for column in columns] if known else list(columns)


def _renamed(
    catalyst: Catalyst, columns: Sequence[Expression], new: Sequence[Expression], old: Sequence[Expression]
) -> list[Expression]:
    pairs = {column.expr_id: replacement for column, replacement in zip(new, old, strict=True)}

    def replace_(expression: Expression) -> Expression | None:
        return pairs.get(expression.expr_id) if expression.kind == "AttributeReference" else None

    return [rewrite_expression(catalyst, column, replace_) for column in columns]


def _by_name(catalyst: Catalyst, columns: Sequence[Expression], node: Node) -> list[Expression]:
    below = node.children[0].output
    pairs = [
        (new, old)
        for new in node.output
        for old in below
        # Ambiguous names are left out: they might prefetch other keys, to no use.
        if new.name == old.name and new.type == old.type and sum(same.name == new.name for same in below) == 1
    ]
    return _renamed(catalyst, columns, [new for new, _ in pairs], [old for _, old in pairs])


def _opaque_part(expression: Expression) -> Expression | None:
    """Return the part of an expression that cannot be computed in advance; None if there is none."""
    opaque = (part for part in expression.walk() if part.kind in _OPAQUE or subquery(part) is not None)
    return next(opaque, None if expression.deterministic else expression)


def _references(expression: Expression) -> Iterator[Expression]:
    return (part for part in expression.walk() if part.kind == "AttributeReference")


def _missing_columns(columns: Sequence[Expression], node: Node) -> list[str]:
    known = {column.expr_id for column in node.output}
    return sorted(
        {reference.name for column in columns for reference in _references(column) if reference.expr_id not in known}
    )


def _unreachable(below: Sequence[Decided], why: str) -> _Placement:
    stages = (
        descendant.node for child in below for descendant in child.walk() if stage_columns(descendant.node) is not None
    )
    return _Placement(reasons={id(node): why for node in stages})


def _merged(branches: Sequence[_Placement]) -> _Placement:
    together = zip_longest(*(branch.places for branch in branches), fillvalue=[])
    places = [[place for stages in row for place in stages] for row in together]
    return _Placement(places, {node: why for branch in branches for node, why in branch.reasons.items()})
