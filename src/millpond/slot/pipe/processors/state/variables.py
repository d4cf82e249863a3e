"""State variables as the user's processor has them: they work on what a call sent, and remember what they changed.

A variable reads its column of the call when it is first used in it. What has expired is left out as it is read, since
all that a batch does happens at one time; and what a batch writes expires at one time too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import ValueState

from millpond.layout import NEVER
from millpond.operators.processors.calls import Ask
from millpond.slot.pipe.processors.state.columns import built, stored
from millpond.slot.pipe.processors.state.refusals import no_key, not_initialized, refused
from millpond.slot.pipe.processors.state.values import Form, Refused
from millpond.spec.kinds.processor import Variable
from millpond.spec.types import parse_type


class Place:
    """Where the processor is.

    Attributes:
        at: the position in the call of the key that it is called for; None if it is called for none.
        ask: gives parts of variables that the keys of the call have.
    """

    __slots__ = ("ask", "at")

    def __init__(self, ask: Ask) -> None:
        self.at: Any = None
        self.ask = ask


class Changes(NamedTuple):
    """What a variable has changed in a call.

    Attributes:
        at: positions of the keys, in order.
        values: all that each key has now, null for nothing.
        expiries: when the first part of that expires, for each key, in milliseconds.
        heads: what parts each key has beside, null for none; not given if no key has any.
        parts: those that have changed, if any, as the slot takes them.
    """

    at: list[int]
    values: pa.Array
    expiries: Sequence[int]
    heads: pa.StructArray | None = None
    parts: pa.RecordBatch | None = None

    def table(self) -> pa.RecordBatch:
        """As the slot takes it."""
        columns = [pa.array(self.at, pa.int64()), self.values, pa.array(self.expiries, pa.int64()), self.heads]
        columns = columns[: 3 if self.heads is None else 4]
        return pa.RecordBatch.from_arrays(columns, ["at", "value", "expiry", "head"][: len(columns)])


class Held:
    """What the state variables of all kinds have in common.

    Args:
        variable: what it is. place: where the processor is.
        now: the time of the batch, by which parts expire, in milliseconds.

    Attributes:
        changed: positions in the call of the keys of which something was changed.
        deleted: whether `init` has deleted it after it asked for it. As in Spark, every use fails then, but going
            through a list or a map gives nothing.
    """

    def _hold(self, variable: Variable, place: Place, now: int) -> None:
        self.variable = variable
        self._stateName = variable.name
        self._place = place
        self._now = now
        self._lives = bool(variable.ttl_ms)
        self._expiry = min(now + variable.ttl_ms, NEVER) if variable.ttl_ms else NEVER
        self._form = Form(parse_type(variable.value))
        self._kept = self._form.kept
        self._sent: pa.Array | None = None
        self.changed: set[int] = set()
        self.deleted = False

    def require(self, value: Any, key: Any) -> None:
        """Take note of what may not be null, by the types as the user gives them."""
        self._form.require(value)
        self._kept = self._form.kept

    def begin(self, sent: pa.Array | None, heads: pa.StructArray | None = None) -> None:
        """A call begins: this is what its keys have, and what parts beside that, if any."""
        self._sent = sent
        self.changed = set()

    def end(self) -> None:
        """The call is over, and what its keys have is nobody's any more."""
        self.begin(None)

    def lacks(self, at: int, key: Any | None) -> bool:
        """Whether something was neither sent with the call nor fetched since.

        Args:
            at: the position of a key in the call.
            key: of a map, a key whose value is wanted, as the user gives it; None for all that the key of the call has,
                which is read piece by piece, and not lacking, where it is much.
        """
        return False

    def fetch(self, wanted: Sequence[tuple[int, Any | None]]) -> None:
        """Get what is lacking, for many keys at once; afterwards less of it is.

        Args:
            wanted: what `lacks` was asked about.
        """

    @abstractmethod
    def changes(self, at: list[int]) -> Changes:
        """What the call has changed of some keys, asked for before it is over; again of fewer where it is too large."""

    def _at(self, doing: str) -> int:
        at: int | None = self._place.at
        if self.deleted:
            raise refused(doing, not_initialized(self.variable.kind, self.variable.name))
        if at is None or self._sent is None:
            raise refused(doing, no_key(self.variable.name))
        return at

    def _taken(self, value: Any, doing: str) -> tuple[Any, ...]:
        """What is kept of a value that the user gives."""
        if self._kept(value):
            return value  # type: ignore[no-any-return]
        try:
            return self._form.taken(value)
        except Refused as error:
            raise refused(doing, str(error)) from None


class HeldValue(Held, ValueState):  # type: ignore[misc]
    """A variable with one value for each key."""

    def __init__(self, variable: Variable, place: Place, now: int) -> None:
        self._hold(variable, place, now)
        self._values: Any = None  # the values of all keys of the call; None until it is used in it

    def begin(self, sent: pa.Array | None, heads: pa.StructArray | None = None) -> None:
        """A call begins: this is what its keys have."""
        super().begin(sent)
        self._values = None

    def exists(self) -> bool:
        """Whether the key has a value."""
        try:
            return self._values[self._place.at] is not None
        except TypeError:
            return self._read("checking value state exists") is not None

    def get(self) -> tuple[Any, ...] | None:
        """The value of the key, if it has one."""
        try:
            value = self._values[self._place.at]
        except TypeError:
            value = self._read("getting value state")
        if value is None or self._form.plain:
            return value  # type: ignore[no-any-return]
        return self._form.shown(value)

    def update(self, newValue: tuple[Any, ...]) -> None:
        """Give the key a value."""
        at = self._place.at
        if not self._kept(newValue):
            newValue = self._taken(newValue, "updating value state")
        try:
            self._values[at] = newValue
        except TypeError:
            self._read("updating value state")
            self._values[at] = newValue
        self.changed.add(at)

    def clear(self) -> None:
        """Take the key's value away."""
        if self._read("clearing value state") is not None:
            self._values[self._place.at] = None
            self.changed.add(self._place.at)

    def _read(self, doing: str) -> Any:
        at = self._at(doing)
        if self._values is None:
            self._values = self._whole(self._sent)
        return self._values[at]

    def _whole(self, sent: Any) -> list[Any]:
        if sent.null_count == len(sent):
            return [None] * len(sent)
        if not self._lives:
            return stored(sent)
        values, expiries = map(stored, sent.flatten())
        return [
            None if expiry is None or expiry <= self._now else value
            for value, expiry in zip(values, expiries, strict=True)
        ]

    def changes(self, at: list[int]) -> Changes:
        """See `Held`."""
        values = [self._values[one] for one in at]
        array = built(values, self._form.arrow)
        expiries = [self._expiry] * len(at)
        if self._lives:
            mask = pa.array([value is None for value in values], pa.bool_())
            fields = [pa.field("value", array.type), pa.field("expiry", pa.int64())]
            array = pa.StructArray.from_arrays([array, pa.array(expiries, pa.int64())], fields=fields, mask=mask)
            expiries = [NEVER if value is None else self._expiry for value in values]
        return Changes(at, array, expiries)
