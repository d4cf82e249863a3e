"""Upsert into a hot table, a block of keys at a time.

Each block is processed in three passes: prefetch the index lines; read them and prefetch the rows; compare keys.
Where keys may be long, a further pass prefetches those before the comparison. So the cache misses of a block overlap
instead of following each other.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import numpy as np

from millpond.kernels.compiled import helper, kernel
from millpond.kernels.hot_table.arena import free_chunk, store_bytes
from millpond.kernels.hot_table.index import BITS, EMPTY, ROW_MASK, fingerprint, holds, home, place, seek
from millpond.kernels.hot_table.state import (
    ACCESS_TIME_SHIFT,
    COUNT,
    DEAD,
    DIRTY,
    DIRTY_ROWS,
    FLAGS,
    FREE,
    FRESH,
    HEAP,
    HIGH,
    INITIAL,
    KEY_NULLS,
    KEY_START,
    KEY_STOP,
    LAST,
    SLAB,
    STRIDE,
    TOMBSTONE,
    TOUCHED,
    TOUCHED_ROWS,
    WIDTH,
)
from millpond.kernels.pointers import advance, prefetch, put_word, word
from millpond.layout import INLINE, LENGTH

BLOCK = 2048
"""Keys per block."""

TOUCH_ALL = 0
TOUCH_CREATED = 1
TOUCH_NONE = 2
"""Do not touch: rows are created in advance, flagged so that the next upsert of their key sees them as new."""
_PREFETCH_DISTANCE = 12


@helper
def _new_row(state, free):
    if state[FREE] > 0:
        state[FREE] -= 1
        return np.int64(free[state[FREE]])
    row = state[HIGH]
    state[HIGH] = row + 1
    return row


@helper
def _create(state, references, lists, free, key, key_heap, stamp):
    """Create a row for a key from the table's initial row."""
    row = _new_row(state, free)
    address = advance(state[SLAB], row * state[STRIDE])
    for w in range(state[WIDTH]):
        put_word(address, w, word(state[INITIAL], w))
    put_word(address, 0, word(key, 0))
    put_word(address, 1, np.uint64(stamp) << np.uint64(ACCESS_TIME_SHIFT))
    put_word(address, 2, word(address, 2) | (word(key, 2) & np.uint64(state[KEY_NULLS])))
    for w in range(state[KEY_START], state[KEY_STOP]):
        value = word(key, w)
        if references[w] != 0 and (word(key, w - 1) & LENGTH) > INLINE:
            value = store_bytes(state, lists, advance(key_heap, np.int64(value)), np.int64(word(key, w - 1) & LENGTH))
        put_word(address, w, value)
    return row


@helper
def _guess(mark, at):
    """Guess a key's row: the first entry with its fingerprint from an address on, or −1; it may be another key's.

    Nearly always it is one of the first four entries, which are compared without a branch that could be mispredicted.
    """
    first = word(at, 0)
    second = word(at, 1)
    third = word(at, 2)
    fourth = word(at, 3)
    entry = fourth if fourth >> BITS == mark else EMPTY
    entry = third if third >> BITS == mark else entry
    entry = second if second >> BITS == mark else entry
    entry = first if first >> BITS == mark else entry
    if entry == EMPTY and fourth != EMPTY and fourth >> BITS < mark:
        slot = 4
        entry = word(at, slot)
        while entry != EMPTY and entry >> BITS < mark:
            slot += 1
            entry = word(at, slot)
        entry = entry if entry >> BITS == mark else EMPTY
    return np.int64(entry & ROW_MASK) - 1


@helper
def _prefetch_key(state, references, at):
    """Prefetch the long key values of the row at an address."""
    for w in range(state[KEY_START], state[KEY_STOP]):
        if references[w] != 0:
            size = np.int64(word(at, w - 1) & LENGTH)
            if size > INLINE:
                offset = np.int64(word(at, w))
                prefetch(np.uint64(state[HEAP]), offset)
                prefetch(np.uint64(state[HEAP]), offset + size - 1)


