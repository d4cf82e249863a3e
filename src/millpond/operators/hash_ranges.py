"""Ranges of the hash axis, one after the other, so that several tables are read together and little is in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from millpond.conf import KEY_GROUP_BITS
from millpond.layout import HASH, HashRange, Rows

_GROUP = 1 << (64 - KEY_GROUP_BITS)


def bounds(range_: HashRange, pieces: int) -> list[int]:
    """Where ranges of the axis end: on key groups, within which the panes of a key lie anywhere."""
    low, high = range_.lo // _GROUP, -(-range_.hi // _GROUP)
    inner = np.linspace(low, high, max(1, min(pieces, high - low)) + 1)[1:-1]
    return [*(int(bound) * _GROUP for bound in inner), 1 << 64]


def by_range(pieces: Iterator[Rows], bounds: Iterable[int]) -> Iterator[list[Rows]]:
    """Rows in hash order, range by range; no piece is empty."""
    rest: Rows | None = next(pieces, None)
    for bound in bounds:
        found: list[Rows] = []
        while rest is not None:
            hashes = rest.words[:, HASH]
            cut = len(hashes) if int(hashes[-1]) < bound else int(np.searchsorted(hashes, np.uint64(bound), "left"))
            if cut:
                found.append(Rows(rest.words[:cut], rest.heap))
            if cut < len(hashes):
                rest = Rows(rest.words[cut:], rest.heap)
                break
            rest = next(pieces, None)
        yield found


def key_groups(rows: Rows) -> HashRange:
    """The range of the key groups that rows in hash order are of."""
    first, last = (int(rows.words[at, HASH]) // _GROUP for at in (0, -1))
    return HashRange(first * _GROUP, (last + 1) * _GROUP)
