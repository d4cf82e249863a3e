"""Expiry of rows: keep a list of rows that expire soon, and take expired rows from it.

A row's time of expiry, in milliseconds, is one of its value words. Its access time in the META word repeats it,
shifted to be positive.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import numpy as np

from millpond.kernels.compiled import helper, kernel
from millpond.kernels.hot_table.index import fingerprint, seek
from millpond.kernels.hot_table.state import (
    ACCESS_TIME_SHIFT,
    EXPIRING,
    EXPIRY,
    FLAGS,
    FRESH,
    HIGH,
    LAST,
    SLAB,
    STRIDE,
    TOMBSTONE,
)
from millpond.kernels.pointers import advance, prefetch, put_word, word

ACCESS_TIME_ZERO = 1 << 46
"""Access time in the META word for the time 0."""
ACCESS_TIME_END = (1 << 48) - 1
_PREFETCH_DISTANCE = 24
_MOST = np.int64(0x7FFFFFFFFFFFFFFF)


@helper
def access_time_of(time):
    """Convert a time of expiry in milliseconds to an access time."""
    return (
        max(1, min(ACCESS_TIME_END, max(time, -ACCESS_TIME_ZERO) + ACCESS_TIME_ZERO))
        if time < ACCESS_TIME_END
        else ACCESS_TIME_END
    )


@kernel("int64(int64[::1], int64[::1], int64, uint32[::1], int64)")
def list_expiring(state, rows, horizon, listed, count):
    """Write the expiry of rows to their META words, and list those that expire soon.

    Args:
        state: the table's state array.
        rows: row ids, with their times of expiry written.
        horizon: the last time of expiry of listed rows.
        listed: ids of listed rows; long enough for all of `rows` to be added.
        count: number of listed rows.

    Returns:
        New number of listed rows.
    """
    for i in range(len(rows)):
        if i + _PREFETCH_DISTANCE < len(rows):
            prefetch(np.uint64(state[SLAB]), rows[i + _PREFETCH_DISTANCE] * state[STRIDE])
        address = advance(state[SLAB], rows[i] * state[STRIDE])
        time = np.int64(word(address, state[EXPIRY]))
        flags = word(address, 1) & np.uint64(FLAGS)
        if time <= horizon and flags & np.uint64(EXPIRING) == np.uint64(0):
            flags |= np.uint64(EXPIRING)
            listed[count] = np.uint32(rows[i])
            count += 1
        put_word(address, 1, np.uint64(access_time_of(time)) << np.uint64(ACCESS_TIME_SHIFT) | flags)
    return count


@kernel("int64(int64[::1], int64, int64[::1])")
def sample_times(state, step_rows, times):
    """Sample the times of expiry of every `step_rows`-th row into `times`; return the number of samples."""
    count = 0
    row = np.int64(0)
    while row < state[HIGH] and count < len(times):
        address = advance(state[SLAB], row * state[STRIDE])
        meta = word(address, 1)
        if meta != np.uint64(0) and meta & np.uint64(TOMBSTONE | FRESH) == np.uint64(0):
            times[count] = np.int64(word(address, state[EXPIRY]))
            count += 1
        row += step_rows
    return count


@kernel("int64(int64[::1], int64, uint32[::1])")
def relist_expiring(state, horizon, listed):
    """List exactly the rows that expire up to `horizon`; return their number."""
    count = 0
    for row in range(state[HIGH]):
        address = advance(state[SLAB], row * state[STRIDE])
        meta = word(address, 1)
        if meta == np.uint64(0):
            continue
        soon = meta & np.uint64(TOMBSTONE | FRESH) == np.uint64(0) and np.int64(word(address, state[EXPIRY])) <= horizon
        if soon:
            listed[count] = np.uint32(row)
            count += 1
        flags = np.uint64(EXPIRING) if soon else np.uint64(0)
        put_word(address, 1, (meta & ~np.uint64(EXPIRING)) | flags)
    return count


@kernel("int64(int64[::1], int64, int64, uint32[::1], int64[::1], int64[::1])")
def take_due(state, limit, horizon, listed, due, figures):
    """Take expired rows, and rows that expire after the horizon, from the list.

    Args:
        state: the table's state array.
        limit: last time of expiry of expired rows.
        horizon: as for `list_expiring`.
        listed: ids of listed rows; shortened in place.
        due: filled with the ids of expired rows; as long as `listed`.
        figures: filled with the number of rows that stay listed, and the earliest time of expiry among them.

    Returns:
        Number of expired rows.
    """
    kept = 0
    expired = 0
    following = _MOST
    for i in range(len(listed)):
        if i + _PREFETCH_DISTANCE < len(listed):
            prefetch(np.uint64(state[SLAB]), np.int64(listed[i + _PREFETCH_DISTANCE]) * state[STRIDE])
        row = np.int64(listed[i])
        address = advance(state[SLAB], row * state[STRIDE])
        meta = word(address, 1)
        if meta & np.uint64(EXPIRING) == np.uint64(0):
            continue  # the listed row was removed, or is listed twice
        time = np.int64(word(address, state[EXPIRY]))
        if limit < time <= horizon:
            listed[kept] = np.uint32(row)
            kept += 1
            following = min(following, time)
            continue
        put_word(address, 1, meta & ~np.uint64(EXPIRING))
        if time <= limit:
            due[expired] = row
            expired += 1
    figures[0] = kept
    figures[1] = following
    return expired


@kernel("void(int64[::1], uint8[::1], uint64, int64, uint64, int64[::1])")
def find(state, references, keys, stride, key_heap, rows):
    """Find the rows of keys, without creating any.

    Args:
        state, references: the table's state array, and the row words that may point into the heap.
        keys, stride, key_heap: address of the first key row, words from one to the next, address of their heap.
        rows: filled with row ids, −1 for absent keys.
    """
    for i in range(len(rows)):
        key = advance(keys, i * stride * 8)
        mark = fingerprint(state, word(key, 0))
        rows[i] = -1
        if mark <= np.uint64(state[LAST]):
            _, _, row = seek(state, references, mark, key, key_heap)
            rows[i] = row
