"""Reads `applyInPandasWithState`: a function of the user's own over groups, with a state and a timeout for each."""

from __future__ import annotations

import json
import pickle

from pyspark.sql.types import StructField, StructType

from millpond.ddl import ddl
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import WATERMARK_DELAY, Node
from millpond.plan.catalyst.python import broadcasts, callable_here, command, worker_settings
from millpond.plan.reading.aggregate import Derived, check_key, check_one_time, unique
from millpond.plan.reading.processor import ProcessorReading
from millpond.plan.reading.reasons import Reason, Unsupported
from millpond.slot.pipe.processors.groups import UserGroups
from millpond.spec.kinds.group_state import STATE, GroupStateSpec
from millpond.spec.kinds.processor import TimeMode, Variable
from millpond.spec.operators import EventTime, Field

GROUP_STATES = {"FlatMapGroupsInPandasWithState": "applyInPandasWithState"}
"""Nodes that call a function of the user with groups and their state → how to call them."""

_FORMAT = "spark.sql.streaming.flatMapGroupsWithState.stateFormatVersion"
_TIMEOUTS: dict[str, TimeMode] = {
    "NoTimeout": "none",
    "ProcessingTimeTimeout": "processing",
    "EventTimeTimeout": "event",
}


def group_state_title(node: Node) -> str:
    """The operator in a few words."""
    return f"applyInPandasWithState by {', '.join(key.name for key in node.list('groupingAttributes'))}"


def read_group_state(catalyst: Catalyst, node: Node) -> tuple[ProcessorReading, GroupStateSpec]:
    """Read a node that calls a function with groups and their state: the function sees all columns of its child.

    Raises:
        Unsupported: it stays on Spark.
    """
    title = group_state_title(node)
    if not callable_here():
        raise Unsupported(Reason("MP-PROCESSOR", "a version of Spark before 4.3"))
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
        raise Unsupported(Reason(spec.unsupported, title))
    reading.processor = UserGroups(
        title=title,
        command=pickled,
        pandas=True,
        columns=StructType([StructField(one.name, one.data_type) for one in reading.raw]),
        values=tuple(range(len(reading.raw))),
        shown=StructType([StructField(one.name, one.data_type) for one in node.output]),
        spec=spec,
        conf=worker_settings(catalyst),
        state=state,
    )
    reading.broadcasts = broadcasts(function)
    return reading, spec
