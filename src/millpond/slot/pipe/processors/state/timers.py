"""The timers of the keys of a call."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from millpond.layout import NEVER
from millpond.slot.pipe.processors.state.columns import built, stored
from millpond.slot.pipe.processors.state.variables import Changes

_TIMES = pa.list_(pa.field("element", pa.int64()))


class Timers:
    """At which times the processor asked to be called, key by key."""

    def __init__(self) -> None:
        self._sent: Any = None
        self._times: list[set[int]] | None = None
        self._changed: set[int] = set()

    def begin(self, sent: pa.Array) -> None:
        """A call begins: these are its keys' timers."""
        self._sent, self._times = sent, None
        self._changed = set()

    def of(self, at: int) -> set[int]:
        """The times of a key."""
        if self._times is None:
            self._times = [set(times or ()) for times in stored(self._sent)]
        return self._times[at]

    def add(self, at: int, time: int) -> None:
        """Remember a time; one that is there already stays as it is."""
        times = self.of(at)
        if time not in times:
            times.add(time)
            self._changed.add(at)

    def remove(self, at: int, time: int) -> None:
        """Forget a time, if it is there."""
        times = self.of(at)
        if time in times:
            times.remove(time)
            self._changed.add(at)

    def listed(self, at: int) -> list[int]:
        """The times of a key in Spark's order, which is that of their little-endian bytes."""
        return sorted(self.of(at), key=lambda time: time.to_bytes(8, "little", signed=True))

    def changes(self) -> Changes:
        """What the call has changed; the call is over."""
        at = sorted(self._changed)
        times = [sorted(self.of(one)) for one in at]
        firsts = [one[0] if one else NEVER for one in times]
        return Changes(at, built([one or None for one in times], _TIMES), firsts)
