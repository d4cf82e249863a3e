"""The read-modify-write store: a hot table over hash-ordered runs, as batches use it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from millpond.errors import UsageError
from millpond.files.formats.blocks import shape_of
from millpond.files.formats.segment import decode_rows, encode_rows
from millpond.kernels.hot_table.state import FRESH, STAMP_SHIFT, TOMBSTONE, TOUCHED
from millpond.kernels.hot_table.upsert import TOUCH_ALL, TOUCH_CREATED, TOUCH_NONE
from millpond.kernels.runs.gather import addresses, gather_rows
from millpond.layout import HASH, META, Bytes, HashRange, Rows, Words
from millpond.stores.memory.spooled import joined, spooled
from millpond.stores.protocol import Found, Located, TableDelta
from millpond.stores.rmw.expiry import Expiry
from millpond.stores.rmw.recovery import RecoverableTable
from millpond.stores.rmw.scan import merged
from millpond.stores.rmw.scratch import Scratch
from millpond.stores.runs.prefetcher import Prefetches

_MOST_ROWS = 1 << 32  # more than any batch has
_CHUNK = 16384  # rows that are worked on together, at least, where there is memory for as many
_LEAST = 1024  # the same where there is not
_RARE = 0.02  # share of keys to be brought into memory that is small
_IN_ORDER = 2  # passes, where memory is enough for all
_FEW = 2048  # rows of which the order does not matter


class RmwTable(RecoverableTable):
    """One table of one partition: associative state by key, read and written a block of keys at a time.

    Not thread-safe: one writer. Row ids are valid until the next `upsert`, `load`, `begin` or `seal`. Arguments and
    attributes: see `RecoverableTable`.
    """

    _sealed = True
    _narrow = False
    _crowded = True  # whether the keys of a batch have no room together, as far as is known
    _sweeping = False  # whether so many are missing that passes read all there is of the runs, in any case
    _vain = 0  # keys that were announced, and not read ahead for that reason
    _coming = 0  # keys that the batch may bring into memory, and that the index was not laid out for
    _missing = 1.0  # share of the last batch's keys that were not in memory; nothing is known of it yet
    _distinct = 1.0  # share of the last batch's keys that were not the same as others of it
    _updated = _sealed_keys = 0  # keys of this batch: looked for to be changed, different ones
    _changed: list[Rows] | None = None  # what the batch changed, once sealed, if that is little
    _encoded: tuple[Any, ...] = ()  # the same in segments, where some of it left memory before it was sealed

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

        One, if nearly all keys are in memory, going by the last batch. Few, if those which are not have room there
        together: rows in the order of their hashes ask for each block of a run once. Else so many that they have.
        """
        coming = rows * min(2 * self._missing, 1.25 * self._distinct)
        self._crowded = not self._memory.complete and coming > self._memory.capacity
        self._sweeping = self._crowded and coming > sum(run.source.index.count for run in self._runs.runs)
        if self._crowded:
            return math.ceil(rows * self._distinct / self._together)
        self._coming = int(coming)
        return 1 if self._at_hand or rows < _FEW else _IN_ORDER

    @property
    def _at_hand(self) -> bool:
        """Whether nearly all keys are in memory."""
        return self._memory.complete or self._missing < _RARE

    @property
    def _together(self) -> int:
        capacity = self._memory.capacity
        return max(min(_CHUNK, capacity), capacity // 4, _LEAST)

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
        self._changed, self._encoded = None, ()
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
        the runs lies together there, is read in sequence, and once; the rows of the parts before have left memory,
        unless `passes` has found that there is room for all.
        """
        if self._crowded:
            self._memory.narrow(range_)
            self._narrow = True
            self._coming = self._together
        self.expect(self._coming)
        self._coming = 0

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

    def _touched(self, size: int) -> Iterator[Rows]:
        sealed = iter(self._changed) if self._changed is not None else None
        if self._encoded:
            # What left memory lies in runs, perhaps afar: the segments are nearer.
            sealed = decode_rows(joined(self._encoded), self.layout, "what a batch changed", self._budget.piece)
        if sealed is not None:
            for rows in sealed:
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
        self._encoded = tuple(pieces) if held > limit and self._memory.spilled else ()
        self._sealed = True
        if self._prefetcher is not None:
            self._prefetcher.over(self._version)
            came = self._prefetcher.latest
            self._ahead_share.learn(came)
            self._prefetcher.latest = came._replace(dropped=came.dropped + self._vain)
        self._vain = 0
        self._version += 1
        if self._flusher is not None:
            self._flusher.sealed(self._version, held)
        self._budget.relieve()
        return delta

    def _sealed_rows(self) -> Iterator[Rows]:
        size = self._piece_rows()
        if self._memory.spilled:
            yield from self._relieved(self._merged_touched(size, dead=True))
            return
        ids = self._hot.touched_ids()
        for start in range(0, len(ids), size):
            yield self._hot.copy(ids[start : start + size], keep=TOMBSTONE, clear=TOUCHED)

    def announce(self, hashes: Words, stamp: int, needed: int) -> int:
        """Say which keys the batch that reads version `needed` will ask for: they stay in memory, or are brought near.

        Args:
            hashes: of keys. stamp: when they will be used (rows that expire stay in the order in which they do).

        Where the last batch's keys had no room together, and were as many as there are blocks to read, nothing is
        brought: passes read every block once, and a key read before that would cost one more.

        Returns:
            How many were not in memory.
        """
        if self._memory.complete:
            return 0
        hashes = np.unique(hashes)
        stamp = 0 if self._hot.expiring else self._stamps.announced(stamp)
        there = self._hot.stamp(hashes, np.full(len(hashes), stamp))
        absent = hashes[~there]
        if self._sweeping:
            self._vain += len(absent)
        elif self._prefetcher is not None:
            self._prefetcher.announce(absent, needed)
        return len(absent)

    def _asked(self, keys: Rows, pending: NDArray[np.int64]) -> None:
        """Keys are looked for in the runs now: it is too late to read them ahead."""
        if self._prefetcher is not None:
            self._prefetcher.take(keys.words[pending, HASH])