@helper
def _touch(state, touched, at, row, meta):
    """Write a row's META with the flags of a change."""
    if meta & np.uint64(TOUCHED) == np.uint64(0):
        touched[state[TOUCHED_ROWS]] = np.uint32(row)
        state[TOUCHED_ROWS] += 1
        if meta & np.uint64(DIRTY) == np.uint64(0):
            state[DIRTY_ROWS] += 1
    put_word(at, 1, meta | np.uint64(TOUCHED | DIRTY))


@helper
def _refresh(meta, stamp):
    """Return META with its access time raised to `stamp`."""
    flags = meta & np.uint64(FLAGS)
    return max(meta ^ flags, np.uint64(stamp) << np.uint64(ACCESS_TIME_SHIFT)) | flags


@kernel(
    "int64(int64[::1], uint8[::1], int64[::1], uint32[::1], uint32[::1], uint64, int64, int64, uint64, uint64, int64,"
    " int64, int64, int64[::1], boolean[::1], int64[::1], uint64[::1])"
)
def upsert(
    state,
    references,
    lists,
    free,
    touched,
    keys,
    stride,
    count,
    key_heap,
    stamps,
    stamp,
    touch,
    defer,
    rows,
    created,
    pending,
    scratch,
):
    """Find the row of each key, and create rows for absent keys.

    Args:
        state, references, lists, free, touched: the table: state array, row words that may point into the heap, free
            lists of the arena, stack of free rows, list of touched rows.
        keys, stride, count, key_heap: address of the first key row, words from one to the next, number of keys,
            address of their heap.
        stamps: address of an access time per key, or 0.
        stamp: access time of all keys if `stamps` is 0.
        touch: `TOUCH_ALL`, `TOUCH_CREATED` or `TOUCH_NONE`.
        defer: 1 if created rows are touched or flagged later, by `settle` (no effect with `TOUCH_ALL`).
        rows: filled with row ids.
        created: filled with whether the key was absent.
        pending: filled with the positions of absent keys.
        scratch: two words for each key of a block.

    Returns:
        Number of absent keys; or −1 − p if the hash of the key at position *p* is outside the table's range.
    """
    absent = 0
    slab = np.uint64(state[SLAB])
    row_bytes = state[STRIDE]
    tail = state[WIDTH] * 8 - 8
    last = np.uint64(state[LAST])
    touched_rows = state[TOUCHED_ROWS]
    dirty_rows = state[DIRTY_ROWS]
    long_keys = False
    for w in range(state[KEY_START], state[KEY_STOP]):
        long_keys = long_keys or references[w] != 0
    for start in range(0, count, BLOCK):
        block = min(BLOCK, count - start)
        for i in range(block):
            mark = fingerprint(state, word(keys, (start + i) * stride))
            if mark > last:
                state[TOUCHED_ROWS] = touched_rows
                state[DIRTY_ROWS] = dirty_rows
                return -1 - (start + i)
            entries, slot = home(state, mark)
            prefetch(entries, slot * 8)
            prefetch(entries, slot * 8 + 24)
            scratch[2 * i] = mark
            scratch[2 * i + 1] = advance(entries, slot * 8)
        for i in range(block):
            row = _guess(scratch[2 * i], scratch[2 * i + 1])
            prefetch(slab, row * row_bytes)
            prefetch(slab, row * row_bytes + tail)
            scratch[2 * i + 1] = np.uint64(row)
        if long_keys:
            for i in range(block):
                row = np.int64(scratch[2 * i + 1])
                if row >= 0:
                    _prefetch_key(state, references, advance(slab, row * row_bytes))
        for i in range(block):
            position = start + i
            key = advance(keys, position * stride * 8)
            when = stamp if stamps == np.uint64(0) else np.int64(word(stamps, position))
            row = np.int64(scratch[2 * i + 1])
            address = advance(slab, row * row_bytes)
            fresh = False
            if row < 0 or word(address, 0) != word(key, 0) or not holds(state, references, address, key, key_heap):
                mark = scratch[2 * i]
                entries, slot, row = seek(state, references, mark, key, key_heap)
                if row < 0:
                    row = _create(state, references, lists, free, key, key_heap, when)
                    place(state, entries, slot, mark, row)
                    state[COUNT] += 1
                    pending[absent] = position
                    absent += 1
                    fresh = True
                address = advance(slab, row * row_bytes)
            meta = _refresh(word(address, 1), when)
            prepared = meta & np.uint64(FRESH) != np.uint64(0) and touch != TOUCH_NONE
            if prepared:
                meta ^= np.uint64(FRESH)
            rows[position] = row
            if meta & np.uint64(TOMBSTONE) != np.uint64(0) and touch != TOUCH_NONE:
                meta ^= np.uint64(TOMBSTONE)
                state[DEAD] -= 1
                prepared = True
            created[position] = fresh or prepared
            if touch == TOUCH_ALL or prepared or (fresh and defer == 0):
                # Branch-free append: the entry is overwritten if the row was touched before.
                touched[touched_rows] = np.uint32(row)
                touched_rows += np.int64(meta & np.uint64(TOUCHED) == np.uint64(0))
                dirty_rows += np.int64(meta & np.uint64(DIRTY) == np.uint64(0))
                meta |= np.uint64(TOUCHED | DIRTY)
            put_word(address, 1, meta)
    state[TOUCHED_ROWS] = touched_rows
    state[DIRTY_ROWS] = dirty_rows
    return absent


