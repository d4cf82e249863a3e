"""State variables of a user's processor: they work on the state that a call sent, and record changes.

A variable reads its column of the call when it is first used in the call. Expired items are skipped on reading, since a
batch happens at one processing time. For the same reason all that a batch writes expires at one time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import ValueState

from millpond.layout import NEVER
from millpond.operators.processors.calls import FetchState
from millpond.spec.kinds.processor import Variable
from millpond.spec.types import parse_type
from millpond.worker.processors.state.columns import from_stored, to_stored
from millpond.worker.processors.state.refusals import no_key, not_initialized, refused
from millpond.worker.processors.state.values import Refused, ValueCodec


class CurrentKey:
    """Position of the processor's current key.

    Attributes:
        position: position of the key in the call; None between keys.
        ask: fetches parts of variables of the call's keys.
    """

    __slots__ = ("ask", "position")

    def __init__(self, ask: FetchState) -> None:
        self.position: Any = None
        self.ask = ask


class Changes(NamedTuple):
    """Changes of a variable in a call.

    Attributes:
        at: positions of the changed keys, in order.
        values: the complete new state of each key, null if it has none.
        expiries: for each key, when its first item expires, in milliseconds.
        heads: descriptions of the keys' parts, null for a key without parts; None if no key has parts.
        parts: changed parts, in the slot's format; None if there are none.
    """

    at: list[int]
    values: pa.Array
    expiries: Sequence[int]
    heads: pa.StructArray | None = None
    parts: pa.RecordBatch | None = None

    def table(self) -> pa.RecordBatch:
        """Convert the changes to the slot's format."""
        columns = [pa.array(self.at, pa.int64()), self.values, pa.array(self.expiries, pa.int64()), self.heads]
        columns = columns[: 3 if self.heads is None else 4]
        return pa.RecordBatch.from_arrays(columns, ["at", "value", "expiry", "head"][: len(columns)])


class StateVariable:
    """Base of state variables of all kinds.

    Args:
        variable: its declaration.
        current_key: position of the processor's current key.
        now: the batch's processing time, by which items expire, in milliseconds.

    Attributes:
        changed: positions of the changed keys in the call.
        deleted: whether `init` has deleted the variable after declaring it. As in Spark, every use then fails, except
            that iterating over a list or map yields nothing.
    """

    def _declare(self, variable: Variable, current_key: CurrentKey, now: int) -> None:
        self.variable = variable
        self._stateName = variable.name
        self._current_key = current_key
        self._now = now
        self._has_ttl = bool(variable.ttl_ms)
        self._expiry = min(now + variable.ttl_ms, NEVER) if variable.ttl_ms else NEVER
        self._codec = ValueCodec(parse_type(variable.value))
        self._is_stored_form = self._codec.is_stored_form
        self._sent: pa.Array | None = None
        self.changed: set[int] = set()
        self.deleted = False

    def require(self, value: Any, key: Any) -> None:
        """Refuse nulls in non-nullable fields of the user's schemas."""
        self._codec.require(value)
        self._is_stored_form = self._codec.is_stored_form

    def begin(self, sent: pa.Array | None, heads: pa.StructArray | None = None) -> None:
        """Start a call with the state of its keys, and the heads of those with parts."""
        self._sent = sent
        self.changed = set()

    def end(self) -> None:
        """Drop per-call state."""
        self.begin(None)

    def lacks(self, at: int, key: Any | None) -> bool:
        """Return whether data was neither sent with the call nor fetched since.

        Args:
            at: position of a key in the call.
            key: of a map, the key whose value is read, as the user gives it. None for all data of the call's key; if
                that is much, it is read piece by piece and never lacking.
        """
        return False

    def fetch(self, wanted: Sequence[tuple[int, Any | None]]) -> None:
        """Fetch missing data for many keys at once; afterwards less of it is missing.

        Args:
            wanted: arguments of `lacks`.
        """

    @abstractmethod
    def changes(self, at: list[int]) -> Changes:
        """Return the changes of some keys, before the call ends; called again with fewer keys if they are too large."""

    def _at(self, doing: str) -> int:
        position: int | None = self._current_key.position
        if self.deleted:
            raise refused(doing, not_initialized(self.variable.kind, self.variable.name))
        if position is None or self._sent is None:
            raise refused(doing, no_key(self.variable.name))
        return position

    def _from_user(self, value: Any, doing: str) -> tuple[Any, ...]:
        """Convert a value from the user to its stored form."""
        if self._is_stored_form(value):
            return value  # type: ignore[no-any-return]
        try:
            return self._codec.from_user(value)
        except Refused as error:
            raise refused(doing, str(error)) from None


class ValueVariable(StateVariable, ValueState):  # type: ignore[misc]
    """A variable with one value per key."""

    def __init__(self, variable: Variable, current_key: CurrentKey, now: int) -> None:
        self._declare(variable, current_key, now)
        self._values: Any = None  # values of all keys of the call; None until first used in the call

    def begin(self, sent: pa.Array | None, heads: pa.StructArray | None = None) -> None:
        """Start a call with the state of its keys."""
        super().begin(sent)
        self._values = None

    def exists(self) -> bool:
        """Return whether the key has a value."""
        try:
            return self._values[self._current_key.position] is not None
        except TypeError:
            return self._read("checking value state exists") is not None

    def get(self) -> tuple[Any, ...] | None:
        """Return the key's value; None if it has none."""
        try:
            value = self._values[self._current_key.position]
        except TypeError:
            value = self._read("getting value state")
        if value is None or self._codec.plain:
            return value  # type: ignore[no-any-return]
        return self._codec.to_user(value)

    def update(self, newValue: tuple[Any, ...]) -> None:
        """Set the key's value."""
        position = self._current_key.position
        if not self._is_stored_form(newValue):
            newValue = self._from_user(newValue, "updating value state")
        try:
            self._values[position] = newValue
        except TypeError:
            self._read("updating value state")
            self._values[position] = newValue
        self.changed.add(position)

    def clear(self) -> None:
        """Remove the key's value."""
        if self._read("clearing value state") is not None:
            self._values[self._current_key.position] = None
            self.changed.add(self._current_key.position)

    def _read(self, doing: str) -> Any:
        position = self._at(doing)
        if self._values is None:
            self._values = self._whole(self._sent)
        return self._values[position]

    def _whole(self, sent: Any) -> list[Any]:
        if sent.null_count == len(sent):
            return [None] * len(sent)
        if not self._has_ttl:
            return to_stored(sent)
        values, expiries = map(to_stored, sent.flatten())
        return [
            None if expiry is None or expiry <= self._now else value
            for value, expiry in zip(values, expiries, strict=True)
        ]

    def changes(self, at: list[int]) -> Changes:
        """See `StateVariable`."""
        values = [self._values[position] for position in at]
        array = from_stored(values, self._codec.arrow)
        expiries = [self._expiry] * len(at)
        if self._has_ttl:
            mask = pa.array([value is None for value in values], pa.bool_())
            fields = [pa.field("value", array.type), pa.field("expiry", pa.int64())]
            array = pa.StructArray.from_arrays([array, pa.array(expiries, pa.int64())], fields=fields, mask=mask)
            expiries = [NEVER if value is None else self._expiry for value in values]
        return Changes(at, array, expiries)
