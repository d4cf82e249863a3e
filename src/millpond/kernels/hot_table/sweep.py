"""Scans of a whole hot table: choose and evict rows, and compact."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import numpy as np

from millpond.kernels.compiled import helper, kernel
from millpond.kernels.hot_table.arena import chunk_of, free_chunk
from millpond.kernels.hot_table.expiry import access_time_of
from millpond.kernels.hot_table.index import BITS, EMPTY, ROW_MASK
from millpond.kernels.hot_table.state import (
    ACCESS_TIME_SHIFT,
    COPIED,
    COUNT,
    DEAD,
    DIRTY,
    DIRTY_ROWS,
    ENTRIES,
    EXPIRING,
    EXPIRY,
    FLAGS,
    FREE,
    FRESH,
    HEAP,
    HEAP_TOP,
    LOST,
    SCALE,
    SLAB,
    SLOTS,
    STRIDE,
    TOMBSTONE,
    TOUCHED,
    WALK,
    WIDTH,
)
from millpond.kernels.pointers import advance, copy_bytes, prefetch, put_word, word
from millpond.layout import INLINE, LENGTH

_PREFETCH_DISTANCE = 24
_MIX = np.uint64(0x9E3779B97F4A7C15)
_TOUCHED_RANK = np.uint64(1 << 48)


@helper
def _rank(meta):
    """Return a row's eviction rank: its access time; rows touched in this batch or listed for expiry rank higher."""
    rank = meta >> np.uint64(ACCESS_TIME_SHIFT)
    if meta & np.uint64(TOUCHED | EXPIRING) != np.uint64(0):
        rank |= _TOUCHED_RANK
    return rank


@helper
def _free(state, free, at, row, meta):
    """Put the row at an address on the free list; its index entry has been removed."""
    put_word(at, 1, np.uint64(0))
    free[state[FREE]] = np.uint32(row)
    state[FREE] += 1
    state[COUNT] -= 1
    state[DEAD] -= np.int64(meta & np.uint64(TOMBSTONE))


@helper
def _prefetch_ahead(state, entries, slot):
    entry = word(entries, slot + _PREFETCH_DISTANCE)
    if entry != EMPTY:
        ahead = (np.int64(entry & ROW_MASK) - 1) * state[STRIDE]
        prefetch(np.uint64(state[SLAB]), ahead)
        prefetch(np.uint64(state[SLAB]), ahead + state[WIDTH] * 8 - 8)


@kernel("int64(int64[::1], int64, uint64[::1])")
def sample_ranks(state, step_slots, ranks):
    """Sample the ranks of rows in every `step_slots`-th slot into `ranks`; return the number of samples."""
    entries = np.uint64(state[ENTRIES])
    count = 0
    slot = np.int64(0)
    while slot < state[SLOTS] and count < len(ranks):
        entry = word(entries, slot)
        if entry != EMPTY:
            row = np.int64(entry & ROW_MASK) - 1
            ranks[count] = _rank(word(advance(state[SLAB], row * state[STRIDE]), 1))
            count += 1
        slot += step_slots
    return count


@kernel("int64(int64[::1], int64, int64, uint32[::1])")
def walk_flagged(state, slot, flag, rows):
    """Collect rows with a flag in hash order; see `index.walk`."""
    entries = np.uint64(state[ENTRIES])
    slots = state[SLOTS]
    count = 0
    while count < len(rows):
        _prefetch_ahead(state, entries, slot)
        entry = word(entries, slot)
        if entry != EMPTY:
            row = np.int64(entry & ROW_MASK) - 1
            if word(advance(state[SLAB], row * state[STRIDE]), 1) & np.uint64(flag) != np.uint64(0):
                rows[count] = np.uint32(row)
                count += 1
        elif slot >= slots:
            slot = np.int64(-1)
            break
        slot += 1
    state[WALK] = slot
    return count


