"""Passing over a whole hot table: what to evict, evicting, moving rows together."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import numpy as np

from millpond.kernels.compiled import helper, kernel
from millpond.kernels.hot_table.arena import chunk_of, give_back
from millpond.kernels.hot_table.expiry import stamp_of
from millpond.kernels.hot_table.index import BITS, EMPTY, ROW_MASK
from millpond.kernels.hot_table.state import (
    COPIED,
    COUNT,
    DEAD,
    DIRTY,
    DIRTY_ROWS,
    ENTRIES,
    EXPIRY,
    FILED,
    FLAGS,
    FREE,
    FRESH,
    HEAP,
    HEAP_TOP,
    LOST,
    SCALE,
    SLAB,
    SLOTS,
    STAMP_SHIFT,
    STRIDE,
    TOMBSTONE,
    TOUCHED,
    WALK,
    WIDTH,
)
from millpond.kernels.pointers import copy_bytes, prefetch, put_word, step, word
from millpond.layout import INLINE, LENGTH

_AHEAD = 24
_MIX = np.uint64(0x9E3779B97F4A7C15)
_TOUCHED_RANK = np.uint64(1 << 48)


@helper
def _rank(meta):
    """Rows of low rank are evicted first: by stamp, those changed in this batch or about to expire last."""
    rank = meta >> np.uint64(STAMP_SHIFT)
    if meta & np.uint64(TOUCHED | FILED) != np.uint64(0):
        rank |= _TOUCHED_RANK
    return rank


@helper
def _free(state, free, at, row, meta):
    """Let the row at an address be used again; its entry is gone from the index."""
    put_word(at, 1, np.uint64(0))
    free[state[FREE]] = np.uint32(row)
    state[FREE] += 1
    state[COUNT] -= 1
    state[DEAD] -= np.int64(meta & np.uint64(TOMBSTONE))


@helper
def _prefetch_ahead(state, entries, slot):
    entry = word(entries, slot + _AHEAD)
    if entry != EMPTY:
        ahead = (np.int64(entry & ROW_MASK) - 1) * state[STRIDE]
        prefetch(np.uint64(state[SLAB]), ahead)
        prefetch(np.uint64(state[SLAB]), ahead + state[WIDTH] * 8 - 8)


@kernel("int64(int64[::1], int64, uint64[::1])")
def sample_ranks(state, step_slots, ranks):
    """Fill `ranks` with those of the rows in every so many slots; returns how many were found."""
    entries = np.uint64(state[ENTRIES])
    found = 0
    slot = np.int64(0)
    while slot < state[SLOTS] and found < len(ranks):
        entry = word(entries, slot)
        if entry != EMPTY:
            row = np.int64(entry & ROW_MASK) - 1
            ranks[found] = _rank(word(step(state[SLAB], row * state[STRIDE]), 1))
            found += 1
        slot += step_slots
    return found


@kernel("int64(int64[::1], int64, int64, uint32[::1])")
def walk_flagged(state, slot, flag, rows):
    """As `walk`, but collects only rows that have a flag."""
    entries = np.uint64(state[ENTRIES])
    slots = state[SLOTS]
    found = 0
    while found < len(rows):
        _prefetch_ahead(state, entries, slot)
        entry = word(entries, slot)
        if entry != EMPTY:
            row = np.int64(entry & ROW_MASK) - 1
            if word(step(state[SLAB], row * state[STRIDE]), 1) & np.uint64(flag) != np.uint64(0):
                rows[found] = np.uint32(row)
                found += 1
        elif slot >= slots:
            slot = np.int64(-1)
            break
        slot += 1
    state[WALK] = slot
    return found


@kernel("int64(int64[::1], int64[::1], int64[::1], uint32[::1], int64, uint64, uint64, uint64[:, ::1], uint8[::1])")
def evict(state, blobs, lists, free, slot, rank, share, out, heap):
    """Remove rows of low rank, copying the dirty ones out in hash order.

    Args:
        state, lists, free: the table. blobs: first words of the byte columns.
        slot: where to begin; the walk's end stands in `state[WALK]` afterwards (-1: the table's end).
        rank, share: rows below this rank go, and this share (of 2³²) of those that have it.
        out, heap: filled with dirty rows and their long values; the walk ends before they overflow. `state[COPIED]`
            tells how many bytes of `heap` were used.

    Returns:
        The number of rows copied out.
    """
    entries = np.uint64(state[ENTRIES])
    slots = state[SLOTS]
    scale = np.uint64(state[SCALE])
    width = state[WIDTH]
    to = np.int64(0)
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
            if stopping:  # only here: entries behind a gap would not be found any more
                break
            slot += 1
            continue
        row = np.int64(entry & ROW_MASK) - 1
        at = step(state[SLAB], row * state[STRIDE])
        meta = word(at, 1)
        own = _rank(meta)
        goes = own < rank or (own == rank and (word(at, 0) * _MIX) >> BITS < share)
        if goes and not stopping and meta & np.uint64(DIRTY) != np.uint64(0):
            size = np.int64(0)
            for c in range(len(blobs)):
                length = word(at, blobs[c]) & LENGTH
                if length > INLINE:
                    size += np.int64(length)
            stopping = bool(copied == len(out) or used + size > len(heap))
        put_word(entries, slot, EMPTY)
        if not goes or stopping:
            to = max(to, np.int64(((entry >> BITS) * scale) >> BITS))
            put_word(entries, to, entry)
            to += 1
            slot += 1
            continue
        dirty = meta & np.uint64(DIRTY) != np.uint64(0)
        if dirty:
            for w in range(width):
                out[copied, w] = word(at, w)
            stamp = meta & ~np.uint64(FLAGS)
            if state[EXPIRY] != 0:  # looking for a row may have moved its stamp beyond the time at which it expires
                stamp = np.uint64(stamp_of(np.int64(word(at, state[EXPIRY])))) << np.uint64(STAMP_SHIFT)
            out[copied, 1] = stamp | (meta & np.uint64(FLAGS & ~(DIRTY | FILED)))
        elif state[EXPIRY] != 0 and meta & np.uint64(TOMBSTONE | FRESH) == np.uint64(0):
            state[LOST] = min(state[LOST], stamp_of(np.int64(word(at, state[EXPIRY]))))
        for c in range(len(blobs)):
            length = np.int64(word(at, blobs[c]) & LENGTH)
            if np.uint64(length) > INLINE:
                chunk = np.int64(word(at, blobs[c] + 1))
                if dirty:
                    copy_bytes(step(heap.ctypes.data, used), step(state[HEAP], chunk), length)
                    out[copied, blobs[c] + 1] = np.uint64(used)
                    used += length
                give_back(state, lists, chunk, length)
        if dirty:
            copied += 1
            state[DIRTY_ROWS] -= 1
        _free(state, free, at, row, meta)
        slot += 1
    state[WALK] = slot
    state[COPIED] = used
    return copied


@kernel("void(int64[::1], int64[::1], int64[::1], uint32[::1], int64)")
def drop_dead(state, blobs, lists, free, flags):
    """Free the rows of tombstones, but for those that have any of some flags.

    Args:
        state, blobs, lists, free: the table, as for `evict`.
        flags: of tombstones that stay.
    """
    entries = np.uint64(state[ENTRIES])
    scale = np.uint64(state[SCALE])
    slot = np.int64(0)
    to = np.int64(0)
    while True:
        _prefetch_ahead(state, entries, slot)
        entry = word(entries, slot)
        if entry == EMPTY:
            if slot >= state[SLOTS]:
                return
            slot += 1
            continue
        row = np.int64(entry & ROW_MASK) - 1
        at = step(state[SLAB], row * state[STRIDE])
        meta = word(at, 1)
        put_word(entries, slot, EMPTY)
        slot += 1
        if meta & np.uint64(TOMBSTONE) == np.uint64(0) or meta & np.uint64(flags) != np.uint64(0):
            to = max(to, np.int64(((entry >> BITS) * scale) >> BITS))
            put_word(entries, to, entry)
            to += 1
            continue
        for c in range(len(blobs)):
            length = np.int64(word(at, blobs[c]) & LENGTH)
            if np.uint64(length) > INLINE:
                give_back(state, lists, np.int64(word(at, blobs[c] + 1)), length)
        if meta & np.uint64(DIRTY) != np.uint64(0):
            state[DIRTY_ROWS] -= 1
        _free(state, free, at, row, meta)


@kernel("void(int64[::1], uint32[::1], int64)")
def move_rows(state, free, high):
    """Move every row from id `high` on to a free row below; `free` holds just these."""
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
                old = step(state[SLAB], row * state[STRIDE])
                copy_bytes(step(state[SLAB], target * state[STRIDE]), old, state[WIDTH] * 8)
                put_word(entries, slot, (entry & ~ROW_MASK) | np.uint64(target + 1))
        slot += 1


@kernel("void(int64[::1], int64[::1])")
def move_values(state, blobs):
    """Copy every long value to the arena's end, from `state[HEAP_TOP]` on, and make the rows point there."""
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
            at = step(state[SLAB], (np.int64(entry & ROW_MASK) - 1) * state[STRIDE])
            for c in range(len(blobs)):
                length = np.int64(word(at, blobs[c]) & LENGTH)
                if np.uint64(length) > INLINE:
                    to = state[HEAP_TOP]
                    copy_bytes(step(heap, to), step(heap, np.int64(word(at, blobs[c] + 1))), length)
                    put_word(at, blobs[c] + 1, np.uint64(to))
                    state[HEAP_TOP] = to + chunk_of(length)[1]
        slot += 1
