"""Read `transformWithState`, also in pandas, and `applyInPandasWithState`: user code that keeps state.

A processor's state variables are those that its `init` requests. It runs once, on a copy, as Spark runs it on the
driver.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from pyspark.sql.types import StructField, StructType

from millpond.conf import read_settings
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import WATERMARK_DELAY, Expression, Node
from millpond.plan.catalyst.python import broadcasts, command, load, worker_settings
from millpond.plan.catalyst.session import settings_of
from millpond.plan.catalyst.versions import calls_user_code
from millpond.plan.reading.reading import InputColumn, Reading, check_key, check_one_time, unique_name
from millpond.plan.reading.reasons import Reason, Unsupported
from millpond.spec.kinds.group_state import STATE, GroupStateSpec
from millpond.spec.kinds.processor import InitialState, ProcessorSpec, TimeMode, Variable
from millpond.spec.operators import EventTime, Field
from millpond.tasks.ddl import ddl

if TYPE_CHECKING:
    from millpond.tasks.user_processor import UserProcessor

PROCESSORS = {"TransformWithStateInPySpark": "transformWithState"}
"""Nodes that call a user's processor → their titles."""

EVENT_TIME_NODE = "UpdateEventTimeWatermarkColumn"
"""The node above a processor that names its event-time column (`eventTimeColumnName`)."""

GROUP_STATES = {"FlatMapGroupsInPandasWithState": "applyInPandasWithState"}
"""Nodes that call a user function with groups and their state → their titles."""

_ENCODING = "spark.sql.streaming.stateStore.encodingFormat"
_FORMAT = "spark.sql.streaming.flatMapGroupsWithState.stateFormatVersion"
_TIME_MODES: dict[str, TimeMode] = {"NoTime": "none", "ProcessingTime": "processing", "EventTime": "event"}
_TIMEOUTS: dict[str, TimeMode] = {
    "NoTimeout": "none",
    "ProcessingTimeTimeout": "processing",
    "EventTimeTimeout": "event",
}


@dataclass
class InitialReading(Reading):
    """The reading of the initial state.

    Attributes:
        node: the node of its rows: the grouping columns, then all columns of the data.
        positions: the positions of the key columns.
    """

    node: Node = field(kw_only=True)
    positions: tuple[int, ...] = ()


@dataclass
class ProcessorReading(Reading):
    """The reading of a node that calls a user's processor.

    Attributes:
        processor: the user's processor, as it is sent to the worker that calls it.
        broadcasts: the JVM objects of broadcast variables that it uses.
        initial: the initial state of the first batch.
    """

    processor: UserProcessor | None = None
    broadcasts: list[Any] = field(default_factory=list)
    initial: InitialReading | None = None


def processor_title(node: Node) -> str:
    """Return the operator's title."""
    name = "transformWithStateInPandas" if _uses_pandas(node) else "transformWithState"
    keys = ", ".join(key.label(node.column_numbers) for key in node.children[0].output[: grouping_count(node)])
    return f"{name} by {keys}"


def by_event_time(node: Node) -> bool:
    """Whether a node of `PROCESSORS` or `GROUP_STATES` uses event time, for late rows and for timers or time-outs."""
    if node.kind in PROCESSORS:
        return _TIME_MODES[str(node.java.timeMode().toString())] == "event"
    return _TIMEOUTS[str(node.java.timeout().toString())] == "event"


def passes_watermark(node: Node) -> bool:
    """Whether operators above a node of `PROCESSORS` or `GROUP_STATES` get a watermark, as on Spark."""
    return node.kind in PROCESSORS and _TIME_MODES[str(node.java.timeMode().toString())] != "processing"


