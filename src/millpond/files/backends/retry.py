"""Retries of requests to a store, with backoff."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from millpond.errors import TransientError
from millpond.files.backends.filesystem import AlreadyExistsError, Buffer, FileSystem

MAX_TRIES = 5
RETRY_SECONDS = 5.0
"""Seconds after which a failure is not retried here: the store's own client has retried it already."""

LONG_RETRY: dict[str, Any] = {
    "max_retries": 1000,
    "retry_timeout": timedelta(minutes=3),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 4},
}
"""obstore's retries in a running query: for 3 minutes, some 60 times, also if the store refuses connections.

By default, obstore gives up after ten tries, which take a few seconds. That is enough while a query starts.
"""

SHORT_RETRY: dict[str, Any] = {"max_retries": 1, "retry_timeout": timedelta(seconds=5)}
"""obstore's retries for an object that may be missing."""

_FIRST_PAUSE_SECONDS = 0.05  # seconds before the second try; doubled for each further try
_MAX_PAUSE_SECONDS = 15.0  # longest pause, in seconds

T = TypeVar("T")


def with_retries(
    action: Callable[[], T],
    *,
    tries: int = MAX_TRIES,
    within: float = RETRY_SECONDS,
    pause: Callable[[float], object] = time.sleep,
) -> T:
    """Run an idempotent action, up to `tries` times while the store fails, with exponential backoff.

    Args:
        action: reads, or writes under a unique name.
        tries: largest number of tries.
        within: seconds after which a failure is not retried; the store's own client may have retried long enough.
        pause: sleeps for a number of seconds.

    Raises:
        TransientError: the store failed each time; this is the last failure.
    """
    until = time.monotonic() + within
    for attempt in range(tries - 1):
        try:
            return action()
        except TransientError:
            if time.monotonic() > until:
                raise
            pause(min(_MAX_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2**attempt))
    return action()


def put_once(files: FileSystem, name: str, data: Sequence[Buffer]) -> None:
    """Put an object if absent; no other writer may write the same bytes under this name.

    If an answer is lost, the store's client repeats the request and finds the name taken by its own first try. So an
    existing object with the same bytes counts as success.

    Raises:
        AlreadyExistsError: the name holds other bytes.
    """
    try:
        files.put(name, data, create=True)
    except AlreadyExistsError:
        if bytes(files.get(name)) != b"".join(bytes(memoryview(piece).cast("B")) for piece in data):
            raise
