"""The slot's outside: accepts connections, a thread for each, gives signs of life, and knows when to end."""

from __future__ import annotations

import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from millpond.errors import MillpondError
from millpond.layout import Words
from millpond.operators.processors.calls import Caller
from millpond.slot.batch.task import Lookahead, PipeTask
from millpond.slot.process.calling import ConnectedCaller
from millpond.slot.process.connection import Connection, Kind, PeerGone, PeerSilent
from millpond.slot.process.identity import identify
from millpond.slot.process.lifecycle import PATIENCE, POLL, SlotDirectory
from millpond.slot.process.messages import (
    Answered,
    Done,
    Drain,
    Drained,
    Hello,
    Hints,
    Open,
    Opened,
    Run,
    Status,
    Welcome,
)

Answer = Generator[pa.RecordBatch, None, Done]
"""Output batches, none of them before all input is in and sealed; the generator's return value closes the batch."""


class Work(Protocol):
    """The slot's inside, as the sockets see it. Every method may be called from any thread."""

    def run(self, run: Run, batches: Iterator[pa.RecordBatch], abandon: Callable[[], None], caller: Caller) -> Answer:
        """Run one batch of one partition; `abandon` cuts this attempt off when a later one overtakes it, `caller` calls
        the user's processor.
        """

    def hint(
        self,
        task: PipeTask,
        partition: int,
        batch: int,
        lookahead: Lookahead,
        hashes: Words,
        keys: pa.RecordBatch | None = None,
    ) -> None:
        """Keys that a batch will ask for, by their hashes, and with what the operator asks for (`Spec.announced`), and
        who saw them; nothing comes of those that nobody can use.
        """

    def open_ahead(self, tasks: Sequence[PipeTask], partitions: Sequence[int], version: int) -> None:
        """Open partitions of a query's operators before their first batch; failures are left to that."""

    def drain(self, query: str, timeout: float, generation: int | None = None) -> list[tuple[int, int, int]]:
        """Make a query's sealed state durable, let go of it, and say which versions that left (see `Drain`)."""

    def answered(self, query: str) -> list[tuple[int, int, int]]:
        """(operator, partition, batch answered last) of the query's partitions."""

    def trouble(self, query: str) -> str:
        """What holds a query's commits up, for the user to know; empty if nothing does."""

    def lost_call(self, query: str) -> str:
        """For which keys code of the user was called when its process went; empty if that has not happened."""

    def failed_commits(self, query: str) -> int:
        """How many tries to commit have failed in a query's present run."""

    def close(self) -> None:
        """Finish pending commits, bounded in time; nothing is called afterwards."""


class Slot:
    """One slot process.

    Args:
        directory: where it lives.
        listener: its listening socket.
        work: what it does.
    """

    def __init__(self, directory: SlotDirectory, listener: socket.socket, work: Work) -> None:
        self.directory = directory
        self.listener = listener
        self.work = work
        self._process = identify()
        self._connections: set[Connection] = set()
        self._guard = threading.Lock()
        self._ended = False

    def run(self) -> None:
        """Serve until the application is gone or SIGTERM comes, then finish pending commits."""
        signal.signal(signal.SIGTERM, self._end)
        last_look = time.monotonic()
        poller = select.poll()  # not `select`, which knows the first 1,024 files of a process only
        poller.register(self.listener, select.POLLIN)
        while not self._ended:
            if poller.poll(POLL * 1000):
                self._accept()
            if time.monotonic() - last_look >= POLL:
                last_look = time.monotonic()
                for connection in self._open_connections():
                    connection.beat(self.work.trouble)
                self._ended = self._ended or not self.directory.needed()
        self.listener.close()
        for connection in self._open_connections():
            connection.abort()
        self.work.close()
        self.directory.sweep(PATIENCE)

    def _end(self, *_: object) -> None:
        self._ended = True

    def _open_connections(self) -> list[Connection]:
        with self._guard:
            return list(self._connections)

    def _accept(self) -> None:
        sock, _ = self.listener.accept()
        connection = Connection(sock)
        with self._guard:
            self._connections.add(connection)
        threading.Thread(target=self._serve, args=(connection,), daemon=True, name="connection").start()

    def _serve(self, connection: Connection) -> None:
        try:
            while True:
                _, message = connection.receive()
                self._reply(connection, message)
        except (PeerGone, PeerSilent):
            pass  # the other end has what it wanted, or no longer wants it
        except MillpondError as error:
            self._say(connection, error)
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            print(text, file=sys.stderr, flush=True)
            self._say(connection, MillpondError(f"A slot failed unexpectedly.\n{text}", action="Please report this."))
        finally:
            with self._guard:
                self._connections.discard(connection)
            connection.close()

    def _say(self, connection: Connection, error: MillpondError) -> None:
        try:
            connection.send_error(error)
        except OSError:
            print(f"nobody was left to hear: {error}", file=sys.stderr, flush=True)

    def _reply(self, connection: Connection, message: Any) -> None:
        if isinstance(message, Hello):
            connection.send(Welcome(self._process))
        elif isinstance(message, Run):
            connection.serving = message.task.key
            caller = ConnectedCaller(connection)
            self._answer(connection, self.work.run(message, _incoming(connection), connection.abort, caller))
            connection.serving = None
        elif isinstance(message, Hints):
            keys = connection.receive_table()
            hashes = keys.column(0).to_numpy().view(np.uint64)
            more = keys if keys.num_columns > 1 else None
            self.work.hint(message.task, message.partition, message.batch, message.lookahead, hashes, more)
        elif isinstance(message, Open):
            self.work.open_ahead(message.tasks, message.partitions, message.version)
            connection.send(Opened())
        elif isinstance(message, Drain):
            connection.serving = message.query
            connection.send(Drained(self.work.drain(message.query, message.timeout, message.generation)))
            connection.serving = None
        elif isinstance(message, Status):
            work, query = self.work, message.query
            connection.send(
                Answered(work.answered(query), work.trouble(query), work.failed_commits(query), work.lost_call(query))
            )
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
