"""What one partition does with hints: looks at them when it is at rest, or between two pieces of a batch."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from millpond.layout import Words
from millpond.metrics import LOOKAHEAD, LOOKAHEADS, PREFETCH, SLACK
from millpond.operators.protocol import Announced, KeysAnnounced, Operator
from millpond.slot.batch.task import Lookahead
from millpond.slot.prefetch.switch import MOST, HintSwitch

_FURTHEST = 2
"""Batches that hints may be ahead of the one that is next."""

_SHARE = 16
"""Hints that cannot be looked at yet may take such a part of a partition's memory."""

_MISSED = 0.002
"""Share of the keys of a batch that were not in memory, from which hints are wanted."""

_MARGIN = 1.25
"""How many times as long as the longest read hints have to come before their rows."""

_UNUSED = 0.02
"""Share of the keys read ahead that no row asked for, from which a lookahead sees other keys than the operator."""

_IN_VAIN = 8
"""Batches in a row of which more keys had no room than were read ahead, until hints are given up for a while: what
they cost is spent on few."""

_REST = 64, 4096
"""Batches for which they are: the first time, and at most, as it is twice as long each time."""

_WRONG = 0.5
"""The same of the last lookahead, behind which there is no other: late rows, and processors that do not ask for all
that they have, are no reason to do without."""


@dataclass
class _Batch:
    """Hints for one batch.

    Attributes:
        first: by whom the first came when. kept: what is yet to be looked at. bytes: that this takes.
        count: how many keys were kept.
    """

    first: dict[Lookahead, float] = field(default_factory=dict)
    kept: list[tuple[Words, pa.RecordBatch | None]] = field(default_factory=list)
    bytes: int = 0
    count: int = 0


