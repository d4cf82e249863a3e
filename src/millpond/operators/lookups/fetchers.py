"""A process's connections to external tables, shared by the partitions of a lookup join."""

from __future__ import annotations

import threading
from collections import Counter

from millpond.lookup.fetch import Fetcher
from millpond.spec.kinds.enrich import EnrichSpec

_shared: dict[EnrichSpec, Fetcher] = {}
"""The fetcher that `acquire` returns for a lookup join. One that hangs is replaced here before its last release."""
_users: Counter[Fetcher] = Counter()
"""Number of partitions that use each fetcher, also a replaced one."""
_lock = threading.Lock()


def acquire(spec: EnrichSpec) -> Fetcher:
    """Acquire the fetcher of a lookup join; pair each call with `release`.

    Raises:
        UsageError: its table cannot be loaded here.
    """
    with _lock:
        fetcher = _shared.get(spec)
        # A request that hangs fails each batch that waits for an answer of its fetcher. A partition that starts after
        # that gets a new fetcher.
        if fetcher is None or fetcher.hangs:
            fetcher = _shared[spec] = Fetcher(spec)
        _users[fetcher] += 1
        return fetcher


def release(spec: EnrichSpec, fetcher: Fetcher) -> None:
    """Release a partition's use of a fetcher; the last release closes it."""
    with _lock:
        _users[fetcher] -= 1
        if _users[fetcher]:
            return
        del _users[fetcher]
        if _shared.get(spec) is fetcher:
            del _shared[spec]
    # Without the lock: closing connections may take long, and other partitions must not wait for it.
    fetcher.close()
