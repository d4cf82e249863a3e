"""Cells of maps with many entries, which are divided into numbered buckets by linear hashing (Litwin 1980).

The number of buckets follows the number of entries and need not be a power of two. Adding a bucket splits one; removing
a bucket merges two.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

from millpond.worker.processors.state.parts import MAX_SENT_BYTES, Head

MAX_ENTRIES = 64
"""Maximum number of a map's entries that travel with every call, and the maximum average per bucket."""

_MERGE_FACTOR = 4  # buckets are merged when they are this many times emptier than the maximum
_MAX_BUCKETS = 1 << 15  # maximum number per map


def bucket_of(hash_: int, stop: int) -> int:
    """Return the bucket of a key's hash, out of `stop` buckets."""
    # Linear hashing: buckets at or beyond `stop` are not split yet, so their entries are in the lower half.
    number = hash_ & (2 * _level(stop) - 1)
    return number if number < stop else number & (_level(stop) - 1)


def bucket_count(stop: int, count: int, size: int) -> int:
    """Return the target number of buckets for `count` entries of `size` bytes, given the current number `stop`."""
    full = max(count / MAX_ENTRIES, size / MAX_SENT_BYTES)
    if full > stop:
        wanted = ceil(full)
    elif full * _MERGE_FACTOR < stop:
        wanted = ceil(full * _MERGE_FACTOR)
    else:
        return stop
    return max(1, min(wanted, count, _MAX_BUCKETS))


def moved_buckets(stop: int, wanted: int) -> set[int]:
    """Return the existing buckets whose entries move when the number changes from `stop` to `wanted`."""
    split = {_buddy(number) for number in range(stop, wanted)}
    joined = {affected for number in range(wanted, stop) for affected in (number, _buddy(number))}
    return {number for number in split | joined if number < stop}


def _level(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def _buddy(number: int) -> int:
    """Return the bucket that is split to fill a new one."""
    return number - _level(number)


class Buckets:
    """The cell of a map with many entries; entries map a key's identity to the key, its value, and its time of expiry.

    Attributes:
        head: description of the buckets.
        loaded: entries of fetched buckets, by number.
        written: entries not yet in a bucket; their value is None if they were removed.
        wanted: target number of buckets.
        touched: numbers of changed buckets.
    """

    __slots__ = ("head", "loaded", "touched", "wanted", "written")

    def __init__(self, head: Head) -> None:
        self.head = head
        self.loaded: dict[int, dict[Any, Any]] = {}
        self.written: dict[Any, tuple[Any, Any, int]] = {}
        self.wanted = head.stop
        self.touched: set[int] = set()

    def place_written(self, places: dict[Any, int], *, estimated: bool) -> None:
        """Move written entries to their buckets, and determine the target number of buckets.

        Afterwards the head's bytes are those of all unchanged buckets.

        Args:
            places: the bucket of each written entry.
            estimated: whether entries may have expired in buckets that were not fetched; then their number is
                extrapolated from the fetched ones.
        """
        head, loaded = self.head, self.loaded
        settled = {*places.values()}
        before = sum(len(loaded[number]) for number in settled)
        for identity, number in places.items():
            entry = self.written[identity]
            if entry[1] is None:
                loaded[number].pop(identity, None)
            else:
                loaded[number][identity] = entry
        self.written = {}
        after = sum(len(loaded[number]) for number in settled)
        if estimated:
            before = round(head.entries * len(settled) / head.stop)
        self.touched |= settled
        count = max(after, head.entries - before + after)
        self.wanted = bucket_count(head.stop, count, head.bytes * count // max(1, head.entries))
        seen = len(self.touched | moved_buckets(head.stop, self.wanted))
        self.head = head._replace(entries=count, bytes=head.bytes * (head.stop - seen) // head.stop)

    def resize(self, hashed: Callable[[Any], int]) -> None:
        """Split or merge buckets until their number is the target.

        Args:
            hashed: returns the hash of a key.
        """
        loaded, stop = self.loaded, self.head.stop
        for number in range(stop, self.wanted):
            old = loaded[_buddy(number)]
            new = {
                identity: entry for identity, entry in old.items() if bucket_of(hashed(entry[0]), number + 1) == number
            }
            for identity in new:
                del old[identity]
            loaded[number] = new
            self.touched |= {number, _buddy(number)}
        for number in range(stop - 1, self.wanted - 1, -1):
            loaded[_buddy(number)].update(loaded.pop(number))
            self.touched.discard(number)
            self.touched.add(_buddy(number))
        self.head = self.head._replace(stop=self.wanted)
