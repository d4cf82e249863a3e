"""Awaitable reads of state, answered at once if the data was sent with the call.

A read happens when it is awaited, and sees all writes up to then. It requests missing data from the controller, which
fetches it for many keys at a time (see `controller`).
"""

from __future__ import annotations

import types
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Sequence
from typing import Any, Protocol

from millpond.errors import UsageError
from millpond.worker.processors.state.variables import CurrentKey, StateVariable

MissingData = tuple[StateVariable, int, Any]
"""Data that was not sent with the call: the variable, the position of the key in the call, and a map key. The map key
is None for all data of the key."""


class Request:
    """Object that a coroutine yields to its driver when it must wait; anything else it yields is an error.

    Attributes:
        wanted: the missing data; empty to wait for room for its output rows.
    """

    __slots__ = ("wanted",)

    def __init__(self, wanted: list[MissingData]) -> None:
        self.wanted = wanted


class Source(Protocol):
    """A variable or a set of timers that is read.

    Attributes:
        held: the variable whose state may be missing; None if it never is.
        current_key: position of the processor's current key.
    """

    held: StateVariable | None
    current_key: CurrentKey


class Read:
    """One read of state.

    Args:
        source: the variable or timers to read.
        now: reads it once no data is missing.
        key: of a map, the key whose value is read; None for everything.
    """

    __slots__ = ("_key", "_source", "now")

    def __init__(self, source: Source, now: Callable[[], Any], key: Any = None) -> None:
        self._source = source
        self.now = now
        self._key = key

    def __await__(self) -> Generator[Request, None, Any]:
        source = self._source
        held = source.held
        if held is not None:
            at, key = source.current_key.position, self._key
            # A loop: a fetch may bring only a part of what is missing.
            while at is not None and held.lacks(at, key):
                yield Request([(held, at, key)])
        return self.now()

    def lacking(self) -> list[MissingData]:
        """Return the data that must be fetched first."""
        held, at = self._source.held, self._source.current_key.position
        if held is None or at is None or not held.lacks(at, self._key):
            return []
        return [(held, at, self._key)]

    def __bool__(self) -> bool:
        raise UsageError(
            "A read of state was taken for what it reads.", action="Await it, as in `if await self.total.exists():`."
        )


class Parts(Read):
    """A read of several items: `async for` yields them one after the other, `await` returns a list.

    Args:
        source: the variable or timers to read.
        each: reads the items, as they are when the first one is requested.
    """

    __slots__ = ("_each",)

    def __init__(self, source: Source, each: Callable[[], Iterable[Any]]) -> None:
        super().__init__(source, lambda: list(each()))
        self._each = each

    async def __aiter__(self) -> AsyncIterator[Any]:
        await self._await_data()
        for part in self._each():
            yield part

    @types.coroutine
    def _await_data(self) -> Generator[Request, None, None]:
        while lacking := self.lacking():
            yield Request(lacking)


@types.coroutine
def _exhausted() -> Generator[Any, None, None]:
    yield from ()


DONE = _exhausted()
"""Result of a write, which has taken effect. An exhausted generator can be awaited any number of times."""
DONE.close()


class Gathered:
    """Several reads that are awaited together.

    Args:
        reads: the reads, in the order of their values.
    """

    __slots__ = ("_reads",)

    def __init__(self, reads: Sequence[Read | Gathered]) -> None:
        self._reads = reads

    def __await__(self) -> Generator[Request, None, list[Any]]:
        while lacking := self.lacking():
            yield Request(lacking)
        return self.now()

    def lacking(self) -> list[MissingData]:
        """Return the data that must be fetched first."""
        return [wanted for read in self._reads for wanted in read.lacking()]

    def now(self) -> list[Any]:
        """Return the values of all reads."""
        return [read.now() for read in self._reads]


def gather(*reads: Any) -> Gathered:
    """Combine reads of state, so that missing data is fetched together instead of one read after the other.

    Args:
        reads: reads of an asynchronous processor's variables, such as `self.total.get()`; or other `gather(…)`.

    Returns:
        An awaitable of the list of values, in the same order.

    Raises:
        UsageError: an argument is not a read of state.

    Examples:
        >>> from millpond.testing import ProcessorTester
        >>> from pyspark.sql import Row
        >>> class Ratio(millpond.AsyncStatefulProcessor):
        ...     def init(self, handle):
        ...         self.hits = handle.getValueState("hits", "n bigint")
        ...         self.misses = handle.getValueState("misses", "n bigint")
        ...
        ...     async def handleInputRows(self, key, rows, timerValues):
        ...         hits, misses = await millpond.gather(self.hits.get(), self.misses.get())
        ...         yield Row(page=key[0], ratio=hits[0] / (hits[0] + misses[0]))
        >>> tester = ProcessorTester(Ratio(), "page string", "page string", "page string, ratio double")
        >>> tester.updateValueState("hits", "/home", (3,))
        >>> tester.updateValueState("misses", "/home", (1,))
        >>> tester.test("/home", [Row(page="/home")])
        [Row(page='/home', ratio=0.75)]
    """
    for read in reads:
        if not isinstance(read, Read | Gathered):
            kind = type(read)
            raise UsageError(
                f"millpond.gather was given {kind.__module__}.{kind.__qualname__}, which is no read of state.",
                action="Give what get(), getValue(…) and other reads of state variables return, without awaiting it.",
            )
    return Gathered(reads)
