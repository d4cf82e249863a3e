"""How an operator's state is laid out in tables: schemas, places of columns, and the values of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from millpond.errors import UsageError
from millpond.layout import Column, RowLayout, Rows, TableSchema, Words
from millpond.operators.aggregate.changelog import Images, image_columns
from millpond.operators.columns.decode import OversizeError, ints, key_columns, to_arrow
from millpond.operators.columns.encode import ALL, Place
from millpond.operators.columns.input_rows import StoredRows
from millpond.operators.functions.accumulators import Accumulator
from millpond.operators.functions.registry import accumulator
from millpond.operators.joins.rows import side_schemas
from millpond.operators.protocol import MAIN, MOVED, ROWS, SAMPLE
from millpond.operators.ranking.packed_rows import RankedRows
from millpond.operators.sessions.row_lists import Lists
from millpond.spec.aggregate import AggregateSpec
from millpond.spec.deduplicate import DeduplicateSpec
from millpond.spec.functions import is_distinct
from millpond.spec.join import JoinSpec
from millpond.spec.kinds import OperatorSpec
from millpond.spec.operators import Field
from millpond.spec.over import OverSpec
from millpond.spec.rank import RankSpec
from millpond.spec.session import SessionSpec
from millpond.spec.types import DataType, leaves, parse_type
from millpond.spec.within import WithinSpec

ORDINAL = Field("__ordinal", "bigint")
"""What tells the sessions of a key from each other."""

SESSION = tuple((Column(name, "word"), False) for name in ("start", "end", "expiry", "sessions"))
"""Value columns of a session: start and end (microseconds), the time at which it is closed (milliseconds), and in the
session with ordinal 0 how many there are of its key."""


@dataclass(frozen=True)
class Keyed:
    """A table's schema with the typed meaning of its keys.

    Attributes:
        fields: the key columns before flattening.
        layout: of the table.
        initial: the words of a fresh row.
        keys, values: the places of the key and the value columns.
        window: the type of the windows that the rows are sessions of; then the last key column is an ordinal, and the
            values begin with `SESSION`.
    """

    fields: tuple[Field, ...]
    layout: RowLayout
    initial: Words
    keys: tuple[Place, ...]
    values: tuple[Place, ...]
    window: DataType | None = None

    @property
    def types(self) -> tuple[DataType, ...]:
        """The types of the key columns."""
        return tuple(parse_type(field.type) for field in self.fields)


@dataclass(frozen=True)
class Distinct:
    """Inputs of which only the distinct ones count, for every call that names the same ones and the same filter."""

    table: str
    inputs: tuple[int, ...]
    filter: int | None


def keyed(fields: Sequence[Field], columns: Sequence[tuple[Column, bool]], window: DataType | None = None) -> Keyed:
    """Lay out a table with these keys and value columns, each with whether a fresh row has null there."""
    keys = []
    for position, field in enumerate(fields):
        for part, leaf in enumerate(leaves(parse_type(field.type))):
            keys.append(Column(f"{position}.{part}", leaf.kind))
    layout = RowLayout(TableSchema(tuple(keys), tuple(column for column, _ in columns)))
    places = [Place.of(offset, index) for index, offset in enumerate(layout.offsets)]
    initial: Words = np.zeros(layout.width, dtype=np.uint64)
    for (_, null), place in zip(columns, places[len(keys) :], strict=True):
        if null:
            initial[place.null_word] |= place.null_bit
    return Keyed(tuple(fields), layout, initial, tuple(places[: len(keys)]), tuple(places[len(keys) :]), window)


def accumulators(spec: AggregateSpec | SessionSpec, *, whole: bool = False) -> list[Accumulator]:
    """The accumulators of the calls, not bound yet; `whole`: the rows of each group are all there."""
    made: list[Accumulator] = []
    retracts = isinstance(spec, AggregateSpec) and spec.retracts
    for call in spec.calls:
        inputs = [parse_type(spec.inputs[position].type) for position in call.inputs]
        made.append(accumulator(call, inputs, whole=whole, retracts=retracts))
    return made


def main_table(spec: OperatorSpec, *, whole: bool = False) -> tuple[Keyed, list[Accumulator]]:
    """The main table and, for an aggregate, its accumulators, bound to their columns.

    Args:
        whole: of an aggregate over groups whose rows are all there.
    """
    assert not isinstance(spec, JoinSpec)
    fields = spec.key_fields
    if isinstance(spec, RankSpec | OverSpec):
        return rank_table(spec), []
    if isinstance(spec, DeduplicateSpec):
        return keyed(fields, []), []
    if isinstance(spec, WithinSpec):
        return keyed(fields, [(Column("expiry", "word"), False)]), []
    lists = isinstance(spec, SessionSpec) and spec.keeps_rows
    made: list[Accumulator] = [Lists()] if lists else accumulators(spec, whole=whole)
    columns = [
        (Column(f"{number}.{part}", column.kind), column.null)
        for number, each in enumerate(made)
        for part, column in enumerate(each.columns)
    ]
    if isinstance(spec, SessionSpec):
        table = keyed((*fields, ORDINAL), [*SESSION, *columns], parse_type(spec.window.type))
        remaining = iter(table.values[len(SESSION) :])
    else:
        columns += image_columns(columns, retracts=spec.retracts, changes=spec.changes)
        table = keyed(fields, columns)
        remaining = iter(table.values)
    for each in made:
        each.bind([next(remaining) for _ in each.columns])
    return table, made


def images(spec: AggregateSpec, table: Keyed) -> Images | None:
    """What the main table holds of groups that come and go; None where they only come."""
    if not spec.retracts and not spec.changes:
        return None
    return Images(spec, table.values, [column.kind for column in table.layout.schema.values])


def before_images(spec: AggregateSpec, found: Images) -> list[Accumulator]:
    """Accumulators that read how groups stood before the batch."""
    made = accumulators(spec)
    remaining = iter(found.before)
    for each in made:
        each.bind([next(remaining) for _ in each.columns])
    return made


def single(spec: RankSpec) -> bool:
    """Whether one row a key suffices."""
    return spec.function == "row_number" and spec.limit == 1 and not spec.retracts and not spec.changes


def rank_table(spec: RankSpec | OverSpec) -> Keyed:
    """How the rows of each key are stored: the one row itself, or all of them in one value, with their number."""
    fields = spec.key_fields
    if isinstance(spec, RankSpec) and single(spec):
        return keyed(fields, [(column, False) for column in RankedRows(spec.columns, spec.order).columns()])
    return keyed(fields, [(Column("slots", "bytes"), False), (Column("count", "word"), False)])


def distincts(spec: AggregateSpec) -> list[tuple[Distinct, Keyed, list[int]]]:
    """The side tables, each with the positions of the calls that it serves.

    The key of a side table is the group's key and the distinct inputs; its one value is the group's hash, by which a
    change of partitions tells whose row it is.
    """
    users: dict[tuple[tuple[int, ...], int | None], list[int]] = {}
    for number, call in enumerate(spec.calls):
        if is_distinct(call):
            inputs = tuple(dict.fromkeys(call.inputs))
            users.setdefault((inputs, call.filter), []).append(number)
    made = []
    for number, ((inputs, mask), calls) in enumerate(users.items()):
        fields = [*spec.key_fields, *(spec.inputs[position] for position in inputs)]
        table = keyed(fields, [(Column("group", "word"), False)])
        made.append((Distinct(f"distinct{number}", inputs, mask), table, calls))
    return made


def distinct_inputs(spec: AggregateSpec) -> list[tuple[int, ...]]:
    """The inputs of which only distinct ones count, for some call."""
    return list(dict.fromkeys(distinct.inputs for distinct, _, _ in distincts(spec)))


def sample_table() -> Keyed:
    """How some distinct inputs of appended rows are known: by a hash of each with its group."""
    return keyed([Field("entry", "bigint")], [])


def moved_table() -> Keyed:
    """How it is known up to which hash appended rows have become groups: in a table of one row."""
    return keyed([], [(Column("until", "word"), False)])


def table_schemas(spec: OperatorSpec) -> dict[str, tuple[TableSchema, Words]]:
    """The operator's tables by name: schema, and the words of a fresh row."""
    if isinstance(spec, AggregateSpec) and spec.keeps_rows:
        stored = StoredRows(spec)
        return {MAIN: (stored.layout.schema, stored.initial)}
    if isinstance(spec, SessionSpec) and spec.keeps_rows:
        main, stored = main_table(spec)[0], StoredRows(spec)
        return {MAIN: (main.layout.schema, main.initial), ROWS: (stored.layout.schema, stored.initial)}
    if isinstance(spec, JoinSpec):
        return {name: (schema, np.zeros(0, np.uint64)) for name, schema in side_schemas(spec).items()}
    tables = {MAIN: main_table(spec)[0]}
    if isinstance(spec, AggregateSpec):
        tables |= {distinct.table: table for distinct, table, _ in distincts(spec)}
    if spec.observed:
        tables |= {SAMPLE: sample_table(), MOVED: moved_table()}
    schemas = {name: (table.layout.schema, table.initial) for name, table in tables.items()}
    if isinstance(spec, AggregateSpec) and spec.observed:
        stored = StoredRows(spec)
        schemas[ROWS] = stored.layout.schema, stored.initial
    return schemas


