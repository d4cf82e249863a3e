"""Many entries of a map, shared out among numbered buckets: linear hashing (Litwin 1980).

There are as many buckets as the entries need, not a power of two: one more splits one bucket, one fewer puts two
together.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

from millpond.slot.pipe.processors.state.parts import LARGEST, Head

MOST = 64
"""Entries of a map that travel with every call, and of a bucket on average, at most."""

_SPARSE = 4  # buckets are put together when they have so many times less than they may
_BUCKETS = 1 << 15  # of a map, at most


def bucket(hash_: int, stop: int) -> int:
    """The bucket of a key, by its hash, among so many."""
    number = hash_ & (2 * _level(stop) - 1)
    return number if number < stop else number & (_level(stop) - 1)


def enough(stop: int, count: int, size: int) -> int:
    """How many buckets there should be for so many entries and bytes, if there are some now."""
    full = max(count / MOST, size / LARGEST)
    if full > stop:
        wanted = ceil(full)
    elif full * _SPARSE < stop:
        wanted = ceil(full * _SPARSE)
    else:
        return stop
    return max(1, min(wanted, count, _BUCKETS))


def moved(stop: int, wanted: int) -> set[int]:
    """The buckets out of which, or into which, entries move when there are `wanted` instead of `stop`."""
    split = {_buddy(number) for number in range(stop, wanted)}
    joined = {one for number in range(wanted, stop) for one in (number, _buddy(number))}
    return {number for number in split | joined if number < stop}


def _level(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def _buddy(number: int) -> int:
    """The bucket that is split for another one."""
    return number - _level(number)


class Buckets:
    """The cell of a map that has many entries: what tells keys apart → a key, its value, and when it expires.

    Attributes:
        head: what is known of the buckets.
        loaded: those that were fetched, by number.
        written: entries that are in no bucket yet; without a value if they were removed.
        wanted: how many buckets there shall be. touched: the numbers of those that have changed.
    """

    __slots__ = ("head", "loaded", "touched", "wanted", "written")

    def __init__(self, head: Head) -> None:
        self.head = head
        self.loaded: dict[int, dict[Any, Any]] = {}
        self.written: dict[Any, tuple[Any, Any, int]] = {}
        self.wanted = head.stop
        self.touched: set[int] = set()

    def settle(self, places: dict[Any, int], *, estimated: bool) -> None:
        """Put what was written into its buckets, and find how many there should be.

        The head's bytes are then those of all other buckets.

        Args:
            places: the bucket of each written entry.
            estimated: entries may have left other buckets unseen; how many there are follows from those that are seen.
        """
        head, loaded = self.head, self.loaded
        settled = {*places.values()}
        before = sum(len(loaded[number]) for number in settled)
        for told, number in places.items():
            entry = self.written[told]
            if entry[1] is None:
                loaded[number].pop(told, None)
            else:
                loaded[number][told] = entry
        self.written = {}
        after = sum(len(loaded[number]) for number in settled)
        if estimated:
            before = round(head.entries * len(settled) / head.stop)
        self.touched |= settled
        count = max(after, head.entries - before + after)
        self.wanted = enough(head.stop, count, head.bytes * count // max(1, head.entries))
        seen = len(self.touched | moved(head.stop, self.wanted))
        self.head = head._replace(entries=count, bytes=head.bytes * (head.stop - seen) // head.stop)

    def resize(self, hashed: Callable[[Any], int]) -> None:
        """Let there be as many buckets as there should be."""
        loaded, stop = self.loaded, self.head.stop
        for number in range(stop, self.wanted):
            old = loaded[_buddy(number)]
            new = {told: entry for told, entry in old.items() if bucket(hashed(entry[0]), number + 1) == number}
            for told in new:
                del old[told]
            loaded[number] = new
            self.touched |= {number, _buddy(number)}
        for number in range(stop - 1, self.wanted - 1, -1):
            loaded[_buddy(number)].update(loaded.pop(number))
            self.touched.discard(number)
            self.touched.add(_buddy(number))
        self.head = self.head._replace(stop=self.wanted)
