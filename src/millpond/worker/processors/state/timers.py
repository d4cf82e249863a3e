"""Timers of the keys of a call."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from millpond.layout import NEVER
from millpond.worker.processors.state.columns import from_stored, to_stored
from millpond.worker.processors.state.variables import Changes

_TIMES = pa.list_(pa.field("element", pa.int64()))


class Timers:
    """Times for which the processor has registered timers, by key."""

    def __init__(self) -> None:
        self._sent: Any = None
        self._times: list[set[int]] | None = None
        self._changed: set[int] = set()

    def begin(self, sent: pa.Array) -> None:
        """Start a call with the timers of its keys."""
        self._sent, self._times = sent, None
        self._changed = set()

    def of(self, at: int) -> set[int]:
        """Return the times of a key."""
        if self._times is None:
            self._times = [set(times or ()) for times in to_stored(self._sent)]
        return self._times[at]

    def add(self, at: int, time: int) -> None:
        """Add a timer; an existing one stays."""
        times = self.of(at)
        if time not in times:
            times.add(time)
            self._changed.add(at)

    def remove(self, at: int, time: int) -> None:
        """Remove a timer if it exists."""
        times = self.of(at)
        if time in times:
            times.remove(time)
            self._changed.add(at)

    def listed(self, at: int) -> list[int]:
        """Return the times of a key in Spark's order, that of their little-endian bytes."""
        return sorted(self.of(at), key=lambda time: time.to_bytes(8, "little", signed=True))

    def changes(self) -> Changes:
        """Return the changes of the call."""
        positions = sorted(self._changed)
        times = [sorted(self.of(position)) for position in positions]
        firsts = [due[0] if due else NEVER for due in times]
        return Changes(positions, from_stored([due or None for due in times], _TIMES), firsts)
