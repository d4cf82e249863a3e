"""Windows of the aligned append store by their numbers, for tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor

import numpy as np
from numpy.typing import NDArray

from millpond.files.formats.append_file import ByteRange
from millpond.files.refs import TableManifest
from millpond.layout import HashRange, Rows, TableSchema
from millpond.stores.aligned.hash_intervals import read_gradually
from millpond.stores.aligned.table import AlignedStore, AlignedTable
from millpond.stores.append_files import AppendFiles
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.protocol import TableDelta


class WindowTables:
    """A store with a table for each window; rows are given out to them, and read from several."""

    def __init__(self, schema: TableSchema, files: AppendFiles, budget: MemoryBudget, background: Executor) -> None:
        self.store = AlignedStore(schema, files, budget, background)
        self.tables: dict[int, AlignedTable] = {}
        self._appended: set[int] = set()

    def open(self, window: int, manifest: TableManifest, deltas: Sequence[ByteRange] = ()) -> None:
        self.tables[window] = self.store.open(window, manifest, deltas)

    def begin(self, version: int) -> None:
        for table in self.tables.values():
            table.begin(version)

    def append(self, rows: Rows, windows: NDArray[np.int64]) -> None:
        for window in np.unique(windows).tolist():
            if window not in self.tables:
                self.open(window, TableManifest())
            self.tables[window].append(Rows(rows.words[windows == window], rows.heap))
            self._appended.add(window)

    def read(self, *windows: int, size: int | None = None, range_: HashRange = HashRange()) -> Iterator[Rows]:  # noqa: B008
        files = [self.tables[window].all_segments() for window in windows if window in self.tables]
        return read_gradually(files, self.store.layout, size or self.store.piece, range_)

    def drop(self, window: int) -> None:
        if window in self.tables:
            table = self.tables.pop(window)
            table.drop_copies()
            table.close()
        self._appended.discard(window)

    def seal(self) -> dict[int, TableDelta]:
        appended, self._appended = self._appended, set()
        return {window: self.tables[window].seal() for window in sorted(appended)}

    def stats(self) -> Counter[str]:
        figures: Counter[str] = Counter()
        for table in self.tables.values():
            figures.update(table.stats())
        return figures

    def close(self) -> None:
        self.store.close()
