"""Handle with which a user's processor declares its state variables and sets its timers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle
from pyspark.sql.streaming.stateful_processor_api_client import StatefulProcessorHandleState as State
from pyspark.sql.types import StructType

from millpond.errors import UsageError
from millpond.operators.processors.calls import Changes, FetchState
from millpond.spec.kinds.processor import TIMERS, ProcessorSpec, TimeMode
from millpond.worker.processors.state import refusals
from millpond.worker.processors.state.columns import in_pieces
from millpond.worker.processors.state.lists import ListVariable
from millpond.worker.processors.state.maps import MapVariable
from millpond.worker.processors.state.refusals import refused
from millpond.worker.processors.state.timers import Timers
from millpond.worker.processors.state.variables import CurrentKey, ValueVariable

_MODES: Mapping[TimeMode, str] = {"none": "NoTime", "processing": "ProcessingTime", "event": "EventTime"}
_KIND_NAMES = {"value": "Value", "list": "List", "map": "Map"}
_SPACES = "".join(map(chr, range(ord(" ") + 1)))  # as Java trims
_VARIABLE_CLASSES: Mapping[str, Any] = {"value": ValueVariable, "list": ListVariable, "map": MapVariable}


_REGISTER_FIELD, _DELETE_FIELD = "RegisterTimer.expiryTimestampMs", "DeleteTimer.expiryTimestampMs"

MakeVariable = Callable[[Any, str, "StructType | str", "StructType | str", int], Any]
"""Creates a variable from its kind, its name, the type of its values, that of its keys, and its time to live."""


class CheckedHandle(StatefulProcessorHandle):  # type: ignore[misc]
    """Handle that checks each call as Spark does; subclasses implement the operations.

    Attributes:
        state: stage of the processor's life.
    """

    def __init__(self, mode: TimeMode, state: State, made: MakeVariable) -> None:
        self.state = state
        self._make_variable = made
        self._mode = mode
        self._initial = state
        self._variables: dict[str, tuple[str, Any]] = {}

    def getValueState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> Any:
        """Declare a variable with one value per key; a value expires `ttlDurationMs` after it is written."""
        return self._checked_declaration("value", stateName, schema, "", ttlDurationMs)

    def getListState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> Any:
        """Declare a variable with a list per key; an element expires `ttlDurationMs` after it is written."""
        return self._checked_declaration("list", stateName, schema, "", ttlDurationMs)

    def getMapState(
        self,
        stateName: str,
        userKeySchema: StructType | str,
        valueSchema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> Any:
        """Declare a variable with a map per key; an entry expires `ttlDurationMs` after it is written."""
        return self._checked_declaration("map", stateName, valueSchema, userKeySchema, ttlDurationMs)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """Register a timer at a time in milliseconds."""
        _milliseconds(expiryTimestampMs, _REGISTER_FIELD)
        self._check_timers("register timer", "register_timer")

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        """Delete the timer at a time in milliseconds."""
        _milliseconds(expiryTimestampMs, _DELETE_FIELD)
        self._check_timers("deleting timer", "delete_timer")

    def listTimers(self) -> Iterator[int]:
        """Yield the times of the key's timers; they are read when the first is requested."""
        self._check_timers("listing timers", "list_timers")
        yield from ()

    def deleteIfExists(self, stateName: str) -> None:
        """Delete a state variable of earlier runs."""
        doing = "deleting state"
        self._check_state(doing, "delete_if_exists")
        _check_name(stateName, doing, "remove_col_family")

    def _checked_declaration(
        self, kind: Any, name: str, value: StructType | str, key: StructType | str, ttl: int | None
    ) -> Any:
        doing = f"initializing {kind} state"
        if self._variables.get(name, ("",))[0] == kind:
            raise refused(doing, f"{_KIND_NAMES[kind]} state {name} already exists")
        self._check_state(doing, f"get_{kind}_state")
        if name in self._variables:
            raise refused(doing, refusals.defined_twice(name))
        ttl_ms = _milliseconds(ttl, "TTLConfig.durationMs")
        if ttl_ms and self._mode != "processing":
            raise refused(doing, refusals.ttl_needs_processing_time(name, _MODES[self._mode]))
        if ttl_ms < 0:
            raise refused(doing, refusals.ttl_not_positive(name))
        _check_name(name, doing, "create_col_family")
        variable = self._make_variable(kind, name, value, key, ttl_ms)
        self._variables[name] = (kind, variable)
        return variable

    def _check_state(self, doing: str, operation: str) -> None:
        if self.state is not self._initial:
            raise refused(doing, refusals.wrong_handle_state(operation, self.state.name))

    def _check_timers(self, doing: str, operation: str) -> None:
        if self._mode == "none":
            raise refused(doing, refusals.wrong_time_mode(operation, _MODES[self._mode]))
        if self.state not in (State.INITIALIZED, State.DATA_PROCESSED):
            raise refused(doing, refusals.wrong_handle_state(operation, self.state.name))


