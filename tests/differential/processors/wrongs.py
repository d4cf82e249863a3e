"""Processors that misbehave until they are mended. Spark's workers import this module: it needs no pytest."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

from tests.differential.processors.processors import Script

KEY = "b"
"""The key for which things go wrong."""


def _fails(*_: Any) -> Any:
    raise ValueError("wrong")


def _exits(*_: Any) -> Any:
    sys.exit(3)


def _is_gone(*_: Any) -> Any:
    os._exit(3)


def _crashes(*_: Any) -> Any:
    ctypes.string_at(0)


def _hoards(*_: Any) -> Any:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), before[1]))
    try:
        return [bytearray(1 << 20) for _ in count()]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@cache
def _sleeps() -> None:
    """Once in the life of a worker, longer than anybody waits for a slot (see `test_a_long_sleep`)."""
    time.sleep(14)


def _sleeps_on(*_: Any) -> Any:
    time.sleep(600)


def _kills_its_slot(*_: Any) -> Any:
    """At the other end of one of the worker's sockets."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.family == socket.AF_UNIX:
                pid = int.from_bytes(one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), "little")
                if b"millpond.slot.template" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
                    return
    raise AssertionError("there is no slot")


WRONGS: dict[str, Callable[..., Any]] = {
    "fails": _fails,
    "exits": _exits,
    "is gone": _is_gone,
    "crashes": _crashes,
    "hoards": _hoards,
    "sleeps": _sleeps,
    "sleeps on": _sleeps_on,
    "kills its slot": _kills_its_slot,
}


class Killing(Script):
    """A script that kills its slot once it has reported a key, in the first attempt of each task."""

    def answer(self, key: Any, rows: Iterable[Any], times: Any) -> Iterator[tuple[Any, ...]]:
        from pyspark import TaskContext

        yield from super().answer(key, rows, times)
        context: Any = TaskContext.get()
        if context.attemptNumber() == 0:
            _kills_its_slot()


class Wrong(StatefulProcessor):
    """Counts rows in state of every kind, and does wrong somewhere: in the second batch, for one key.

    Args:
        where: `init`, `rows`, `middle` (of its output), `timer` or `close`; `endless` is output
            without an end. what: among `WRONGS`.
        pandas: whether it sees frames. mended: whether nothing goes wrong any more.
        once: whether it goes wrong for any key in any batch, in the first attempt of a task.
    """

    def __init__(self, where: str, what: str, pandas: bool = False, mended: bool = False, once: bool = False) -> None:
        self.where, self.what, self.pandas, self.mended, self.once = where, what, pandas, mended, once

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.due = False
        self.total = handle.getValueState("total", "n int")
        self.seen = handle.getListState("seen", "n int")
        self.texts = handle.getMapState("texts", "s string", "n int")
        self.now("init", self.second())

    def second(self) -> bool:
        """Whether this is the second batch, or one behind it."""
        from pyspark import TaskContext

        context: Any = TaskContext.get()
        return context is not None and int(context.getLocalProperty("streaming.sql.batchId") or 0) > 0

    def now(self, where: str, really: bool = True) -> None:
        """Here it goes wrong, if it does here."""
        from pyspark import TaskContext

        context: Any = TaskContext.get()
        if self.once:
            really = context is not None and context.attemptNumber() == 0
        if where == self.where and really and not self.mended:
            WRONGS[self.what]()

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        each = (row for frame in rows for row in frame.itertuples(index=False)) if self.pandas else rows
        return self.given(self.told(key[0], sorted(each, key=lambda row: int(row.n))))

    def told(self, key: str, rows: Iterable[Any]) -> Iterator[tuple[str, str]]:
        for row in rows:
            self.total.update(((self.total.get() or (0,))[0] + 1,))
            self.seen.appendValue((int(row.n),))
            self.texts.updateValue((row.do,), (int(row.n),))
            self.handle.registerTimer(self.total.get()[0] * 1000)
            wrong = key == KEY and self.total.get()[0] > 1
            self.now("rows", wrong)
            yield key, self.said()
            self.now("middle", wrong)
            while wrong and self.where == "endless" and not self.mended:
                yield key, "again"
            self.due = wrong

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        self.now("timer", key[0] == KEY)
        self.seen.appendValue((-1,))
        return self.given(iter([(key[0], self.said())]))

    def said(self) -> str:
        held = self.total.get(), list(self.seen.get()), list(self.texts.iterator()), sorted(self.handle.listTimers())
        return repr(held)

    def given(self, answers: Iterable[tuple[str, str]]) -> Iterator[Any]:
        if not self.pandas:
            return (Row(k=key, said=said) for key, said in answers)
        import pandas as pd

        return (pd.DataFrame([answer], columns=["k", "said"]) for answer in answers)

    def close(self) -> None:
        if getattr(self, "due", False):
            self.now("close")
