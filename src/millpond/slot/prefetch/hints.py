"""Prefetch hints of one partition: looked up while the partition is idle, or between two pieces of a batch."""

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
from millpond.operators.protocol import KeyPrefetchable, Operator, Prefetchable
from millpond.slot.prefetch.switch import MAX_HINTED_KEYS, HintSwitch
from millpond.tasks.operator_task import Lookahead

_MAX_BATCHES_AHEAD = 2
"""Number of batches that hints may be ahead of the next batch."""

_MEMORY_SHARE = 16
"""Hints that wait to be looked up may take 1/16 of a partition's memory."""

_MIN_MISS_RATIO = 0.002
"""Fraction of a batch's keys that miss memory above which hints are requested."""

_SLACK_FACTOR = 1.25
"""Factor by which the slack of hints must exceed the longest read."""

_MAX_UNUSED_RATIO = 0.02
"""Fraction of prefetched keys that no row uses, above which a lookahead is dropped: it sees other keys than the
operator."""

_MAX_UNUSED_RATIO_OF_LAST = 0.5
"""The same limit for the last lookahead, which has no successor. Late rows, and processors that do not read all keys,
do not justify giving up hints."""

_MAX_DROPPED = 8
"""Consecutive batches with more dropped than prefetched keys after which hints pause: their cost helps too few keys."""

_PAUSE_BATCHES = 64, 4096
"""Length of a pause of hints, in batches: the first one, and the maximum. Each pause is twice as long as the previous
one."""

_RESUME_RATIO = 0.25
"""Fraction of the keys that those batches missed below which a batch ends the pause: once state was loaded in large
batches, there may be room for the keys of small ones."""


@dataclass
class _Batch:
    """Hints for one batch.

    Attributes:
        first: arrival time of the first hint, per lookahead.
        waiting: hashes, and keys if there are any, that are still to be looked up.
        bytes: size of `waiting`.
        count: number of keys waiting.
    """

    first: dict[Lookahead, float] = field(default_factory=dict)
    waiting: list[tuple[Words, pa.RecordBatch | None]] = field(default_factory=list)
    bytes: int = 0
    count: int = 0


