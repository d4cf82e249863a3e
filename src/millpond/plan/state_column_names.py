"""Names for state columns, taken from the query's output, for people who read the state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from millpond.plan.catalyst.nodes import Expression, Node
from millpond.plan.decision.decision import Decided, Operator
from millpond.plan.reading.join import JoinReading
from millpond.plan.reading.processor import ProcessorReading
from millpond.plan.reading.reading import Reading, calls_user_function, unique_name
from millpond.spec.calls import result_fields

Names = Mapping[int, str]
"""Identity of a column below the query's output → its name in the output."""


def state_column_names(root: Decided) -> dict[int, tuple[str, ...]]:
    """Name the columns of each operator's state as the query's output does.

    Args:
        root: the decided plan.

    Returns:
        Operator number → a name for each of `Spec.state_fields`; empty for processors, whose state has names of its
        own. A column that has no name in the output keeps the spec's name.
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
    renamed: dict[int, str] = {}
    results = zip(project.list("projectList"), project.output, strict=True)
    # the unrenamed column takes precedence
    for result, column in sorted(results, key=lambda pair: pair[0].kind == "Alias"):
        source = result.children[0] if result.kind == "Alias" else result
        if source.kind == "AttributeReference":
            renamed.setdefault(source.expr_id, _name(column, names))
    return {**names, **renamed}


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
    return tuple(unique_name(wanted.get(name, name), taken) for name in own)


def _of_columns(reading: Reading, names: Names) -> dict[str, str]:
    """Name columns of the operator's input that are columns of the query."""
    return {
        column.field.name: _name(reading.raw[column.raw[0]], names)
        for column in reading.keys + reading.inputs
        if column.sql == "{0}" and reading.raw[column.raw[0]].kind == "AttributeReference"
    }


def _of_results(node: Node, reading: Reading, names: Names) -> dict[str, str]:
    """Name groupings and functions that an aggregate's output shows unchanged."""
    functions = [function for function in reading.aggregates if not calls_user_function(function)]
    calls = zip(result_fields(reading.calls), functions, strict=False)  # all user functions share one call, the last
    expressions = [
        *reading.results(node.list("groupingExpressions")),
        *((field.name, function) for field, function in calls),
    ]
    shown_names: dict[str, str] = {}
    for result, column in zip(node.list("aggregateExpressions"), node.output, strict=True):
        value = result.children[0] if result.kind == "Alias" else result
        for name, expression in expressions:
            if expression.semantic_equals(value):
                shown_names.setdefault(name, _name(column, names))
    return shown_names


def _of_join(reading: JoinReading, names: Names) -> dict[str, str]:
    """Name keys as on the left side, values as on their own side; prefixes `left_` and `right_` resolve clashes."""
    spec = reading.spec
    keys = [(field.name, "", attribute) for field, attribute in zip(spec.keys, reading.left.keys, strict=True)]
    values = [
        (field.name, side, attribute)
        for side, fields, attributes in (
            ("left_", spec.left.values, reading.left.values),
            ("right_", spec.right.values, reading.right.values),
        )
        for field, attribute in zip(fields, attributes, strict=True)
    ]
    known = [
        (own, side, _name(attribute, names))
        for own, side, attribute in keys + values
        if attribute.kind == "AttributeReference"
    ]
    headers = [field.name for field in spec.state_fields if field.name not in {own for own, _, _ in keys + values}]
    count = Counter([*headers, *(name for _, _, name in known)])
    return {own: f"{side}{name}" if count[name] > 1 else name for own, side, name in known}
