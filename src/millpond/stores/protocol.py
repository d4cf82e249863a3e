"""The interface of a store that operators and slots use."""

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
    """Interface of every table, whichever store it belongs to. Not thread-safe.

    A batch is `begin`, then calls of the store's own methods, then `seal`.
    """

    @property
    def layout(self) -> RowLayout:
        """Layout of the rows."""

    @property
    def portion_bytes(self) -> int:
        """Bytes of rows that the table takes at once, roughly."""

    def begin(self, version: int) -> None:
        """Start the batch that reads state `version`."""

    def seal(self) -> TableDelta:
        """End the batch, and return the rows that it changed."""

    def manifest(self) -> TableManifest:
        """List the files that hold the state together with the deltas of later versions."""

    def stats(self) -> Mapping[str, float]:
        """Return figures by name: what the table holds (`keys`, `bytes`) and has done."""

    def close(self) -> None:
        """Release all memory."""


class LoadedTable(Table, Protocol):
    """A table that loads its deltas into memory; tables of the append stores read deltas in place."""

    def load(self, delta_rows: Rows, visible: HashRange = HashRange()) -> None:  # noqa: B008
        """Apply a delta's rows on top of the table's files, oldest delta first; rows outside `visible` are skipped."""

    def scan(self) -> Iterator[Rows]:
        """Yield all rows, in pieces."""


class SlicedTable(Table, Protocol):
    """A table of which an operator may have many, one for each slice of event time."""

    @property
    def in_flight(self) -> bool:
        """Whether a background write is running, or is done and not yet taken over."""

    @property
    def over_budget(self) -> bool:
        """Whether the table should release memory."""

    def set_idle(self, idle: bool) -> None:
        """Mark the table as idle: no rows are expected for now."""

    def passes(self, rows: int) -> int:
        """Return the number of passes over hash ranges for a batch with this number of rows."""

    def restrict(self, range_: HashRange) -> None:
        """Restrict to a hash range: until the next call or batch, all rows have hashes within it."""


class LocatedRows(NamedTuple):
    """Rows of keys: `rows` are row ids, `created` marks the first occurrence of each new key."""

    rows: NDArray[np.int64]
    created: NDArray[np.bool_]


class Writable(Protocol):
    """Rows that accumulators write to: those of a table, or scratch rows."""

    words: Words
    heap: Heap

    def put_bytes(self, rows: NDArray[np.int64], offset: int, values: Words, heap: Bytes) -> None:
        """Write byte values, two words each, into column word `offset` of the rows; `heap` holds the long ones."""


class FoundRows(NamedTuple):
    """Rows of keys, in place in the blocks of runs.

    Attributes:
        positions: indices of the keys that have a row.
        rows_at, heaps_at: addresses of the rows, and of the heaps that they refer to.
        pins: objects that keep the addressed memory alive.
    """

    positions: NDArray[np.int64]
    rows_at: NDArray[np.uint64]
    heaps_at: NDArray[np.uint64]
    pins: Sequence[Any]


@dataclass(frozen=True)
class TableDelta:
    """The rows that one batch changed, encoded.

    Attributes:
        rows: number of rows.
        pieces: the encoding, in the order in which it is written.
    """

    rows: int
    pieces: list[Any]

    @property
    def bytes(self) -> int:
        """Length of the encoding."""
        return sum(memoryview(piece).nbytes for piece in self.pieces)
