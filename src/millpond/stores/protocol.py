"""What operators and slots see of a store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from millpond.layout import Bytes, HashRange, RowLayout, Rows, Words

if TYPE_CHECKING:
    from millpond.files.refs import TableManifest
    from millpond.stores.memory.heap import Heap


class Table(Protocol):
    """What every table offers, whichever store it is in. Not thread-safe.

    A batch is `begin`, what the store's own methods do to rows, and `seal`.
    """

    @property
    def layout(self) -> RowLayout:
        """Of its rows."""

    @property
    def portion(self) -> int:
        """Bytes of rows that it takes at once, roughly."""

    def begin(self, version: int) -> None:
        """Start the batch that reads state `version`."""

    def seal(self) -> TableDelta:
        """End the batch: the rows that it changed."""

    def manifest(self) -> TableManifest:
        """The files that hold the state together with the deltas of later versions."""

    def stats(self) -> Mapping[str, float]:
        """What it holds (`keys`, `bytes`) and did, by name."""

    def close(self) -> None:
        """Give all memory back."""


class LoadedTable(Table, Protocol):
    """A table that holds what its deltas say; others read deltas where they lie."""

    def load(self, delta_rows: Rows, window: HashRange = HashRange()) -> None:  # noqa: B008
        """Apply rows of a delta behind the table's files, oldest first; those outside of a window do not count."""

    def scan(self) -> Iterator[Rows]:
        """All rows, in pieces."""


class SlicedTable(Table, Protocol):
    """A table of which an operator may have many, one for each slice of event time."""

    @property
    def in_flight(self) -> bool:
        """Whether something that it had written in the background waits to be taken up."""

    @property
    def crowded(self) -> bool:
        """Whether it should give memory back."""

    def rest(self, resting: bool) -> None:
        """Say whether rows are expected to come."""

    def passes(self, rows: int) -> int:
        """In how many passes over ranges of the hash to work through a batch of so many rows."""

    def narrow(self, range_: HashRange) -> None:
        """Until the next call, or the next batch, all rows will have hashes of this range."""


class Located(NamedTuple):
    """Where the rows of some keys are: `rows` are row ids, `created` marks the first occurrence of each new key."""

    rows: NDArray[np.int64]
    created: NDArray[np.bool_]


class Writable(Protocol):
    """Rows that accumulators write to: those of a table, or scratch."""

    words: Words
    heap: Heap

    def put_bytes(self, rows: NDArray[np.int64], offset: int, values: Words, heap: Bytes) -> None:
        """Write byte values, two words each, into column word `offset` of given rows; `heap` has the long ones."""


class Found(NamedTuple):
    """Rows of some keys where they lie, in blocks of runs.

    Attributes:
        positions: which of the keys.
        rows_at, heaps_at: addresses of their rows and of the heaps these point into.
        pins: keeps what the addresses point to alive.
    """

    positions: NDArray[np.int64]
    rows_at: NDArray[np.uint64]
    heaps_at: NDArray[np.uint64]
    pins: Sequence[Any]


@dataclass(frozen=True)
class TableDelta:
    """The rows that one batch changed, encoded.

    Attributes:
        rows: how many.
        pieces: the encoding, ready to be written one after the other.
    """

    rows: int
    pieces: list[Any]

    @property
    def bytes(self) -> int:
        """Length of the encoding."""
        return sum(memoryview(piece).nbytes for piece in self.pieces)
