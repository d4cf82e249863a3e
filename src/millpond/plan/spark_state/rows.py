"""State of Spark's own operators, as rows that Millpond's operators take over (see `AdoptsSparkState`).

Spark's plan says for each operator what it keeps; that is compared with the schema of its state store. Then the rows
are checked, since a schema does not have the length of windows or the keys of a join. Differences, and state that Spark
keeps as bytes, are refused with the name of the part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, permutations
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from millpond.humanize import counted
from millpond.plan.catalyst.buffers import Buffers, buffers_of
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import WATERMARK_DELAY, Expression, Node
from millpond.plan.decision.decision import Decided, Operator
from millpond.plan.reading.join import JoinReading, SideReading
from millpond.plan.reading.join_input import side_projections
from millpond.plan.reading.reading import Reading
from millpond.plan.spark_state.buffers import StateColumn, state_columns
from millpond.plan.spark_state.checks import (
    check_groups,
    check_keys,
    check_rows,
    compare_times,
    end_and_checks,
    refused,
)
from millpond.plan.spark_state.contradictions import Check, Times, closed_checks, delay_checks, micros
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.kinds.deduplicate import DeduplicateSpec, WithinSpec
from millpond.spec.kinds.join import JoinSpec
from millpond.spec.kinds.session import SessionSpec
from millpond.spec.operators import AggregateCall, Field
from millpond.spec.types import parse_type
from millpond.tasks.ddl import quoted

ReadStore = Callable[[str], DataFrame]
"""Reads a store of one operator: its columns are the structs `key` and `value`."""

DEFAULT = "default"
"""Name of the store of an operator that has only one."""

_JOIN = "symmetricHashJoin"
_ROWS = "-keyWithIndexToValue"
_MAX_PERMUTED_FUNCTIONS = 7  # up to this number of functions, all orders are tried
_AMBIGUOUS_ORDER = (
    "the projection above it may have had Spark keep its functions in another order, which the state does not record"
)


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


def projected(decided: Decided, *, above: bool = False) -> Iterator[Decided]:
    """Yield the operators whose columns a projection reads, below the next operator."""
    if decided.operator is not None and above:
        yield decided
    above = decided.node.kind == "Project" or (above and decided.operator is None)
    for child in decided.children:
        yield from projected(child, above=above)


def imported_rows(
    catalyst: Catalyst,
    decided: Decided,
    held: StoredOperator,
    read: ReadStore,
    times: Times,
    *,
    projected: bool = False,
) -> DataFrame:
    """Return the rows that an operator takes over from Spark's state: its columns, and the hash last.

    Args:
        catalyst: of the query's session.
        decided: the node with its operator.
        held: the operator in the checkpoint.
        read: reads a store of the operator.
        times: the query's watermarks.
        projected: whether a projection reads its columns. Spark merges that into an aggregate, and keeps the functions'
            state in the projection's order.

    Raises:
        StateIncompatibleError: the state is another query's, or cannot be taken over.
    """
    operator = decided.operator
    assert operator is not None
    spec, reading = operator.spec, operator.reading
    wanted = _SPARK_NAMES.get(type(spec)) if spec is not None else None
    if wanted is None:
        raise refused(operator, "state of this kind cannot be taken over")
    if held.name != wanted:
        raise refused(operator, f"the query has {_kind(wanted)} there; its checkpoint has {_kind(held.name)}")
    if isinstance(reading, JoinReading):
        assert isinstance(spec, JoinSpec)
        return _joined(catalyst, decided.node, operator, reading, held, read, times)
    assert isinstance(reading, Reading)
    if isinstance(spec, DeduplicateSpec | WithinSpec):
        return _deduplicated(decided.node, operator, spec, reading, read(DEFAULT), times)
    assert isinstance(spec, AggregateSpec | SessionSpec)
    return _aggregated(catalyst, decided.node, operator, spec, reading, read(DEFAULT), times, projected=projected)


_SPARK_NAMES: dict[type, str] = {
    AggregateSpec: "stateStoreSave",
    SessionSpec: "sessionWindowStateStoreSaveExec",
    DeduplicateSpec: "dedupe",
    WithinSpec: "dedupeWithinWatermark",
    JoinSpec: _JOIN,
}
_KINDS = {
    "stateStoreSave": "groupBy",
    "sessionWindowStateStoreSaveExec": "groupBy with session windows",
    "sessionWindowStateStoreRestoreExec": "groupBy with session windows",
    "dedupe": "dropDuplicates",
    "dedupeWithinWatermark": "dropDuplicatesWithinWatermark",
    _JOIN: "a join of two streams",
    "flatMapGroupsWithState": "flatMapGroupsWithState",
    "applyInPandasWithState": "applyInPandasWithState",
    "transformWithStateExec": "transformWithState",
    "transformWithStateInPySpark": "transformWithState",
    "globalLimit": "limit",
}
"""Spark's name of an operator in a checkpoint → its name in Spark's API."""


def describe_stored(held: dict[int, StoredOperator]) -> str:
    """Describe the operators of a checkpoint for people."""
    names = ", ".join(_kind(held[number].name) for number in sorted(held))
    return counted(len(held), "stateful operator") + (f" ({names})" if names else "")


def describe_operators(order: Sequence[Decided]) -> str:
    """Describe the operators of a query for people."""
    names = ", ".join(decided.operator.title for decided in order if decided.operator is not None)
    return counted(len(order), "stateful operator") + (f" ({names})" if names else "")


def _kind(name: str) -> str:
    return _KINDS.get(name, name)


def _aggregated(
    catalyst: Catalyst,
    node: Node,
    operator: Operator,
    spec: AggregateSpec | SessionSpec,
    reading: Reading,
    state: DataFrame,
    times: Times,
    *,
    projected: bool,
) -> DataFrame:
    _check_spec(operator, spec)
    buffers = _buffers(catalyst, node, reading)
    keys, values = _fields(state, "key"), _fields(state, "value")
    session = isinstance(spec, SessionSpec)
    if not session:
        _compare(operator, "groups by", buffers.keys, keys)
    with_keys = session or len(values) == len(buffers.keys) + len(buffers.columns)
    if projected:
        buffers = _in_stored_order(operator, buffers, values[len(buffers.keys) if with_keys else 0 :])
    # Aggregates in state format 1, and sessions, have the keys among the values, too.
    first = len(buffers.keys) if with_keys else 0
    if session:
        _compare(operator, "groups by", buffers.keys, values[:first])
    if first or buffers.columns:  # otherwise Spark keeps a placeholder
        _compare(operator, "keeps for its functions", buffers.columns, values[first:])
    flat = _flat(state, values if session or buffers.columns else [], keys=[] if session else keys)
    place = "v" if session else "k"
    compare_times(operator, buffers.keys, buffers.metadata, _metadata(state, "value" if session else "key"), times)
    check_groups(node, operator, spec, reading, buffers, flat, place, first, times)
    columns = _group_columns(spec, reading, buffers.keys, place)
    for number, (call, own) in enumerate(zip(spec.calls, buffers.calls, strict=True)):
        parts = _state_columns(operator, spec, call, buffers, own, reading.function_name(number))
        held = [f"v{first + position}" for position in own or ()]
        columns |= {f"__{number}_{part}": column.sql.format(*held) for part, column in enumerate(parts)}
    rows = flat.selectExpr(*(f"{sql} as {quoted(name)}" for name, sql in columns.items()))
    return rows.selectExpr("*", f"{reading.hash} as __hash")


def _buffers(catalyst: Catalyst, node: Node, reading: Reading) -> Buffers:
    """Return the keys and buffers that Spark keeps for a node; a `Distinct` has keys only."""
    if node.kind != "Distinct":
        return buffers_of(catalyst, node, reading.aggregates)
    keys = [Field(column.name, column.type) for column in node.output]
    return Buffers(keys, [column.metadata for column in node.output], [], [], [])


def _group_columns(
    spec: AggregateSpec | SessionSpec, reading: Reading, held: Sequence[Field], place: str
) -> dict[str, str]:
    """Return SQL for the key columns of the operator's input, and for the bounds of sessions.

    Args:
        spec, reading: of the query.
        held: the groupings in the state.
        place: the prefix of the columns that hold them.
    """
    columns: dict[str, str] = {}
    groupings = list(range(len(held)))
    if reading.session is not None:
        groupings.remove(reading.session.position)
    for number, key in zip(groupings, reading.keys, strict=True):
        sql = f"{place}{number}"
        if reading.assignment is not None and reading.time is not None and reading.time.column == number:
            sql = micros(f"{sql}.start", parse_type(held[number].type).fields[0][1].name)
        columns[key.field.name] = sql
    if reading.session is not None:
        window = f"{place}{reading.session.position}"
        kind = parse_type(spec.window.type).fields[0][1].name if isinstance(spec, SessionSpec) else ""
        columns |= {f"__{bound}": micros(f"{window}.{bound}", kind) for bound in ("start", "end")}
    return columns


def _in_stored_order(operator: Operator, buffers: Buffers, held: Sequence[Field]) -> Buffers:
    """Return the buffers in the order of the state; exactly one order has to fit."""
    blocks = sorted(buffers.blocks, key=lambda block: block.start)
    if len(blocks) > _MAX_PERMUTED_FUNCTIONS:
        if len(set(map(_identity, buffers.columns))) < len(buffers.columns):
            raise refused(operator, _AMBIGUOUS_ORDER)
        return buffers
    wanted = [*map(_identity, held)]
    columns = [*map(_identity, buffers.columns)]
    fitting = [order for order in permutations(blocks) if [columns[position] for position in chain(*order)] == wanted]
    if len(fitting) > 1:
        raise refused(operator, _AMBIGUOUS_ORDER)
    if not fitting:
        return buffers
    place = {old: new for new, old in enumerate(chain(*fitting[0]))}
    calls = [None if own is None else range(place[own.start], place[own.start] + len(own)) for own in buffers.calls]
    return buffers._replace(columns=[buffers.columns[old] for old in place], calls=calls)


def _identity(field: Field) -> tuple[str, object]:
    return field.name, _plain(field.type)


def _check_spec(operator: Operator, spec: AggregateSpec | SessionSpec) -> None:
    windows = spec.time.windows if isinstance(spec, AggregateSpec) and spec.time is not None else None
    if windows is not None and windows.shared:
        raise refused(operator, "Spark keeps sliding windows each by itself, Millpond what they share")
    if spec.keeps_rows:
        raise refused(operator, "the rows of its groups are kept, and Spark has kept results of them only")
    if isinstance(spec, AggregateSpec) and (spec.retracts or spec.changes):
        raise refused(operator, "Spark has no operators over rows that change")


def _state_columns(
    operator: Operator,
    spec: AggregateSpec | SessionSpec,
    call: AggregateCall,
    buffers: Buffers,
    own: range | None,
    name: str,
) -> list[StateColumn]:
    inputs = [spec.inputs[position].type for position in call.inputs]
    columns = None
    if own is not None:
        types = [buffers.columns[position].type for position in own]
        columns = state_columns(call, [parse_type(ddl) for ddl in inputs], inputs, types)
    if columns is None:
        raise refused(operator, f"what Spark keeps of {name}({', '.join(inputs)}) cannot be read")
    return columns


def _deduplicated(
    node: Node,
    operator: Operator,
    spec: DeduplicateSpec | WithinSpec,
    reading: Reading,
    state: DataFrame,
    times: Times,
) -> DataFrame:
    held = _fields(state, "key")
    expected = _stored_keys(operator, spec, reading, held)
    time = spec.time.column if isinstance(spec, WithinSpec) else None
    values = _fields(state, "value") if time is not None else []
    if time is not None:
        _compare(operator, "keeps of each key", [Field("expiresAtMicros", "bigint")], values)
    flat = _flat(state, values, keys=held)
    fields = [Field(column.name, column.type) for column in expected]
    compare_times(operator, fields, [column.metadata for column in expected], _metadata(state, "key"), times)
    check_rows(operator, flat, _key_checks(node, spec, reading, expected, times))
    if time in spec.keys:
        raise refused(operator, "the event time is one of its keys")
    position_of = {column.expr_id: number for number, column in enumerate(expected)}
    columns = []
    for position, column in enumerate(reading.inputs):
        if position == time:
            sql = _time("v0", column.field.type)
        elif position in spec.keys:
            sql = f"k{position_of[reading.raw[column.raw[0]].expr_id]}"
        else:
            sql = f"cast(null as {column.field.type})"
        columns.append((column.field.name, sql))
    rows = flat.selectExpr(*(f"{sql} as {quoted(name)}" for name, sql in columns))
    return rows.selectExpr("*", f"{reading.hash} as __hash")


def _stored_keys(
    operator: Operator, spec: DeduplicateSpec | WithinSpec, reading: Reading, held: Sequence[Field]
) -> list[Expression]:
    """Return the query's key columns in the order of the state's keys."""
    expected = [reading.raw[reading.inputs[position].raw[0]] for position in spec.keys]
    names = [field.name for field in held]
    if len(set(names)) == len(names) and {column.name for column in expected} == set(names):
        # The order of the keys does not matter, as long as their names are distinct.
        expected.sort(key=lambda column: names.index(column.name))
    _compare(operator, "deduplicates by", [Field(column.name, column.type) for column in expected], held)
    if len(set(names)) < len(names):
        raise refused(operator, "two of its keys have one name, by which the state cannot distinguish them")
    return expected


def _key_checks(
    node: Node, spec: DeduplicateSpec | WithinSpec, reading: Reading, keys: Sequence[Expression], times: Times
) -> list[Check]:
    """Return the checks of a deduplication's rows: windows among the keys, and the times when keys expire."""
    closed = None if spec.lag is None else times.watermark - spec.lag
    within = spec if isinstance(spec, WithinSpec) else None
    checks: list[Check] = []
    for number, key in enumerate(keys):
        end, own = end_and_checks(node, key, f"k{number}")
        checks += own
        marked = within is None and WATERMARK_DELAY in key.metadata
        if end is not None and closed is not None and marked:
            checks += closed_checks(*end, "keys", closed)
    if within is not None and closed is not None:
        checks += closed_checks("v0", "timestamp_micros(v0)", "keys", closed)
        time = reading.raw[reading.inputs[within.time.column].raw[0]]
        marks = [mark.expression("eventTime") for mark in node.walk() if mark.kind == "EventTimeWatermark"]
        # otherwise this time may be ahead of the time that the watermark follows
        if len(marks) == 1 and marks[0].expr_id == time.expr_id:
            checks += delay_checks("v0", within.delay_ms, times.following)
    return checks


