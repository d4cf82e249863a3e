"""Copies of rows out of a hot table."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import numpy as np

from millpond.kernels.compiled import kernel
from millpond.kernels.hot_table.expiry import access_time_of
from millpond.kernels.hot_table.state import (
    ACCESS_TIME_SHIFT,
    EXPIRY,
    FLAGS,
    SLAB,
    STRIDE,
    WIDTH,
)
from millpond.kernels.pointers import advance, prefetch, put_word, word

_PREFETCH_DISTANCE = 48


@kernel("void(int64[::1], uint32[::1], uint64[:, ::1], int64, int64)")
def gather(state, ids, out, keep_flags, clear_flags):
    """Copy rows in the order of their ids; long values stay in the arena.

    Args:
        state: the table's state array.
        ids: row ids.
        out: filled with the rows.
        keep_flags: flags to keep in the copies.
        clear_flags: flags to clear in the table.
    """
    slab = np.uint64(state[SLAB])
    row_bytes = state[STRIDE]
    width = state[WIDTH]
    tail = width * 8 - 8
    count = len(ids)
    kept = np.uint64(keep_flags) | ~np.uint64(FLAGS)
    cleared = ~np.uint64(clear_flags)
    for i in range(count):
        if i + _PREFETCH_DISTANCE < count:
            ahead = np.int64(ids[i + _PREFETCH_DISTANCE]) * row_bytes
            prefetch(slab, ahead)
            prefetch(slab, ahead + tail)
        address = advance(slab, np.int64(ids[i]) * row_bytes)
        for w in range(width):
            out[i, w] = word(address, w)
        meta = out[i, 1]
        if clear_flags != 0:
            put_word(address, 1, meta & cleared)
        if state[EXPIRY] != 0:  # a lookup may have raised the access time beyond the time of expiry
            stamp = np.uint64(access_time_of(np.int64(word(address, state[EXPIRY])))) << np.uint64(ACCESS_TIME_SHIFT)
            meta = stamp | (meta & np.uint64(FLAGS))
        out[i, 1] = meta & kept
