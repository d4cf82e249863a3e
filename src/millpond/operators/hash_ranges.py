"""Ranges of the hash axis: read several tables together, range after range, with little in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from millpond.key_groups import IN_GROUP_BITS
from millpond.layout import HASH, HashRange, Rows

_GROUP = 1 << IN_GROUP_BITS


def bounds(range_: HashRange, pieces: int) -> list[int]:
    """Return the ends of hash ranges.

    The ends lie on key groups, because the panes of a key lie anywhere within its key group.
    """
    low, high = range_.lo // _GROUP, -(-range_.hi // _GROUP)
    inner = np.linspace(low, high, max(1, min(pieces, high - low)) + 1)[1:-1]
    # The last end is beyond all hashes, so that no piece is left over.
    return [*(int(bound) * _GROUP for bound in inner), 1 << 64]


def by_range(pieces: Iterator[Rows], bounds: Iterable[int]) -> Iterator[list[Rows]]:
    """Split rows in hash order by range; the pieces must not be empty."""
    piece: Rows | None = next(pieces, None)
    for bound in bounds:
        within: list[Rows] = []
        while piece is not None:
            hashes = piece.words[:, HASH]
            cut = len(hashes) if int(hashes[-1]) < bound else int(np.searchsorted(hashes, np.uint64(bound), "left"))
            if cut:
                within.append(piece.take(slice(cut)))
            if cut < len(hashes):
                piece = piece.take(slice(cut, None))
                break
            piece = next(pieces, None)
        yield within


def key_groups(rows: Rows) -> HashRange:
    """Return the range of the key groups of rows in hash order."""
    first, last = (int(rows.words[position, HASH]) // _GROUP for position in (0, -1))
    return HashRange(first * _GROUP, (last + 1) * _GROUP)
