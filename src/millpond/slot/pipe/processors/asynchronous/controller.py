"""The asynchronous execution controller: works on many keys of a call, each as far as it gets (Flink 2.0 §4.1–4.3).

Nobody else drives the coroutines: no event loop. A key's records are worked through one after the other, by one worker;
a worker takes key after key until one has to wait for state, and the next worker goes on with the keys behind it. Those
that have what they waited for come before new keys. When nothing can run, all that is wanted is fetched, at once for
each variable. A run ends when all its keys are through: this is the barrier before the timers of a batch, and before it
is sealed (Flink 2.0 §4.4–4.5). Rows come out in the order of keys, however the keys took turns.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, Self

from millpond.errors import UsageError
from millpond.slot.pipe.processors.asynchronous.foreign import NO_LOOP, refusal, without_loop
from millpond.slot.pipe.processors.asynchronous.reads import Request, Wanted
from millpond.slot.pipe.processors.state.variables import Held, Place

_CLOSINGS = 100
"""How often a coroutine is told to end that goes on waiting."""


class Results(Protocol):
    """What keys give out.

    Attributes:
        given: that. owners: how many things there are after each key that gave any, and the key.
        look: after how many things it is worth while to look whether there are enough.
    """

    given: list[Any]
    owners: list[tuple[int, Any]]
    look: int

    @property
    def size(self) -> int:
        """How many rows there are, or things, if these are more."""

    @property
    def enough(self) -> bool:
        """Whether there are enough for now."""

    @property
    def append(self) -> Callable[[Any], None]:
        """Takes one thing."""

    def empty(self) -> Self:
        """Others of the same output, none yet."""

    def join(self, others: Self) -> None:
        """Put others behind these, which are none then."""


class Focus(Protocol):
    """Whoever is told which key is worked on.

    Attributes:
        key: that.
    """

    key: Any


Task = tuple[int, Any, Iterable[Any]]
"""A key's position in the call, what the user is told of it, and its records: what the user's function gives for each.

