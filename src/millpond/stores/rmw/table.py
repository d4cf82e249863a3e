"""The read-modify-write store: a hot table over hash-ordered runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from concurrent.futures import Executor
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from millpond.errors import UsageError
from millpond.files.formats.blocks import shape_of
from millpond.files.formats.segment import encode_rows
from millpond.files.refs import Axis, TableManifest
from millpond.kernels.hot_table.state import FRESH, STAMP_SHIFT, TOMBSTONE, TOUCHED
from millpond.kernels.hot_table.upsert import TOUCH_ALL, TOUCH_CREATED, TOUCH_NONE
from millpond.kernels.runs.gather import addresses, gather_rows
from millpond.layout import HASH, META, Bytes, HashRange, RowLayout, Rows, TableSchema, Words
from millpond.stores.jobs import Elsewhere
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.memory.heap import Heap
from millpond.stores.memory.spooled import spooled
from millpond.stores.protocol import Found, Located, TableDelta
from millpond.stores.rmw.eviction_buffer import EvictionBuffer
from millpond.stores.rmw.expiry import Expiry
from millpond.stores.rmw.flush import Flusher
from millpond.stores.rmw.hot_table import HotTable
from millpond.stores.rmw.memory_pressure import MemoryManager
from millpond.stores.rmw.policy import Policy, Stamps
from millpond.stores.rmw.scan import merged
from millpond.stores.rmw.scratch import Scratch
from millpond.stores.runs.compactor import Compactor, Writer
from millpond.stores.runs.prefetcher import Prefetcher, Prefetches
from millpond.stores.runs.run_set import RunSet
from millpond.stores.runs.run_store import RunStore
from millpond.stores.windows import axis_word, inside

_PIECE = 65536  # rows in a piece of a scan or a delta, at most
_LEAST_PIECE = 1024
_MOST_ROWS = 1 << 32  # more than any batch has
_CHUNK = 16384  # rows that are loaded at once
_AHEAD_SHARE = 4
"""Keys that were read ahead may take such a part of the table's memory."""
_RARE = 0.02  # share of keys to be brought into memory that is small