@kernel("int64(int64[::1], int64[::1], int64[::1], uint32[::1], int64, uint64, uint64, uint64[:, ::1], uint8[::1])")
def evict(state, blobs, lists, free, slot, rank, share, out, heap):
    """Evict rows of low rank; copy the dirty ones out in hash order.

    Args:
        state, lists, free: the table's state array, free lists of the arena, stack of free rows.
        blobs: first words of the byte columns.
        slot: first slot; afterwards `state[WALK]` is the slot at which to continue (−1: end of the table).
        rank: rows below this rank are evicted.
        share: fraction (of 2³²) of the rows of exactly this rank that are evicted, chosen by hash.
        out, heap: filled with dirty rows and their long values; the scan stops before they overflow. `state[COPIED]`
            is set to the used bytes of `heap`.

    Returns:
        Number of rows copied out.
    """
    entries = np.uint64(state[ENTRIES])
    slots = state[SLOTS]
    scale = np.uint64(state[SCALE])
    width = state[WIDTH]
    target_slot = np.int64(0)
    copied = 0
    used = np.int64(0)
    stopping = False
    while True:
        _prefetch_ahead(state, entries, slot)
        entry = word(entries, slot)
        if entry == EMPTY:
            if slot >= slots:
                slot = np.int64(-1)
                break
            if stopping:  # only at a gap: entries behind a new gap would not be found
                break
            slot += 1
            continue
        row = np.int64(entry & ROW_MASK) - 1
        address = advance(state[SLAB], row * state[STRIDE])
        meta = word(address, 1)
        own = _rank(meta)
        evicted = own < rank or (own == rank and (word(address, 0) * _MIX) >> BITS < share)
        if evicted and not stopping and meta & np.uint64(DIRTY) != np.uint64(0):
            size = np.int64(0)
            for c in range(len(blobs)):
                length = word(address, blobs[c]) & LENGTH
                if length > INLINE:
                    size += np.int64(length)
            stopping = bool(copied == len(out) or used + size > len(heap))
        # Rebuild the index in place: kept entries move towards their home slots, in hash order.
        put_word(entries, slot, EMPTY)
        if not evicted or stopping:
            target_slot = max(target_slot, np.int64(((entry >> BITS) * scale) >> BITS))
            put_word(entries, target_slot, entry)
            target_slot += 1
            slot += 1
            continue
        dirty = meta & np.uint64(DIRTY) != np.uint64(0)
        if dirty:
            for w in range(width):
                out[copied, w] = word(address, w)
            stamp = meta & ~np.uint64(FLAGS)
            if state[EXPIRY] != 0:  # a lookup may have raised the access time beyond the time of expiry
                stamp = np.uint64(access_time_of(np.int64(word(address, state[EXPIRY])))) << np.uint64(
                    ACCESS_TIME_SHIFT
                )
            out[copied, 1] = stamp | (meta & np.uint64(FLAGS & ~(DIRTY | EXPIRING)))
        elif state[EXPIRY] != 0 and meta & np.uint64(TOMBSTONE | FRESH) == np.uint64(0):
            state[LOST] = min(state[LOST], access_time_of(np.int64(word(address, state[EXPIRY]))))
        for c in range(len(blobs)):
            length = np.int64(word(address, blobs[c]) & LENGTH)
            if np.uint64(length) > INLINE:
                chunk = np.int64(word(address, blobs[c] + 1))
                if dirty:
                    copy_bytes(advance(heap.ctypes.data, used), advance(state[HEAP], chunk), length)
                    out[copied, blobs[c] + 1] = np.uint64(used)
                    used += length
                free_chunk(state, lists, chunk, length)
        if dirty:
            copied += 1
            state[DIRTY_ROWS] -= 1
        _free(state, free, address, row, meta)
        slot += 1
    state[WALK] = slot
    state[COPIED] = used
    return copied


@kernel("void(int64[::1], int64[::1], int64[::1], uint32[::1], int64)")
def drop_dead(state, blobs, lists, free, flags):
    """Free tombstones, except those that have any of the given flags.

    Args:
        state, blobs, lists, free: the table, as for `evict`.
        flags: flags of tombstones to keep.
    """
    entries = np.uint64(state[ENTRIES])
    scale = np.uint64(state[SCALE])
    slot = np.int64(0)
    target_slot = np.int64(0)
    while True:
        _prefetch_ahead(state, entries, slot)
        entry = word(entries, slot)
        if entry == EMPTY:
            if slot >= state[SLOTS]:
                return
            slot += 1
            continue
        row = np.int64(entry & ROW_MASK) - 1
        address = advance(state[SLAB], row * state[STRIDE])
        meta = word(address, 1)
        # Rebuild the index in place: kept entries move towards their home slots, in hash order.
        put_word(entries, slot, EMPTY)
        slot += 1
        if meta & np.uint64(TOMBSTONE) == np.uint64(0) or meta & np.uint64(flags) != np.uint64(0):
            target_slot = max(target_slot, np.int64(((entry >> BITS) * scale) >> BITS))
            put_word(entries, target_slot, entry)
            target_slot += 1
            continue
        for c in range(len(blobs)):
            length = np.int64(word(address, blobs[c]) & LENGTH)
            if np.uint64(length) > INLINE:
                free_chunk(state, lists, np.int64(word(address, blobs[c] + 1)), length)
        if meta & np.uint64(DIRTY) != np.uint64(0):
            state[DIRTY_ROWS] -= 1
        _free(state, free, address, row, meta)


@kernel("void(int64[::1], uint32[::1], int64)")
def move_rows(state, free, high):
    """Move every row with id ≥ `high` to a free row below `high`; `free` holds exactly those."""
    entries = np.uint64(state[ENTRIES])
    slot = np.int64(0)
    while True:
        entry = word(entries, slot)
        if entry == EMPTY:
            if slot >= state[SLOTS]:
                return
        else:
            row = np.int64(entry & ROW_MASK) - 1
            if row >= high:
                state[FREE] -= 1
                target = np.int64(free[state[FREE]])
                old = advance(state[SLAB], row * state[STRIDE])
                copy_bytes(advance(state[SLAB], target * state[STRIDE]), old, state[WIDTH] * 8)
                put_word(entries, slot, (entry & ~ROW_MASK) | np.uint64(target + 1))
        slot += 1


@kernel("void(int64[::1], int64[::1])")
def move_values(state, blobs):
    """Copy all long values to the arena's end, from `state[HEAP_TOP]` on, and redirect the rows."""
    entries = np.uint64(state[ENTRIES])
    heap = np.uint64(state[HEAP])
    slot = np.int64(0)
    while True:
        _prefetch_ahead(state, entries, slot)
        entry = word(entries, slot)
        if entry == EMPTY:
            if slot >= state[SLOTS]:
                return
        else:
            address = advance(state[SLAB], (np.int64(entry & ROW_MASK) - 1) * state[STRIDE])
            for c in range(len(blobs)):
                length = np.int64(word(address, blobs[c]) & LENGTH)
                if np.uint64(length) > INLINE:
                    target = state[HEAP_TOP]
                    copy_bytes(advance(heap, target), advance(heap, np.int64(word(address, blobs[c] + 1))), length)
                    put_word(address, blobs[c] + 1, np.uint64(target))
                    state[HEAP_TOP] = target + chunk_of(length)[1]
        slot += 1
