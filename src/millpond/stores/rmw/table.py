"""The read-modify-write store: associative state by key, in a hot table over hash-ordered runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from millpond.errors import UsageError
from millpond.files.refs import Axis, TableManifest
from millpond.kernels.hot_table.upsert import TOUCH_ALL, TOUCH_CREATED, TOUCH_NONE
from millpond.layout import Bytes, HashRange, RowLayout, Rows, TableSchema, Words, contiguous
from millpond.stores.hash_filter import axis_word, inside
from millpond.stores.memory.heap import Heap
from millpond.stores.protocol import LocatedRows, TableDelta
from millpond.stores.rmw.batch_changes import BatchChanges
from millpond.stores.rmw.eviction_buffer import EvictionBuffer
from millpond.stores.rmw.expiry import Expiry
from millpond.stores.rmw.flush import Flusher
from millpond.stores.rmw.hot.scratch import Scratch
from millpond.stores.rmw.hot.table import HotTable
from millpond.stores.rmw.key_lookup import KeyLookup
from millpond.stores.rmw.memory_manager import MemoryManager
from millpond.stores.rmw.pass_planner import PassPlanner
from millpond.stores.rmw.policy import Policy, PrefetchShare, Stamps
from millpond.stores.rmw.scan import merge_hot_and_runs
from millpond.stores.runs.compactor import Compactor, Writer
from millpond.stores.runs.merge import piece_rows
from millpond.stores.runs.prefetcher import Prefetcher
from millpond.stores.runs.run import Run
from millpond.stores.runs.run_set import RunSet
from millpond.stores.runs.run_store import RunStore
from millpond.stores.table_resources import TableResources

_LOAD_ROWS = 16384  # rows loaded at a time
_COPIES_DIVISOR = 16  # divisor of the table's memory that may hold copies of the rows that a batch changed


class RmwTable:
    """One table of one partition: rows by key, read and written a block of keys at a time.

    Not thread-safe: one writer. Row ids are valid until the next `upsert`, `load`, `begin` or `seal`. A batch calls
    `begin`, then any number of lookups and writes, then `seal`. Recovery opens the table on the runs of a manifest and
    loads the deltas behind them.

    Args:
        schema: the stored columns.
        initial: a whole row (`width` words) with the null bits and value columns of a fresh row.
        runs: the runs behind the hot table.
        resources: the memory and the threads that the table shares with the other tables of its slot.
        range_: the hash range of the table.
        store: writes run files. Without one, everything stays in memory.
        policy: which rows are evicted first; rows that expire are evicted in the order in which they expire.
        flushed: the version up to which deltas are covered by `runs`.
        keys: number of keys of the state that `runs` and the deltas to be loaded make up.
        axis: the hash by which rows belong to the partition. If it is "group", looked-up keys have the hash of their
            group behind their key columns.
        earlier: earlier schemas of the table, which runs may still have.

    Attributes:
        layout: of the rows.
        words: the hot rows, `words[row_id, word]`; the array's address never changes.
        heap: long byte values that `words` refers to.
    """

    def __init__(
        self,
        schema: TableSchema,
        initial: Words,
        runs: RunSet,
        resources: TableResources,
        range_: HashRange = HashRange(),  # noqa: B008
        *,
        store: Writer | None = None,
        policy: Policy = "timestamp",
        flushed: int = 0,
        keys: int = 0,
        axis: Axis = "hash",
        earlier: Collection[TableSchema] = (),
    ) -> None:
        budget = resources.budget
        self.layout = RowLayout(schema)
        self._axis = axis
        self._range = range_
        self._runs = runs
        self._hot = HotTable(self.layout, initial, range_, budget.total)
        self.words: Words = self._hot.words
        self.heap: Heap = self._hot.heap
        self._budget = budget
        self._account = budget.open()
        self._eviction_buffer: EvictionBuffer | None = None
        self._flusher: Flusher | None = None
        self._compactor: Compactor | None = None
        if store is not None:
            self._eviction_buffer = EvictionBuffer(runs, store, resources.write_pool)
            self._flusher = Flusher(self._hot, self._eviction_buffer, budget.total, flushed)
            self._compactor = Compactor(
                runs,
                store,
                resources.background,
                piece=budget.piece,
                remote_compactor=resources.remote_compactor,
                earlier=earlier,
            )
        stamps = Stamps(policy)
        self._memory = MemoryManager(
            self._hot, runs, self._eviction_buffer, self._account, second_chances=stamps.second_chances
        )
        self._plan = PassPlanner(self._memory, lambda: sum(run.source.index.count for run in runs.runs))
        share = PrefetchShare()
        self._prefetcher: Prefetcher | None = None
        if resources.readers is not None:
            self._prefetcher = Prefetcher(runs, resources.readers, lambda: int(self._account.limit * share.value))
        self._lookup = KeyLookup(
            self.layout, self._hot, runs, self._memory, self._plan, stamps, self._prefetcher, share
        )
        self._changes = BatchChanges(self.layout, self._hot, self._memory, range_)
        self._version = flushed
        self._keys = keys
        self._sealed = True
        self._restricted = False  # to the hash range of a pass

    @classmethod
    def open(
        cls,
        schema: TableSchema,
        initial: Words,
        manifest: TableManifest,
        store: RunStore,
        resources: TableResources,
        range_: HashRange = HashRange(),  # noqa: B008
        *,
        policy: Policy = "timestamp",
        axis: Axis = "hash",
        earlier: Collection[TableSchema] = (),
    ) -> Self:
        """Open a table on the runs that a manifest names; `load` then applies the deltas behind them.

        Args:
            earlier: earlier schemas of the table (see `RunStore.open`).

        Raises:
            StateDamagedError: a run file is missing or damaged.
        """
        layout = RowLayout(schema)
        opened = store.open_all(manifest.runs, layout, range_, axis_word(layout, axis), earlier)
        return cls(
            schema,
            initial,
            RunSet(layout, opened, range_),
            resources,
            range_,
            store=store,
            policy=policy,
            flushed=manifest.flushed,
            keys=manifest.keys,
            axis=axis,
            earlier=earlier,
        )

    @property
    def range(self) -> HashRange:
        """The hash range of the table."""
        return self._range

    def scratch(self) -> Scratch:
        """Create scratch rows with the layout of this table."""
        return Scratch(self.layout, 2 * self._budget.total)

    # Recovery

    def size_index(self, keys: int) -> None:
        """Size the index for more keys at once.

        An index that grows while keys arrive in hash order would be crowded at one end.
        """
        if keys > self._hot.index.room:
            self._hot.index.grow(keys)

    def size_index_for_load(self, rows: int) -> None:
        """Size the index for deltas with this number of rows, before they are loaded."""
        # Deltas repeat keys, so the number of keys in the manifest is a second upper bound.
        self.size_index(min(rows, self._keys or rows, self._memory.capacity))

    def load(self, delta_rows: Rows, visible: HashRange = HashRange()) -> None:  # noqa: B008
        """Apply rows of a delta during recovery: each replaces the row of its key.

        Args:
            delta_rows: in the order of the deltas. visible: other hashes are skipped.
        """
        delta_rows = inside(delta_rows, visible, axis_word(self.layout, self._axis)).contiguous()
        for piece in delta_rows.pieces(_LOAD_ROWS):
            self._memory.make_room(piece.count, self._hot.long_bytes(piece))
            self._hot.load(piece)
        if self._flusher is not None:
            # Version 0: the next flush covers all deltas that recovery has loaded.
            self._flusher.backlog.add(0, delta_rows.words.nbytes + len(delta_rows.heap))

    # Planning a batch

    @property
    def portion_bytes(self) -> int:
        """Bytes of input to work on at once, at most."""
        return 2 * self._budget.piece

    @property
    def portion_keys(self) -> int:
        """Number of keys to work on together; more could evict each other. Unlimited if most keys are in memory."""
        return self._plan.block_if_needed

    @property
    def index_room(self) -> int:
        """Number of keys that may be added before the index grows."""
        return self._hot.index.room

    def passes(self, rows: int) -> int:
        """Return the number of passes over hash ranges (see `restrict`) for a batch with this number of rows."""
        return self._plan.passes(rows)

    def begin(self, version: int) -> None:
        """Start the batch that reads `version`: take over written files, and continue a flush."""
        if not self._sealed:
            raise UsageError(f"The batch on version {self._version} was not sealed.", action="Open the table again.")
        self._version = version
        self._lookup.begin(version)
        self._sealed = False
        self._changes.begin()
        self._plan.learn()
        self.unrestrict()
        if self._eviction_buffer is not None and self._flusher is not None and self._compactor is not None:
            self._eviction_buffer.adopt()
            self._flusher.step(version)
            self._compactor.step()
        # Without runs there are no older versions that tombstones would have to hide.
        self._hot.drop_tombstones(dirty=not self._runs.runs)
        self._memory.shrink_to_limit()

    def restrict(self, range_: HashRange) -> None:
        """Restrict the table to a part of its hash range until the next call or `begin`.

        A batch whose keys do not fit in memory is processed in passes over such parts (grace partitioning). A pass
        reads its blocks of the runs sequentially, and once. Rows of earlier parts have been evicted, unless `passes`
        found room for all of them.
        """
        if self._plan.over_budget:
            self._memory.restrict(range_)
            self._restricted = True
        self.size_index(self._plan.take_arriving())

    def unrestrict(self) -> None:
        """Undo `restrict`: keys of the whole range may be looked up again."""
        if self._restricted:
            self._memory.restrict(self._range)
            self._restricted = False

    def set_idle(self, idle: bool) -> None:
        """Mark the table as idle or not; an idle table yields its memory and reports no figures."""
        self._account.set_idle(idle)
        if idle:
            self._plan.learn()
            self._lookup.clear_figures()

    # Reading and writing

    def upsert(
        self, keys: Rows, stamps: NDArray[np.int64] | int, touch: Literal["all", "created"] = "all"
    ) -> LocatedRows:
        """Find the rows of keys, in memory or in runs, and create fresh rows for new keys.

        Blocks of 2,048 to 16,384 keys are best: their rows then stay in the CPU's cache for the work that follows. The
        keys of one call must fit in memory; a batch may have any number of keys.

        Args:
            keys: rows with the words hash, nulls and key columns filled; other words are ignored.
            stamps: access times as event times in milliseconds (0 to 2⁴⁸), one for each key or one for all.
            touch: which rows count as changed by the batch: all of them, or only created ones.

        Returns:
            The row ids; and for each key whether it is the first occurrence of a new one.
        """
        located = self._lookup.upsert(keys, stamps, TOUCH_ALL if touch == "all" else TOUCH_CREATED)
        self._keys += int(np.count_nonzero(located.created))
        return located

    def preload(self, keys: Rows, stamps: NDArray[np.int64] | int) -> None:
        """Load keys into memory that are about to be upserted in this batch, in smaller blocks.

        A look-up of many keys at once in the runs costs far less per key. Does nothing if nearly all keys are in
        memory, judged by the last batch, or if the keys are too many and would evict each other.
        """
        self._budget.trim_if_needed()
        if self._memory.spilled and self._eviction_buffer is not None and self._compactor is not None:
            # A batch larger than memory makes runs faster than one merge per batch can remove them.
            self._eviction_buffer.adopt()
            self._compactor.step([evicted.run for evicted in self._memory.spilled])
        if self._plan.in_memory or len(keys.words) > self._plan.block:
            return
        self._lookup.upsert(keys, stamps, TOUCH_NONE)
        self._memory.expect_present(len(keys.words))

    def find(self, keys: Rows, stamp: int, *, counted: bool = True) -> NDArray[np.int64]:
        """Find the rows of keys, in memory or in runs, without creating or changing any.

        Args:
            keys: as for `upsert`, each once. stamp: the access time, ignored if rows expire.
            counted: whether the lookup counts for the passes of later batches and for the figures of the cache; not so
                lookups that an operator makes for itself.

        Returns:
            The row ids; -1 for keys that the state does not have.
        """
        return self._lookup.find(keys, stamp, counted=counted)

    def prefetch(self, hashes: Words, stamp: int, needed: int) -> int:
        """Hint keys that the batch reading version `needed` will look up: they stay in memory, or are read.

        Nothing is read if the last batch's keys did not fit in memory together and were as many as there are blocks:
        passes then read every block once, and prefetching a key would cost one more read.

        Args:
            hashes: of the keys. stamp: the future access time, ignored if rows expire.

        Returns:
            The number of keys that were not in memory.
        """
        return self._lookup.prefetch(hashes, stamp, needed)

    def put_bytes(self, rows: NDArray[np.int64], offset: int, values: Words, heap: Bytes) -> None:
        """Write byte values into a column of rows.

        Args:
            rows: row ids. offset: index of the column's first word.
            values: two words for each row, as in the row layout. heap: the long values that they refer to.
        """
        values = contiguous(values)
        self._memory.reserve_values(self.heap.size_of(values))
        self.heap.put(rows, offset, values, heap)

    def touch(self, rows: NDArray[np.int64]) -> None:
        """Mark rows as changed by the batch that were found with `touch="created"`."""
        self._hot.touch(rows)

    def copy(self, rows: NDArray[np.int64]) -> Rows:
        """Copy rows with their long values."""
        return self._hot.copy(rows.astype(np.uint32))

    def remove(self, rows: NDArray[np.int64]) -> None:
        """Remove keys; tombstones hide older versions of them in runs.

        Args:
            rows: ids of their rows, which are reused when a removed key is upserted.
        """
        self._keys -= self._hot.remove(rows)

    def expire_by(self, offset: int) -> Expiry:
        """Expire rows by a value word, the time of expiry in milliseconds; the table must be fresh.

        After a row is created or its time is written, it must be filed (`Expiry.file`) before the next `upsert`. Stamps
        are shifted times of expiry from then on: see `Expiry.stamps`.
        """
        return Expiry(self._hot, self._runs, self._memory, self._range, offset, self._budget.piece)

    @property
    def row_id_epoch(self) -> int:
        """A number that changes whenever row ids become invalid; otherwise they stay valid even after `upsert`."""
        return self._hot.moves + self._hot.evictions

    # The end of a batch

    def seal(self) -> TableDelta:
        """End the batch, and encode its changes. `touched` may be called until the next `begin`."""
        size = self._piece_rows(self._spilled_runs())
        delta, held = self._changes.encode(size, self._account.limit // _COPIES_DIVISOR)
        self._plan.seal(delta.rows)
        self._sealed = True
        self._lookup.seal(self._version)
        self._version += 1
        if self._flusher is not None:
            self._flusher.backlog.add(self._version, held)
        self._budget.trim_if_needed()
        return delta

    def touched(self, size: int | None = None) -> Iterator[Rows]:
        """Yield the rows that the batch changed, each key once, in their current state, without removed keys.

        Long values may stay in the table's own heap: use a piece before the table changes.

        Args:
            size: rows in a piece; by default as the memory allows.
        """
        return self._trimming(self._changes.read(size or self._piece_rows(self._spilled_runs()), self._budget.piece))

    def scan(self, size: int | None = None) -> Iterator[Rows]:
        """Yield the whole state in hash order, in pieces as for `touched`; use a piece before the table changes."""
        return self._trimming(self._scan(size or self._piece_rows(self._runs.runs)))

    def _scan(self, size: int) -> Iterator[Rows]:
        if not self._memory.complete:
            yield from merge_hot_and_runs(self._hot, [run.view for run in self._runs.runs], self._range, size)
            return
        for ids in self._hot.walk(size):
            live = self._hot.live(ids)
            if len(live):
                yield self._hot.copy(live, compact=False)

    def _trimming(self, pieces: Iterator[Rows]) -> Iterator[Rows]:
        for rows in pieces:
            yield rows
            self._budget.trim_if_needed()

    def _piece_rows(self, runs: Sequence[Run]) -> int:
        """Return the number of rows in a piece, by the average size of the rows in memory and in `runs`."""
        # Not judged by the rows in memory alone: after a restart, or after an eviction, there are few or none.
        count = self._hot.count + sum(run.rows for run in runs)
        total_bytes = self._hot.count * self._hot.average_row_bytes + sum(run.rows * run.row_bytes for run in runs)
        return piece_rows(self._budget.piece, max(8 * self.layout.width, total_bytes // max(1, count)))

    def _spilled_runs(self) -> list[Run]:
        return [evicted.run for evicted in self._memory.spilled]

    @property
    def in_flight(self) -> bool:
        """Whether a file is being written, or is written and `begin` has not yet taken it over."""
        waiting = self._eviction_buffer is not None and bool(self._eviction_buffer.waiting)
        return waiting or (self._compactor is not None and self._compactor.running)

    @property
    def over_budget(self) -> bool:
        """Whether this idle table should evict rows in `begin`, in favour of other tables."""
        account = self._account
        return account.idle and self._hot.count > 0 and account.reserved > account.limit

    def manifest(self) -> TableManifest:
        """List the runs that hold the state together with the deltas of later versions."""
        refs = [run.ref for run in self._runs.runs]
        flushed = self._flusher.flushed if self._flusher is not None else 0
        # Runs in memory are left out: deltas after the flushed version still hold their rows.
        return TableManifest(tuple(ref for ref in refs if ref is not None), flushed, self._keys, axis=self._axis)

    def stats(self) -> dict[str, int]:
        """Return figures; `cache_hits` and `cache_misses` count since the batch began.

        `keys`: keys held. `bytes`: of the state in memory and in files; of a shared file, the partition's share.
        `cache_hits`, `cache_misses`: looked-up keys that were in memory, or had to be looked up in runs.
        `prefetched_keys`, `prefetched_used`, `dropped_hints`, `prefetch_ms`: of the last batch, see `PrefetchFigures`.
        `hot_rows`, `hot_bytes`: rows and bytes in memory; `dirty_rows`: those of them that are in no run yet;
        `buffer_bytes`: in the eviction buffer; `run_rows`: rows in runs.
        """
        misses = 0 if self._memory.complete else self._plan.misses
        files = sum(run.bytes for run in self._runs.runs if run.ref is not None)
        buffered = 0 if self._eviction_buffer is None else self._eviction_buffer.memory
        return {
            "keys": self._keys,
            "bytes": self._hot.memory + buffered + files,
            "cache_hits": self._plan.lookups - misses,
            "cache_misses": misses,
            **self._lookup.prefetches.stats(),
            "hot_rows": self._hot.count,
            "hot_bytes": self._hot.memory,
            "dirty_rows": self._hot.dirty,
            "buffer_bytes": buffered,
            "run_rows": self._runs.rows,
        }

    def close(self) -> None:
        """Release all memory and end background work."""
        self._lookup.close()
        if self._eviction_buffer is not None and self._compactor is not None:
            self._eviction_buffer.close()
            self._compactor.close()
        for run in self._runs.runs:
            run.close()
        self._hot.close()
        self._account.close()
