"""What recovery needs of a read-modify-write table: it is opened on runs, deltas are loaded, manifests describe it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from concurrent.futures import Executor
from typing import Self

import numpy as np

from millpond.files.refs import Axis, TableManifest
from millpond.layout import HashRange, RowLayout, Rows, TableSchema, Words
from millpond.stores.jobs import Elsewhere
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.memory.heap import Heap
from millpond.stores.rmw.eviction_buffer import EvictionBuffer
from millpond.stores.rmw.flush import Flusher
from millpond.stores.rmw.hot_table import HotTable
from millpond.stores.rmw.memory_pressure import MemoryManager
from millpond.stores.rmw.policy import AheadShare, Policy, Stamps
from millpond.stores.rmw.scan import merged
from millpond.stores.runs.compactor import Compactor, Writer
from millpond.stores.runs.prefetcher import Prefetcher, Prefetches
from millpond.stores.runs.run_set import RunSet
from millpond.stores.runs.run_store import RunStore
from millpond.stores.windows import axis_word, inside

_PIECE = 65536  # rows in a piece of a scan or a delta, at most
_LEAST_PIECE = 1024
_CHUNK = 16384  # rows that are loaded at once


class RecoverableTable:
    """One table of one partition between batches: a hot table over runs, which together are the state.

    Args:
        schema: the stored columns.
        initial: a whole row (`width` words): what a fresh row holds in its null bits and value columns.
        runs: the runs behind the hot table.
        budget: the memory that the table shares with the others of its slot.
        background: merges runs.
        range_: the hashes that the table holds.
        store: writes run files. Without one, everything stays in memory.
        writers: writes what leaves memory; not to be kept waiting by merges. `background` if not given.
        elsewhere: has merges done by others.
        readers: reads keys that are announced. Without one, they are not.
        policy: which rows leave memory first; those that expire leave in the order in which they do.
        flushed: the version up to which deltas are covered by `runs`.
        keys: how many keys the state holds that `runs` and the deltas to be loaded make up.
        axis: by what rows belong to the partition. Keys that are looked for have the hash of their group behind their
            key columns, if it is that.
        earlier: schemas that the table has had before, which runs may still be of.

    Attributes:
        layout: of the rows.
        words: the hot rows, `words[row_id, word]`; the array's address never changes.
        heap: what long byte values in `words` point into.
    """

    def __init__(
        self,
        schema: TableSchema,
        initial: Words,
        runs: RunSet,
        budget: MemoryBudget,
        background: Executor,
        range_: HashRange = HashRange(),  # noqa: B008
        *,
        store: Writer | None = None,
        writers: Executor | None = None,
        elsewhere: Elsewhere | None = None,
        readers: Executor | None = None,
        policy: Policy = "timestamp",
        flushed: int = 0,
        keys: int = 0,
        axis: Axis = "hash",
        earlier: Collection[TableSchema] = (),
    ) -> None:
        self.layout = RowLayout(schema)
        self._axis = axis
        self._range = range_
        self._runs = runs
        self._hot = HotTable(self.layout, initial, range_, 2 * budget.total)
        self.words: Words = self._hot.words
        self.heap: Heap = self._hot.heap
        self._budget = budget
        self._account = budget.open()
        self._eviction_buffer: EvictionBuffer | None = None
        self._flusher: Flusher | None = None
        self._compactor: Compactor | None = None
        if store is not None:
            self._eviction_buffer = EvictionBuffer(runs, store, writers or background)
            self._flusher = Flusher(self._hot, self._eviction_buffer, budget.total, flushed)
            self._compactor = Compactor(
                runs, store, background, piece=budget.piece, elsewhere=elsewhere, earlier=earlier
            )
        self._stamps = Stamps(policy)
        self._memory = MemoryManager(
            self._hot, runs, self._eviction_buffer, self._account, second_chances=self._stamps.second_chances
        )
        self._ahead_share = AheadShare()
        self._prefetcher: Prefetcher | None = None
        if readers is not None:
            self._prefetcher = Prefetcher(runs, readers, lambda: int(self._account.limit * self._ahead_share.value))
        self._version = flushed
        self._keys = keys
        self._sought = self._missed = 0  # keys of this batch: looked for, not in memory

    @classmethod
    def open(
        cls,
        schema: TableSchema,
        initial: Words,
        manifest: TableManifest,
        store: RunStore,
        budget: MemoryBudget,
        background: Executor,
        range_: HashRange = HashRange(),  # noqa: B008
        *,
        writers: Executor | None = None,
        elsewhere: Elsewhere | None = None,
        readers: Executor | None = None,
        policy: Policy = "timestamp",
        axis: Axis = "hash",
        earlier: Collection[TableSchema] = (),
    ) -> Self:
        """Open a table on the runs that a manifest names; the deltas behind them are then to be given to `load`.

        Args:
            earlier: schemas that the table has had before (see `RunStore.open`).

        Raises:
            StateDamagedError: a run file is missing or damaged.
        """
        layout = RowLayout(schema)
        opened = store.open_all(manifest.runs, layout, range_, axis_word(layout, axis), earlier)
        runs = RunSet(layout, opened, range_)
        return cls(
            schema,
            initial,
            runs,
            budget,
            background,
            range_,
            store=store,
            writers=writers,
            elsewhere=elsewhere,
            readers=readers,
            policy=policy,
            flushed=manifest.flushed,
            keys=manifest.keys,
            axis=axis,
            earlier=earlier,
        )

    @property
    def range(self) -> HashRange:
        """The hashes that the table holds."""
        return self._range

    def expect(self, keys: int) -> None:
        """Lay the index out for so many more keys now: if they come in the order of their hashes, they would crowd one
        end of an index that grows as they come.
        """
        if keys > self._hot.index.room:
            self._hot.index.grow(keys)

    def expect_load(self, rows: int) -> None:
        """Lay the index out for what deltas of so many rows may hold, before they are loaded."""
        self.expect(min(rows, self._keys or rows, self._memory.capacity))

    def load(self, delta_rows: Rows, window: HashRange = HashRange()) -> None:  # noqa: B008
        """Apply rows of a delta, in recovery: they replace what the table knows of their keys; others do not count."""
        delta_rows = inside(delta_rows, window, axis_word(self.layout, self._axis))
        words = delta_rows.words
        if words.strides[1] != 8 or words.strides[0] % 8:
            words = np.ascontiguousarray(words)
        for start in range(0, len(words), _CHUNK):
            piece = Rows(words[start : start + _CHUNK], delta_rows.heap)
            self._memory.make_room(len(piece.words), self._hot.long_bytes(piece))
            self._hot.load(piece)
        if self._flusher is not None:
            self._flusher.sealed(0, words.nbytes + len(delta_rows.heap))

    def scan(self, size: int | None = None) -> Iterator[Rows]:
        """The whole state in hash order, in pieces as for `touched`; use a piece before the table changes."""
        return self._relieved(self._scan(size or self._piece_rows()))

    def _scan(self, size: int) -> Iterator[Rows]:
        if not self._memory.complete:
            yield from merged(self._hot, [run.view for run in self._runs.runs], self._range, size)
            return
        for ids in self._hot.walk(size):
            live = self._hot.live(ids)
            if len(live):
                yield self._hot.copy(live, compact=False)

    def _relieved(self, pieces: Iterator[Rows]) -> Iterator[Rows]:
        for rows in pieces:
            yield rows
            self._budget.relieve()

    def _piece_rows(self) -> int:
        """Rows that take about the bytes of a piece."""
        return min(max(self._budget.piece // self._hot.average_bytes, _LEAST_PIECE), _PIECE)

    @property
    def in_flight(self) -> bool:
        """Whether files are being written, or written, that `begin` has yet to take over."""
        waiting = self._eviction_buffer is not None and bool(self._eviction_buffer.waiting)
        return waiting or (self._compactor is not None and self._compactor.running)

    @property
    def crowded(self) -> bool:
        """Whether rows are to leave memory, as `begin` has them do, for others' sake."""
        account = self._account
        return account.resting and self._hot.count > 0 and account.reserved > account.limit

    def manifest(self) -> TableManifest:
        """The runs that hold the state together with the deltas of later versions."""
        refs = [run.ref for run in self._runs.runs]
        flushed = self._flusher.flushed if self._flusher is not None else 0
        return TableManifest(tuple(ref for ref in refs if ref is not None), flushed, self._keys, axis=self._axis)

    def stats(self) -> dict[str, int]:
        """Figures, `cache_hits` and `cache_misses` since the batch began.

        `keys`: keys held. `bytes`: of the state in memory and in files.
        `cache_hits`, `cache_misses`: keys that were looked for and were in memory, or had to be sought in runs.
        `prefetched_keys`, `prefetched_used`, `dropped_hints`, `prefetch_ms`: see `Prefetches`; of the last batch.
        `hot_rows`, `hot_bytes`: rows and bytes in memory; `dirty_rows` of them are in no run yet; `buffer_bytes`: on
        their way to files; `run_rows`: rows in runs.
        """
        searched = 0 if self._memory.complete else self._missed
        files = sum(run.ref.bytes for run in self._runs.runs if run.ref is not None)
        buffered = 0 if self._eviction_buffer is None else self._eviction_buffer.memory
        ahead = Prefetches() if self._prefetcher is None else self._prefetcher.latest
        return {
            "keys": self._keys,
            "bytes": self._hot.memory + buffered + files,
            "cache_hits": self._sought - searched,
            "cache_misses": searched,
            **ahead.stats(),
            "hot_rows": self._hot.count,
            "hot_bytes": self._hot.memory,
            "dirty_rows": self._hot.dirty,
            "buffer_bytes": buffered,
            "run_rows": self._runs.rows,
        }

    def close(self) -> None:
        """Give all memory back."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        if self._eviction_buffer is not None and self._compactor is not None:
            self._eviction_buffer.close()
            self._compactor.close()
        for run in self._runs.runs:
            run.close()
        self._hot.close()
        self._account.close()
