"""A user's processor, called in the test's own process as a pipe calls it beside a slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from millpond.operators.processors.calls import Changes, FetchState, Phase
from millpond.slot.process.messages import Call
from millpond.tasks.user_processor import UserProcessor
from millpond.worker.processors.processor import RunningProcessor
from millpond.worker.processors.start import start_processor


class Called:
    """A `Caller` for one attempt at a batch.

    Args:
        user: what is called. before: is called before each message of either side: what it raises ends the attempt.
    """

    def __init__(self, user: UserProcessor, before: Callable[[], None] = lambda: None) -> None:
        self._user = user
        self._before = before
        self._running: RunningProcessor | None = None
        self._answer: FetchState | None = None

    def __call__(
        self,
        phase: Phase,
        times: tuple[int, int],
        tables: Mapping[str, pa.RecordBatch],
        take: Callable[[pa.RecordBatch], None],
        answer: FetchState,
    ) -> Changes:
        """See `Caller`."""
        self._before()
        self._answer = answer
        self._running = self._running or start_processor(self._user, self._asked)
        call = Call(phase, *times, list(tables))
        for batch in self._running.call(call, _sent(tables)):
            take(_sent({"": batch})[""])
            self._before()
        return [(name, _sent({name: table})[name]) for name, table in self._running.changes()]

    def _asked(self, table: str, parts: pa.RecordBatch) -> pa.Array:
        """Parts of state, of the keys of the call that runs."""
        assert self._answer is not None
        return self._answer(table, _sent({"": parts})[""])


def _sent(tables: Mapping[str, pa.RecordBatch]) -> dict[str, Any]:
    """Tables as they arrive."""
    return {name: pa.ipc.read_record_batch(one.serialize(), one.schema) for name, one in tables.items()}
