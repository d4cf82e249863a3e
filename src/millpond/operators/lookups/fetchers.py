"""A process's connections to external tables, shared by the partitions of a lookup join."""

from __future__ import annotations

import threading

from millpond.lookup.fetch import Fetcher
from millpond.spec.kinds.enrich import EnrichSpec

_shared: dict[EnrichSpec, tuple[Fetcher, int]] = {}
_lock = threading.Lock()


def acquire(spec: EnrichSpec) -> Fetcher:
    """Acquire the fetcher of a lookup join; pair each call with `release`.

    Raises:
        UsageError: its table cannot be loaded here.
    """
    with _lock:
        fetcher, users = _shared.get(spec) or (Fetcher(spec), 0)
        _shared[spec] = fetcher, users + 1
        return fetcher


def release(spec: EnrichSpec) -> None:
    """Release a partition's use of the fetcher; the last release closes it."""
    with _lock:
        fetcher, users = _shared.pop(spec)
        if users > 1:
            _shared[spec] = fetcher, users - 1
            return
    # Without the lock: closing connections may take long, and other partitions must not wait for it.
    fetcher.close()
