"""Requests to an external table on their way; no key is requested twice at a time."""

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
    """Keys that are requested together.

    Attributes:
        hashes: the hashes of the keys, in order.
        keys: their columns.
        rows: the keys as the cache takes them.
        answer: the future answer.
        stamp: the batch that uses them.
    """

    hashes: Ints
    keys: pa.RecordBatch
    rows: Rows
    answer: Future[Answer]
    stamp: int

    def positions_of(self, hashes: Ints, keys: list[pa.Array]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find keys in this request.

        Returns:
            The positions of the keys that it asks for, and their positions in the request.
        """
        places = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        which = np.flatnonzero(self.hashes[places] == hashes)
        # Different keys may have the same hash.
        for own, searched in zip(self.keys.columns, keys, strict=True):
            if len(which):
                same = pc.equal(own.take(pa.array(places[which])), searched.take(pa.array(which)))
                which = which[same.to_numpy(zero_copy_only=False)]
        return which, places[which]


class Requests:
    """The requests that have not been answered yet, or whose answers have not been taken, oldest first."""

    def __init__(self) -> None:
        self._open: list[Request] = []

    def __len__(self) -> int:
        return len(self._open)

    def add(self, request: Request) -> None:
        """Add a request."""
        self._open.append(request)

    def find(
        self, hashes: Ints, keys: list[pa.Array]
    ) -> Iterator[tuple[NDArray[np.int64], Request, NDArray[np.int64]]]:
        """Find keys in the open requests.

        Yields:
            The positions of the keys, the request that asks for them, and their positions in it.
        """
        remaining = np.arange(len(hashes))
        for request in self._open:
            if not len(remaining):
                return
            which, places = request.positions_of(hashes, keys)
            if len(which):
                yield remaining[which], request, places
                others = np.delete(np.arange(len(remaining)), which)
                remaining, hashes, keys = (
                    remaining[others],
                    hashes[others],
                    [key.take(pa.array(others)) for key in keys],
                )

    def answered(self) -> list[Request]:
        """Remove and return the requests that have been answered, or failed."""
        done = [request for request in self._open if request.answer.done()]
        if done:
            self._open = [request for request in self._open if not any(request is answered for answered in done)]
        return done

    def cancel(self) -> None:
        """Cancel all requests."""
        for request in self._open:
            request.answer.cancel()
        self._open.clear()