def _joined(
    catalyst: Catalyst,
    node: Node,
    operator: Operator,
    reading: JoinReading,
    held: StoredOperator,
    read: ReadStore,
    times: Times,
) -> DataFrame:
    frames = []
    parts = (reading.left, reading.right)
    sides = zip(("left", "right"), parts, node.children, side_projections(catalyst, reading), strict=True)
    for side, part, child, projection in sides:
        store = side + _ROWS
        if store not in held.stores:
            raise refused(operator, f"its state is of a format that has no {store}")
        frames.append(_joined_side(catalyst, operator, reading.spec, side, part, child, projection, read(store), times))
    return frames[0].union(frames[1])


def _joined_side(
    catalyst: Catalyst,
    operator: Operator,
    spec: JoinSpec,
    side: str,
    reading: SideReading,
    child: Node,
    projection: tuple[list[Expression], list[str]],
    state: DataFrame,
    times: Times,
) -> DataFrame:
    """Return the rows of one side of a join.

    Args:
        catalyst: of the query's session.
        operator, spec: the join.
        side: left or right.
        reading: the side's reading.
        child: the query's plan below that side.
        projection: the side's input (see `side_projections`).
        state: the side's rows in the state.
        times: the query's watermarks.
    """
    values = _fields(state, "value")
    # Only Spark's second format of join state records which rows have found a match.
    known = values and values[-1].name == "matched" and values[-1].type == "boolean"
    if not known and spec.kind != "inner":
        raise refused(operator, "its state has Spark's first join format, which does not record matched rows")
    rows = values[:-1] if known else values
    *keys, number = _fields(state, "key")  # the number of a row within its key
    flat = _flat(state, values, [*keys, number])
    matched = F.col(f"v{len(rows)}") if known else F.lit(None).cast("boolean")
    analyzed = catalyst.analyzed(flat.withColumn("__matched", matched))
    aliases, columns = projection
    places = _stored_places(operator, side, child.output, aliases, rows)
    metadata = _metadata(state, "value")
    compare_times(
        operator,
        [Field(column.name, column.type) for column, _ in places],
        [column.metadata for column, _ in places],
        [metadata[place] for _, place in places],
        times,
    )
    check_rows(
        operator, flat, [check for column, place in places for check in end_and_checks(child, column, f"v{place}")[1]]
    )
    # Spark's columns take the identities of the query's, so that the query's own expressions apply to them.
    stored = analyzed.output[len(keys) + 1 :]
    renamed = [catalyst.aliased_as(catalyst.cast_to(stored[place], column), column) for column, place in places]
    under = catalyst.project([*analyzed.output, *renamed], analyzed)
    projected = catalyst.dataframe(catalyst.project([*aliases, *analyzed.output], under))
    *others, hashed = columns
    named = [f"{column} as __{column}" for column in flat.columns]
    check_keys(operator, reading.keys, spec, side, projected.selectExpr(*named, *others), keys, rows)
    return projected.selectExpr(*others, "__matched", hashed)


