"""What one partition does with hints: looks at them when it is at rest, or between two pieces of a batch."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from millpond.layout import Words
from millpond.operators.protocol import Announced, KeysAnnounced, Operator
from millpond.slot.batch.task import Lookahead
from millpond.slot.prefetch.switch import HintSwitch

_MOST = 1 << 20
"""Keys that are kept for one batch until they can be looked at, at most: more would be read too late anyway."""

_MISSED = 0.002
"""Share of the keys of a batch that were not in memory, from which hints are wanted."""

_MARGIN = 1.25
"""How many times as long as the longest read hints have to come before their rows."""

_UNUSED = 0.02
"""Share of the keys read ahead that no row asked for, from which a lookahead sees other keys than the operator."""


class Announcements:
    """Hints for one partition, and the choice of who sends them (Keyed Prefetching §IV-A, Keyed Prefetching §IV-C).

    Nobody does until keys are missing from memory. Then the latest lookahead does that comes early enough: its slack,
    from its first hint for a batch to the first row, is longer than the reads take. One that announces keys which no
    row asks for is dropped for good. `keep` may be called from any thread, the rest by whoever has the partition's
    turn.

    Args:
        switch: to be set when hints are wanted; None where there are none to be had.
        lookaheads: who can send them, in the order of the plan.
    """

    def __init__(self, switch: HintSwitch | None, lookaheads: Sequence[Lookahead]) -> None:
        self._switch = switch
        self._choices = list(lookaheads)
        self._lock = threading.Lock()
        self._kept: dict[int, list[tuple[Words, pa.RecordBatch | None]]] = {}
        self._counts: dict[int, int] = {}
        self._first: dict[tuple[int, Lookahead], float] = {}
        self._chosen: Lookahead | None = self._choices[-1] if self._choices else None
        self._slack: dict[Lookahead, float] = {}  # in seconds, of the last batch for which there were hints

    def keep(self, batch: int, lookahead: Lookahead, hashes: Words, keys: pa.RecordBatch | None = None) -> None:
        """Keep hints for a batch, as far as there is room; `keys` come for operators that want more than hashes."""
        with self._lock:
            self._first.setdefault((batch, lookahead), time.monotonic())
            count = self._counts.get(batch, 0)
            if len(hashes) and count < _MOST:
                most = _MOST - count
                some = None if keys is None else keys.slice(0, most)
                self._kept.setdefault(batch, []).append((hashes[:most], some))
                self._counts[batch] = min(_MOST, count + len(hashes))

    def begin(self, batch: int) -> None:
        """The first rows of a batch are there."""
        now = time.monotonic()
        with self._lock:
            first, self._first = self._first, {}
            for (number, lookahead), at in first.items():
                if number > batch:
                    self._first[number, lookahead] = at
                elif number == batch:
                    self._slack[lookahead] = now - at

    def pass_on(self, operator: Operator | None, version: int) -> None:
        """Tell an operator, which is at some version, of all that was kept; what is for earlier batches is dropped."""
        if not self._kept:
            return
        with self._lock:
            kept, self._kept, self._counts = self._kept, {}, {}
        for needed, parts in kept.items():
            if needed < version:
                continue
            keys = [some for _, some in parts if some is not None]
            if keys and isinstance(operator, KeysAnnounced):
                operator.announce_keys(pa.concat_batches(keys), needed)
            elif isinstance(operator, Announced):
                operator.announce(np.concatenate([hashes for hashes, _ in parts]), needed)

    def learn(self, figures: Mapping[str, float]) -> None:
        """See from a batch's figures whether hints are wanted for the next ones, and whose."""
        if self._switch is None or self._chosen is None:
            return
        misses, hits = figures.get("cache_misses", 0.0), figures.get("cache_hits", 0.0)
        announced = figures.get("announced_keys", 0.0)  # these would have been missing
        if misses + announced <= _MISSED * (misses + hits):
            self._switch.set(None)
            return
        read, used = figures.get("prefetched_keys", 0.0), figures.get("prefetched_used", 0.0)
        if self._chosen != self._choices[-1] and read - used > _UNUSED * read:
            self._choices = self._choices[self._choices.index(self._chosen) + 1 :]
        needed = _MARGIN * figures.get("prefetch_ms", 0.0) / 1000
        early = (one for one in reversed(self._choices) if self._slack.get(one, math.inf) > needed)
        self._chosen = next(early, self._choices[0])
        self._switch.set(self._chosen)