def read_processor(catalyst: Catalyst, node: Node) -> tuple[ProcessorReading, ProcessorSpec]:
    """Read a node that calls a processor.

    Its left child has the grouping columns, then all columns of the data; so has the right child with the initial
    state.

    Raises:
        Unsupported: it stays on Spark.
        PySparkException: the processor's `init` uses its handle in a way that Spark does not allow.
        UsageError: only a part of it is asynchronous.
    """
    _check_version()
    # These modules use private names of PySpark that only supported versions have.
    from millpond.tasks.user_processor import InitialColumns, UserProcessor
    from millpond.worker.processors.asynchronous.base import check_asynchronous
    from millpond.worker.processors.declaration import run_init

    mode = str(node.java.outputMode().toString()).lower()
    evolves = str(catalyst.spark.conf.get(_ENCODING, "unsaferow")).lower() == "avro"
    time_mode = _TIME_MODES[str(node.java.timeMode().toString())]
    if time_mode == "processing" and mode == "complete":
        raise Unsupported(Reason("MP-PROCESSOR", "processing time in output mode complete"))
    reading = ProcessorReading()
    keys = _read_columns(reading, node.children[0].output, grouping_count(node))
    reading.initial = initial = _read_initial(node, keys) if node.java.hasInitialState() else None
    function = node.expression("functionExpr")
    processor = _load_processor(catalyst, function)
    asynchronous = check_asynchronous(processor, pandas=_uses_pandas(node))
    marked = [item for item in node.children[0].output if WATERMARK_DELAY in item.metadata]
    if time_mode == "event":
        _set_time(reading, marked)
    names: set[str] = set()
    declared = run_init(processor, time_mode)
    spec = ProcessorSpec(
        columns=tuple(column.field for column in reading.inputs),
        keys=keys,
        outputs=tuple(Field(unique_name(item.name, names), item.type) for item in node.output),
        variables=tuple(replace(item, evolves=evolves) for item in declared.variables),
        time_mode=time_mode,
        output_mode=mode,
        time=reading.time,
        marked=any(item.kind == "EventTimeWatermark" for item in node.children[0].walk()),
        purged=tuple(declared.purged),
        full=tuple(declared.full),
        initial=InitialState(tuple(item.field for item in initial.inputs), initial.positions) if initial else None,
    )
    reading.processor = UserProcessor(
        title=processor_title(node),
        command=command(catalyst, function),
        pandas=_uses_pandas(node),
        columns=_struct(reading.raw),
        values=tuple(range(len(reading.raw) - _data_columns(node), len(reading.raw))),
        output_schema=_struct(node.output),
        spec=spec,
        conf=worker_settings(catalyst),
        initial=InitialColumns(_struct(initial.raw), initial.positions, tuple(range(len(initial.raw))))
        if initial
        else None,
        in_flight=read_settings(settings_of(catalyst.spark)).async_in_flight if asynchronous else None,
    )
    reading.broadcasts = broadcasts(function)
    return reading, spec


def is_asynchronous(catalyst: Catalyst, node: Node) -> bool:
    """Whether a node calls an asynchronous processor, which Spark cannot run."""
    if node.kind not in PROCESSORS:
        return False
    from millpond.worker.processors.asynchronous.base import AsyncStatefulProcessor

    try:
        return isinstance(_load_processor(catalyst, node.expression("functionExpr")), AsyncStatefulProcessor)
    except Unsupported:
        return False


def _read_initial(node: Node, keys: tuple[int, ...]) -> InitialReading:
    """Read the initial state; it has to be grouped as the input, whose key positions are `keys`."""
    if node.children[1].streaming:
        raise Unsupported(Reason("MP-PROCESSOR", "an initial state that is a stream"))
    above, below = (child.output for child in node.children)
    count = int(node.java.initGroupingAttrsLen())
    by, over = ([column.type for column in output] for output in (below[:count], above[: len(keys)]))
    if by != over:
        detail = f"an initial state that is grouped by {', '.join(by)} (the input is by {', '.join(over)})"
        raise Unsupported(Reason("MP-PROCESSOR", detail))
    reading = InitialReading(node=node.children[1])
    reading.positions = _read_columns(reading, below, count)
    if list(map(reading.positions.index, reading.positions)) != list(map(keys.index, keys)):
        raise Unsupported(Reason("MP-PROCESSOR", "an initial state that is grouped by a column twice"))
    return reading


def group_state_title(node: Node) -> str:
    """Return the operator's title."""
    keys = ", ".join(key.label(node.column_numbers) for key in node.list("groupingAttributes"))
    return f"applyInPandasWithState by {keys}"


