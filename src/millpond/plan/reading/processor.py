"""Reads `transformWithState`, also in pandas, and `applyInPandasWithState`: code of the user that keeps state.

A processor's state variables are those that its `init` asks for: that is run once, on a copy, as Spark does on the
driver.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from pyspark.sql.types import StructField, StructType

from millpond.conf import read_settings
from millpond.ddl import ddl
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import WATERMARK_DELAY, Expression, Node
from millpond.plan.catalyst.python import broadcasts, command, worker_settings
from millpond.plan.catalyst.versions import calls_user_code
from millpond.plan.reading.aggregate import Derived, Reading, check_key, check_one_time, unique
from millpond.plan.reading.reasons import Reason, Unsupported
from millpond.spec.kinds.group_state import STATE, GroupStateSpec
from millpond.spec.kinds.processor import InitialState, ProcessorSpec, TimeMode, Variable
from millpond.spec.operators import EventTime, Field

if TYPE_CHECKING:
    from millpond.slot.pipe.processors.processor import UserProcessor

PROCESSORS = {"TransformWithStateInPySpark": "transformWithState"}
"""Nodes that call a processor of the user → how to call them."""

EMITTED_TIME = "UpdateEventTimeWatermarkColumn"
"""The node above a processor that says which of its columns is the event time (`eventTimeColumnName`)."""

GROUP_STATES = {"FlatMapGroupsInPandasWithState": "applyInPandasWithState"}
"""Nodes that call a function of the user with groups and their state → how to call them."""

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
    """What was read of the initial state.

    Attributes:
        node: gives its rows: the grouping columns, then all columns of the data.
        positions: of those columns that make up the key.
    """

    node: Node = field(kw_only=True)
    positions: tuple[int, ...] = ()


@dataclass
class ProcessorReading(Reading):
    """What was read from a node that calls a processor of the user.

    Attributes:
        processor: the user's, as it travels to where it is called.
        broadcasts: the JVM's objects of broadcast variables that it uses.
        initial: what the first batch begins with.
    """

    processor: UserProcessor | None = None
    broadcasts: list[Any] = field(default_factory=list)
    initial: InitialReading | None = None


def processor_title(node: Node) -> str:
    """The operator in a few words."""
    name = "transformWithStateInPandas" if _pandas(node) else "transformWithState"
    keys = ", ".join(key.name for key in node.children[0].output[: _groupings(node)])
    return f"{name} by {keys}"


def by_event_time(node: Node) -> bool:
    """Whether a node of `PROCESSORS` or `GROUP_STATES` drops late rows and has timers or timeouts of event time."""
    if node.kind in PROCESSORS:
        return _TIME_MODES[str(node.java.timeMode().toString())] == "event"
    return _TIMEOUTS[str(node.java.timeout().toString())] == "event"


def read_processor(catalyst: Catalyst, node: Node) -> tuple[ProcessorReading, ProcessorSpec]:
    """Read a node that calls a processor.

    Its left child has the grouping columns, then all columns of the data; so has the right one of the initial state.

    Raises:
        Unsupported: it stays on Spark.
        PySparkException: the processor's `init` uses its handle in a way that Spark does not allow.
        UsageError: it is asynchronous in part only.
    """
    _check_version()
    from millpond.slot.pipe.processors.asynchronous.base import check_asynchronous
    from millpond.slot.pipe.processors.learning import learned
    from millpond.slot.pipe.processors.processor import InitialColumns, UserProcessor

    mode = str(node.java.outputMode().toString()).lower()
    evolves = str(catalyst.spark.conf.get(_ENCODING, "unsaferow")).lower() == "avro"
    time_mode = _TIME_MODES[str(node.java.timeMode().toString())]
    if time_mode == "processing" and mode == "complete":
        raise Unsupported(Reason("MP-PROCESSOR", "processing time in output mode complete"))
    reading = ProcessorReading()
    keys = _read_columns(reading, node.children[0].output, _groupings(node))
    reading.initial = initial = _read_initial(node, keys) if node.java.hasInitialState() else None
    function = node.expression("functionExpr")
    pickled = command(catalyst, function)
    processor = _processor(pickled)
    asynchronous = check_asynchronous(processor, pandas=_pandas(node))
    marked = [one for one in node.children[0].output if WATERMARK_DELAY in one.metadata]
    if time_mode == "event":
        check_one_time(marked)
        ids = [one.expr_id for one in reading.raw]
        if marked:
            reading.time = EventTime(ids.index(marked[0].expr_id))
    names: set[str] = set()
    kept = learned(processor, time_mode)
    spec = ProcessorSpec(
        columns=tuple(column.field for column in reading.inputs),
        keys=keys,
        outputs=tuple(Field(unique(one.name, names), one.type) for one in node.output),
        variables=tuple(replace(one, evolves=evolves) for one in kept.variables),
        time_mode=time_mode,
        output_mode=mode,
        time=reading.time,
        marked=any(one.kind == "EventTimeWatermark" for one in node.children[0].walk()),
        purged=tuple(kept.purged),
        full=tuple(kept.full),
        initial=InitialState(tuple(one.field for one in initial.inputs), initial.positions) if initial else None,
    )
    if spec.unsupported is not None:
        raise Unsupported(Reason(spec.unsupported, processor_title(node)))
    reading.processor = UserProcessor(
        title=processor_title(node),
        command=pickled,
        pandas=_pandas(node),
        columns=_struct(reading.raw),
        values=tuple(range(len(reading.raw) - _data(node), len(reading.raw))),
        shown=_struct(node.output),
        spec=spec,
        conf=worker_settings(catalyst),
        initial=InitialColumns(_struct(initial.raw), initial.positions, tuple(range(len(initial.raw))))
        if initial
        else None,
        in_flight=read_settings(catalyst.settings).async_in_flight if asynchronous else None,
    )
    reading.broadcasts = broadcasts(function)
    return reading, spec


def is_asynchronous(catalyst: Catalyst, node: Node) -> bool:
    """Whether a node calls an asynchronous processor, which Spark cannot run."""
    if node.kind not in PROCESSORS:
        return False
    from millpond.slot.pipe.processors.asynchronous.base import AsyncStatefulProcessor

    try:
        return isinstance(_processor(command(catalyst, node.expression("functionExpr"))), AsyncStatefulProcessor)
    except Unsupported:
        return False


def _read_initial(node: Node, keys: tuple[int, ...]) -> InitialReading:
    """Read the initial state, which has to be grouped as the input is: `keys` are the positions of its key."""
    if node.children[1].streaming:
        raise Unsupported(Reason("MP-PROCESSOR", "an initial state that is a stream"))
    above, below = (child.output for child in node.children)
    count = int(node.java.initGroupingAttrsLen())
    by, over = ([one.type for one in output] for output in (below[:count], above[: len(keys)]))
    if by != over:
        what = f"an initial state that is grouped by {', '.join(by)} (the input is by {', '.join(over)})"
        raise Unsupported(Reason("MP-PROCESSOR", what))
    reading = InitialReading(node=node.children[1])
    reading.positions = _read_columns(reading, below, count)
    if list(map(reading.positions.index, reading.positions)) != list(map(keys.index, keys)):
        raise Unsupported(Reason("MP-PROCESSOR", "an initial state that is grouped by a column twice"))
    return reading


def group_state_title(node: Node) -> str:
    """The operator in a few words."""
    return f"applyInPandasWithState by {', '.join(key.name for key in node.list('groupingAttributes'))}"


def read_group_state(catalyst: Catalyst, node: Node) -> tuple[ProcessorReading, GroupStateSpec]:
    """Read a node that calls a function with groups and their state: the function sees all columns of its child.

    Raises:
        Unsupported: it stays on Spark.
    """
    _check_version()
    from millpond.slot.pipe.processors.groups import UserGroups

    if str(catalyst.spark.conf.get(_FORMAT, "2")) == "1":
        raise Unsupported(Reason("MP-PROCESSOR", "state format 1, in which a removed state has no timeout"))
    function = node.expression("functionExpr")
    pickled = command(catalyst, function)
    if not isinstance(pickle.loads(pickled), tuple):
        raise Unsupported(Reason("MP-PROCESSOR", "a function that is so large that Spark sends it as a broadcast"))
    reading = ProcessorReading()
    names: set[str] = set()
    for at, attribute in enumerate(node.children[0].output):
        reading.raw.append(attribute)
        reading.inputs.append(Derived(Field(unique(attribute.name, names), attribute.type), (at,), "{0}"))
    ids = [one.expr_id for one in reading.raw]
    groupings = node.list("groupingAttributes")
    if not groupings:
        raise Unsupported(Reason("MP-PROCESSOR", "no key"))
    for one in groupings:
        check_key(one)
    keys = tuple(ids.index(one.expr_id) for one in groupings)
    reading.set_hash([reading.inputs[at].field.name for at in dict.fromkeys(keys)])
    mode = _TIMEOUTS[str(node.java.timeout().toString())]
    marked = [one for one in reading.raw if WATERMARK_DELAY in one.metadata]
    if mode == "event":
        check_one_time(marked)
        if marked:
            reading.time = EventTime(ids.index(marked[0].expr_id))
    state = StructType.fromJson(json.loads(str(node.java.stateType().json())))
    shown: set[str] = set()
    spec = GroupStateSpec(
        columns=tuple(column.field for column in reading.inputs),
        keys=keys,
        outputs=tuple(Field(unique(one.name, shown), one.type) for one in node.output),
        variables=(Variable(STATE, "value", ddl(state)),),
        time_mode=mode,
        output_mode=str(node.java.outputMode().toString()).lower(),
        time=reading.time,
        marked=bool(marked),
    )
    if spec.unsupported is not None:
        raise Unsupported(Reason(spec.unsupported, group_state_title(node)))
    reading.processor = UserGroups(
        title=group_state_title(node),
        command=pickled,
        pandas=True,
        columns=_struct(reading.raw),
        values=tuple(range(len(reading.raw))),
        shown=_struct(node.output),
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
    """Read the columns that the processor sees, as Spark has them: grouping columns that are not data, then the data.

    Args:
        reading: takes them up. output: the grouping columns, then the data. count: of grouping columns.

    Returns:
        The positions of the grouping columns.
    """
    groupings, data = output[:count], output[count:]
    known = {one.expr_id for one in data}
    names: set[str] = set()
    for attribute in [*(one for one in groupings if one.expr_id not in known), *data]:
        reading.raw.append(attribute)
        column = Field(unique(attribute.name, names), attribute.type)
        reading.inputs.append(Derived(column, (len(reading.raw) - 1,), "{0}"))
    ids = [one.expr_id for one in reading.raw]
    for one in groupings:
        check_key(one)
    keys = tuple(ids.index(one.expr_id) for one in groupings)
    reading.set_hash([reading.inputs[position].field.name for position in dict.fromkeys(keys)])
    return keys


def _groupings(node: Node) -> int:
    return int(node.java.groupingAttributesLen())


def _data(node: Node) -> int:
    return len(node.children[0].output) - _groupings(node)


def _pandas(node: Node) -> bool:
    return "pandas" in str(node.java.userFacingDataType().toString()).lower()


def _struct(columns: list[Any]) -> StructType:
    return StructType([StructField(one.name, one.data_type) for one in columns])


def _processor(pickled: bytes) -> Any:
    """A copy of the user's processor."""
    loaded = pickle.loads(pickled)
    if not isinstance(loaded, tuple):
        raise Unsupported(Reason("MP-PROCESSOR", "a processor that is so large that Spark sends it as a broadcast"))
    return loaded[0].__self__._stateful_processor
