"""The connections of a process to tables outside: the partitions of one lookup join share them."""

from __future__ import annotations

import threading

from millpond.lookup.fetch import Fetcher
from millpond.spec.kinds.enrich import EnrichSpec

_shared: dict[EnrichSpec, tuple[Fetcher, int]] = {}
_lock = threading.Lock()


def take(spec: EnrichSpec) -> Fetcher:
    """What looks keys up for a lookup join; to be given back.

    Raises:
        UsageError: its table cannot be loaded here.
    """
    with _lock:
        fetcher, users = _shared.get(spec) or (Fetcher(spec), 0)
        _shared[spec] = fetcher, users + 1
        return fetcher


def give_back(spec: EnrichSpec) -> None:
    """Say that one partition has no more use for it."""
    with _lock:
        fetcher, users = _shared.pop(spec)
        if users > 1:
            _shared[spec] = fetcher, users - 1
            return
    fetcher.close()
