"""Names of files in manifests: what a store hands out and a checkpoint keeps, neither knowing the other."""

from __future__ import annotations

import msgspec


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


class TableManifest(msgspec.Struct, frozen=True):
    """The runs of one table, newest first; deltas of versions up to `flushed` are covered by them.

    Attributes:
        keys: how many keys the table holds, deltas included.
        expired: for tables in order of time, the time (microseconds) up to which rows are not part of the state.
        skip: how many rows of the deltas behind `flushed`, in order, are covered too (by stores that only append).
    """

    runs: tuple[RunRef, ...] = ()
    flushed: int = 0
    keys: int = 0
    expired: int = -(1 << 63)
    skip: int = 0
