"""Rows that expire: filing those that do soon, and picking those that have.

A row's time of expiry, in milliseconds, is a word of its values; its stamp repeats it, shifted so that it is positive.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import numpy as np

from millpond.kernels.compiled import helper, kernel
from millpond.kernels.hot_table.index import fingerprint, seek
from millpond.kernels.hot_table.state import (
    EXPIRY,
    FILED,
    FLAGS,
    FRESH,
    HIGH,
    LAST,
    SLAB,
    STAMP_SHIFT,
    STRIDE,
    TOMBSTONE,
)
from millpond.kernels.pointers import prefetch, put_word, step, word

STAMP_ZERO = 1 << 46
"""The stamp of the time 0."""
STAMP_END = (1 << 48) - 1
_AHEAD = 24
_MOST = np.int64(0x7FFFFFFFFFFFFFFF)


@helper
def stamp_of(time):
    """The stamp of a time of expiry in milliseconds."""
    return max(1, min(STAMP_END, max(time, -STAMP_ZERO) + STAMP_ZERO)) if time < STAMP_END else STAMP_END


@kernel("int64(int64[::1], int64[::1], int64, uint32[::1], int64)")
def file(state, rows, horizon, filed, count):
    """Stamp rows with the time at which they expire, and file those that do so soon.

    Args:
        state: the table. rows: row ids, whose times of expiry are written.
        horizon: the last time of expiry with which a row is filed.
        filed, count: the ids of filed rows, and how many there are; large enough for all of `rows` to be added.

    Returns:
        How many rows are filed now.
    """
    for i in range(len(rows)):
        if i + _AHEAD < len(rows):
            prefetch(np.uint64(state[SLAB]), rows[i + _AHEAD] * state[STRIDE])
        at = step(state[SLAB], rows[i] * state[STRIDE])
        time = np.int64(word(at, state[EXPIRY]))
        flags = word(at, 1) & np.uint64(FLAGS)
        if time <= horizon and flags & np.uint64(FILED) == np.uint64(0):
            flags |= np.uint64(FILED)
            filed[count] = np.uint32(rows[i])
            count += 1
        put_word(at, 1, np.uint64(stamp_of(time)) << np.uint64(STAMP_SHIFT) | flags)
    return count


@kernel("int64(int64[::1], int64, int64[::1])")
def sample_times(state, step_rows, times):
    """Fill `times` with the times of expiry of every so many rows; returns how many were found."""
    found = 0
    row = np.int64(0)
    while row < state[HIGH] and found < len(times):
        at = step(state[SLAB], row * state[STRIDE])
        meta = word(at, 1)
        if meta != np.uint64(0) and meta & np.uint64(TOMBSTONE | FRESH) == np.uint64(0):
            times[found] = np.int64(word(at, state[EXPIRY]))
            found += 1
        row += step_rows
    return found


@kernel("int64(int64[::1], int64, uint32[::1])")
def file_all(state, horizon, filed):
    """File all rows that expire up to a horizon and no others; returns how many."""
    count = 0
    for row in range(state[HIGH]):
        at = step(state[SLAB], row * state[STRIDE])
        meta = word(at, 1)
        if meta == np.uint64(0):
            continue
        soon = meta & np.uint64(TOMBSTONE | FRESH) == np.uint64(0) and np.int64(word(at, state[EXPIRY])) <= horizon
        if soon:
            filed[count] = np.uint32(row)
            count += 1
        flags = np.uint64(FILED) if soon else np.uint64(0)
        put_word(at, 1, (meta & ~np.uint64(FILED)) | flags)
    return count


@kernel("int64(int64[::1], int64, int64, uint32[::1], int64[::1], int64[::1])")
def take_due(state, limit, horizon, filed, due, figures):
    """Take the rows that have expired off the file, and those that are not to be filed any more.

    Args:
        state: the table.
        limit: rows expire up to this time. horizon: as for `file`.
        filed: the ids of filed rows; shortened in place.
        due: filled with the ids of rows that have expired; as long as `filed`.
        figures: filled with how many stay filed, and the time at which the next of them expires.

    Returns:
        How many have expired.
    """
    kept = 0
    found = 0
    following = _MOST
    for i in range(len(filed)):
        if i + _AHEAD < len(filed):
            prefetch(np.uint64(state[SLAB]), np.int64(filed[i + _AHEAD]) * state[STRIDE])
        row = np.int64(filed[i])
        at = step(state[SLAB], row * state[STRIDE])
        meta = word(at, 1)
        if meta & np.uint64(FILED) == np.uint64(0):
            continue  # the row that was filed has gone, or stands in the list once more
        time = np.int64(word(at, state[EXPIRY]))
        if limit < time <= horizon:
            filed[kept] = np.uint32(row)
            kept += 1
            following = min(following, time)
            continue
        put_word(at, 1, meta & ~np.uint64(FILED))
        if time <= limit:
            due[found] = row
            found += 1
    figures[0] = kept
    figures[1] = following
    return found


@kernel("void(int64[::1], uint8[::1], uint64, int64, uint64, int64[::1])")
def find(state, references, keys, stride, key_heap, rows):
    """Find the rows of keys without making any.

    Args:
        state, references: the table.
        keys, stride, key_heap: address of the first key row, words from one to the next, address of their heap.
        rows: filled with row ids, −1 for a key that is not in the table.
    """
    for i in range(len(rows)):
        key = step(keys, i * stride * 8)
        mark = fingerprint(state, word(key, 0))
        rows[i] = -1
        if mark <= np.uint64(state[LAST]):
            _, _, row = seek(state, references, mark, key, key_heap)
            rows[i] = row
