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

    def places(self, hashes: Ints, keys: list[pa.Array]) -> NDArray[np.int64]:
        """Where some keys stand in the request, -1 for those that it does not ask for."""
        at = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        same = self.hashes[at] == hashes
        for mine, theirs in zip(self.keys.columns, keys, strict=True):
            if not same.any():
                break
            same &= pc.equal(mine.take(pa.array(at)), theirs).to_numpy(zero_copy_only=False)
        return np.where(same, at, -1)


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
            at = pa.array(left)
            places = request.places(hashes[left], [key.take(at) for key in keys])
            there = places >= 0
            if there.any():
                yield left[there], request, places[there]
                left = left[~there]

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