def read_group_state(catalyst: Catalyst, node: Node) -> tuple[ProcessorReading, GroupStateSpec]:
    """Read a node that calls a function with groups and their state; the function sees all columns of its child.

    Raises:
        Unsupported: it stays on Spark.
    """
    _check_version()
    # This module uses private names of PySpark that only supported versions have.
    from millpond.tasks.user_processor import UserGroups

    if str(catalyst.spark.conf.get(_FORMAT, "2")) == "1":
        raise Unsupported(Reason("MP-PROCESSOR", "state format 1, in which a removed state has no timeout"))
    function = node.expression("functionExpr")
    if not isinstance(load(catalyst, function), tuple):
        raise Unsupported(Reason("MP-PROCESSOR", "a function that is so large that Spark sends it as a broadcast"))
    reading = ProcessorReading()
    groupings = node.list("groupingAttributes")
    if not groupings:
        raise Unsupported(Reason("MP-PROCESSOR", "no key"))
    keys = _read_columns(reading, [*groupings, *node.children[0].output], len(groupings))
    mode = _TIMEOUTS[str(node.java.timeout().toString())]
    marked = [column for column in reading.raw if WATERMARK_DELAY in column.metadata]
    if mode == "event":
        _set_time(reading, marked)
    state = StructType.fromJson(json.loads(str(node.java.stateType().json())))
    shown: set[str] = set()
    spec = GroupStateSpec(
        columns=tuple(column.field for column in reading.inputs),
        keys=keys,
        outputs=tuple(Field(unique_name(column.name, shown), column.type) for column in node.output),
        variables=(Variable(STATE, "value", ddl(state)),),
        time_mode=mode,
        output_mode=str(node.java.outputMode().toString()).lower(),
        time=reading.time,
        marked=bool(marked),
    )
    reading.processor = UserGroups(
        title=group_state_title(node),
        command=command(catalyst, function),
        pandas=True,
        columns=_struct(reading.raw),
        values=tuple(range(len(reading.raw))),
        output_schema=_struct(node.output),
        spec=spec,
        conf=worker_settings(catalyst),
        state=state,
    )
    reading.broadcasts = broadcasts(function)
    return reading, spec


def _check_version() -> None:
    if not calls_user_code():
        raise Unsupported(Reason("MP-VERSION", "a processor"))


def _read_columns(reading: Reading, output: Sequence[Expression], count: int) -> tuple[int, ...]:
    """Read the columns that the processor sees, as in Spark: grouping columns that are not data, then the data.

    Args:
        reading: the reading to extend.
        output: the grouping columns, then the data.
        count: the number of grouping columns.

    Returns:
        The positions of the grouping columns.
    """
    groupings, data = output[:count], output[count:]
    known = {expression.expr_id for expression in data}
    names: set[str] = set()
    for attribute in [*(expression for expression in groupings if expression.expr_id not in known), *data]:
        reading.raw.append(attribute)
        column = Field(unique_name(attribute.name, names), attribute.type)
        reading.inputs.append(InputColumn(column, (len(reading.raw) - 1,), "{0}"))
    ids = [expression.expr_id for expression in reading.raw]
    for expression in groupings:
        check_key(expression)
    keys = tuple(ids.index(expression.expr_id) for expression in groupings)
    reading.set_hash([reading.inputs[position].field.name for position in dict.fromkeys(keys)])
    return keys


def _set_time(reading: Reading, marked: list[Expression]) -> None:
    """Set the event time: the only column with a watermark, if there is one."""
    check_one_time(marked)
    if marked:
        ids = [column.expr_id for column in reading.raw]
        reading.time = EventTime(ids.index(marked[0].expr_id))


def grouping_count(node: Node) -> int:
    """Return by how many of its first input columns a node of `PROCESSORS` groups."""
    return int(node.java.groupingAttributesLen())


def _data_columns(node: Node) -> int:
    return len(node.children[0].output) - grouping_count(node)


def _uses_pandas(node: Node) -> bool:
    return "pandas" in str(node.java.userFacingDataType().toString()).lower()


def _struct(columns: list[Any]) -> StructType:
    return StructType([StructField(column.name, column.data_type) for column in columns])


def _load_processor(catalyst: Catalyst, function: Expression) -> Any:
    """Return a copy of the user's processor."""
    loaded = load(catalyst, function)
    if not isinstance(loaded, tuple):
        raise Unsupported(Reason("MP-PROCESSOR", "a processor that is so large that Spark sends it as a broadcast"))
    return loaded[0].__self__._stateful_processor
