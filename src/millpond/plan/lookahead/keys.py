"""Which stages can tell the keys of which operators: the hash of a key, brought down to the columns of the stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from pyspark.sql import functions as F

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node
from millpond.plan.catalyst.text import readable, subquery
from millpond.plan.lookahead.stages import columns_of, title
from millpond.plan.reading.aggregate import Reading, prepared, rewrite
from millpond.plan.reading.decision import Announces, Decided, Operator, Stage
from millpond.plan.reading.join import JoinReading
from millpond.plan.reading.join_input import announced_columns, joined_sides
from millpond.plan.reading.map_groups import MAPS
from millpond.plan.reading.processor import GROUP_STATES, PROCESSORS

_FUNCTIONS = frozenset({*MAPS, *PROCESSORS, *GROUP_STATES, "MapInArrow", "PythonMapInArrow", "MapInPandas"})
"""Nodes whose columns are whatever a function of the user makes: one that has the name and type of a column below is
taken for it, since that is what the user says with a stage; if it is not, other keys are announced, and no row differs.
"""

_OPAQUE = frozenset({"PythonUDF", "PythonUDAF", "ScalaUDF", "AggregateExpression", "WindowExpression"})
"""Expressions that are not computed beforehand: functions of the user, and what more than one row is asked for."""


@dataclass
class _Found:
    """What was found on the way from an operator down to the sources.

    Attributes:
        places: the stages that can tell its keys, latest first, with what they are told by; of several branches, those
            that stand in the same order.
        reasons: why others cannot, by stage.
    """

    places: list[list[tuple[Node, list[Expression]]]] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)


def with_stages(catalyst: Catalyst, root: Decided) -> tuple[Stage, ...]:
    """The stages of a plan, bottom up, and which operators' keys each of them announces."""
    stages = [Stage(one.node, named) for one in root.walk() if (named := columns_of(one.node)) is not None]
    for decided in root.walk():
        operator = decided.operator
        if operator is None or not any(columns_of(one.node) for child in decided.children for one in child.walk()):
            continue
        found = _found(catalyst, decided, operator)
        for place, name in enumerate(_names(found)):
            for node, columns in found.places[-1 - place]:
                announces = Announces(place, name, tuple(columns))
                stages = [_told(stage, operator, announces) if stage.node is node else stage for stage in stages]
        stages = [
            replace(stage, reasons={**stage.reasons, operator.title: found.reasons[id(stage.node)]})
            if id(stage.node) in found.reasons
            else stage
            for stage in stages
        ]
    return tuple(stages)


def lost(plan: Node, stages: Sequence[Stage], why: str) -> tuple[Stage, ...]:
    """The stages of a plan that are not among some, for a reason."""
    left = [stage.columns for stage in stages]
    found = []
    for node in plan.walk():
        columns = columns_of(node)
        if columns in left:
            left.remove(columns)
        elif columns is not None:
            found.append(Stage(node, columns, reasons={"the query": why}))
    return tuple(found)


def _told(stage: Stage, operator: Operator, announces: Announces) -> Stage:
    assert operator.index is not None
    return replace(stage, announces={**stage.announces, operator.index: announces})


def _names(found: _Found) -> list[str]:
    """A name for each place in the order of the plan, of which no two are alike."""
    names: list[str] = []
    for places in reversed(found.places):
        name = " + ".join(sorted({title(columns_of(node) or ()) for node, _ in places}))
        before = sum(one == name or one.startswith(f"{name} #") for one in names)
        names.append(f"{name} #{before + 1}" if before else name)
    return names


def _found(catalyst: Catalyst, decided: Decided, operator: Operator) -> _Found:
    spec = operator.spec
    if spec is None:
        return _none(decided.children, "it is none of Millpond's operators")
    if not (spec.keyed or spec.announced) or decided.node.kind in MAPS:
        return _none(decided.children, "its state is read as a whole, not key by key")
    reading = operator.reading
    below = decided.children
    needed = 1 + len(spec.announced)
    if isinstance(reading, JoinReading):
        needed = 2  # without its time, a row may meet what there is of any
        sides = zip(decided.node.children, joined_sides(catalyst, reading), strict=True)
        plans = [
            catalyst.analyzed(
                catalyst.dataframe(catalyst.project(aliases, child)).select(
                    *map(F.expr, announced_columns(reading, columns))
                )
            )
            for child, (aliases, columns) in sides
        ]
    else:
        assert isinstance(reading, Reading)
        if reading.assigned is not None and reading.assigned.expanded:  # the operator finds the windows of a row
            while below[0].node.kind != "Expand":
                below = below[0].children
            below = below[0].children
        hashed = prepared(catalyst, below[0].node, reading.raw, reading.columns, reading.hash)
        announced = [spec.input_fields[at].name for at in spec.announced]
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
    """What a plan of projections computes, over the columns of the node that they stand on."""
    known = {column.expr_id for column in below.output}
    columns: list[Expression] = list(plan.list("projectList"))
    while not all(one.expr_id in known for column in columns for one in _references(column)):
        plan = plan.children[0]
        columns = _replaced(catalyst, columns, plan.list("projectList"))
    return [column.children[0] if column.kind == "Alias" else column for column in columns]