A record begins when it is awaited, or iterated over, and the next one is asked for when it is done.
"""


class _Worker:
    """A coroutine that takes key after key, and where it is.

    Attributes:
        coroutine: gives requests. results: of its keys. size: of these, when it was last seen.
        at, key: the key for which it waits. wanted: what for.
        left: generators of the user's that were not used up.
        state: `full`: it waits for room; `done`: it takes no more keys.
    """

    __slots__ = ("at", "coroutine", "key", "left", "results", "size", "state", "wanted")

    def __init__(self, results: Results) -> None:
        self.coroutine: Coroutine[Any, None, bool]
        self.results = results
        self.size = 0
        self.at: int | None = None
        self.key: Any = None
        self.wanted: list[Wanted] = []
        self.left: list[AsyncGenerator[Any, None]] = []
        self.state = ""


class Controller:
    """Drives the coroutines of one processor.

    Args:
        place: where the processor is, for its state. focus: is told which key is worked on.
        limit: how many reads may wait at a time; of most keys that is one.
        room: how many rows may wait for those of earlier keys, about; then only the first key is worked on.
    """

    def __init__(self, place: Place, focus: Focus, limit: int, room: int) -> None:
        self._place = place
        self._focus = focus
        self._limit = limit
        self._room = room
        self._tasks: Iterator[Task] = iter(())
        self._left: list[AsyncGenerator[Any, None]] = []  # of the worker that runs
        self._reset()

    def _reset(self) -> None:
        self._workers: deque[_Worker] = deque()  # in the order of keys; none that is done before all others
        self._ready: deque[_Worker] = deque()
        self._waiting: list[_Worker] = []
        self._wanted = 0
        self._full = 0
        self._behind = 0
        self._ended = False

    def run(self, tasks: Iterable[Task], results: Results, *, yields: bool) -> Iterator[None]:
        """Work through all keys.

        Args:
            tasks: the keys, in order. results: take the rows, in the order of keys.
            yields: whether records give rows out; else they are just awaited.

        Yields:
            When there are enough results, which are to be taken away.

        Raises:
            UsageError: something else than state is awaited.
        """
        self._tasks = iter(tasks)
        self._reset()
        with _abandoned(self._left_over):
            try:
                while (worker := self._next(results, yields)) is not None:
                    self._step(worker)
                    self._behind += worker.results.size - worker.size
                    worker.size = worker.results.size
                    while self._workers and self._workers[0].state:
                        self._in_order(results)
                        if results.enough:
                            yield
            finally:
                self._close()

    def _next(self, results: Results, yields: bool) -> _Worker | None:
        """Who runs next: who was answered, else a new worker, else who waits, answered now; or the first one only."""
        if self._behind >= self._room:
            first = self._workers[0]
            if first not in self._ready:
                self._fetch()
            self._ready.remove(first)
            return first
        if not self._ready:
            if not self._ended and not self._full and self._wanted < self._limit:
                worker = _Worker(results.empty())
                worker.coroutine = self._work(worker) if yields else self._await(worker)
                self._workers.append(worker)
                return worker
            self._fetch()
        return self._ready.popleft() if self._ready else None

    def _step(self, worker: _Worker) -> None:
        """Let a worker run until it has to wait."""
        if worker.at is not None:
            self._place.at, self._focus.key = worker.at, worker.key
            if worker.left:
                self._left, worker.left = worker.left, self._left
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
        worker.at, worker.key = self._place.at, self._focus.key
        if self._left:
            worker.left, self._left = self._left, []
        if type(request) is not Request:
            self._refuse(worker, request)
        elif request.wanted:
            worker.wanted = request.wanted
            self._wanted += len(request.wanted)
            self._waiting.append(worker)
        else:
            worker.state = "full"
            self._full += 1

    def _in_order(self, results: Results) -> None:
        """Take the rows of the first keys, which are through, or have given out many."""
        first = self._workers[0]
        results.join(first.results)
        self._behind -= first.size
        first.size = 0
        if first.state == "done":
            self._workers.popleft()
        else:
            first.state = ""
            self._full -= 1
            self._ready.append(first)

    def _fetch(self) -> None:
        """Get all that is wanted: at once for each variable, what is wanted of a key of a map apart from all of it."""
        groups: dict[tuple[int, bool], tuple[Held, list[tuple[int, Any]]]] = {}
        for worker in self._waiting:
            for held, at, key in worker.wanted:
                groups.setdefault((id(held), key is None), (held, []))[1].append((at, key))
        self._focus.key = None
        for held, wanted in groups.values():
            held.fetch(wanted)
        self._ready.extend(self._waiting)
        self._waiting = []
        self._wanted = 0

    # what workers do ------------------------------------------------------------------------------------------

    async def _work(self, worker: _Worker) -> bool:
        """Take keys whose records give rows out, until one had to wait; returns whether there are no more keys."""
        place, focus, results = self._place, self._focus, worker.results
        append, given, owners, look = results.append, results.given, results.owners, results.look
        owned = 0
        record: AsyncIterable[Any]
        for at, key, records in self._tasks:
            place.at, focus.key = at, key
            for record in records:
                async for one in record:
                    append(one)
                    if len(given) >= look and results.enough:
                        owners.append((len(given), key))
                        await _ROOM
                        owned = len(given)
                if self._left:
                    await self._close_left()
            if len(given) > owned:
                owned = len(given)
                owners.append((owned, key))
            if worker.at is not None:
                return False
        return True

    async def _await(self, worker: _Worker) -> bool:
        """The same with records that give nothing out."""
        place, focus = self._place, self._focus
        record: Awaitable[Any]
        for at, key, records in self._tasks:
            place.at, focus.key = at, key
            for record in records:
                given = await record
                if given is not None:
                    raise UsageError(
                        f"The processor returned {type(given).__qualname__} for key {key!r}.",
                        action="Let it give rows out with yield, one by one, or return nothing.",
                    )
                if self._left:
                    await self._close_left()
            if worker.at is not None:
                return False
        return True

    async def _close_left(self) -> None:
        while self._left:
            await self._left.pop().aclose()

    def _left_over(self, generator: AsyncGenerator[Any, None]) -> None:
        self._left.append(generator)

    # the end ---------------------------------------------------------------------------------------------------

    def _refuse(self, worker: _Worker, request: Any) -> None:
        """Raise where the worker awaits it that something else than state is awaited."""
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
        """End all coroutines that are under way; none of them is heard any more."""
        self._close_now()
        for worker in self._workers:
            if worker.state != "done":
                self._place.at, self._left = worker.at, worker.left
                _end(worker.coroutine)
                self._close_now()
        self._reset()

    def _close_now(self) -> None:
        while self._left:
            closing = self._left.pop().aclose()
            with suppress(Exception):
                closing.send(None)
                _end(closing)


class _Room:
    """Awaited to make room for rows."""

    def __await__(self) -> Generator[Request, None, None]:
        yield Request([])


_ROOM = _Room()


class Ended(BaseException):
    """What is raised where a coroutine waits that is to end, as another has failed.

    `GeneratorExit` would not reach what a generator does in the end: it ends who waits for the generator.
    """


def _end(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Let a coroutine end, with what it does in the end, as far as that needs to wait for nothing."""
    with suppress(Exception, Ended):
        for _ in range(_CLOSINGS):
            coroutine.throw(Ended())


@contextmanager
def _abandoned(take: Any) -> Iterator[None]:
    """Be given the asynchronous generators that are not used up."""
    before = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(firstiter=None, finalizer=take)
    try:
        yield
    finally:
        sys.set_asyncgen_hooks(*before)