@helper
def _copy_values(state, references, lists, at, source, heap):
    """Write the null bits and values of a row from another row of the same key."""
    for w in range(2, state[KEY_START]):
        put_word(at, w, word(source, w))
    for w in range(state[KEY_STOP], state[WIDTH]):
        value = word(source, w)
        if references[w] != 0 and (word(source, w - 1) & LENGTH) > INLINE:
            value = store_bytes(state, lists, advance(heap, np.int64(value)), np.int64(word(source, w - 1) & LENGTH))
        put_word(at, w, value)


@helper
def drop_values(state, references, lists, at, start):
    """Free the long values in a row's words from `start` on."""
    for w in range(start, state[WIDTH]):
        if references[w] != 0:
            size = word(at, w - 1) & LENGTH
            if size > INLINE:
                free_chunk(state, lists, np.int64(word(at, w)), np.int64(size))


@kernel(
    "void(int64[::1], uint8[::1], int64[::1], uint32[::1], int64[::1], boolean[::1], int64[::1], int64[::1],"
    " uint64[::1], uint64[::1], int64)"
)
def settle(state, references, lists, touched, rows, created, pending, found, sources, heaps, touch):
    """Complete the rows that an `upsert` created: keys that were found in runs take their values from there.

    Args:
        state, references, lists, touched: the table, as for `upsert`.
        rows, created, pending: results of `upsert` (`pending` cut to size).
        found: ascending indices into `pending` of the keys that were found.
        sources, heaps: addresses of the found rows and of their heaps, in the order of `found`.
        touch: as for `upsert`.
    """
    lines = (state[WIDTH] * 8 + 63) // 64
    f = 0
    for p in range(len(pending)):
        position = pending[p]
        row = rows[position]
        address = advance(state[SLAB], row * state[STRIDE])
        if f < len(found) and found[f] == p:
            if f + _PREFETCH_DISTANCE < len(found):
                for line in range(lines):
                    prefetch(sources[f + _PREFETCH_DISTANCE], line * 64)
            created[position] = False
            _copy_values(state, references, lists, address, sources[f], heaps[f])
            f += 1
        elif touch == TOUCH_CREATED:
            _touch(state, touched, address, row, word(address, 1))
        elif touch == TOUCH_NONE:
            put_word(address, 1, word(address, 1) | np.uint64(FRESH))


