"""A template whose slots do nothing but hand rows back, after all of them are in; commands come as column names."""

import ctypes
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from millpond.errors import StateDamagedError, TransientError
from millpond.operators.processors.calls import Caller
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.slot.process.messages import Done, QueryStatus, RunBatch
from millpond.slot.process.server import Answer, Slot
from millpond.slot.template import main
from millpond.tasks.operator_task import OperatorTask


class Echo:
    def __init__(self, directory: SlotDirectory, number: int) -> None:
        self.directory = directory
        self.number = number
        self.waiting = False
        self.versions: dict[tuple[int, int], int] = {}

    def run(
        self, run: RunBatch, batches: Iterator[pa.RecordBatch], cancel: Callable[[], None], caller: Caller
    ) -> Answer:
        rows = []
        for batch in batches:
            command = batch.schema.names[-1]
            if command == "fail":
                raise StateDamagedError("made to fail", file="x.run")
            if command == "busy":
                for number in range(100):
                    logging.getLogger("millpond").warning("try %d failed", number)
                raise TransientError("The store is busy.")
            if command == "crash":
                raise ZeroDivisionError("made to crash")
            if command == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if command == "segfault":
                ctypes.string_at(0)
            if command == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
                threading.Event().wait(600)  # another thread takes the signal: this one goes on for a moment
            if command == "wait":
                self.waiting = True
                threading.Event().wait(4.5)
                self.waiting = False
            rows.append(batch)
        self.versions[run.task.operator, run.partition] = (run.batch or 0) + 1
        yield from rows
        return Done(batch=run.batch or 0, metrics={"rows": float(sum(b.num_rows for b in rows)), "pid": os.getpid()})

    def open_ahead(self, tasks: Sequence[OperatorTask], partitions: Sequence[int], version: int) -> None:
        pass

    def drain(self, query: str, timeout: float, generation: int | None = None) -> list[tuple[int, int, int]]:
        return [(operator, partition, version) for (operator, partition), version in self.versions.copy().items()]

    def status(self, query: str) -> QueryStatus:
        return QueryStatus(
            [(operator, partition, version - 1) for operator, partition, version in self.drain(query, 0.0)],
            [f"the store of {query} is full"] if self.waiting else [],
            int(self.waiting),
        )

    def close(self) -> None:
        (self.directory.path.parent / f"closed-{self.number}").touch()


def serve(directory: SlotDirectory, number: int, listener: socket.socket) -> None:
    Slot(directory, listener, Echo(directory, number)).run()


if __name__ == "__main__":
    main(serve)