def _below(catalyst: Catalyst, decided: Decided, columns: list[Expression], needed: int) -> _Found:
    """The stages at or below a node that can tell what is computed of its output: the first columns, and the others
    where they can.
    """
    node = decided.node
    named = columns_of(node)
    if named is not None:
        others = {one.name for column in columns[:needed] for one in _references(column)} - set(named)
        found = _below(catalyst, decided.children[0], columns, needed)
        if others:
            found.reasons[id(node)] = f"its key depends on {', '.join(sorted(others))}, which the stage does not name"
        else:
            told = _told_or_null(
                catalyst, columns, needed, lambda column: all(one.name in named for one in _references(column))
            )
            found.places.insert(0, [(node, told)])
        return found
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
    opaque = {one.expr_id for one in computed if one.kind == "Alias" and _not_computed(one.children[0]) is not None}
    columns = _told_or_null(
        catalyst, columns, needed, lambda column: all(one.expr_id not in opaque for one in _references(column))
    )
    wanted = {one.expr_id for column in columns for one in _references(column)}
    for one in computed:
        if one.expr_id in wanted & opaque:
            return _none(decided.children, f"its key depends on {one.name}, which is {readable(one.children[0])}")
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
    """Columns, with null for those behind the first that cannot be told."""
    return [column if at < needed or told(column) else catalyst.unknown(column) for at, column in enumerate(columns)]


def _there(catalyst: Catalyst, columns: Sequence[Expression], needed: int, node: Node) -> list[Expression]:
    return _told_or_null(catalyst, columns, needed, lambda column: not _missing([column], node))


def _replaced(catalyst: Catalyst, columns: Sequence[Expression], computed: Sequence[Expression]) -> list[Expression]:
    """Columns with what they are made of in place of results that are computed below."""
    known = {one.expr_id: one.children[0] for one in computed if one.kind == "Alias"}

    def replace_(expression: Expression) -> Expression | None:
        return known.get(expression.expr_id) if expression.kind == "AttributeReference" else None

    return [rewrite(catalyst, column, replace_) for column in columns] if known else list(columns)


def _renamed(
    catalyst: Catalyst, columns: Sequence[Expression], new: Sequence[Expression], old: Sequence[Expression]
) -> list[Expression]:
    pairs = {one.expr_id: other for one, other in zip(new, old, strict=True)}

    def replace_(expression: Expression) -> Expression | None:
        return pairs.get(expression.expr_id) if expression.kind == "AttributeReference" else None

    return [rewrite(catalyst, column, replace_) for column in columns]


def _by_name(catalyst: Catalyst, columns: Sequence[Expression], node: Node) -> list[Expression]:
    below = node.children[0].output
    pairs = [
        (one, other)
        for one in node.output
        for other in below
        if one.name == other.name and one.type == other.type and sum(same.name == one.name for same in below) == 1
    ]
    return _renamed(catalyst, columns, [one for one, _ in pairs], [other for _, other in pairs])


def _not_computed(expression: Expression) -> Expression | None:
    """What of an expression is not computed beforehand, if there is anything."""
    opaque = (part for part in expression.walk() if part.kind in _OPAQUE or subquery(part) is not None)
    return next(opaque, None if expression.deterministic else expression)


def _references(expression: Expression) -> Iterator[Expression]:
    return (part for part in expression.walk() if part.kind == "AttributeReference")


def _missing(columns: Sequence[Expression], node: Node) -> list[str]:
    known = {column.expr_id for column in node.output}
    return sorted({one.name for column in columns for one in _references(column) if one.expr_id not in known})


def _none(below: Sequence[Decided], why: str) -> _Found:
    stages = (one.node for child in below for one in child.walk() if columns_of(one.node) is not None)
    return _Found(reasons={id(node): why for node in stages})


def _merged(branches: Sequence[_Found]) -> _Found:
    together = zip_longest(*(one.places for one in branches), fillvalue=[])
    places = [[place for some in row for place in some] for row in together]
    return _Found(places, {node: why for one in branches for node, why in one.reasons.items()})
