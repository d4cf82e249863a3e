"""The tables of groups: a row of the main table for each, and side tables of their distinct inputs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from millpond.layout import Column
from millpond.operators.aggregate.changelog import GroupChangelog, changelog_columns
from millpond.operators.functions.accumulators import Accumulator
from millpond.operators.tables.bound import accumulators, bind, state_columns
from millpond.operators.tables.keyed import Keyed, keyed
from millpond.spec.functions import is_distinct
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.operators import Field

SAMPLE = "sample"
"""The name of the table of some of the distinct inputs of the rows that are kept beside groups."""

BACKFILLED = "moved"
"""The name of the table whose being there says that such rows become groups."""


_MAX_FILTERS = 64
"""Filters that one side table can tell apart: a bit of a word each."""


@dataclass(frozen=True)
class Distinct:
    """Inputs of which only the distinct ones count, for every call that names the same ones.

    Attributes:
        table: the name of the side table. inputs: their positions.
        filters: of these calls, each once; None for no filter. Entries know which of several they have passed.
    """

    table: str
    inputs: tuple[int, ...]
    filters: tuple[int | None, ...]


def main_table(spec: AggregateSpec, *, whole: bool = False) -> tuple[Keyed, list[Accumulator]]:
    """The main table and the accumulators, bound to its columns; `whole`: the rows of each group are all there."""
    made = accumulators(spec.calls, spec.inputs, whole=whole, retracts=spec.retracts)
    columns = state_columns(made)
    columns += changelog_columns(columns, retracts=spec.retracts, changes=spec.changes)
    table = keyed(spec.key_fields, columns)
    bind(made, table.values)
    return table, made


def images(spec: AggregateSpec, table: Keyed) -> GroupChangelog | None:
    """What the main table holds of groups that come and go; None where they only come."""
    if not spec.retracts and not spec.changes:
        return None
    return GroupChangelog(spec, table.values, [column.kind for column in table.layout.schema.values])


def accumulators_before(spec: AggregateSpec, found: GroupChangelog) -> list[Accumulator]:
    """Accumulators that read how groups stood before the batch."""
    made = accumulators(spec.calls, spec.inputs, retracts=spec.retracts)
    bind(made, found.before)
    return made


def distincts(spec: AggregateSpec) -> list[tuple[Distinct, Keyed, list[int]]]:
    """The side tables, each with the positions of the calls that it serves.

    The key of a side table is the group's key and the distinct inputs; its values are the group's hash, by which a
    change of partitions tells whose row it is, and if calls have several filters, a bit for each that was passed.
    """
    users: dict[tuple[int, ...], dict[int | None, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, call in enumerate(spec.calls):
        if is_distinct(call):
            users[tuple(dict.fromkeys(call.inputs))][call.filter].append(number)
    made: list[tuple[Distinct, Keyed, list[int]]] = []
    for inputs, filters in users.items():
        fields = [*spec.key_fields, *(spec.inputs[position] for position in inputs)]
        for first in range(0, len(filters), _MAX_FILTERS):
            chunk = list(filters.items())[first : first + _MAX_FILTERS]
            values = [
                (Column("group", "word"), False),
                *([(Column("passed", "word"), False)] if len(chunk) > 1 else []),
            ]
            distinct = Distinct(f"distinct{len(made)}", inputs, tuple(column for column, _ in chunk))
            made.append((distinct, keyed(fields, values), [number for _, numbers in chunk for number in numbers]))
    return made


def distinct_inputs(spec: AggregateSpec) -> list[tuple[int, ...]]:
    """The inputs of which only distinct ones count, for some call."""
    return list(dict.fromkeys(distinct.inputs for distinct, _, _ in distincts(spec)))


def sample_table() -> Keyed:
    """How some distinct inputs of appended rows are known: by a hash of each with its group."""
    return keyed([Field("entry", "bigint")], [])


def backfill_table() -> Keyed:
    """How it is known that appended rows become groups: by a table without rows."""
    return keyed([], [(Column("nothing", "word"), False)])