class RmwTable:
    """One table of one partition: associative state by key, read and written a block of keys at a time.

    Not thread-safe: one writer. Row ids are valid until the next `upsert`, `load`, `begin` or `seal`.

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
        self._prefetcher: Prefetcher | None = None
        if readers is not None:
            self._prefetcher = Prefetcher(runs, readers, lambda: self._account.limit // _AHEAD_SHARE)
        self._version = flushed
        self._sealed = True
        self._narrow = False
        self._missing = 1.0  # share of the last batch's keys that were not in memory; nothing is known of it yet
        self._distinct = 1.0  # share of the last batch's keys that were not the same as others of it
        self._sought = self._missed = 0  # keys of this batch: looked for, not in memory
        self._updated = self._sealed_keys = 0  # looked for to be changed, different ones
        self._keys = keys
        self._changed: list[Rows] | None = None  # what the batch changed, once sealed, if that is little

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
    ) -> RmwTable:
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

    def scratch(self) -> Scratch:
        """Room for rows like those of this table."""
        return Scratch(self.layout, 2 * self._budget.total)

    @property
    def portion(self) -> int:
        """Bytes of input that should be worked on at once, at most."""
        return 2 * self._budget.piece

    @property
    def ahead(self) -> int:
        """How many keys should be worked on together: more might drive each other out. Any, if most are in memory."""
        return _MOST_ROWS if self._at_hand else self._together

    @property
    def spare(self) -> int:
        """How many keys may be added before the index grows."""
        return self._hot.index.room

    def passes(self, rows: int) -> int:
        """In how many passes over ranges of the hash (see `narrow`) to work through a batch of so many rows.

        One, unless the keys which are not in memory, going by the last batch, have no room there together.
        """
        coming = rows * min(2 * self._missing, 1.25 * self._distinct)
        if self._memory.complete or coming <= self._memory.capacity:
            return 1
        return math.ceil(rows * self._distinct / self._together)

    @property
    def _at_hand(self) -> bool:
        """Whether nearly all keys are in memory."""
        return self._memory.complete or self._missing < _RARE

    @property
    def _together(self) -> int:
        return max(_CHUNK, self._memory.capacity // 4)

    # A batch

    def begin(self, version: int) -> None:
        """Start the batch that reads `version`. Written files are taken over, and rows flushed, here."""
        if not self._sealed:
            raise UsageError(f"The batch on version {self._version} was not sealed.", action="Open the table anew.")
        self._version = version
        self._stamps.begin(version)
        self._sealed = False
        if self._memory.spilled:
            self._hot.clear_touched()
            self._memory.spilled.clear()
        self._hot.forget_touched()
        self._changed = None
        self._conclude()
        self.widen()
        if self._eviction_buffer is not None and self._flusher is not None and self._compactor is not None:
            self._eviction_buffer.adopt()
            self._flusher.step(version)
            self._compactor.step()
        self._hot.drop_dead(dirty=not self._runs.runs)
        self._memory.tidy()

    def widen(self) -> None:
        """Take back `narrow`: rows of the whole range may be asked for again."""
        if self._narrow:
            self._memory.narrow(self._range)
            self._narrow = False

    def narrow(self, range_: HashRange) -> None:
        """Hold rows of a part of the table's range only, until the next call or `begin`: no others are asked for.

        A batch whose keys do not fit in memory is worked through in passes, each over one part. What a pass needs of
        the runs lies together there, is read in sequence, and once; the rows of the parts before have left memory.
        """
        self._memory.narrow(range_)
        self._narrow = True

    def expect(self, keys: int) -> None:
        """Lay the index out for so many more keys now: if they come in the order of their hashes, they would crowd one
        end of an index that grows as they come.
        """
        if keys > self._hot.index.room:
            self._hot.index.grow(keys)

    def expect_load(self, rows: int) -> None:
        """Lay the index out for what deltas of so many rows may hold, before they are loaded."""
        self.expect(min(rows, self._keys or rows, self._memory.capacity))

    def upsert(self, keys: Rows, stamps: NDArray[np.int64] | int, touch: Literal["all", "created"] = "all") -> Located:
        """Find the rows of some keys, in memory or in runs, and make fresh ones for those that are new.

        Best called with 2,048 to 16,384 keys at a time: then what is done with the rows finds them in the cache. There
        must be memory for all the keys of one call; a batch may have any number of them.

        Args:
            keys: rows of which the words hash, nulls and key columns are filled; more words are ignored.
            stamps: event times in milliseconds (0 to 2⁴⁸), one a key or one for all: when the row was last used.
            touch: which rows the batch is said to change: all of them, or those created.

        Returns:
            The row ids; and for each key whether it is the first occurrence of one that was nowhere.
        """
        return self._locate(keys, stamps, TOUCH_ALL if touch == "all" else TOUCH_CREATED)

    def prepare(self, keys: Rows, stamps: NDArray[np.int64] | int) -> None:
        """Bring keys into memory that are about to be upserted, in this batch and in smaller blocks.

        Looking for many keys at once in the runs costs far less a key. Nothing is done if nearly all keys are in memory
        anyway, as the last batch has shown, or if there are so many that they would drive each other out.
        """
        self._budget.relieve()
        if self._memory.spilled and self._eviction_buffer is not None and self._compactor is not None:
            # A batch larger than memory makes runs faster than one merge between two batches takes them away.
            self._eviction_buffer.adopt()
            self._compactor.step([evicted.run for evicted in self._memory.spilled])
        if self._at_hand or len(keys.words) > self._together:
            return
        self._locate(keys, stamps, TOUCH_NONE)
        self._memory.expect(len(keys.words))

    def _locate(self, keys: Rows, stamps: NDArray[np.int64] | int, mode: int) -> Located:
        if not self._hot.expiring:
            stamps = self._stamps.used(stamps)
        if keys.words.strides[1] != 8 or keys.words.strides[0] % 8:
            keys = Rows(np.ascontiguousarray(keys.words), keys.heap)
        count = len(keys.words)
        self._memory.make_room(count, self._hot.long_key_bytes(keys))
        search = not self._memory.complete
        located, pending = self._hot.upsert(keys, stamps, mode, search)
        self._missed += len(pending)
        if search and len(pending):
            self._asked(keys, pending)
            found = self._runs.lookup(keys, pending)
            self._memory.reserve_values(self._hot.found_bytes(found))
            self._hot.settle(located, pending, found, mode)
        if mode != TOUCH_NONE:
            self._sought += count
            self._updated += count if mode == TOUCH_ALL else 0
            self._keys += int(np.count_nonzero(located.created))
        return located

    def find(self, keys: Rows, stamp: int) -> NDArray[np.int64]:
        """Find the rows of some keys, in memory or in runs, without making or changing any.

        Args:
            keys: as for `upsert`, each once. stamp: when the rows were last used, unless they expire.

        Returns:
            The row ids; -1 for keys that are nowhere.
        """
        if keys.words.strides[1] != 8 or keys.words.strides[0] % 8:
            keys = Rows(np.ascontiguousarray(keys.words), keys.heap)
        count = len(keys.words)
        if not self._memory.complete:  # rows may leave for those to come
            self._memory.make_room(count, self._hot.long_key_bytes(keys))
        rows = self._hot.find(keys)
        absent = np.flatnonzero(rows < 0)
        self._sought += count
        self._missed += len(absent)
        if not self._memory.complete:
            if not self._hot.expiring:
                self._hot.stamp(keys.words[:, HASH], np.full(count, self._stamps.used(stamp)))
            if len(absent):
                self._asked(keys, absent)
                found = self._runs.lookup(keys, absent)
                if len(found.positions):
                    rows[found.positions] = self._bring_in(found, stamp)
        there = rows >= 0
        gone = (self.words[rows[there], META] & np.uint64(TOMBSTONE | FRESH)) != 0
        rows[np.flatnonzero(there)[gone]] = -1
        return rows

    def _bring_in(self, found: Found, stamp: int) -> NDArray[np.int64]:
        """The ids of rows that were found in runs, now in memory, for which there is room."""
        self._memory.reserve_values(self._hot.found_bytes(found))
        shape = shape_of(self.layout)
        rows = Rows(*gather_rows(found.rows_at, found.heaps_at, shape.width, shape.blobs))
        stamps = (rows.words[:, META] >> np.uint64(STAMP_SHIFT)).astype(np.int64)
        if not self._hot.expiring:
            stamps = np.maximum(stamps, stamp)
        located, pending = self._hot.upsert(rows, stamps, TOUCH_NONE, True)
        self._hot.settle(located, pending, Found(pending, *addresses(*rows), (rows,)), TOUCH_NONE)
        return located.rows

    def put_bytes(self, rows: NDArray[np.int64], offset: int, values: Words, heap: Bytes) -> None:
        """Write byte values into a column of given rows.

        Args:
            rows: row ids. offset: the first of the column's two words.
            values: two words a row, as in the row layout. heap: what long values point into.
        """
        if values.strides[1] != 8 or values.strides[0] % 8:
            values = np.ascontiguousarray(values)
        self._memory.reserve_values(self.heap.size_of(values))
        self.heap.put(rows, offset, values, heap)

    @property
    def in_flight(self) -> bool:
        """Whether files are being written, or written, that `begin` has yet to take over."""
        waiting = self._eviction_buffer is not None and bool(self._eviction_buffer.waiting)
        return waiting or (self._compactor is not None and self._compactor.running)

    def rest(self, resting: bool) -> None:
        """Say whether no rows are expected for now: then others come first for memory, and there is nothing to report.

        What rests has no part in the batch's figures, though no batch may begin with it for a while.
        """
        self._account.rest(resting)
        if resting:
            self._conclude()
            if self._prefetcher is not None:
                self._prefetcher.latest = Prefetches()

    def _conclude(self) -> None:
        """See from the last batch what to expect of the next."""
        if self._sought:
            self._missing = self._missed / self._sought
            self._distinct = min(1.0, self._sealed_keys / self._sought) if self._updated == self._sought else 1.0
        self._sought = self._missed = self._updated = 0

    @property
    def crowded(self) -> bool:
        """Whether rows are to leave memory, as `begin` has them do, for others' sake."""
        account = self._account
        return account.resting and self._hot.count > 0 and account.reserved > account.limit

    @property
    def epoch(self) -> int:
        """Row ids are valid as long as this is the same, even after an `upsert`."""
        return self._hot.moves + self._hot.departures

    def touch(self, rows: NDArray[np.int64]) -> None:
        """Say that the batch changed some rows, which were found with `touch="created"`."""
        self._hot.touch(rows)

    def copy(self, rows: NDArray[np.int64]) -> Rows:
        """Copies of rows with their long values."""
        return self._hot.copy(rows.astype(np.uint32))

    def remove(self, rows: NDArray[np.int64]) -> None:
        """Remove keys: they are nowhere now, though runs may hold older versions of them.

        Args:
            rows: ids of their rows. These serve again when a removed key is upserted.
        """
        self._keys -= self._hot.remove(rows)

    def expire_by(self, offset: int) -> Expiry:
        """Say that a word of the values is each row's time of expiry, in milliseconds; the table must be fresh.

        Every row that is made or whose time is written is then to be filed (`Expiry.file`) before the next `upsert`.
        Stamps are times of expiry from then on, shifted: see `Expiry.stamps`.
        """
        return Expiry(self._hot, self._runs, self._memory, self._range, offset)

    def touched(self, size: int | None = None) -> Iterator[Rows]:
        """The rows that the batch changed, each key once, as they are now, in pieces of about `size` rows (if not
        given, as the memory allows). Keys that it removed are left out.

        Long values may stay in the table's own heap: use a piece before the table changes.
        """
        return self._relieved(self._touched(size or self._piece_rows()))

    def _relieved(self, pieces: Iterator[Rows]) -> Iterator[Rows]:
        for rows in pieces:
            yield rows
            self._budget.relieve()

    def _touched(self, size: int) -> Iterator[Rows]:
        if self._changed is not None:
            for rows in self._changed:
                words = rows.words
                dead = (words[:, META] & np.uint64(TOMBSTONE)) != 0
                words = words[~dead] if dead.any() else words
                for start in range(0, len(words), size):
                    yield Rows(words[start : start + size], rows.heap)
            return
        if self._memory.spilled:
            yield from self._merged_touched(size)
            return
        ids = self._hot.live(self._hot.touched_ids())
        for start in range(0, len(ids), size):
            yield self._hot.copy(ids[start : start + size], compact=False)

    def _merged_touched(self, size: int, *, dead: bool = False) -> Iterator[Rows]:
        spilled = [evicted.run.view for evicted in reversed(self._memory.spilled)]
        return merged(self._hot, spilled, self._range, size, touched=True, dead=dead)

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

    def seal(self) -> TableDelta:
        """End the batch: what it changed, encoded. `touched` may still be asked until the next `begin`."""
        count = held = 0
        kept: list[Rows] = []
        limit = self._account.limit // 16

        def encoded() -> Iterator[list[Any]]:
            nonlocal count, held
            for rows in self._sealed_rows():
                piece = encode_rows(rows, self.layout, True)
                count += rows.count
                held += rows.words.nbytes + rows.heap.nbytes
                if held <= limit:
                    kept.append(rows)
                else:
                    kept.clear()
                yield piece
            if not count:
                yield encode_rows(self._hot.copy(np.empty(0, np.uint32)), self.layout, True)

        pieces = spooled(encoded(), limit)
        delta = TableDelta(count, pieces)
        self._sealed_keys = count
        self._changed = kept if held <= limit else None
        self._sealed = True
        if self._prefetcher is not None:
            self._prefetcher.over(self._version)
        self._version += 1
        if self._flusher is not None:
            self._flusher.sealed(self._version, held)
        self._budget.relieve()
        return delta

    def _piece_rows(self) -> int:
        """Rows that take about the bytes of a piece."""
        return min(max(self._budget.piece // self._hot.average_bytes, _LEAST_PIECE), _PIECE)

    def _sealed_rows(self) -> Iterator[Rows]:
        size = self._piece_rows()
        if self._memory.spilled:
            yield from self._relieved(self._merged_touched(size, dead=True))
            return
        ids = self._hot.touched_ids()
        for start in range(0, len(ids), size):
            yield self._hot.copy(ids[start : start + size], keep=TOMBSTONE, clear=TOUCHED)

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

    # The rest

    def announce(self, hashes: Words, stamp: int, needed: int) -> int:
        """Say which keys the batch that reads version `needed` will ask for: they stay in memory, or are brought near.

        Args:
            hashes: of keys. stamp: when they will be used (rows that expire stay in the order in which they do).

        Returns:
            How many were not in memory.
        """
        if self._memory.complete:
            return 0
        hashes = np.unique(hashes)
        stamp = 0 if self._hot.expiring else self._stamps.announced(stamp)
        there = self._hot.stamp(hashes, np.full(len(hashes), stamp))
        absent = hashes[~there]
        if self._prefetcher is not None:
            self._prefetcher.announce(absent, needed)
        return len(absent)

    def _asked(self, keys: Rows, pending: NDArray[np.int64]) -> None:
        """Keys are looked for in the runs now: it is too late to read them ahead."""
        if self._prefetcher is not None:
            self._prefetcher.take(keys.words[pending, HASH])

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
            "prefetched_keys": ahead.read,
            "prefetched_used": ahead.used,
            "dropped_hints": ahead.dropped,
            "prefetch_ms": round(ahead.seconds * 1000),
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
