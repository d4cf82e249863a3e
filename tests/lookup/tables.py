"""Tables to look keys up in: in memory, and with manners that can be chosen."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from millpond.errors import UsageError
from millpond.lookup import Found

_tables: dict[str, Memory] = {}


class Memory:
    """Rows of a table in memory, and how it behaves.

    Attributes:
        rows: by key (a tuple), values by column.
        asked: how often each key was asked for. requests: how many there were; at_once: most of them at a time.
        delay: seconds that a request takes. failing: requests that fail from now on. broken: keys with no good row.
        open: connections. gate: requests wait for it. starts: connections of earlier starts are broken.
    """

    def __init__(self, name: str) -> None:
        self.rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.asked: Counter[tuple[Any, ...]] = Counter()
        self.requests = self.at_once = self.open = self.most = 0
        self.delay = 0.0
        self.failing = self.starts = 0
        self.broken: set[tuple[Any, ...]] = set()
        self.wrong = ""
        self.gate = threading.Event()
        self.gate.set()
        self.lock = threading.Lock()
        self._running = 0
        _tables[name] = self

    def enter(self, keys: list[tuple[Any, ...]]) -> None:
        with self.lock:
            self.requests += 1
            self._running += 1
            self.at_once = max(self.at_once, self._running)
            self.most = max(self.most, len(keys))
            self.asked.update(keys)
        self.gate.wait(20)
        time.sleep(self.delay)

    def leave(self) -> None:
        with self.lock:
            self._running -= 1


@dataclass(frozen=True)
class MemoryTable:
    """A table in this process's memory, by its name."""

    name: str = field()

    def connect(self, columns: pa.Schema, timeout: float) -> MemoryConnection:
        _tables[self.name].open += 1
        return MemoryConnection(_tables[self.name], columns)


class MemoryConnection:
    def __init__(self, memory: Memory, columns: pa.Schema) -> None:
        self.memory = memory
        self.columns = columns
        self.start = memory.starts

    def fetch(self, keys: pa.RecordBatch) -> Found:
        memory = self.memory
        wanted = list(zip(*(column.to_pylist() for column in keys.columns), strict=True))
        memory.enter(wanted)
        try:
            if self.start < memory.starts:
                raise ConnectionError("the server was started anew")
            if memory.failing > 0:
                memory.failing -= 1
                raise ConnectionError("gone")
            if memory.wrong == "usage":
                raise UsageError("This is no table.", action="Mend it.")
            at = [position for position, key in enumerate(wanted) if key in memory.rows]
            at.reverse()
            rows = pa.RecordBatch.from_pylist([memory.rows[wanted[position]] for position in at], self.columns)
            if memory.wrong == "twice":
                return Found(pa.concat_batches([rows, rows]), at + at)
            if memory.wrong == "columns":
                return Found(rows.select([]), at)
            if memory.wrong == "collisions":
                return Found(rows, [len(wanted)] * len(at))
            if memory.wrong == "unreadable collisions":
                return Found(rows, at, {-1: "it is broken"})
            unreadable = {position: "it is broken" for position, key in enumerate(wanted) if key in memory.broken}
            return Found(rows, at, unreadable)
        finally:
            memory.leave()

    def close(self) -> None:
        self.memory.open -= 1
