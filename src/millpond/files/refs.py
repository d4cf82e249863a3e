"""Names of files in manifests: what a store hands out and a checkpoint keeps, neither knowing the other."""

from __future__ import annotations

from typing import Literal

import msgspec

from millpond.layout import LAST_HASH, HashRange

Axis = Literal["hash", "group", "none"]
"""By what a table's rows belong to partitions: their hash, that of their group which stands beside, or nothing: rows of
such a table are of use to all, and may be in several.
"""

Window = tuple[int, int]
"""Hashes of which rows count in a file that has others too, both ends included."""


def range_of(window: Window | None) -> HashRange:
    """A window as a range."""
    return HashRange() if window is None else HashRange(window[0], window[1] + 1)


def window_of(range_: HashRange) -> Window | None:
    """A range, which is not empty, as a window."""
    return None if range_.whole else (range_.lo, min(range_.hi - 1, LAST_HASH))


class RunRef(msgspec.Struct, frozen=True):
    """A run file of one table.

    Attributes:
        name: the file, below the state location.
        rows, bytes: what it holds and how long the file is.
        first, last: lowest and highest hash among its rows, both included.
        flushed: the version up to which deltas are covered by this run and those behind it, as far as its writer knew.
        oldest, newest: lowest and highest stamp among its rows.
        checksum: of the file's footer, which holds what is needed to check the rest.
        marks: whether its rows are not rows of the table but notes on rows of its other runs (see `OrderedTable`).
        pending: whether the file only must not be removed: its rows are (still) found in deltas or in other runs.
        window: the hashes of the rows that count, by the axis of the table: a file that was written before partitions
            changed belongs to several of them, each of which reads its own.
    """

    name: str
    rows: int
    bytes: int
    first: int
    last: int
    flushed: int = 0
    oldest: int = 0
    newest: int = 0
    checksum: int = 0
    marks: bool = False
    pending: bool = False
    window: Window | None = None


class TableManifest(msgspec.Struct, frozen=True):
    """The runs of one table, newest first; deltas of versions up to `flushed` are covered by them.

    Attributes:
        keys: how many keys the table holds, deltas included.
        expired: for tables in order of time, the time (microseconds) up to which rows are not part of the state.
        skip: how many rows of the deltas behind `flushed`, in order, are covered too (by stores that only append).
        lowest: rows of lower hashes do not count any more (by stores that are read in the order of hashes).
        axis: by what the table's rows belong to partitions.
    """

    runs: tuple[RunRef, ...] = ()
    flushed: int = 0
    keys: int = 0
    expired: int = -(1 << 63)
    skip: int = 0
    lowest: int = 0
    axis: Axis = "hash"
