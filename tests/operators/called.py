"""A user's processor, called in the test's own process as a pipe calls it beside a slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from millpond.operators.processors.calls import Phase
from millpond.slot.pipe.processors.processor import Running, UserProcessor
from millpond.slot.process.protocol import Call


class Called:
    """A `Caller` for one attempt at a batch.

    Args:
        user: what is called. before: is called before each message of either side: what it raises ends the attempt.
    """

    def __init__(self, user: UserProcessor, before: Callable[[], None] = lambda: None) -> None:
        self._user = user
        self._before = before
        self._running: Running | None = None

    def __call__(
        self,
        phase: Phase,
        times: tuple[int, int],
        tables: Mapping[str, pa.RecordBatch],
        take: Callable[[pa.RecordBatch], None],
    ) -> Mapping[str, pa.RecordBatch]:
        """See `Caller`."""
        self._before()
        self._running = self._running or self._user.start()
        call = Call(phase, *times, list(tables))
        for batch in self._running.call(call, _sent(tables)):
            take(_sent({"": batch})[""])
            self._before()
        return _sent(self._running.changes())


def _sent(tables: Mapping[str, pa.RecordBatch]) -> dict[str, Any]:
    """Tables as they arrive."""
    return {name: pa.ipc.read_record_batch(one.serialize(), one.schema) for name, one in tables.items()}
