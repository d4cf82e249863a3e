"""How a slot has the user's code called: by the pipe at the other end of the connection that the rows came by."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pyarrow as pa

from millpond.operators.processors.calls import Ask, Changed, Phase
from millpond.slot.process.protocol import Call, Called, Connection, Fetch, Kind, PeerGone


def send_tables(connection: Connection, tables: Mapping[str, pa.RecordBatch]) -> None:
    """Send tables that a message has named, each a schema and one record batch."""
    for batch in tables.values():
        send_table(connection, batch)


def send_table(connection: Connection, batch: pa.RecordBatch) -> None:
    """Send one table: a schema and one record batch."""
    connection.send_schema(batch.schema)
    connection.send_batch(batch)


def receive_tables(connection: Connection, names: list[str]) -> dict[str, pa.RecordBatch]:
    """Receive the tables that a message has named."""
    return {name: receive_table(connection) for name in names}


def receive_table(connection: Connection) -> pa.RecordBatch:
    """Receive one table: a schema and one record batch."""
    while True:
        kind, payload = connection.receive()
        if kind is Kind.BATCH:
            return payload
        if kind is not Kind.SCHEMA:
            raise PeerGone(f"expected a table, got {kind.name}")


class ConnectedCaller:
    """A `Caller` at the other end of a connection, which may take its time.

    Args:
        connection: by which the rows of the batch have come.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __call__(
        self,
        phase: Phase,
        times: tuple[int, int],
        tables: Mapping[str, pa.RecordBatch],
        take: Callable[[pa.RecordBatch], None],
        answer: Ask,
    ) -> Changed:
        """See `Caller`."""
        self._connection.send(Call(phase, *times, list(tables)))
        send_tables(self._connection, tables)
        while True:
            kind, payload = self._connection.receive()
            if kind is Kind.BATCH:
                take(payload)
            elif kind is Kind.MESSAGE:
                if isinstance(payload, Fetch):
                    values = answer(payload.table, receive_table(self._connection))
                    answered = pa.RecordBatch.from_arrays([values], names=["value"])
                    send_tables(self._connection, {payload.table: answered})
                    continue
                if not isinstance(payload, Called):
                    raise PeerGone(f"expected what a processor has changed, got {type(payload).__name__}")
                return [(name, receive_table(self._connection)) for name in payload.tables]
