"""The stateful operators of a checkpoint of Spark's, and their order and names in a query."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from millpond.humanize import counted
from millpond.plan.decision.decision import Decided

JOIN = "symmetricHashJoin"
"""Spark's name of a join of two streams in a checkpoint."""

_API_NAMES = {
    "stateStoreSave": "groupBy",
    "sessionWindowStateStoreSaveExec": "groupBy with session windows",
    "sessionWindowStateStoreRestoreExec": "groupBy with session windows",
    "dedupe": "dropDuplicates",
    "dedupeWithinWatermark": "dropDuplicatesWithinWatermark",
    JOIN: "a join of two streams",
    "flatMapGroupsWithState": "flatMapGroupsWithState",
    "applyInPandasWithState": "applyInPandasWithState",
    "transformWithStateExec": "transformWithState",
    "transformWithStateInPySpark": "transformWithState",
    "globalLimit": "limit",
}
"""Spark's name of an operator in a checkpoint → its name in Spark's API."""


@dataclass(frozen=True)
class StoredOperator:
    """An operator in Spark's checkpoint: its name there, and the names of its stores."""

    name: str
    stores: frozenset[str]


def in_spark_order(root: Decided) -> Iterator[Decided]:
    """Yield the nodes with stateful operators in the order of Spark's numbering: top down, left to right."""
    if root.operator is not None and root.operator.stateful:
        yield root
    for child in root.children:
        yield from in_spark_order(child)


def below_projections(decided: Decided, *, above: bool = False) -> Iterator[Decided]:
    """Yield the operators whose columns a projection reads, with no other operator between."""
    if decided.operator is not None and above:
        yield decided
    above = decided.node.kind == "Project" or (above and decided.operator is None)
    for child in decided.children:
        yield from below_projections(child, above=above)


def describe_stored(stored: dict[int, StoredOperator]) -> str:
    """Describe the operators of a checkpoint for people."""
    names = ", ".join(api_name(stored[number].name) for number in sorted(stored))
    return counted(len(stored), "stateful operator") + (f" ({names})" if names else "")


def describe_operators(order: Sequence[Decided]) -> str:
    """Describe the operators of a query for people."""
    names = ", ".join(decided.operator.title for decided in order if decided.operator is not None)
    return counted(len(order), "stateful operator") + (f" ({names})" if names else "")


def api_name(name: str) -> str:
    """Return the name in Spark's API of an operator in a checkpoint."""
    return _API_NAMES.get(name, name)
