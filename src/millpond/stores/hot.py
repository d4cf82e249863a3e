"""The hot table: the mutable rows of one table, in memory, found by an index that keeps them in hash order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from millpond.errors import UsageError
from millpond.files.blocks import HashRange, shape_of
from millpond.kernels import extract
from millpond.kernels import hot_state as hs
from millpond.kernels.arena import long_bytes, relocate
from millpond.kernels.index import migrate, walk
from millpond.kernels.pointers import address
from millpond.kernels.upsert import BLOCK, TOUCH_ALL, overwrite, settle, upsert
from millpond.layout import Bytes, RowLayout, Rows, Words
from millpond.stores.heap import Heap
from millpond.stores.mapping import Mapping
from millpond.stores.protocol import Located

_LOAD = 0.7  # fullest that an index gets
_FRESH_LOAD = 0.47  # how full it is after growing
_CROWDED = 0.8  # how full the small index may get while its entries move
_MIN_SLOTS = 64
_STEPS_PER_KEY = 8  # slots that move into the grown index for each key looked for
_MAX_ROWS = (1 << 32) - 2
_NO_IDS = np.empty(0, np.uint32)


class HotTable:
    """Rows addressed by row id, in one slab whose address never changes.

    Args:
        layout: of the rows.
        initial: a whole row: what a fresh row holds besides its key.
        range_: the hashes that the table holds.
        space: bytes of address space for the rows; as much again serves long values.

    Attributes:
        words: the slab, one row id to a line; lines may be longer than a row.
        heap: what long values point into.
    """

    def __init__(self, layout: RowLayout, initial: Words, range_: HashRange, space: int) -> None:
        self.layout = layout
        shape = shape_of(layout)
        self._references, self._blobs = shape.references, shape.blobs
        self._initial = np.array(initial, np.uint64, copy=True).reshape(layout.width)
        # Rows of seven words would straddle two cache lines for the sake of one word.
        width = layout.width + (layout.width % 8 == 7)
        capacity = min(max(space // (8 * width), 1 << 16), _MAX_ROWS)
        self._slab = Mapping(capacity * width * 8)
        self._free = Mapping(capacity * 4)
        self._touched = Mapping(capacity * 4)
        self._free_ids: NDArray[np.uint32] = self._free.view(np.uint32)
        self._touched_ids: NDArray[np.uint32] = self._touched.view(np.uint32)
        self.words: Words = self._slab.view(np.uint64)[: capacity * width].reshape(capacity, width)
        self.state = np.zeros(hs.SIZE, np.int64)
        self.heap = Heap(self.state, 2 * space if layout.bytes_columns else 0)
        self._scratch = np.empty(2 * BLOCK, np.uint64)
        self._entries = self._next = Mapping(0)
        state = self.state
        state[hs.SLAB] = self._slab.address
        state[hs.STRIDE] = width * 8
        state[hs.WIDTH] = layout.width
        state[hs.INITIAL] = address(self._initial)
        state[hs.KEY_START] = layout.key_start
        state[hs.KEY_STOP] = layout.key_stop
        state[hs.KEY_NULLS] = np.array(shape.null_mask, np.uint64).view(np.int64)
        state[hs.LOW] = np.array(range_.lo, np.uint64).view(np.int64)
        span = range_.hi - range_.lo - 1
        state[hs.SHIFT] = max(0, span.bit_length() - 32)
        state[hs.LAST] = span >> int(state[hs.SHIFT])
        self._open_index(_MIN_SLOTS)

    # The index

    def _new_index(self, slots: int) -> tuple[Mapping, int]:
        # Entries pushed beyond the last slot stand behind it: in the worst case all of them.
        mapping = Mapping((2 * slots + 64) * 8)
        mapping.using(slots * 8)
        return mapping, (slots << 32) // (int(self.state[hs.LAST]) + 1)

    def _open_index(self, slots: int) -> None:
        self._entries, scale = self._new_index(slots)
        self.state[hs.ENTRIES] = self._entries.address
        self.state[hs.SLOTS] = slots
        self.state[hs.SCALE] = scale

    @property
    def _growing(self) -> bool:
        return bool(self.state[hs.NEXT_ENTRIES])

    def _move_index(self, slots: int) -> None:
        """Go on growing the index, if it is being grown."""
        if self._growing and migrate(self.state, slots):
            state = self.state
            self._entries.close()
            self._entries = self._next
            state[hs.ENTRIES] = state[hs.NEXT_ENTRIES]
            state[hs.SLOTS] = state[hs.NEXT_SLOTS]
            state[hs.SCALE] = state[hs.NEXT_SCALE]
            for number in (hs.NEXT_ENTRIES, hs.NEXT_SLOTS, hs.NEXT_SCALE, hs.FRONTIER, hs.CURSOR, hs.NEXT_STOP):
                state[number] = 0

    def settle_index(self) -> None:
        """Finish growing the index at once."""
        self._move_index(int(self.state[hs.SLOTS]) + 1)

    def index_room(self) -> int:
        """How many keys can be added before the index has to be enlarged."""
        slots = self.state[hs.NEXT_SLOTS] if self._growing else self.state[hs.SLOTS]
        return int(slots * _LOAD) - self.count

    def grow_index(self, keys: int) -> None:
        """Begin to enlarge the index for that many more keys; the entries move later, a few at a time."""
        self.settle_index()
        slots = int((self.count + keys) / _LOAD * 1.02) + _MIN_SLOTS
        slots = max(slots, int(self.count / _FRESH_LOAD))
        self._next, scale = self._new_index(slots)
        self.state[hs.NEXT_ENTRIES] = self._next.address
        self.state[hs.NEXT_SLOTS] = slots
        self.state[hs.NEXT_SCALE] = scale
        if self.count + keys > self.state[hs.SLOTS] * _CROWDED:
            self.settle_index()

    # Figures

    @property
    def count(self) -> int:
        """Rows in the table."""
        return int(self.state[hs.COUNT])

    @property
    def dirty(self) -> int:
        """Rows changed since they were last copied into a run."""
        return int(self.state[hs.DIRTY_ROWS])

    @property
    def free(self) -> int:
        """Rows that were used and are free again."""
        return int(self.state[hs.FREE])

    @property
    def row_room(self) -> int:
        """How many rows can be added before address space ends."""
        return len(self.words) - int(self.state[hs.HIGH]) + self.free

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the slab."""
        return int(self.state[hs.STRIDE])

    @property
    def memory(self) -> int:
        """Bytes of memory in use: rows ever used, index, arena, lists."""
        state = self.state
        index = int(state[hs.SLOTS] + state[hs.NEXT_SLOTS]) * 8
        high = int(state[hs.HIGH])
        return high * self.row_bytes + index + self.heap.used + 4 * (self.free + int(state[hs.TOUCHED_ROWS]))

    # Rows

    def long_key_bytes(self, keys: Rows) -> int:
        """Arena bytes that the long key columns of some keys take at most."""
        return self._long_bytes(keys, self._blobs[: self.layout.key_bytes])

    def long_bytes(self, rows: Rows) -> int:
        """Arena bytes that the long values of whole rows take at most."""
        return self._long_bytes(rows, self._blobs)

    def _long_bytes(self, rows: Rows, columns: NDArray[np.int64]) -> int:
        if not len(columns):
            return 0
        return int(long_bytes(address(rows.words), len(rows.words), rows.words.strides[0] // 8, columns))

    def upsert(
        self, keys: Rows, stamps: NDArray[np.int64] | int, touch: int, defer: bool
    ) -> tuple[Located, NDArray[np.int64]]:
        """Find or make the rows of keys; there must be room for all of them.

        Returns:
            The rows, and the positions of keys that were absent.
        """
        words = keys.words
        count = len(words)
        rows = np.empty(count, np.int64)
        created = np.empty(count, np.bool_)
        pending = np.empty(count, np.int64)
        constant = isinstance(stamps, (int, np.integer))
        self._slab.using((int(self.state[hs.HIGH]) + count) * self.row_bytes)
        absent = upsert(
            self.state,
            self._references,
            self.heap.lists,
            self._free_ids,
            self._touched_ids,
            address(words),
            words.strides[0] // 8,
            count,
            address(keys.heap),
            0 if constant else address(stamps),  # type: ignore[arg-type]
            stamps if constant else 0,
            touch,
            defer,
            rows,
            created,
            pending,
            self._scratch,
        )
        if absent < 0:
            raise UsageError(
                f"A key's hash {int(words[-1 - absent, 0])} lies outside the range of the table's partition.",
                action="Route each row to the partition that owns its hash.",
            )
        if self._growing:
            self._move_index(_STEPS_PER_KEY * count)
        return Located(rows, created), pending[:absent]

    def settle(
        self, located: Located, pending: NDArray[np.int64], positions: NDArray[np.int64], found: Rows, touch: int
    ) -> None:
        """Give fresh rows the values that their keys have in runs.

        Args:
            located, pending: what `upsert` returned.
            positions, found: keys that were found (positions among the keys upserted) and their rows.
        """
        which = np.searchsorted(pending, positions)
        order = np.argsort(which, kind="stable")
        words = np.ascontiguousarray(found.words[order])
        settle(
            self.state,
            self._references,
            self.heap.lists,
            self._touched_ids,
            located.rows,
            located.created,
            pending,
            which[order],
            address(words),
            words.shape[1],
            address(found.heap),
            touch,
        )

    def load(self, rows: Rows) -> None:
        """Put whole rows in, over those of the same keys; they become dirty. There must be room for all of them."""
        located, _ = self.upsert(rows, 0, TOUCH_ALL + 1, True)
        words = rows.words
        overwrite(
            self.state,
            self._references,
            self.heap.lists,
            located.rows,
            address(words),
            words.strides[0] // 8,
            address(rows.heap),
        )

    # Copies

    def touched_ids(self) -> NDArray[np.uint32]:
        """The rows changed in this batch, in the order of their first change."""
        return self._touched_ids[: int(self.state[hs.TOUCHED_ROWS])]

    def forget_touched(self) -> None:
        """Begin a new list of touched rows; their flags were cleared by `copy`."""
        self.state[hs.TOUCHED_ROWS] = 0

    def copy(self, ids: NDArray[np.uint32], *, keep: int = 0, clear: int = 0, compact: bool = True) -> Rows:
        """Copies of rows.

        Args:
            ids: row ids. keep: flags to keep in the copies. clear: flags to clear in the table.
            compact: copy long values too, so that the copies do not depend on the table.
        """
        words = np.empty((len(ids), self.layout.width), np.uint64)
        extract.gather(self.state, ids, words, keep, clear)
        if not compact:
            return Rows(words, self.heap.data)
        return Rows(words, self._own_heap(words))

    def _own_heap(self, words: Words) -> Bytes:
        if not len(self._blobs):
            return np.empty(0, np.uint8)
        stride = words.shape[1]
        size = long_bytes(address(words), len(words), stride, self._blobs)
        heap = np.empty(size, np.uint8)
        used = relocate(address(words), len(words), stride, self._blobs, address(self.heap.data), heap, 0)
        return heap[:used]

    def walk(self, size: int) -> Iterator[NDArray[np.uint32]]:
        """Row ids in hash order, about `size` at a time. The table may not change meanwhile."""
        self.settle_index()
        slot = 0
        while slot >= 0:
            ids = np.empty(size, np.uint32)
            found = walk(self.state, slot, ids)
            slot = int(self.state[hs.WALK])
            if found:
                yield ids[:found]

    def close(self) -> None:
        """Give all memory back."""
        for mapping in (self._slab, self._free, self._touched, self._entries, self._next):
            mapping.close()
        self.heap.close()