class Announcements:
    """Hints for one partition, and the choice of who sends them (Keyed Prefetching §IV-A, Keyed Prefetching §IV-C).

    Nobody does until keys are missing from memory. Then the latest lookahead does that comes early enough: its slack,
    from its first hint for a batch to the first row, is longer than the reads take. One that announces keys which no
    row asks for is dropped for good. Where most keys have no room, nobody does for a while. The last lookahead sends
    hints beside whoever is chosen: for rows that were not there yet when that one looked, because it begins, is late or
    has failed.

    `keep` and `close` may be called from any thread, the rest by whoever has the partition's turn.

    Args:
        switch: to be set when hints are wanted; None where there are none to be had.
        lookaheads: who can send them, in the order of the plan.
        memory: bytes that the partition has.
    """

    def __init__(self, switch: HintSwitch | None, lookaheads: Sequence[Lookahead], memory: int) -> None:
        self._switch = switch
        self._choices = list(lookaheads)
        self._room = max(1 << 16, memory // _SHARE)
        self._lock = threading.Lock()
        self._batches: dict[int, _Batch] = {}
        self._dropped = 0  # keys that were not looked at
        self._bytes = 0  # that came since figures were told
        self._version: int | None = None
        self._chosen: Lookahead | None = self._choices[-1] if self._choices else None
        self._asked: tuple[Lookahead, ...] = ()
        self._in_vain = 0  # batches in a row of which most keys had no room
        self._rest, self._next_rest = 0, _REST[0]  # batches until hints are tried again; how long, the next time
        self._slack: dict[Lookahead, float] = {}  # in seconds, of the last batch for which there were hints
        self._measured: dict[Lookahead, float] = {}  # the same of the batch that runs

    def keep(self, batch: int, lookahead: Lookahead, hashes: Words, keys: pa.RecordBatch | None = None) -> None:
        """Keep hints for a batch, as far as there is room; `keys` come for operators that want more than hashes."""
        with self._lock:
            self._bytes += hashes.nbytes if keys is None else keys.nbytes
            hints = self._hints_for(batch)
            if hints is None:
                self._dropped += len(hashes)
                return
            hints.first.setdefault(lookahead, time.monotonic())
            if not len(hashes):
                return
            size = 8 + (0 if keys is None else -(-keys.nbytes // len(hashes)))
            most = max(0, min(MOST - hints.count, (self._room - self._held) // size))
            if most < len(hashes):
                self._dropped += len(hashes) - most
                # What a slice leaves out would stay in memory.
                hashes = hashes[:most].copy()
                keys = None if keys is None else keys.take(pa.array(np.arange(most)))
            if most:
                hints.kept.append((hashes, keys))
                hints.count += len(hashes)
                hints.bytes += size * len(hashes)

    @property
    def _held(self) -> int:
        """Bytes that wait to be looked at."""
        return sum(hints.bytes for hints in self._batches.values())

    def _hints_for(self, batch: int) -> _Batch | None:
        """Those for a batch; None if it is over, or too far away."""
        version = self._version
        if version is None:
            near = len(self._batches) <= _FURTHEST or batch in self._batches
        else:
            near = version <= batch <= version + _FURTHEST
        return self._batches.setdefault(batch, _Batch()) if near else None

    def _at(self, version: int) -> None:
        """The partition is at a version: what is for other batches than the next ones is dropped."""
        self._version = version
        for batch in list(self._batches):
            if not version <= batch <= version + _FURTHEST:
                self._dropped += sum(len(hashes) for hashes, _ in self._batches.pop(batch).kept)

    def begin(self, batch: int) -> None:
        """The first rows of a batch are there."""
        now = time.monotonic()
        with self._lock:
            self._at(batch)
            hints = self._batches.get(batch)
            self._measured = {} if hints is None else {one: now - at for one, at in hints.first.items()}
            self._slack |= self._measured

    def pass_on(self, operator: Operator | None, version: int) -> None:
        """Tell an operator, which is at some version, of all that was kept."""
        with self._lock:
            if not self._held and self._version == version:
                return
            self._at(version)
            taken = []
            for batch, hints in sorted(self._batches.items()):
                taken.append((batch, hints.kept))
                hints.kept, hints.bytes = [], 0
        for needed, parts in taken:
            if isinstance(operator, KeysAnnounced):
                for keys in _alike(some for _, some in parts if some is not None):
                    operator.announce_keys(keys, needed)
                parts = [(hashes, some) for hashes, some in parts if some is None]
            if parts and isinstance(operator, Announced):
                operator.announce(np.concatenate([hashes for hashes, _ in parts]), needed)

    def figures(self) -> dict[str, float]:
        """Of the batch that runs: `dropped_hints` and `hint_bytes`, since they were last asked for; `lookahead`, who
        was asked to send hints (see `metrics.LOOKAHEADS`); `slack_ms`, how long before its rows their first hint came.
        """
        with self._lock:
            dropped, self._dropped = self._dropped, 0
            told, self._bytes = self._bytes, 0
        names = [one if one in ("source", "exchange") else "stage" for one in self._asked]
        asked = LOOKAHEADS.index(", ".join(names) or "off")
        figures = {"dropped_hints": float(dropped), "hint_bytes": float(told), LOOKAHEAD: float(asked)}
        slack = [self._measured[one] for one in self._asked if one in self._measured]
        return figures | ({SLACK: max(slack) * 1000} if slack else {})

    def learn(self, figures: Mapping[str, float]) -> None:
        """See from a batch's figures whether hints are wanted for the next ones, and whose."""
        with self._lock:
            if self._switch is not None and self._chosen is not None:
                self._choose(self._chosen, figures)

    def _choose(self, chosen: Lookahead, figures: Mapping[str, float]) -> None:
        misses, hits = figures.get("cache_misses", 0.0), figures.get("cache_hits", 0.0)
        announced = figures.get("announced_keys", 0.0)  # these would have been missing
        if misses + announced <= _MISSED * (misses + hits):
            self._ask(())
            return
        read, used = figures.get("prefetched_keys", 0.0), figures.get("prefetched_used", 0.0)
        if self._has_no_room(read, figures.get("dropped_hints", 0.0)):
            self._ask(())
            return
        if read - used > (_WRONG if chosen == self._choices[-1] else _UNUSED) * read:
            self._choices = self._choices[self._choices.index(chosen) + 1 :]
            if not self._choices:
                self._chosen = None
                self._ask(())
                return
        needed = _MARGIN * figures.get(PREFETCH, 0.0) / 1000
        early = (one for one in reversed(self._choices) if self._slack.get(one, math.inf) > needed)
        self._chosen = chosen = next(early, self._choices[0])
        last = self._choices[-1]
        self._ask((chosen,) if chosen == last else (chosen, last))

    def _has_no_room(self, read: float, dropped: float) -> bool:
        """Whether hints rest, as there is no room for most keys; half of a table's memory may become theirs before."""
        if self._rest:
            self._rest -= 1
            return True
        if dropped > read:
            self._in_vain += 1
        elif read:
            self._in_vain, self._next_rest = 0, _REST[0]
        if self._in_vain < _IN_VAIN:
            return False
        self._in_vain = 0
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _REST[1])
        return True

    def _ask(self, lookaheads: tuple[Lookahead, ...]) -> None:
        assert self._switch is not None
        self._switch.set(lookaheads)
        self._asked = lookaheads

    def close(self) -> None:
        """Ask for no hints any more, whatever is learnt yet."""
        with self._lock:
            self._batches.clear()
            self._choices, self._chosen = [], None
            if self._switch is not None:
                self._switch.close()


def _alike(keys: Iterable[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Those whose columns have the same types together.

    Lookaheads give columns names of their own, and may know of fewer that can be null.
    """
    found: dict[tuple[pa.DataType, ...], list[pa.RecordBatch]] = {}
    for some in keys:
        plain = pa.RecordBatch.from_arrays(
            some.columns, names=["__hash", *(f"_{at}" for at in range(1, some.num_columns))]
        )
        found.setdefault(tuple(plain.schema.types), []).append(plain)
    return [pa.concat_batches(batches) for batches in found.values()]