class PrefetchHints:
    """Hints for one partition, and the choice of the lookahead that sends them (Keyed Prefetching §IV-A).

    No lookahead sends hints until keys are missing from memory. Then the latest lookahead that is early enough sends
    them: its slack, the time from its first hint for a batch to the first row, must exceed the duration of the reads. A
    lookahead whose hints name keys that no row uses is dropped for good. Hints pause while most keys have no room in
    memory. The last lookahead always sends hints beside the chosen one. It covers rows that the chosen one did not see
    because it just starts, is late or has failed.

    `store` and `close` may be called from any thread, all other methods only by the holder of the partition's attempt
    lock.

    Args:
        switch: set when hints are wanted; None if the operator has no lookaheads.
        lookaheads: lookaheads that can send hints, in plan order.
        memory: the partition's memory in bytes.
    """

    def __init__(self, switch: HintSwitch | None, lookaheads: Sequence[Lookahead], memory: int) -> None:
        self._switch = switch
        self._choices = list(lookaheads)
        self._memory_limit = max(1 << 16, memory // _MEMORY_SHARE)
        self._lock = threading.Lock()
        self._batches: dict[int, _Batch] = {}
        self._dropped = 0  # keys that were not looked up
        self._bytes = 0  # received since the last call of `figures`
        self._version: int | None = None
        self._chosen: Lookahead | None = self._choices[-1] if self._choices else None
        self._requested: tuple[Lookahead, ...] = ()
        self._dropped_batches = 0  # consecutive batches in which most keys had no room
        self._pause, self._next_pause = 0, _PAUSE_BATCHES[0]  # batches until hints resume; length of the next pause
        self._most_missing = 0.0  # keys that one of the dropped batches missed, or one before the pause
        self._slack: dict[Lookahead, float] = {}  # in seconds, of the last batch with hints
        self._measured: dict[Lookahead, float] = {}  # in seconds, of the current batch

    def store(self, batch: int, lookahead: Lookahead, hashes: Words, keys: pa.RecordBatch | None = None) -> None:
        """Store hints for a batch within the memory limit.

        Args:
            batch: the batch that will read the keys.
            lookahead: sender of the hints.
            hashes: hashes of the keys.
            keys: columns of the keys, for operators that need more than hashes.
        """
        with self._lock:
            self._bytes += hashes.nbytes if keys is None else keys.nbytes
            hints = self._hints_for(batch)
            if hints is None:
                self._dropped += len(hashes)
                return
            # Only the first hint counts: slack is measured from it to the batch's first row.
            hints.first.setdefault(lookahead, time.monotonic())
            # Without keys, the hint only gives the time at which the lookahead could have sent some.
            if not len(hashes):
                return
            size = 8 + (0 if keys is None else -(-keys.nbytes // len(hashes)))
            room = max(0, min(MAX_HINTED_KEYS - hints.count, (self._memory_limit - self._waiting_bytes) // size))
            if room < len(hashes):
                self._dropped += len(hashes) - room
                # Copy: a slice would keep the whole array in memory.
                hashes = hashes[:room].copy()
                keys = None if keys is None else keys.take(pa.array(np.arange(room)))
            if room:
                hints.waiting.append((hashes, keys))
                hints.count += len(hashes)
                hints.bytes += size * len(hashes)

    @property
    def _waiting_bytes(self) -> int:
        """Bytes of hints that wait to be looked up."""
        return sum(hints.bytes for hints in self._batches.values())

    def _hints_for(self, batch: int) -> _Batch | None:
        """Return the hints for a batch; None if the batch is over or too far ahead."""
        version = self._version
        if version is None:
            # Before the first batch, the version is unknown: the first batches that are named are kept.
            in_window = len(self._batches) <= _MAX_BATCHES_AHEAD or batch in self._batches
        else:
            in_window = version <= batch <= version + _MAX_BATCHES_AHEAD
        return self._batches.setdefault(batch, _Batch()) if in_window else None

    def _set_version(self, version: int) -> None:
        """Set the partition's version and drop hints for batches outside its window."""
        self._version = version
        for batch in list(self._batches):
            if not version <= batch <= version + _MAX_BATCHES_AHEAD:
                self._dropped += sum(len(hashes) for hashes, _ in self._batches.pop(batch).waiting)

    def begin(self, batch: int) -> None:
        """Record the slack of each lookahead when a batch's first rows arrive."""
        now = time.monotonic()
        with self._lock:
            self._set_version(batch)
            hints = self._batches.get(batch)
            self._measured = (
                {} if hints is None else {lookahead: now - arrival for lookahead, arrival in hints.first.items()}
            )
            self._slack |= self._measured

    def prefetch(self, operator: Operator | None, version: int) -> None:
        """Pass all stored hints to the operator, which holds state of `version`."""
        with self._lock:
            if not self._waiting_bytes and self._version == version:
                return
            self._set_version(version)
            taken = []
            for batch, hints in sorted(self._batches.items()):
                taken.append((batch, hints.waiting))
                hints.waiting, hints.bytes = [], 0
        for needed, parts in taken:
            if isinstance(operator, KeyPrefetchable):
                for keys in _merge_same_types(columns for _, columns in parts if columns is not None):
                    operator.prefetch_keys(keys, needed)
                parts = [(hashes, columns) for hashes, columns in parts if columns is None]
            if parts and isinstance(operator, Prefetchable):
                operator.prefetch(np.concatenate([hashes for hashes, _ in parts]), needed)

    def figures(self) -> dict[str, float]:
        """Return the current batch's figures on hints.

        `dropped_hints` and `hint_bytes` count since the previous call. `lookahead` is the requested lookahead (see
        `metrics.LOOKAHEADS`). `slack_ms` is the time between its first hint and the first row.
        """
        with self._lock:
            dropped, self._dropped = self._dropped, 0
            received, self._bytes = self._bytes, 0
        names = [lookahead if lookahead in ("source", "exchange") else "stage" for lookahead in self._requested]
        asked = LOOKAHEADS.index(", ".join(names) or "off")
        figures = {"dropped_hints": float(dropped), "hint_bytes": float(received), LOOKAHEAD: float(asked)}
        slack = [self._measured[lookahead] for lookahead in self._requested if lookahead in self._measured]
        return figures | ({SLACK: max(slack) * 1000} if slack else {})

    def adapt(self, figures: Mapping[str, float]) -> None:
        """Decide from a batch's figures whether the next batches need hints, and from which lookahead."""
        with self._lock:
            if self._switch is not None and self._chosen is not None:
                self._choose(self._chosen, figures)

    def _choose(self, chosen: Lookahead, figures: Mapping[str, float]) -> None:
        misses, hits = figures.get("cache_misses", 0.0), figures.get("cache_hits", 0.0)
        announced = figures.get("announced_keys", 0.0)  # without hints these keys would have missed
        # Nearly all keys are in memory: hints would cost more than they save.
        if misses + announced <= _MIN_MISS_RATIO * (misses + hits):
            self._request(())
            return
        read, used = figures.get("prefetched_keys", 0.0), figures.get("prefetched_used", 0.0)
        if self._has_no_room(misses + announced, read, figures.get("dropped_hints", 0.0)):
            self._request(())
            return
        if read - used > (_MAX_UNUSED_RATIO_OF_LAST if chosen == self._choices[-1] else _MAX_UNUSED_RATIO) * read:
            self._choices = self._choices[self._choices.index(chosen) + 1 :]
            if not self._choices:
                self._chosen = None
                self._request(())
                return
        needed = _SLACK_FACTOR * figures.get(PREFETCH, 0.0) / 1000
        # Choices are in plan order, so the reverse order starts with the latest lookahead.
        early = (lookahead for lookahead in reversed(self._choices) if self._slack.get(lookahead, math.inf) > needed)
        self._chosen = chosen = next(early, self._choices[0])
        last = self._choices[-1]
        self._request((chosen,) if chosen == last else (chosen, last))

    def _has_no_room(self, missing: float, read: float, dropped: float) -> bool:
        """Return whether hints pause because most keys have no room.

        Before a pause, hints may take half of a table's memory.
        """
        if self._pause and missing < _RESUME_RATIO * self._most_missing:
            self._pause, self._most_missing = 0, 0.0
        if self._pause:
            self._pause -= 1
            return True
        if dropped > read:
            self._dropped_batches += 1
            self._most_missing = max(self._most_missing, missing)
        elif read:
            self._dropped_batches, self._most_missing, self._next_pause = 0, 0.0, _PAUSE_BATCHES[0]
        if self._dropped_batches < _MAX_DROPPED:
            return False
        self._dropped_batches = 0
        self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, _PAUSE_BATCHES[1])
        return True

    def _request(self, lookaheads: tuple[Lookahead, ...]) -> None:
        assert self._switch is not None
        self._switch.set(lookaheads)
        self._requested = lookaheads

    def close(self) -> None:
        """Drop all hints and request no more, whatever figures follow."""
        with self._lock:
            self._batches.clear()
            self._choices, self._chosen = [], None
            if self._switch is not None:
                self._switch.close()


def _merge_same_types(keys: Iterable[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Merge batches of keys that have the same column types.

    Lookaheads name columns differently, and may declare fewer of them nullable.
    """
    batches_by_types: dict[tuple[pa.DataType, ...], list[pa.RecordBatch]] = {}
    for batch in keys:
        plain = pa.RecordBatch.from_arrays(
            batch.columns, names=["__hash", *(f"_{position}" for position in range(1, batch.num_columns))]
        )
        batches_by_types.setdefault(tuple(plain.schema.types), []).append(plain)
    return [pa.concat_batches(batches) for batches in batches_by_types.values()]
