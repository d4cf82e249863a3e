"""Slot stage's side of a call of the user's processor."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from millpond.slot.process.connection import Connection
from millpond.slot.process.messages import Call, Called, Fetch
from millpond.worker.processors.processor import RunningProcessor


class StateFetcher:
    """Fetches parts of variables from a slot while the slot waits for the end of a call.

    After one failure every later request fails: a late answer would be taken for that of another request.

    Args:
        connection: connection to the slot.

    Attributes:
        failed: the failure of a request, which the user's code has not caused; None if there was none.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.failed: BaseException | None = None

    def __call__(self, table: str, keys: pa.RecordBatch) -> pa.Array:
        """Fetch parts of the variable of a table (see `operators.processors.calls.FetchState`)."""
        self.check()
        try:
            self._connection.send(Fetch(table))
            self._connection.send_table(keys)
            return self._connection.receive_table().column(0)
        except BaseException as error:
            self.failed = error
            raise

    def check(self) -> None:
        """Raise the earlier failure, if there was one."""
        if self.failed is not None:
            raise self.failed


def answer(connection: Connection, call: Call, running: RunningProcessor, place: str) -> None:
    """Receive the tables of a call, call the processor, and send its output and its state changes.

    While user code runs, the slot's heartbeats wait in the socket; those that do not fit are dropped.

    Args:
        connection: connection to the slot that has sent the call.
        call: the call.
        running: the processor; its `ask` is an `StateFetcher`.
        place: operator, partition and batch, for the note on errors of user code.
    """
    fetcher = running.ask
    assert isinstance(fetcher, StateFetcher)
    tables = {name: connection.receive_table() for name in call.tables}
    output = running.call(call, tables)
    while (batch := _next_output(output, running, fetcher, place)) is not None:
        connection.send_table(batch)  # with its schema: requests since the last batch have sent another one
    # After the output: the user's function may change state until its last row is taken.
    changes = running.changes()
    connection.send(Called([name for name, _ in changes]))
    for _, table in changes:
        connection.send_table(table)


def _next_output(
    output: Iterator[pa.RecordBatch], running: RunningProcessor, fetcher: StateFetcher, place: str
) -> pa.RecordBatch | None:
    """Return the next output batch. Any exception of user code, even `SystemExit`, gets a note and ends the task.

    A failed request takes precedence: the user's code may have swallowed or replaced its error.
    """
    try:
        batch = next(output, None)
        fetcher.check()
        return batch
    except BaseException as error:
        if fetcher.failed is not None:
            raise fetcher.failed from None
        key = "" if running.key is None else f", key {running.key!r}"
        error.add_note(
            f"This processor was called by Millpond for {place}{key}. "
            "The state is not harmed: mend the processor and restart."
        )
        raise
