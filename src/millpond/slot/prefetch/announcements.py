"""What one partition does with hints: looks at them when it is at rest, or between two pieces of a batch."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from millpond.layout import Words
from millpond.operators.protocol import Announced, KeysAnnounced, Operator
from millpond.slot.prefetch.switch import HintSwitch

_MOST = 1 << 20
"""Keys that are kept for one batch until they can be looked at, at most: more would be read too late anyway."""

_MISSED = 0.002
"""Share of the keys of a batch that were not in memory, from which hints are wanted."""


class Announcements:
    """Hints for one partition. `keep` may be called from any thread, the rest by whoever has the partition's turn.

    Args:
        switch: to be set when hints are wanted; None where there are none to be had.
    """

    def __init__(self, switch: HintSwitch | None) -> None:
        self._switch = switch
        self._lock = threading.Lock()
        self._kept: dict[int, list[tuple[Words, pa.RecordBatch | None]]] = {}
        self._counts: dict[int, int] = {}

    def keep(self, batch: int, hashes: Words, keys: pa.RecordBatch | None = None) -> None:
        """Keep hints for a batch, as far as there is room; `keys` come for operators that want more than hashes."""
        with self._lock:
            count = self._counts.get(batch, 0)
            if count < _MOST:
                most = _MOST - count
                some = None if keys is None else keys.slice(0, most)
                self._kept.setdefault(batch, []).append((hashes[:most], some))
                self._counts[batch] = min(_MOST, count + len(hashes))

    def pass_on(self, operator: Operator | None, version: int) -> None:
        """Tell an operator, which is at some version, of all that was kept; what is for earlier batches is dropped."""
        if not self._kept:
            return
        with self._lock:
            kept, self._kept, self._counts = self._kept, {}, {}
        for needed, parts in kept.items():
            if needed < version:
                continue
            if isinstance(operator, Announced):
                operator.announce(np.concatenate([hashes for hashes, _ in parts]), needed)
            elif isinstance(operator, KeysAnnounced):
                keys = [some for _, some in parts if some is not None]
                if keys:
                    operator.announce_keys(pa.concat_batches(keys), needed)

    def learn(self, figures: Mapping[str, float]) -> None:
        """See from a batch's figures whether hints are wanted for the next ones."""
        if self._switch is not None:
            misses, hits = figures.get("cache_misses", 0.0), figures.get("cache_hits", 0.0)
            announced = figures.get("announced_keys", 0.0)  # these would have been missing
            self._switch.set(misses + announced > _MISSED * (misses + hits))
