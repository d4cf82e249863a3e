"""The names under which a query's output shows what its operators keep, for people who read the state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from millpond.plan.catalyst.nodes import Expression, Node
from millpond.plan.reading.aggregate import Reading, calls_user, unique
from millpond.plan.reading.decision import Decided, Operator
from millpond.plan.reading.join import JoinReading
from millpond.plan.reading.processor import ProcessorReading
from millpond.spec.calls import result_fields

Names = Mapping[int, str]
"""Names in the query's output by the identities of columns below it."""


def state_columns(root: Decided) -> dict[int, tuple[str, ...]]:
    """Name the columns of each operator's state as the query's output does.

    Args:
        root: the decided plan.

    Returns:
        By the operator's number, a name for each of `Spec.state_fields`; none of processors, whose state has names of
        its own. A column that the output has no name for keeps the spec's.
    """
    return dict(_operators(root, {}))


def _operators(decided: Decided, names: Names) -> Iterator[tuple[int, tuple[str, ...]]]:
    node, operator = decided.node, decided.operator
    if operator is not None and operator.index is not None:
        yield operator.index, _columns(node, operator, names)
    if node.kind == "Project":
        names = _below(node, names)
    for child in decided.children:
        yield from _operators(child, names)


def _below(project: Node, names: Names) -> Names:
    """Follow plain renames (`withColumnRenamed`, `select(col.alias(…))`) through a projection."""
    found: dict[int, str] = {}
    results = zip(project.list("projectList"), project.output, strict=True)
    for result, column in sorted(results, key=lambda pair: pair[0].kind == "Alias"):  # the column itself comes first
        source = result.children[0] if result.kind == "Alias" else result
        if source.kind == "AttributeReference":
            found.setdefault(source.expr_id, _name(column, names))
    return {**names, **found}


def _name(column: Expression, names: Names) -> str:
    return names.get(column.expr_id, column.name)


def _columns(node: Node, operator: Operator, names: Names) -> tuple[str, ...]:
    reading = operator.reading
    if operator.spec is None or isinstance(reading, ProcessorReading):
        return ()
    wanted = _of_join(reading, names) if isinstance(reading, JoinReading) else {}
    if isinstance(reading, Reading):
        wanted = _of_columns(reading, names)
        if node.kind == "Aggregate":
            wanted |= _of_results(node, reading, names)
    taken: set[str] = set()
    own = (field.name for field in operator.spec.state_fields)
    return tuple(unique(wanted.get(name, name), taken) for name in own)


def _of_columns(reading: Reading, names: Names) -> dict[str, str]:
    """Columns of the operator's input that are columns of the query."""
    return {
        column.field.name: _name(reading.raw[column.raw[0]], names)
        for column in reading.keys + reading.inputs
        if column.sql == "{0}" and reading.raw[column.raw[0]].kind == "AttributeReference"
    }


def _of_results(node: Node, reading: Reading, names: Names) -> dict[str, str]:
    """Groupings and functions that are columns of an aggregate's output as they are."""
    functions = [function for function in reading.aggregates if not calls_user(function)]
    calls = zip(result_fields(reading.calls), functions, strict=False)  # the user's own have one call, the last
    sought = [*reading.results(node.list("groupingExpressions")), *((field.name, one) for field, one in calls)]
    found: dict[str, str] = {}
    for result, column in zip(node.list("aggregateExpressions"), node.output, strict=True):
        value = result.children[0] if result.kind == "Alias" else result
        for name, expression in sought:
            if expression.means(value):
                found.setdefault(name, _name(column, names))
    return found


def _of_join(reading: JoinReading, names: Names) -> dict[str, str]:
    """Keys under the left side's names, values under their side's; `left_` and `right_` tell equal names apart."""
    spec = reading.spec
    keys = [(field.name, "", one) for field, one in zip(spec.keys, reading.left.keys, strict=True)]
    values = [
        (field.name, side, one)
        for side, fields, ones in (
            ("left_", spec.left.values, reading.left.values),
            ("right_", spec.right.values, reading.right.values),
        )
        for field, one in zip(fields, ones, strict=True)
    ]
    known = [(own, side, _name(one, names)) for own, side, one in keys + values if one.kind == "AttributeReference"]
    headers = [field.name for field in spec.state_fields if field.name not in {own for own, _, _ in keys + values}]
    count = Counter([*headers, *(name for _, _, name in known)])
    return {own: f"{side}{name}" if count[name] > 1 else name for own, side, name in known}
