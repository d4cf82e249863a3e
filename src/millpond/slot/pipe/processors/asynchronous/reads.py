"""What a processor awaits: reads of state, each answered at once if what it reads was sent along with the call.

A read happens when it is awaited, and sees all writes up to then. What it lacks it asks of the controller, which gets
it for many keys at a time (see `controller`).
"""

from __future__ import annotations

import types
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Sequence
from typing import Any, Protocol

from millpond.errors import UsageError
from millpond.slot.pipe.processors.state.variables import Held, Place

Wanted = tuple[Held, int, Any]
"""What was not sent along, and is wanted: of a variable, by the position of the key in the call, and, of a map, the key
whose value is wanted; None for all that the key of the call has."""


class Request:
    """What a coroutine gives to whoever drives it when it has to wait; of no other kind may anything be.

    Attributes:
        wanted: what it waits for; nothing if it is to make room for the rows that it has given out.
    """

    __slots__ = ("wanted",)

    def __init__(self, wanted: list[Wanted]) -> None:
        self.wanted = wanted


class Source(Protocol):
    """What is read from.

    Attributes:
        held: where state may be missing; None if it never is. place: where the processor is.
    """

    held: Held | None
    place: Place


class Read:
    """One read of state.

    Args:
        source: what is read from. now: reads it, once nothing is lacking.
        key: of a map, the key whose value is wanted; None for all.
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
            at, key = source.place.at, self._key
            while at is not None and held.lacks(at, key):
                yield Request([(held, at, key)])
        return self.now()

    def lacking(self) -> list[Wanted]:
        """What has to be there first, and is not."""
        held, at = self._source.held, self._source.place.at
        if held is None or at is None or not held.lacks(at, self._key):
            return []
        return [(held, at, self._key)]

    def __bool__(self) -> bool:
        raise UsageError(
            "A read of state was taken for what it reads.", action="Await it, as in `if await self.total.exists():`."
        )


class Parts(Read):
    """A read of several things: `async for` gives them one after the other, `await` as a list.

    Args:
        source: what is read from. each: reads them as they are when the first is asked for.
    """

    __slots__ = ("_each",)

    def __init__(self, source: Source, each: Callable[[], Iterable[Any]]) -> None:
        super().__init__(source, lambda: list(each()))
        self._each = each

    async def __aiter__(self) -> AsyncIterator[Any]:
        await self._there()
        for part in self._each():
            yield part

    @types.coroutine
    def _there(self) -> Generator[Request, None, None]:
        while lacking := self.lacking():
            yield Request(lacking)


@types.coroutine
def _nothing() -> Generator[Any, None, None]:
    yield from ()


DONE = _nothing()
"""What a write gives: it has taken effect. A generator that has come to its end can be awaited any number of times."""
DONE.close()


class Gathered:
    """Several reads at a time.

    Args:
        reads: in the order in which their values come.
    """

    __slots__ = ("_reads",)

    def __init__(self, reads: Sequence[Read | Gathered]) -> None:
        self._reads = reads

    def __await__(self) -> Generator[Request, None, list[Any]]:
        while lacking := self.lacking():
            yield Request(lacking)
        return self.now()

    def lacking(self) -> list[Wanted]:
        """What has to be there first, and is not."""
        return [wanted for read in self._reads for wanted in read.lacking()]

    def now(self) -> list[Any]:
        """What all of them read."""
        return [read.now() for read in self._reads]


def gather(*reads: Any) -> Gathered:
    """Reads of state, asked for together: what was not sent along is fetched at once, not one after the other.

    Args:
        reads: what variables of an asynchronous processor give, as `self.total.get()`; or other `gather(…)`.

    Returns:
        What to await for a list of what they read, in the same order.

    Raises:
        UsageError: something else is given.
    """
    for read in reads:
        if not isinstance(read, Read | Gathered):
            kind = type(read)
            raise UsageError(
                f"millpond.gather was given {kind.__module__}.{kind.__qualname__}, which is no read of state.",
                action="Give what get(), getValue(…) and other reads of state variables return, without awaiting it.",
            )
    return Gathered(reads)
