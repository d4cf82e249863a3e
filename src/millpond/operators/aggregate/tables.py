"""The tables of groups: the main table with a row per group, and side tables of their distinct inputs."""

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
"""The name of the table that samples the distinct inputs of appended rows."""

BACKFILLED = "moved"
"""The name of the table whose existence marks that appended rows become groups."""


_MAX_FILTERS = 64
"""Maximum filters of one side table: each has one bit of a word."""


@dataclass(frozen=True)
class Distinct:
    """Inputs of which only distinct values count, shared by all calls with the same inputs.

    Attributes:
        table: the name of the side table.
        inputs: the positions of the inputs.
        filters: the distinct filters of these calls; None for no filter. If there are several, entries record which
            they have passed.
    """

    table: str
    inputs: tuple[int, ...]
    filters: tuple[int | None, ...]


def main_table(spec: AggregateSpec, *, whole: bool = False) -> tuple[Keyed, list[Accumulator]]:
    """Return the main table and the accumulators bound to its columns; `whole`: all rows of each group are existing."""
    bound = accumulators(spec.calls, spec.inputs, whole=whole, retracts=spec.retracts)
    columns = state_columns(bound)
    columns += changelog_columns(columns, retracts=spec.retracts, changes=spec.changes)
    table = keyed(spec.key_fields, columns)
    bind(bound, table.values)
    return table, bound


def changelog_of(spec: AggregateSpec, table: Keyed) -> GroupChangelog | None:
    """Return the changelog columns of the main table; None if groups cannot disappear and changes are not asked for."""
    if not spec.retracts and not spec.changes:
        return None
    return GroupChangelog(spec, table.values, [column.kind for column in table.layout.schema.values])


def accumulators_before(spec: AggregateSpec, changelog: GroupChangelog) -> list[Accumulator]:
    """Return accumulators that read the groups' state before the batch."""
    bound = accumulators(spec.calls, spec.inputs, retracts=spec.retracts)
    bind(bound, changelog.before)
    return bound


def distincts(spec: AggregateSpec) -> list[tuple[Distinct, Keyed, list[int]]]:
    """Return the side tables, each with the positions of the calls that it serves.

    The key of a side table is the group's key and the distinct inputs. Its first value is the group's hash, which
    assigns the row to a partition when the partitions change. For calls with several filters, a second value has one
    bit per filter that was passed.
    """
    users: dict[tuple[int, ...], dict[int | None, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, call in enumerate(spec.calls):
        if is_distinct(call):
            users[tuple(dict.fromkeys(call.inputs))][call.filter].append(number)
    sides: list[tuple[Distinct, Keyed, list[int]]] = []
    for inputs, filters in users.items():
        fields = [*spec.key_fields, *(spec.inputs[position] for position in inputs)]
        for first in range(0, len(filters), _MAX_FILTERS):
            chunk = list(filters.items())[first : first + _MAX_FILTERS]
            values = [
                (Column("group", "word"), False),
                *([(Column("passed", "word"), False)] if len(chunk) > 1 else []),
            ]
            distinct = Distinct(f"distinct{len(sides)}", inputs, tuple(column for column, _ in chunk))
            sides.append((distinct, keyed(fields, values), [number for _, numbers in chunk for number in numbers]))
    return sides


def distinct_inputs(spec: AggregateSpec) -> list[tuple[int, ...]]:
    """Return the sets of inputs of which some call counts only distinct values."""
    return list(dict.fromkeys(distinct.inputs for distinct, _, _ in distincts(spec)))


def sample_table() -> Keyed:
    """Return the layout of the sample table, whose key is a hash of a distinct input with its group."""
    return keyed([Field("entry", "bigint")], [])


def backfill_table() -> Keyed:
    """Return the layout of the marker table of a backfill, which has no rows."""
    return keyed([], [(Column("nothing", "word"), False)])
