"""Trying again what a store refused for the moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from millpond.errors import TransientError
from millpond.files.backends.filesystem import AlreadyExistsError, Buffer, FileSystem

TRIES = 5
AT_ONCE = 5.0
"""Seconds: what has failed after more has been tried again by the store's own client."""

LASTING: dict[str, Any] = {
    "max_retries": 1000,
    "retry_timeout": timedelta(minutes=3),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 4},
}
"""How obstore asks again where a query runs: for some minutes, also a store that refuses connections, some 60 times in
all. By default it gives that up after ten times, which are a few seconds: enough for who has only begun."""

SOON: dict[str, Any] = {"max_retries": 1, "retry_timeout": timedelta(seconds=5)}
"""How obstore looks for something that need not be there."""

_PAUSE = 0.05  # seconds before the second try; doubled for each further one
_LONGEST = 15.0  # up to this

T = TypeVar("T")


def patiently(
    action: Callable[[], T],
    *,
    tries: int = TRIES,
    within: float = AT_ONCE,
    pause: Callable[[float], object] = time.sleep,
) -> T:
    """Do something idempotent, up to `tries` times while the store fails, with growing pauses in between.

    Args:
        action: reads, or writes under a name of its own.
        within: seconds after which nothing is tried again: a store's own client may have tried long enough.
        pause: waits for so many seconds.

    Raises:
        TransientError: the store failed each time; this is its last answer.
    """
    until = time.monotonic() + within
    for attempt in range(tries - 1):
        try:
            return action()
        except TransientError:
            if time.monotonic() > until:
                raise
            pause(min(_LONGEST, _PAUSE * 2**attempt))
    return action()


def put_own(files: FileSystem, name: str, data: Sequence[Buffer]) -> None:
    """Put an object that nobody else puts in these very words, if nothing is there.

    A store's client sends a request again whose answer was lost, and is told then that the object is there: its own.

    Raises:
        AlreadyExistsError: another object is there.
    """
    try:
        files.put(name, data, create=True)
    except AlreadyExistsError:
        if bytes(files.get(name)) != b"".join(bytes(memoryview(piece).cast("B")) for piece in data):
            raise
