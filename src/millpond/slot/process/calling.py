"""Calls of user code from a slot: executed by the slot stage at the other end of the batch's connection."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pyarrow as pa

from millpond.operators.processors.calls import Changes, FetchState, Phase
from millpond.slot.process.connection import Connection, Kind, PeerGone
from millpond.slot.process.messages import Call, Called, Fetch


class ConnectedCaller:
    """`Caller` that runs at the other end of a connection.

    Args:
        connection: the connection that the batch's rows arrived on.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __call__(
        self,
        phase: Phase,
        times: tuple[int, int],
        tables: Mapping[str, pa.RecordBatch],
        take: Callable[[pa.RecordBatch], None],
        answer: FetchState,
    ) -> Changes:
        """See `Caller`."""
        self._connection.send(Call(phase, *times, list(tables)))
        for table in tables.values():
            self._connection.send_table(table)
        while True:
            kind, payload = self._connection.receive()
            if kind is Kind.BATCH:
                take(payload)
            elif kind is Kind.MESSAGE:
                if isinstance(payload, Fetch):
                    values = answer(payload.table, self._connection.receive_table())
                    self._connection.send_table(pa.RecordBatch.from_arrays([values], names=["value"]))
                    continue
                if not isinstance(payload, Called):
                    raise PeerGone(f"expected what a processor has changed, got {type(payload).__name__}")
                return [(name, self._connection.receive_table()) for name in payload.tables]
