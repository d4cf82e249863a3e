"""What operators and slots see of a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from millpond.layout import Bytes, Words

if TYPE_CHECKING:
    from millpond.stores.memory.heap import Heap


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
