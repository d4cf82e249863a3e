"""The asynchronous execution controller: processes many keys of a call, each as far as it can (Flink 2.0 §4.1–4.3).

The controller drives the coroutines itself, without an event loop. One worker processes a key's records one after the
other. It takes key after key until one has to wait for state; then another worker continues with the keys behind it.
Workers whose data has arrived run before new keys are started. When no worker can run, all missing data is fetched,
with one request per variable. A run ends when all its keys are complete: this is the barrier before a batch's timers,
and before it is sealed (Flink 2.0 §4.4–4.5). Output rows keep the order of the keys, whatever the order of execution.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, Self

from millpond.errors import UsageError
from millpond.worker.processors.asynchronous.foreign import NO_LOOP, refusal, without_loop
from millpond.worker.processors.asynchronous.reads import MissingData, Request
from millpond.worker.processors.state.variables import CurrentKey, StateVariable

_MAX_CLOSE_TRIES = 100
"""Number of times that a coroutine which keeps waiting is asked to end."""


class Results(Protocol):
    """Output of keys.

    Attributes:
        items: the items.
        ends_by_key: for each key with output, the number of items up to its last one, and the key.
        check_every: number of items between two checks of `enough`.
    """

    items: list[Any]
    ends_by_key: list[tuple[int, Any]]
    check_every: int

    @property
    def size(self) -> int:
        """Number of rows, or of items if there are more of these."""

    @property
    def enough(self) -> bool:
        """Whether there are enough rows for a batch."""

    @property
    def append(self) -> Callable[[Any], None]:
        """Function that takes one item."""

    def empty(self) -> Self:
        """Create an empty collection for the same output."""

    def join(self, others: Self) -> None:
        """Append other results and empty them."""


class Focus(Protocol):
    """Receiver of the key that is being processed.

    Attributes:
        key: that key.
    """

    key: Any


Task = tuple[int, Any, Iterable[Any]]
"""A key's position in the call, the key as the user sees it, and its records: results of the user's function.