@kernel("void(int64[::1], uint8[::1], int64[::1], int64[::1], uint64, int64, uint64)")
def overwrite(state, references, lists, rows, sources, stride, heap):
    """Replace all of the given rows except their keys by whole rows of the same keys; they become dirty.

    Args:
        state, references, lists: the table, as for `upsert`.
        rows: row ids.
        sources, stride, heap: address of the new rows, words from one to the next, address of their heap.
    """
    for i in range(len(rows)):
        address = advance(state[SLAB], rows[i] * state[STRIDE])
        source = advance(sources, i * stride * 8)
        meta = word(address, 1)
        if meta & np.uint64(DIRTY) == np.uint64(0):
            state[DIRTY_ROWS] += 1
        new = word(source, 1)
        state[DEAD] += np.int64(new & np.uint64(TOMBSTONE)) - np.int64(meta & np.uint64(TOMBSTONE))
        new &= ~np.uint64(FLAGS & ~TOMBSTONE)
        put_word(address, 1, new | (meta & np.uint64(TOUCHED)) | np.uint64(DIRTY))
        drop_values(state, references, lists, address, state[KEY_STOP])
        _copy_values(state, references, lists, address, source, heap)


@kernel("int64(int64[::1], uint8[::1], int64[::1], uint32[::1], int64[::1])")
def remove(state, references, lists, touched, rows):
    """Turn rows into touched tombstones with initial values.

    Args:
        state, references, lists, touched: the table, as for `upsert`.
        rows: row ids.

    Returns:
        Number of rows that were not tombstones before.
    """
    key_nulls = np.uint64(state[KEY_NULLS])
    removed = 0
    for i in range(len(rows)):
        address = advance(state[SLAB], rows[i] * state[STRIDE])
        meta = word(address, 1)
        if meta & np.uint64(TOMBSTONE) != np.uint64(0):
            continue
        drop_values(state, references, lists, address, state[KEY_STOP])
        put_word(address, 2, word(state[INITIAL], 2) | (word(address, 2) & key_nulls))
        for w in range(3, state[KEY_START]):
            put_word(address, w, word(state[INITIAL], w))
        for w in range(state[KEY_STOP], state[WIDTH]):
            put_word(address, w, word(state[INITIAL], w))
        _touch(state, touched, address, rows[i], (meta & ~np.uint64(FLAGS & ~(TOUCHED | DIRTY))) | np.uint64(TOMBSTONE))
        removed += 1
    state[DEAD] += removed
    return removed


@kernel("void(int64[::1], uint32[::1], int64[::1])")
def touch_rows(state, touched, rows):
    """Mark rows, given by ids, as changed by the batch."""
    for i in range(len(rows)):
        address = advance(state[SLAB], rows[i] * state[STRIDE])
        _touch(state, touched, address, rows[i], word(address, 1))


@kernel("int64(int64[::1], uint64[::1], int64[::1], uint8[::1])")
def raise_access_times(state, hashes, stamps, there):
    """Raise the access times of the rows with the given hashes.

    Args:
        state: the table's state array.
        hashes: of keys; all rows with one of these hashes are updated.
        stamps: access times; lower ones than a row's own have no effect.
        there: filled with whether the hash has a row.

    Returns:
        Number of hashes that have rows.
    """
    count = 0
    for i in range(len(hashes)):
        there[i] = 0
        mark = fingerprint(state, hashes[i])
        if mark > np.uint64(state[LAST]):
            continue
        entries, slot = home(state, mark)
        entry = word(entries, slot)
        while entry != EMPTY and (entry >> BITS) <= mark:
            address = advance(state[SLAB], (np.int64(entry & ROW_MASK) - 1) * state[STRIDE])
            if (entry >> BITS) == mark and word(address, 0) == hashes[i]:
                put_word(address, 1, _refresh(word(address, 1), stamps[i]))
                there[i] = 1
            slot += 1
            entry = word(entries, slot)
        count += there[i]
    return count