class Handle(CheckedHandle):
    """Handle of a running processor, over the state that calls send.

    Args:
        spec: the operator.
        now: the batch's processing time in milliseconds.
        ask: fetches parts of variables.

    Attributes:
        current_key: position of the processor's current key.
        timers: timers of the keys of the call.
    """

    def __init__(self, spec: ProcessorSpec, now: int, ask: FetchState) -> None:
        super().__init__(spec.time_mode, State.CREATED, self._declare)
        self.current_key = CurrentKey(ask)
        self.timers = Timers()
        self._timed = spec.timed
        self._known = {variable.name: variable for variable in spec.variables}
        self._now = now

    def begin(self, tables: Mapping[str, pa.RecordBatch]) -> None:
        """Start a call with the state of its keys."""
        for _, held in self._variables.values():
            if not held.deleted:
                held.begin(*tables[held.variable.table].columns)
        if self._timed:
            self.timers.begin(tables[TIMERS].column("value"))

    def changes(self) -> Changes:
        """Return the state changes of the call and end it.

        Raises:
            UsageError: a variable has become too large.
        """
        changed_variables = [
            (held.variable, changes)
            for name, (_, held) in self._variables.items()
            for changes in in_pieces(held.changes, sorted(held.changed), f"The state variable {name!r}")
        ]
        changed = [(variable.table, changes.table()) for variable, changes in changed_variables]
        if self._timed and (timers := self.timers.changes()).at:
            changed.append((TIMERS, timers.table()))
        changed += [
            (variable.parts, changes.parts) for variable, changes in changed_variables if changes.parts is not None
        ]
        for _, held in self._variables.values():
            held.end()
        return changed

    def _declare(self, kind: str, name: str, value: StructType | str, key: StructType | str, ttl_ms: int) -> Any:
        variable = self._known.get(name)
        if variable is None or (variable.kind, variable.ttl_ms) != (kind, ttl_ms):
            raise UsageError(
                f"The processor asks for a {kind} state {name!r} that it did not ask for when the query was started.",
                action="Let init ask for the same variables each time.",
            )
        state_variable = _VARIABLE_CLASSES[kind](variable, self.current_key, self._now)
        state_variable.require(value, key)
        return state_variable

    def deleteIfExists(self, stateName: str) -> None:
        """Delete a state variable of earlier runs. A variable that `init` has declared cannot be used afterwards."""
        super().deleteIfExists(stateName)
        if stateName in self._variables:
            self._variables[stateName][1].deleted = True

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """Register a timer for the key at a time in milliseconds."""
        super().registerTimer(expiryTimestampMs)
        self.timers.add(self._at("register timer"), _milliseconds(expiryTimestampMs, _REGISTER_FIELD))

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        """Delete the key's timer at a time in milliseconds."""
        super().deleteTimer(expiryTimestampMs)
        self.timers.remove(self._at("deleting timer"), _milliseconds(expiryTimestampMs, _DELETE_FIELD))

    def listTimers(self) -> Iterator[int]:
        """Yield the times of the key's timers; they are read when the first is requested."""
        yield from super().listTimers()
        yield from self.timers.listed(self._at("listing timers"))

    def _at(self, doing: str) -> int:
        if self.current_key.position is None:
            table = "$procTimers" if self._mode == "processing" else "$eventTimers"
            raise refused(doing, refusals.no_key(f"{table}_keyToTimestamp"))
        return int(self.current_key.position)


def _check_name(name: str, doing: str, operation: str) -> None:
    """Refuse names that Spark's state store refuses."""
    if name in ("", "default") or name.strip(_SPACES) != name:
        raise refused(doing, refusals.wrong_name(operation, name))
    if name.startswith("$"):
        raise refused(doing, refusals.reserved_name(name))


def _milliseconds(value: Any, field: str) -> int:
    """Convert a number as Spark does for a field of a message: None becomes 0, and booleans are refused."""
    if isinstance(value, bool):
        name = f"org.apache.spark.sql.execution.streaming.state.{field}"
        raise TypeError(f"Field {name}: Expected an int, got a boolean.")
    time = 0 if value is None else operator.index(value)
    if not -(1 << 63) <= time < 1 << 63:
        raise ValueError(f"Value out of range: {time}")
    return time