A record starts when it is awaited or iterated over. The next one is requested when it is complete."""


class _Worker:
    """A coroutine that processes key after key, and its progress.

    Attributes:
        coroutine: yields requests.
        results: output of its keys.
        size: size of the output when last seen.
        position: position of the key for which it waits.
        key: that key.
        wanted: the data for which it waits.
        dropped: unfinished generators of the user's code.
        state: `full`: it waits for room; `done`: it takes no more keys.
    """

    __slots__ = ("coroutine", "dropped", "key", "position", "results", "size", "state", "wanted")

    def __init__(self, results: Results) -> None:
        self.coroutine: Coroutine[Any, None, bool]
        self.results = results
        self.size = 0
        self.position: int | None = None
        self.key: Any = None
        self.wanted: list[MissingData] = []
        self.dropped: list[AsyncGenerator[Any, None]] = []
        self.state = ""


class Controller:
    """Drives the coroutines of one processor.

    Args:
        current_key: position of the processor's current key, for its state.
        focus: receives the key that is being processed.
        limit: maximum number of reads that wait at a time; most keys have one.
        room: approximate number of rows that may wait for those of earlier keys; beyond it only the first key runs.
    """

    def __init__(self, current_key: CurrentKey, focus: Focus, limit: int, room: int) -> None:
        self._current_key = current_key
        self._focus = focus
        self._limit = limit
        self._room = room
        self._tasks: Iterator[Task] = iter(())
        self._dropped: list[AsyncGenerator[Any, None]] = []  # of the current worker
        self._reset()

    def _reset(self) -> None:
        self._workers: deque[_Worker] = deque()  # in key order; the first one is not done
        self._ready: deque[_Worker] = deque()
        self._waiting: list[_Worker] = []
        self._pending_reads = 0
        self._full_workers = 0
        self._rows_behind = 0
        self._ended = False

    def run(self, tasks: Iterable[Task], results: Results, *, yields: bool) -> Iterator[None]:
        """Process all keys.

        Args:
            tasks: the keys, in order.
            results: collects the output rows, in key order.
            yields: whether records yield rows; else they are only awaited.

        Yields:
            When there are enough results; the caller then takes them.

        Raises:
            UsageError: something other than state is awaited.
        """
        self._tasks = iter(tasks)
        self._reset()
        with _collect_dropped(self._add_dropped):
            try:
                while (worker := self._next(results, yields)) is not None:
                    self._step(worker)
                    self._rows_behind += worker.results.size - worker.size
                    worker.size = worker.results.size
                    while self._workers and self._workers[0].state:
                        self._in_order(results)
                        if results.enough:
                            yield
            finally:
                self._close()

    def _next(self, results: Results, yields: bool) -> _Worker | None:
        """Choose the next worker: one whose data has arrived, else a new one, else a waiting one after a fetch.

        If too many rows wait for earlier keys, only the first worker runs.
        """
        # Too many rows wait for those of the first key: run only its worker.
        if self._rows_behind >= self._room:
            first = self._workers[0]
            if first not in self._ready:
                self._fetch()
            self._ready.remove(first)
            return first
        if not self._ready:
            if not self._ended and not self._full_workers and self._pending_reads < self._limit:
                worker = _Worker(results.empty())
                worker.coroutine = self._work(worker) if yields else self._await(worker)
                self._workers.append(worker)
                return worker
            self._fetch()
        return self._ready.popleft() if self._ready else None

    def _step(self, worker: _Worker) -> None:
        """Run a worker until it has to wait."""
        if worker.position is not None:
            self._current_key.position, self._focus.key = worker.position, worker.key
            if worker.dropped:
                self._dropped, worker.dropped = worker.dropped, self._dropped
        try:
            request = worker.coroutine.send(None)
        except StopIteration as end:
            worker.state = "done"
            self._ended = self._ended or bool(end.value)
            return
        except RuntimeError as error:
            if str(error) == NO_LOOP:
                raise without_loop(error, self._focus.key).with_traceback(error.__traceback__) from error
            raise
        worker.position, worker.key = self._current_key.position, self._focus.key
        if self._dropped:
            # Generators that were dropped while the worker ran are closed in its next turn.
            worker.dropped, self._dropped = self._dropped, []
        if type(request) is not Request:
            self._refuse(worker, request)
        elif request.wanted:
            worker.wanted = request.wanted
            self._pending_reads += len(request.wanted)
            self._waiting.append(worker)
        else:
            worker.state = "full"
            self._full_workers += 1

    def _in_order(self, results: Results) -> None:
        """Take the rows of the first worker, which is done or has many rows."""
        first = self._workers[0]
        results.join(first.results)
        self._rows_behind -= first.size
        first.size = 0
        if first.state == "done":
            self._workers.popleft()
        else:
            first.state = ""
            self._full_workers -= 1
            self._ready.append(first)

    def _fetch(self) -> None:
        """Fetch all missing data: one request per variable, with single map keys apart from whole maps."""
        groups: dict[tuple[int, bool], tuple[StateVariable, list[tuple[int, Any]]]] = {}
        for worker in self._waiting:
            for held, at, key in worker.wanted:
                groups.setdefault((id(held), key is None), (held, []))[1].append((at, key))
        self._focus.key = None
        for held, wanted in groups.values():
            held.fetch(wanted)
        self._ready.extend(self._waiting)
        self._waiting = []
        self._pending_reads = 0

    # coroutines of workers -------------------------------------------------------------------------------------

    async def _work(self, worker: _Worker) -> bool:
        """Process keys whose records yield rows until one had to wait; return whether there are no more keys."""
        current_key, focus, results = self._current_key, self._focus, worker.results
        append, items, ends_by_key, check_every = (
            results.append,
            results.items,
            results.ends_by_key,
            results.check_every,
        )
        owned = 0
        record: AsyncIterable[Any]
        for position, key, records in self._tasks:
            current_key.position, focus.key = position, key
            for record in records:
                async for row in record:
                    append(row)
                    if len(items) >= check_every and results.enough:
                        ends_by_key.append((len(items), key))
                        await _ROOM
                        owned = len(items)
                if self._dropped:
                    await self._close_dropped()
            if len(items) > owned:
                owned = len(items)
                ends_by_key.append((owned, key))
            if worker.position is not None:
                return False
        return True

    async def _await(self, worker: _Worker) -> bool:
        """Process keys whose records yield nothing until one had to wait; return whether there are no more keys."""
        current_key, focus = self._current_key, self._focus
        record: Awaitable[Any]
        for position, key, records in self._tasks:
            current_key.position, focus.key = position, key
            for record in records:
                result = await record
                if result is not None:
                    raise UsageError(
                        f"The processor returned {type(result).__qualname__} for key {key!r}.",
                        action="Let it give rows out with yield, one by one, or return nothing.",
                    )
                if self._dropped:
                    await self._close_dropped()
            if worker.position is not None:
                return False
        return True

    async def _close_dropped(self) -> None:
        while self._dropped:
            await self._dropped.pop().aclose()

    def _add_dropped(self, generator: AsyncGenerator[Any, None]) -> None:
        self._dropped.append(generator)

    # errors and end -------------------------------------------------------------------------------------------

    def _refuse(self, worker: _Worker, request: Any) -> None:
        """Raise the error for awaiting something other than state, at the place in the user's code."""
        frame: Any = worker.coroutine.cr_frame  # type: ignore[attr-defined]
        error = refusal(request, worker.key, frame.f_locals.get("record"))
        try:
            worker.coroutine.throw(error)
        except BaseException as raised:
            if raised is error:
                raise
            raise error from raised
        raise error

    def _close(self) -> None:
        """End all unfinished coroutines; their errors are ignored."""
        self._close_now()
        for worker in self._workers:
            if worker.state != "done":
                self._current_key.position, self._dropped = worker.position, worker.dropped
                _end(worker.coroutine)
                self._close_now()
        self._reset()

    def _close_now(self) -> None:
        while self._dropped:
            closing = self._dropped.pop().aclose()
            with suppress(Exception):
                closing.send(None)
                _end(closing)


class _Room:
    """Awaited to wait for room for output rows."""

    def __await__(self) -> Generator[Request, None, None]:
        yield Request([])


_ROOM = _Room()


class Ended(BaseException):
    """Raised in a waiting coroutine to end it, because another one has failed.

    `GeneratorExit` would not reach the cleanup code of a generator: it ends the coroutine that awaits the generator.
    """


def _end(coroutine: Coroutine[Any, Any, Any]) -> None:
    """End a coroutine; its cleanup code runs as far as it does not wait."""
    with suppress(Exception, Ended):
        for _ in range(_MAX_CLOSE_TRIES):
            coroutine.throw(Ended())


@contextmanager
def _collect_dropped(take: Any) -> Iterator[None]:
    """Have `take` called with asynchronous generators that are dropped before their end."""
    before = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(firstiter=None, finalizer=take)
    try:
        yield
    finally:
        sys.set_asyncgen_hooks(*before)
