"""State of Spark's own operators, as rows that Millpond's operators take over (see `AdoptsSparkState`).

Spark's plan says for each operator what it keeps; that is compared with the schema of its state store. Then the rows
are checked, since a schema does not have the length of windows or the keys of a join. Differences, and state that Spark
keeps as bytes, are refused with the name of the part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, permutations

from pyspark.sql import DataFrame

from millpond.plan.catalyst.buffers import Buffers, buffers_of
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import WATERMARK_DELAY, Expression, Node
from millpond.plan.decision.decision import Decided, Operator
from millpond.plan.reading.join import JoinReading
from millpond.plan.reading.reading import Reading
from millpond.plan.spark_state.buffers import StateColumn, state_columns
from millpond.plan.spark_state.checks import check_groups, check_rows, compare_times, end_and_checks, refused
from millpond.plan.spark_state.columns import ReadStore, StoredGroups, field_list, fields_of, flattened, metadata_of
from millpond.plan.spark_state.contradictions import Check, Times, closed_checks, delay_checks, micros
from millpond.plan.spark_state.join_rows import joined_rows
from millpond.plan.spark_state.stored_operators import JOIN, StoredOperator, api_name
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.kinds.deduplicate import DeduplicateSpec, WithinSpec
from millpond.spec.kinds.join import JoinSpec
from millpond.spec.kinds.session import SessionSpec
from millpond.spec.operators import AggregateCall, Field
from millpond.spec.types import DataType, parse_type
from millpond.tasks.ddl import quoted

_DEFAULT = "default"
"""Name of the store of an operator that has only one."""

_MAX_PERMUTED_FUNCTIONS = 7  # up to this number of functions, all orders are tried
_AMBIGUOUS_ORDER = (
    "the projection above it may have had Spark keep its functions in another order, which the state does not record"
)


def imported_rows(
    catalyst: Catalyst,
    decided: Decided,
    stored: StoredOperator,
    read: ReadStore,
    times: Times,
    *,
    projected: bool = False,
) -> DataFrame:
    """Return the rows that an operator takes over from Spark's state: its columns, and the hash last.

    Args:
        catalyst: of the query's session.
        decided: the node with its operator.
        stored: the operator in the checkpoint.
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
    if stored.name != wanted:
        raise refused(operator, f"the query has {api_name(wanted)} there; its checkpoint has {api_name(stored.name)}")
    if isinstance(reading, JoinReading):
        return joined_rows(catalyst, decided.node, operator, reading, stored.stores, read, times)
    assert isinstance(reading, Reading)
    if isinstance(spec, DeduplicateSpec | WithinSpec):
        return _deduplicated(decided.node, operator, spec, reading, read(_DEFAULT), times)
    assert isinstance(spec, AggregateSpec | SessionSpec)
    return _aggregated(catalyst, decided.node, operator, spec, reading, read(_DEFAULT), times, projected=projected)


_SPARK_NAMES: dict[type, str] = {
    AggregateSpec: "stateStoreSave",
    SessionSpec: "sessionWindowStateStoreSaveExec",
    DeduplicateSpec: "dedupe",
    WithinSpec: "dedupeWithinWatermark",
    JoinSpec: JOIN,
}
"""Kind of a spec → Spark's name of the operator in a checkpoint."""


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
    session = isinstance(spec, SessionSpec)
    stored = _stored_groups(operator, _buffers(catalyst, node, reading), state, session=session, projected=projected)
    buffers = stored.buffers
    compare_times(operator, buffers.keys, buffers.metadata, metadata_of(state, "value" if session else "key"), times)
    check_groups(node, operator, spec, reading, stored, times)
    columns = _group_columns(spec, reading, stored)
    for number, (call, buffer) in enumerate(zip(spec.calls, buffers.calls, strict=True)):
        types = None if buffer is None else [buffers.columns[position].type for position in buffer]
        parts = _state_columns(operator, spec, call, types, reading.function_name(number))
        in_buffer = [f"v{stored.first + position}" for position in buffer or ()]
        columns |= {f"__{number}_{part}": column.sql.format(*in_buffer) for part, column in enumerate(parts)}
    return _with_hash(stored.rows, columns.items(), reading)


