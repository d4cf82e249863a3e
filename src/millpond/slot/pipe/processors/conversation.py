"""What a pipe says to a slot that wants the user's processor called."""

from __future__ import annotations

import pyarrow as pa

from millpond.slot.pipe.processors.processor import Running
from millpond.slot.process.protocol import Call, Called, Connection


def answer(connection: Connection, call: Call, running: Running, place: str) -> None:
    """Take the tables of a call, call the processor, and send what it gives out and what it changed.

    While the user's code runs, the slot's signs of life wait in the socket; those that find no room are left out.

    Args:
        connection: to the slot, which has sent the call.
        call: what is to be called. running: what is called.
        place: where this is, for the note on what the user's code raises.
    """
    tables = {name: _table(connection) for name in call.tables}
    output = running.call(call, tables)
    announced = False
    while (batch := _next(output, running, place)) is not None:
        if not announced:
            connection.send_schema(batch.schema)
            announced = True
        connection.send_batch(batch)
    changes = running.changes()
    connection.send(Called(list(changes)))
    for table in changes.values():
        connection.send_schema(table.schema)
        connection.send_batch(table)


def _table(connection: Connection) -> pa.RecordBatch:
    connection.receive()  # its schema
    return connection.receive()[1]


def _next(output: object, running: Running, place: str) -> pa.RecordBatch | None:
    """The next batch of the output. What the user's code raises, `SystemExit` too, gets a note, and ends the task."""
    try:
        return next(output, None)  # type: ignore[call-overload]
    except BaseException as error:
        key = "" if running.key is None else f", key {running.key!r}"
        error.add_note(
            f"This processor was called by Millpond for {place}{key}. "
            "The state is not harmed: mend the processor and restart."
        )
        raise
