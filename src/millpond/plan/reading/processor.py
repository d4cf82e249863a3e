"""Reads `transformWithState` and `transformWithStateInPandas`: a processor of the user's own.

Its state variables are those that its `init` asks for: that is run once, on a copy, as Spark does on the driver.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql.types import StructField, StructType

from millpond.conf import read_settings
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import WATERMARK_DELAY, Node
from millpond.plan.catalyst.python import broadcasts, callable_here, command, worker_settings
from millpond.plan.reading.aggregate import Derived, Reading, check_key, check_one_time, unique
from millpond.plan.reading.reasons import Reason, Unsupported
from millpond.slot.pipe.processors.asynchronous.base import check_asynchronous
from millpond.slot.pipe.processors.learning import learned
from millpond.slot.pipe.processors.processor import UserProcessor
from millpond.spec.kinds.processor import ProcessorSpec, TimeMode
from millpond.spec.operators import EventTime, Field

PROCESSORS = {"TransformWithStateInPySpark": "transformWithState"}
"""Nodes that call a processor of the user → how to call them."""

EMITTED_TIME = "UpdateEventTimeWatermarkColumn"
"""The node above a processor that says which of its columns is the event time (`eventTimeColumnName`)."""

_ENCODING = "spark.sql.streaming.stateStore.encodingFormat"

_TIME_MODES: dict[str, TimeMode] = {"NoTime": "none", "ProcessingTime": "processing", "EventTime": "event"}


@dataclass
class ProcessorReading(Reading):
    """What was read from a node that calls a processor of the user.

    Attributes:
        processor: the user's, as it travels to where it is called.
        broadcasts: the JVM's objects of broadcast variables that it uses.
    """

    processor: UserProcessor | None = None
    broadcasts: list[Any] = field(default_factory=list)


def processor_title(node: Node) -> str:
    """The operator in a few words."""
    name = "transformWithStateInPandas" if _pandas(node) else "transformWithState"
    keys = ", ".join(key.name for key in node.children[0].output[: _groupings(node)])
    return f"{name} by {keys}"


def read_processor(catalyst: Catalyst, node: Node) -> tuple[ProcessorReading, ProcessorSpec]:
    """Read a node that calls a processor.

    Its left child has the grouping columns, then all columns of the data.

    Raises:
        Unsupported: it stays on Spark.
        PySparkException: the processor's `init` uses its handle in a way that Spark does not allow.
        UsageError: it is asynchronous in part only.
    """
    mode = str(node.java.outputMode().toString()).lower()
    if node.java.hasInitialState():
        raise Unsupported(Reason("MP-PROCESSOR", "an initial state"))
    if not callable_here():
        raise Unsupported(Reason("MP-PROCESSOR", "a version of Spark before 4.3"))
    if str(catalyst.spark.conf.get(_ENCODING, "unsaferow")).lower() == "avro":
        raise Unsupported(Reason("MP-PROCESSOR", "state that is encoded as Avro, whose types may change"))
    time_mode = _TIME_MODES[str(node.java.timeMode().toString())]
    if time_mode == "processing" and mode == "complete":
        raise Unsupported(Reason("MP-PROCESSOR", "processing time in output mode complete"))
    reading = ProcessorReading()
    keys = _read_columns(reading, node)
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
        variables=tuple(kept.variables),
        time_mode=time_mode,
        output_mode=mode,
        time=reading.time,
        marked=any(one.kind == "EventTimeWatermark" for one in node.walk()),
        purged=tuple(kept.purged),
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
        in_flight=read_settings(catalyst.settings).async_in_flight if asynchronous else None,
    )
    reading.broadcasts = broadcasts(function)
    return reading, spec


def _read_columns(reading: Reading, node: Node) -> tuple[int, ...]:
    """Read the columns that the processor sees, as Spark has them: grouping columns that are not data, then the data.

    Returns:
        The positions of the grouping columns.
    """
    output = node.children[0].output
    groupings, data = output[: _groupings(node)], output[_groupings(node) :]
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