def _stored_groups(
    operator: Operator, buffers: Buffers, state: DataFrame, *, session: bool, projected: bool
) -> StoredGroups:
    """Return the groups from the rows of their store, whose fields have to be those of the buffers.

    Args:
        operator: the aggregate.
        buffers: what Spark would keep for the query.
        state: the rows of the store.
        session: whether the groups are sessions.
        projected: as in `imported_rows`.

    Raises:
        StateIncompatibleError: Spark would keep other fields for the query.
    """
    keys, values = fields_of(state, "key"), fields_of(state, "value")
    # Aggregates in state format 1, and sessions, have the keys among the values, too.
    with_keys = session or len(values) == len(buffers.keys) + len(buffers.columns)
    first = len(buffers.keys) if with_keys else 0
    if not session:
        _compare(operator, "groups by", buffers.keys, keys)
    if projected:
        buffers = _in_stored_order(operator, buffers, values[first:])
    if session:
        _compare(operator, "groups by", buffers.keys, values[:first])
    if first or buffers.columns:  # otherwise Spark keeps a placeholder
        _compare(operator, "keeps for its functions", buffers.columns, values[first:])
    rows = flattened(state, keys=[] if session else keys, values=values if session or buffers.columns else [])
    return StoredGroups(rows, buffers, "v" if session else "k", first)


def _with_hash(rows: DataFrame, columns: Iterable[tuple[str, str]], reading: Reading) -> DataFrame:
    """Return columns over the rows, each from its name and SQL, and the hash last."""
    selected = rows.selectExpr(*(f"{sql} as {quoted(name)}" for name, sql in columns))
    return selected.selectExpr("*", f"{reading.hash} as __hash")


def _buffers(catalyst: Catalyst, node: Node, reading: Reading) -> Buffers:
    """Return the keys and buffers that Spark keeps for a node; a `Distinct` has keys only."""
    if node.kind != "Distinct":
        return buffers_of(catalyst, node, reading.aggregates)
    keys = [Field(column.name, column.type) for column in node.output]
    return Buffers(keys, [column.metadata for column in node.output], [], [], [])


def _group_columns(spec: AggregateSpec | SessionSpec, reading: Reading, stored: StoredGroups) -> dict[str, str]:
    """Return SQL for the key columns of the operator's input, and for the bounds of sessions."""
    columns: dict[str, str] = {}
    fields = stored.buffers.keys
    groupings = list(range(len(fields)))
    if reading.session is not None:
        groupings.remove(reading.session.position)
    for number, key in zip(groupings, reading.keys, strict=True):
        sql = f"{stored.prefix}{number}"
        if reading.assignment is not None and reading.time is not None and reading.time.column == number:
            sql = micros(f"{sql}.start", _bound_type(fields[number].type))
        columns[key.field.name] = sql
    if reading.session is not None:
        window = f"{stored.prefix}{reading.session.position}"
        type_ = _bound_type(spec.window.type) if isinstance(spec, SessionSpec) else ""
        columns |= {f"__{bound}": micros(f"{window}.{bound}", type_) for bound in ("start", "end")}
    return columns


def _bound_type(window: str) -> str:
    """Return the type of both bounds of a window."""
    return parse_type(window).fields[0][1].name


def _in_stored_order(operator: Operator, buffers: Buffers, stored: Sequence[Field]) -> Buffers:
    """Return the buffers in the order of the state, or unchanged if no order fits.

    Args:
        operator: the aggregate.
        buffers: in the order of the query.
        stored: the fields of the buffers in the state.

    Raises:
        StateIncompatibleError: more than one order may fit.
    """
    blocks = sorted(buffers.blocks, key=lambda block: block.start)
    columns = [*map(_identity, buffers.columns)]
    if len(blocks) > _MAX_PERMUTED_FUNCTIONS:
        if len(set(columns)) < len(columns):
            raise refused(operator, _AMBIGUOUS_ORDER)
        return buffers
    wanted = [*map(_identity, stored)]
    fitting = [order for order in permutations(blocks) if [columns[position] for position in chain(*order)] == wanted]
    if len(fitting) > 1:
        raise refused(operator, _AMBIGUOUS_ORDER)
    if not fitting:
        return buffers
    moved = {old: new for new, old in enumerate(chain(*fitting[0]))}
    calls = [
        None if buffer is None else range(moved[buffer.start], moved[buffer.start] + len(buffer))
        for buffer in buffers.calls
    ]
    return buffers._replace(columns=[buffers.columns[old] for old in moved], calls=calls)


