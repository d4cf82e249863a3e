"""Keys on their way from a table outside: none is asked for twice at a time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millpond.layout import Ints, Rows
from millpond.lookup.fetch import Answer


@dataclass(eq=False)
class Request:
    """Keys that were asked for together.

    Attributes:
        hashes: of the keys, in order. keys: their columns. rows: the keys as the cache takes them.
        answer: what comes of them. stamp: the batch that uses them.
    """

    hashes: Ints
    keys: pa.RecordBatch
    rows: Rows
    answer: Future[Answer]
    stamp: int

    def holds(self, hashes: Ints, keys: list[pa.Array]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which of some keys it asks for, and where they stand in it."""
        places = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        which = np.flatnonzero(self.hashes[places] == hashes)
        for mine, theirs in zip(self.keys.columns, keys, strict=True):
            if len(which):
                same = pc.equal(mine.take(pa.array(places[which])), theirs.take(pa.array(which)))
                which = which[same.to_numpy(zero_copy_only=False)]
        return which, places[which]


class Requests:
    """The requests that have not been answered yet, or whose answers have not been taken, oldest first."""

    def __init__(self) -> None:
        self._open: list[Request] = []

    def __len__(self) -> int:
        return len(self._open)

    def add(self, request: Request) -> None:
        """Note one more."""
        self._open.append(request)

    def find(
        self, hashes: Ints, keys: list[pa.Array]
    ) -> Iterator[tuple[NDArray[np.int64], Request, NDArray[np.int64]]]:
        """The requests that some keys are in: which of the keys, and where they stand there."""
        left = np.arange(len(hashes))
        for request in self._open:
            if not len(left):
                return
            which, places = request.holds(hashes, keys)
            if len(which):
                yield left[which], request, places
                rest = np.delete(np.arange(len(left)), which)
                left, hashes, keys = left[rest], hashes[rest], [key.take(pa.array(rest)) for key in keys]

    def answered(self) -> list[Request]:
        """Take out those that have been answered, or failed."""
        done = [request for request in self._open if request.answer.done()]
        if done:
            self._open = [request for request in self._open if not any(request is one for one in done)]
        return done

    def forget(self) -> None:
        """Take no more interest in any."""
        for request in self._open:
            request.answer.cancel()
        self._open.clear()
