"""The slot's socket server: one thread per connection, heartbeats, and the decision when to exit."""

from __future__ import annotations

import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol

import pyarrow as pa

from millpond.errors import MillpondError
from millpond.operators.processors.calls import Caller
from millpond.slot.process.calling import ConnectedCaller
from millpond.slot.process.connection import Connection, Kind, PeerGone, PeerSilent, accept
from millpond.slot.process.identity import identify
from millpond.slot.process.lifecycle import LOCK_SECONDS, POLL_SECONDS, SlotDirectory
from millpond.slot.process.messages import (
    Done,
    Drain,
    Drained,
    Hello,
    Hints,
    Open,
    Opened,
    QueryStatus,
    RunBatch,
    Status,
    Welcome,
)
from millpond.tasks.operator_task import OperatorTask

Answer = Generator[pa.RecordBatch, None, Done]
"""Output batches, the first one only after all input has arrived and is sealed; returns the message that ends the
batch."""


class Work(Protocol):
    """The slot's work, as the socket server sees it. Every method may be called from any thread."""

    def run(
        self, run: RunBatch, batches: Iterator[pa.RecordBatch], cancel: Callable[[], None], caller: Caller
    ) -> Answer:
        """Run one batch of one partition.

        Args:
            run: the request.
            batches: the partition's input.
            cancel: cuts this attempt off from its input when a later attempt overtakes it.
            caller: calls the user's processor.
        """

    def hint(self, hints: Hints, keys: pa.RecordBatch) -> None:
        """Take prefetch hints for a batch; best effort.

        Args:
            hints: the message.
            keys: hashes of the keys, then the columns that the operator needs (see `Hints`).
        """

    def open_ahead(self, tasks: Sequence[OperatorTask], partitions: Sequence[int], version: int) -> None:
        """Open partitions of a query's operators before their first batch; best effort: the batch reports failures."""

    def drain(self, query: str, timeout: float, generation: int | None = None) -> list[tuple[int, int, int]]:
        """Make a query's sealed state durable, release the query, and return the durable versions (see `Drain`)."""

    def status(self, query: str) -> QueryStatus:
        """Return the status of a query in this slot; `query` is its `OperatorTask.key`."""

    def close(self) -> None:
        """Finish pending commits within a time limit. No method is called afterwards."""


class Slot:
    """One slot process.

    Args:
        directory: the application's slot directory.
        listener: its listening socket.
        work: handles the requests.
    """

    def __init__(self, directory: SlotDirectory, listener: socket.socket, work: Work) -> None:
        self.directory = directory
        self.listener = listener
        self.work = work
        self._process = identify()
        self._connections: set[Connection] = set()
        self._unserved: deque[Connection] = deque()  # accepted, and still without a thread
        self._guard = threading.Lock()
        self._stopping = False

    def run(self) -> None:
        """Serve until the application has ended or SIGTERM arrives, then finish pending commits."""
        signal.signal(signal.SIGTERM, self._end)
        last_look = time.monotonic()
        poller = select.poll()  # `select` cannot watch descriptors above 1,023
        poller.register(self.listener, select.POLLIN)
        while not self._stopping:
            if poller.poll(POLL_SECONDS * 1000):
                self._accept()
            self._start_serving()
            # By time, not when idle: a stream of new connections must not suppress heartbeats.
            if time.monotonic() - last_look >= POLL_SECONDS:
                last_look = time.monotonic()
                for connection in self._open_connections():
                    connection.send_heartbeat(lambda query: "; ".join(self.work.status(query).commit_failures))
                self._stopping = self._stopping or not self.directory.needed()
        self.listener.close()
        for connection in self._open_connections():
            # Attempts that still wait for input fail now, so that pending commits can be finished.
            connection.abort()
        self.work.close()
        self.directory.sweep(LOCK_SECONDS)

    def _end(self, *_: object) -> None:
        self._stopping = True

    def _open_connections(self) -> list[Connection]:
        with self._guard:
            return list(self._connections)

    def _accept(self) -> None:
        sock = accept(self.listener)
        if sock is None:
            return
        connection = Connection(sock)
        with self._guard:
            self._connections.add(connection)
        self._unserved.append(connection)

    def _start_serving(self) -> None:
        """Start a thread for each accepted connection; the others wait while this process has too many threads."""
        while self._unserved:
            thread = threading.Thread(target=self._serve, args=(self._unserved[0],), daemon=True, name="connection")
            try:
                thread.start()
            except RuntimeError as error:
                print(f"a connection waits: {error}", file=sys.stderr, flush=True)
                return
            self._unserved.popleft()

    def _serve(self, connection: Connection) -> None:
        try:
            while True:
                _, message = connection.receive()
                self._reply(connection, message)
        except (PeerGone, PeerSilent):
            pass  # the other end has finished or given up
        except MillpondError as error:
            self._send_error(connection, error)
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            print(text, file=sys.stderr, flush=True)
            self._send_error(
                connection, MillpondError(f"A slot failed unexpectedly.\n{text}", action="Please report this.")
            )
        finally:
            with self._guard:
                self._connections.discard(connection)
            connection.close()

    def _send_error(self, connection: Connection, error: MillpondError) -> None:
        try:
            connection.send_error(error)
        except OSError:
            print(f"could not send an error, as the connection is closed: {error}", file=sys.stderr, flush=True)

    def _reply(self, connection: Connection, message: Any) -> None:
        if isinstance(message, Hello):
            connection.send(Welcome(self._process))
        elif isinstance(message, RunBatch):
            connection.serving = message.task.key
            caller = ConnectedCaller(connection)
            self._answer(connection, self.work.run(message, _incoming(connection), connection.abort, caller))
            connection.serving = None
        elif isinstance(message, Hints):
            self.work.hint(message, connection.receive_table())
        elif isinstance(message, Open):
            self.work.open_ahead(message.tasks, message.partitions, message.version)
            connection.send(Opened())
        elif isinstance(message, Drain):
            connection.serving = message.query
            connection.send(Drained(self.work.drain(message.query, message.timeout, message.generation)))
            connection.serving = None
        elif isinstance(message, Status):
            connection.send(self.work.status(message.query))
        else:
            raise MillpondError(f"A slot cannot answer {type(message).__name__}.", action="Please report this.")

    def _answer(self, connection: Connection, answer: Answer) -> None:
        schema = None
        try:
            while True:
                batch = next(answer)
                if schema is None:
                    schema = batch.schema
                    connection.send_schema(schema)
                connection.send_batch(batch)
        except StopIteration as end:
            connection.send(end.value)
        finally:
            answer.close()


def _incoming(connection: Connection) -> Iterator[pa.RecordBatch]:
    while True:
        kind, payload = connection.receive()
        if kind is Kind.BATCH:
            yield payload
        elif kind is Kind.END:
            return