def _identity(field: Field) -> tuple[str, DataType]:
    """Return what identifies a field: its name and type, however the type is written."""
    return field.name, parse_type(field.type)


def _check_spec(operator: Operator, spec: AggregateSpec | SessionSpec) -> None:
    """Refuse operators whose state differs from that of Spark's operators."""
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
    types: list[str] | None,
    name: str,
) -> list[StateColumn]:
    """Return the state columns of a call.

    Args:
        operator, spec, call: of the query.
        types: the types of the call's columns in Spark's buffers; None if they are not known.
        name: the query's name for the function.

    Raises:
        StateIncompatibleError: they cannot be made of the call's buffer.
    """
    inputs = [spec.inputs[position].type for position in call.inputs]
    columns = None
    if types is not None:
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
    """Return the rows of a deduplication: the columns that are not in the state are null."""
    stored = fields_of(state, "key")
    keys = _stored_keys(operator, spec, reading, stored)
    time = spec.time.column if isinstance(spec, WithinSpec) else None
    values = fields_of(state, "value") if time is not None else []
    if time is not None:
        _compare(operator, "keeps of each key", [Field("expiresAtMicros", "bigint")], values)
    rows = flattened(state, keys=stored, values=values)
    fields = [Field(key.name, key.type) for key in keys]
    compare_times(operator, fields, [key.metadata for key in keys], metadata_of(state, "key"), times)
    check_rows(operator, rows, _key_checks(node, spec, reading, keys, times))
    if time in spec.keys:
        raise refused(operator, "the event time is one of its keys")
    number_of = {key.expr_id: number for number, key in enumerate(keys)}
    columns = []
    for position, column in enumerate(reading.inputs):
        if position == time:
            sql = _time_of_micros("v0", column.field.type)
        elif position in spec.keys:
            sql = f"k{number_of[reading.raw[column.raw[0]].expr_id]}"
        else:
            sql = f"cast(null as {column.field.type})"
        columns.append((column.field.name, sql))
    return _with_hash(rows, columns, reading)


def _stored_keys(
    operator: Operator, spec: DeduplicateSpec | WithinSpec, reading: Reading, stored: Sequence[Field]
) -> list[Expression]:
    """Return the query's key columns in the order of the state's keys.

    Raises:
        StateIncompatibleError: the state has other keys, or two of one name.
    """
    keys = [reading.raw[reading.inputs[position].raw[0]] for position in spec.keys]
    names = [field.name for field in stored]
    if len(set(names)) == len(names) and {key.name for key in keys} == set(names):
        # The order of the keys does not matter, as long as their names are distinct.
        keys.sort(key=lambda key: names.index(key.name))
    _compare(operator, "deduplicates by", [Field(key.name, key.type) for key in keys], stored)
    if len(set(names)) < len(names):
        raise refused(operator, "two of its keys have one name, by which the state cannot distinguish them")
    return keys


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


def _time_of_micros(sql: str, type_: str) -> str:
    """Return SQL for a time from microseconds since the epoch."""
    if type_ == "timestamp":
        return f"timestamp_micros({sql})"
    return f"timestampadd(MICROSECOND, {sql}, timestamp_ntz'1970-01-01 00:00:00')"


def _compare(operator: Operator, does: str, wanted: Sequence[Field], stored: Sequence[Field]) -> None:
    """Check that the checkpoint has the columns that Spark would keep for this query."""
    if [*map(_identity, wanted)] == [*map(_identity, stored)]:
        return
    raise refused(operator, f"the query {does} ({field_list(wanted)}); its checkpoint {does} ({field_list(stored)})")
