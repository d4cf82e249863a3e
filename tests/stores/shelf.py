"""Run files without a file layer: rows in mapped temporary files, so that they do not count as memory."""

import itertools
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millpond.files.formats.blocks import MemorySource, kernel_layout
from millpond.files.refs import RunRef
from millpond.kernels.hot_table.state import ACCESS_TIME_SHIFT
from millpond.kernels.runs.gather import gather_rows
from millpond.layout import META, RowLayout, Rows
from millpond.stores.runs.run import Run
from millpond.stores.runs.run_set import RunSet


def found_rows(runs: RunSet, keys: Rows, pending: NDArray[np.int64]) -> tuple[NDArray[np.int64], Rows]:
    """Return the keys that `lookup` finds, and copies of their rows."""
    found, shape = runs.lookup(keys, pending), kernel_layout(runs.layout)
    return found.positions, Rows(*gather_rows(found.rows_at, found.heaps_at, shape.width, shape.blobs))


def together(pieces: list[Rows], layout: RowLayout) -> Rows:
    """Pieces as one, their long values in one heap."""
    base, words = 0, []
    for piece in pieces:
        moved = piece.words.copy()
        for at in layout.bytes_columns:
            long = (moved[:, at] & np.uint64(0xFFFFFFFF)) > 12
            moved[long, at + 1] += np.uint64(base)
        base += len(piece.heap)
        words.append(moved)
    if not words:  # all that was to be merged was gone
        return Rows(np.empty((0, layout.width), np.uint64), np.empty(0, np.uint8))
    return Rows(np.concatenate(words), np.concatenate([piece.heap for piece in pieces]))


class MappedSource(MemorySource):
    """A run in mapped files."""

    @property
    def memory(self) -> int:
        return self._filter.nbytes


class Shelf:
    """Writes runs into a directory; `gate` can be closed to hold the writing up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written: dict[str, Run] = {}
        self._numbers = itertools.count()  # taken by two threads at a time
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None

    def write(self, rows: Rows | Iterable[Rows], layout: RowLayout) -> Run:
        if not isinstance(rows, Rows):
            rows = together(list(rows), layout)
        self.gate.wait()
        if self.failure is not None:
            raise self.failure
        name = f"{next(self._numbers):04d}.run"
        mapped = Rows(self._map(name + ".words", rows.words), self._map(name + ".heap", rows.heap))
        hashes = rows.words[:, 0]
        # A merge may leave nothing: tombstones that hide only rows of its own inputs.
        first, last = (int(hashes[0]), int(hashes[-1])) if len(hashes) else (0, 0)
        stamps = rows.words[:, META] >> np.uint64(ACCESS_TIME_SHIFT)
        newest = int(stamps.max(initial=0))
        oldest = int(stamps.min(initial=newest, where=(rows.words[:, META] & np.uint64(1)) == 0))
        ref = RunRef(name, rows.count, rows.words.nbytes, first, last, oldest=oldest, newest=newest)
        self.written[name] = Run(MappedSource(mapped, layout), ref)
        return self.written[name]

    def drop(self, run: Run) -> None:
        """Files stay: older manifests name them."""

    def _map(self, name: str, array: np.ndarray) -> np.ndarray:
        if not array.size:
            return np.empty(array.shape, array.dtype)
        array.tofile(self.folder / name)
        return np.memmap(self.folder / name, array.dtype, "c", shape=array.shape)
