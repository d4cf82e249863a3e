"""User function over groups with state (`applyInPandasWithState`), called in Spark's Python worker.

A key's state is PySpark's own `GroupState`, created as in Spark's worker. It is inspected for changes once all results
of the function have been taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.serializers import CPickleSerializer
from pyspark.sql.streaming.state import GroupState
from pyspark.util import fail_on_stopiteration

from millpond.operators.processors.calls import Changes, FetchState
from millpond.operators.protocol import MAIN
from millpond.slot.process.messages import Call
from millpond.spec.kinds.group_state import GroupStateSpec
from millpond.spec.types import parse_type
from millpond.tasks.user_processor import UserGroups
from millpond.worker.processors.group_frames import GroupFrames, GroupResults, result_frames
from millpond.worker.processors.processor import RunningProcessor, counted_keys, freeze
from millpond.worker.processors.state.columns import from_stored, in_pieces, to_stored
from millpond.worker.processors.state.refusals import null_field, refused
from millpond.worker.processors.state.values import ZEROS, Refused, ValueCodec

_TIMEOUTS = {"none": "NoTimeout", "processing": "ProcessingTimeTimeout", "event": "EventTimeTimeout"}


class RunningGroups(RunningProcessor):
    """A running user function over groups, for one partition and batch.

    Args:
        groups: its description.
        ask: fetches more rows of a key; group state has no parts to fetch.

    Attributes:
        key: the key that the function is called for; None between keys.
    """

    def __init__(self, groups: UserGroups, ask: FetchState) -> None:
        from pyspark.worker import RunnerConf
        from pyspark.worker_util import read_command

        freeze()
        self.ask = ask
        self.key: Any = None
        self._spec: GroupStateSpec = groups.spec
        self._schema = pa.schema([(column.name, parse_type(column.type).arrow) for column in groups.spec.outputs])
        function, _ = read_command(CPickleSerializer(), groups.command)
        self._function = fail_on_stopiteration(function)
        conf = RunnerConf(groups.conf)
        self._frames = GroupFrames(groups.columns, self._spec.keys, groups.values, conf)
        self._results = GroupResults(groups.output_schema, conf)
        self._codec = ValueCodec(parse_type(self._spec.state))
        self._type = groups.state
        zeros = [ZEROS.get(inner.name) for _, inner in self._codec.dtype.fields]
        fields = enumerate(zip(groups.state, zeros, strict=True))
        self._non_nullable = [
            (position, column.name, zero) for position, (column, zero) in fields if not column.nullable
        ]
        self._timeout = _TIMEOUTS[self._spec.time_mode]
        self._changed: list[tuple[int, Any, int | None]] = []

    def call(self, call: Call, tables: Mapping[str, pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Call the function for some keys and yield its output.

        Errors of the user's function are passed on.
        """
        keys, counts = counted_keys(tables)
        self._changed = []
        if call.phase == "rows":
            with self._pieces(tables) as pieces:
                yield from self._called(call, tables, self._frames.groups(keys, counts, pieces))
        else:
            yield from self._called(call, tables, self._frames.timed_out(keys, len(counts)))

    def _called(
        self, call: Call, tables: Mapping[str, pa.RecordBatch], groups: Iterator[tuple[Any, Any]]
    ) -> Iterator[pa.RecordBatch]:
        stored_states = to_stored(tables[MAIN].column("value"))
        function, results = self._function, self._results
        for position, (key, frames) in enumerate(groups):
            self.key = key
            state = self._state(stored_states[position], call)
            frames_of_key = result_frames(function(key, frames, state))
            while results.collect(frames_of_key, key):
                yield from self._output()
            self._record_change(position, stored_states[position], state)
            if results.enough:
                yield from self._output()
        yield from self._output()
        self.key = None

    def _state(self, stored_state: Any, call: Call) -> GroupState:
        """Create the state of a key, without its timeout, which Spark does not show either."""
        shown = stored_state if stored_state is None or self._codec.plain else self._codec.to_user(stored_state)
        return GroupState(
            optionalValue=shown,
            batchProcessingTimeMs=call.processing,
            eventTimeWatermarkMs=call.watermark,
            timeoutConf=self._timeout,
            hasTimedOut=call.phase == "timers",
            watermarkPresent=self._spec.marked,
            defined=stored_state is not None,
            updated=False,
            removed=False,
            timeoutTimestamp=GroupState.NO_TIMESTAMP,
            keyAsUnsafe=b"",
            valueSchema=self._type,
        )

    def _record_change(self, at: int, stored_state: Any, state: GroupState) -> None:
        """Record the change of a key's state; nothing if neither the state nor a timeout was set or removed."""
        timeout = _milliseconds(state)
        if not (state._updated or state._removed or timeout is not None):
            return
        value = None
        if state._defined:
            value = stored_state if self._codec.plain and not state._updated else self._to_stored(tuple(state._value))
        self._changed.append((at, value, timeout))

    def _to_stored(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        try:
            kept = value if self._codec.is_stored_form(value) else self._codec.converted(value)
            for position, name, zero in self._non_nullable:
                if kept[position] is None:
                    if zero is None:
                        raise Refused(null_field(position, name))
                    kept = (*kept[:position], zero, *kept[position + 1 :])
        except Refused as error:
            raise refused("updating group state", str(error)) from None
        return kept

    def changes(self) -> Changes:
        """Return the changes of the last call: the complete new state of each changed key.

        Raises:
            UsageError: a state has become too large.
        """
        changed, self._changed = self._changed, []

        def table(keys: list[int]) -> pa.RecordBatch:
            positions, values, timeouts = zip(*(changed[position] for position in keys), strict=True)
            columns = [
                pa.array(positions, pa.int64()),
                from_stored(values, self._codec.arrow),
                pa.array(timeouts, pa.int64()),
            ]
            return pa.RecordBatch.from_arrays(columns, ["at", "value", "expiry"])

        pieces = in_pieces(table, list(range(len(changed))), "The group state")
        return [(MAIN, piece) for piece in pieces]


def _milliseconds(state: GroupState) -> int | None:
    """Return a key's timeout as Spark reads it, None for none: a value that is no integer goes through JSON."""
    time = state._timeout_timestamp
    if type(time) is not int:
        time = json.loads(state.json())["timeoutTimestamp"]
        time = int(time) if abs(time) < 1 << 63 else (1 << 63) - 1
    # Java's long: larger numbers wrap around.
    wrapped = ((time + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)
    return None if wrapped == GroupState.NO_TIMESTAMP else wrapped
