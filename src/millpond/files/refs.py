"""References to files in manifests: the interface between stores, which write files, and checkpoints."""

from __future__ import annotations

from typing import Literal

import msgspec

from millpond.layout import LAST_HASH, HashRange

Axis = Literal["hash", "group", "none"]
"""How a table's rows are assigned to partitions.

`hash`: by their own hash. `group`: by the hash of their group, which is stored beside. `none`: not at all; all
partitions use the rows, and a row may be in several partitions.
"""

HashInterval = tuple[int, int]
"""Interval of hashes, both ends included: only rows of a file within it belong to the partition."""


def range_of(interval: HashInterval | None) -> HashRange:
    """Convert an interval to a range; None is the whole range."""
    return HashRange() if interval is None else HashRange(interval[0], interval[1] + 1)


def interval_of(range_: HashRange) -> HashInterval | None:
    """Convert a range, which is not empty, to an interval; None for the whole range."""
    return None if range_.whole else (range_.lo, min(range_.hi - 1, LAST_HASH))


class RunRef(msgspec.Struct, frozen=True):
    """A run file of one table.

    Attributes:
        name: name of the file, below the state location.
        rows, bytes: number of rows, and length of the file.
        first, last: lowest and highest hash of its rows, both included.
        oldest, newest: lowest access time (tombstones excluded) and highest of its rows.
        checksum: checksum of the file's footer, by which the rest can be checked.
        marks: whether its rows are matched bits for rows of the other runs instead of rows of the table (see
            `OrderedTable`).
        pending: whether the reference only protects the file from removal; its rows are still in deltas or other runs.
        visible: interval of hashes of the rows that count, by the table's axis; None for all. After rescaling, a file
            belongs to several partitions, and each reads its own interval.
    """

    name: str
    rows: int
    bytes: int
    first: int
    last: int
    oldest: int = 0
    newest: int = 0
    checksum: int = 0
    marks: bool = False
    pending: bool = False
    visible: HashInterval | None = None


class TableManifest(msgspec.Struct, frozen=True):
    """The runs of one table, newest first; deltas of versions up to `flushed` are covered by them.

    Attributes:
        runs: the runs, newest first.
        flushed: version up to which the runs cover the deltas.
        keys: number of keys in the table, deltas included.
        expired: for tables ordered by time, event time (microseconds) up to which rows have expired.
        skip: number of rows of the deltas after `flushed`, in order, that the runs cover as well (append-only stores).
        lowest: lowest hash that counts; rows of lower hashes are dropped (stores that are consumed in hash order).
        axis: how the table's rows are assigned to partitions.
    """

    runs: tuple[RunRef, ...] = ()
    flushed: int = 0
    keys: int = 0
    expired: int = -(1 << 63)
    skip: int = 0
    lowest: int = 0
    axis: Axis = "hash"
