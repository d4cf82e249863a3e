"""What a pipe says to a slot that wants the user's processor called."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from millpond.slot.pipe.processors.processor import Running
from millpond.slot.process.connection import Connection
from millpond.slot.process.messages import Call, Called, Fetch


class Asking:
    """Asks a slot for parts of variables while it waits for the answer to a call.

    What went wrong once goes wrong ever after: an answer that still comes would be taken for that to another question.

    Args:
        connection: to the slot.

    Attributes:
        failed: what went wrong with it; no fault of the user's code.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.failed: BaseException | None = None

    def __call__(self, table: str, asked: pa.RecordBatch) -> pa.Array:
        """Parts of the variable that has this table (see `operators.processors.calls.Ask`)."""
        self.check()
        try:
            self._connection.send(Fetch(table))
            self._connection.send_table(asked)
            return self._connection.receive_table().column(0)
        except BaseException as error:
            self.failed = error
            raise

    def check(self) -> None:
        """Raise what went wrong, if anything did."""
        if self.failed is not None:
            raise self.failed


def answer(connection: Connection, call: Call, running: Running, place: str) -> None:
    """Take the tables of a call, call the processor, and send what it gives out and what it changed.

    While the user's code runs, the slot's signs of life wait in the socket; those that find no room are left out.

    Args:
        connection: to the slot, which has sent the call.
        call: what is to be called. running: what is called; it asks by an `Asking`.
        place: where this is, for the note on what the user's code raises.
    """
    asking = running.ask
    assert isinstance(asking, Asking)
    tables = {name: connection.receive_table() for name in call.tables}
    output = running.call(call, tables)
    while (batch := _next(output, running, asking, place)) is not None:
        connection.send_table(batch)  # what was asked since the last batch had another schema
    changes = running.changes()
    connection.send(Called([name for name, _ in changes]))
    for _, table in changes:
        connection.send_table(table)


def _next(output: Iterator[pa.RecordBatch], running: Running, asking: Asking, place: str) -> pa.RecordBatch | None:
    """The next batch of the output. What the user's code raises, `SystemExit` too, gets a note, and ends the task.

    What has gone wrong with a question comes before that: the user's code may have made anything of it, or nothing.
    """
    try:
        batch = next(output, None)
        asking.check()
        return batch
    except BaseException as error:
        if asking.failed is not None:
            raise asking.failed from None
        key = "" if running.key is None else f", key {running.key!r}"
        error.add_note(
            f"This processor was called by Millpond for {place}{key}. "
            "The state is not harmed: mend the processor and restart."
        )
        raise