def decode_rows(
    table: Keyed, calls: Sequence[Accumulator], fields: Sequence[Field], rows: Rows
) -> Iterator[pa.RecordBatch]:
    """Keys and results of rows as Arrow.

    Raises:
        UsageError: one row's are larger than Arrow's 32-bit offsets allow.
    """
    try:
        if table.window is None:
            columns = key_columns(rows, table.keys, table.types)
        else:
            columns = key_columns(rows, table.keys[:-1], table.types[:-1])
            bounds = [ints(rows, table.values[bound].offset) for bound in (0, 1)]
            children = [
                to_arrow(values, ALL, inner) for values, (_, inner) in zip(bounds, table.window.fields, strict=True)
            ]
            columns.append(pa.Array.from_buffers(table.window.arrow, rows.count, [None], children=children))
        columns += [call.result(rows) for call in calls]
    except OversizeError as error:
        middle = rows.count // 2
        if not middle:
            raise UsageError(
                "The results of one group take more than 2 GiB, which is more than an Arrow column holds.",
                action="Group by more columns, or collect less of each row.",
            ) from error
        yield from decode_rows(table, calls, fields, Rows(rows.words[:middle], rows.heap))
        yield from decode_rows(table, calls, fields, Rows(rows.words[middle:], rows.heap))
        return
    if columns:
        yield pa.RecordBatch.from_arrays(columns, names=[field.name for field in fields])
