"""Windows, grouping sets and orders that a plan computes below its operators: a restart must have the same ones."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.plan.catalyst.nodes import Expression, Node
from millpond.plan.decision.decision import Operator
from millpond.plan.reading.aggregate import MAPS, grouping_sets
from millpond.plan.reading.join import JoinReading
from millpond.plan.reading.processor import GROUP_STATES, PROCESSORS, grouping_count
from millpond.plan.reading.ranking import computed_columns
from millpond.plan.reading.reading import Reading
from millpond.plan.reading.windows import describe_windows

_KEYS = {
    "Aggregate": "groupingExpressions",
    "Window": "partitionSpec",
    "Deduplicate": "keys",
    "DeduplicateWithinWatermark": "keys",
    **dict.fromkeys((*MAPS, *GROUP_STATES), "groupingAttributes"),
}
"""Kinds of nodes → their field with the key columns."""


def computed_below(node: Node, operator: Operator) -> tuple[str, ...]:
    """Describe what is computed below an operator's node and decides its state, as recorded with the state.

    The operator's spec and title have only the names of the columns that this becomes.
    """
    reading = operator.reading
    # The spec has the lengths of windows that the operator assigns itself. Keys have the places of its input columns.
    assigned = reading.time.column if isinstance(reading, Reading) and reading.assignment and reading.time else None
    keys = enumerate(_keys(node, reading))
    columns = [(place, part) for place, key in keys for part in key.walk() if part.kind == "AttributeReference"]
    texts = {part.expr_id: describe_windows(node, part, lengths=place != assigned) for place, part in columns}
    sets = grouping_sets(node) if node.kind == "Aggregate" else None
    expressions = computed_columns(node) if node.kind == "Window" else []
    numbered = _numbered_columns(node, reading) if node.kind == "Window" and isinstance(reading, Reading) else None
    return tuple(text for text in (*texts.values(), sets, *expressions, numbered) if text is not None)


def _numbered_columns(node: Node, reading: Reading) -> str | None:
    """Describe the columns that an operator reads, in order, if their names alone do not distinguish them."""
    numbers = node.column_numbers
    parts = (part for column in reading.raw for part in column.walk() if part.kind == "AttributeReference")
    if not any(part.expr_id in numbers for part in parts):
        return None
    return f"columns {', '.join(column.sql(numbers) for column in reading.raw)}"


def _keys(node: Node, reading: Reading | JoinReading | None) -> Sequence[Expression]:
    """Return the columns by which an operator groups, partitions, deduplicates or joins its rows."""
    if isinstance(reading, JoinReading):
        return [*reading.left.keys, *reading.right.keys]
    if node.kind in PROCESSORS:
        return node.children[0].output[: grouping_count(node)]
    if node.kind == "Distinct":
        return node.output
    return node.list(_KEYS[node.kind]) if node.kind in _KEYS else []
