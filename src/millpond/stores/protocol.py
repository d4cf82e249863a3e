"""What operators and slots see of a store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from millpond.layout import Rows


class Located(NamedTuple):
    """Where the rows of some keys are: `rows` are row ids, `created` marks the first occurrence of each new key."""

    rows: NDArray[np.int64]
    created: NDArray[np.bool_]


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


class Runs(Protocol):
    """The immutable runs behind a hot table, as far as a lookup is concerned."""

    @property
    def rows(self) -> int:
        """Rows in all runs."""

    @property
    def memory(self) -> int:
        """Bytes of memory that the runs hold."""

    def lookup(self, keys: Rows, pending: NDArray[np.int64]) -> tuple[NDArray[np.int64], Rows]:
        """Positions in `keys` of the pending keys that were found, and their rows in the same order."""