def _stored_places(
    operator: Operator, side: str, output: Sequence[Expression], aliases: Sequence[Expression], held: Sequence[Field]
) -> list[tuple[Expression, int]]:
    """Return the columns of a join's side that the state has, each with its place among the stored columns.

    Raises:
        StateIncompatibleError: the join reads a column that the state lacks, or has twice.
    """
    parts = (part for alias in aliases for part in alias.walk())
    needed = {part.expr_id for part in parts if part.kind == "AttributeReference"}
    found: list[tuple[Expression, int]] = []
    for column in output:
        places = [place for place, field in enumerate(held) if (field.name, field.type) == (column.name, column.type)]
        if len(places) == 1:
            found.append((column, places[0]))
        elif column.expr_id in needed:
            raise refused(
                operator,
                f"the query reads {column.name} {column.type} on its {side} side; its checkpoint has "
                f"{_field_list(held)} there",
            )
    return found


def _metadata(state: DataFrame, part: str) -> list[dict[str, Any]]:
    struct: Any = state.schema[part].dataType
    return [field.metadata for field in struct.fields]


def _fields(state: DataFrame, part: str) -> list[Field]:
    struct: Any = state.schema[part].dataType
    return [Field(field.name, field.dataType.simpleString()) for field in struct.fields]


def _flat(state: DataFrame, values: Sequence[Field], keys: Sequence[Field]) -> DataFrame:
    """Return the fields of both structs as columns `k0`…, `v0`…, by position, since names may repeat."""
    parts: list[str] = []
    for part, letter, fields in (("key", "k", keys), ("value", "v", values)):
        if fields:
            names = ", ".join(f"{letter}{number}: {field.type}" for number, field in enumerate(fields))
            parts.append(f"cast({part} as struct<{names}>) as {letter}")
    if not parts:
        return state.selectExpr("true as nothing")
    structs = state.selectExpr(*parts)
    return structs.selectExpr(*(f"{column}.*" for column in structs.columns))


def _time(sql: str, kind: str) -> str:
    """Return SQL for a time from microseconds since the epoch."""
    if kind == "timestamp":
        return f"timestamp_micros({sql})"
    return f"timestampadd(MICROSECOND, {sql}, timestamp_ntz'1970-01-01 00:00:00')"


def _compare(operator: Operator, does: str, wanted: Sequence[Field], held: Sequence[Field]) -> None:
    """Check that the checkpoint has the columns that Spark would keep for this query."""
    if [(column.name, _plain(column.type)) for column in wanted] == [
        (column.name, _plain(column.type)) for column in held
    ]:
        return
    raise refused(operator, f"the query {does} ({_field_list(wanted)}); its checkpoint {does} ({_field_list(held)})")


def _plain(type_: str) -> object:
    return parse_type(type_)


def _field_list(fields: Sequence[Field]) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in fields)
