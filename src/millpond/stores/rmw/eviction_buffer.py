"""The eviction buffer: rows that left the hot table and are being written to files."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor, Future, wait

from millpond.layout import Rows
from millpond.stores.runs.compactor import Writer
from millpond.stores.runs.run import Run, discard_result, memory_run
from millpond.stores.runs.run_set import RunSet


class EvictedRun:
    """Rows that left the hot table: a run in memory, searched like any other, until its file is written.

    Attributes:
        run: the run in memory, later the one in the file.
        memory: bytes that it holds until then.
    """

    def __init__(self, run: Run, file: Future[Run]) -> None:
        self.run = run
        self.file = file
        self.memory = run.memory


class EvictionBuffer:
    """The eviction buffer: sorted runs in memory that a background thread writes to files (Keyed Prefetching §IV-D).

    Args:
        runs: the table's runs; evicted rows become the newest of them.
        store: writes the files.
        background: runs the writes.
    """

    def __init__(self, runs: RunSet, store: Writer, background: Executor) -> None:
        self._runs = runs
        self._store = store
        self._background = background
        self._waiting: list[EvictedRun] = []

    @property
    def memory(self) -> int:
        """Bytes of the runs whose files are not written yet."""
        return sum(evicted.memory for evicted in self._waiting)

    @property
    def waiting(self) -> tuple[EvictedRun, ...]:
        """The runs whose files are not written yet, oldest first."""
        return tuple(self._waiting)

    def add(self, rows: Rows) -> EvictedRun:
        """Add rows in hash order, each key once; look-ups find them from now on."""
        run = memory_run(rows, self._runs.layout)
        self._runs.add(run)
        evicted = EvictedRun(run, self._background.submit(self._store.write, rows, self._runs.layout))
        self._waiting.append(evicted)
        return evicted

    def adopt(self) -> None:
        """Replace runs in memory by their written files.

        Raises:
            MillpondError: writing a file has failed.
        """
        for evicted in list(self._waiting):
            if evicted.file.done():
                written = evicted.file.result()
                # Writes may end in any order: `replace` keeps the place of the run, and so which rows are newer.
                self._runs.replace([evicted.run], [written])
                # `MemoryManager.spilled` refers to the same object, and reads the file from now on.
                evicted.run = written
                self._waiting.remove(evicted)

    def drain(self, below: int) -> None:
        """Wait until the runs in memory take at most `below` bytes."""
        self.adopt()
        while self._waiting and self.memory > below:
            wait([self._waiting[0].file])
            self.adopt()

    def written(self, evicted: Iterable[EvictedRun]) -> bool:
        """Return whether the files of all these runs are in place."""
        return not any(run in self._waiting for run in evicted)

    def close(self) -> None:
        """Drop waiting runs; files being written are left to the store's garbage collection."""
        for evicted in self._waiting:
            discard_result(evicted.file)
        self._waiting.clear()
