"""Session windows: cut a batch's rows into pieces of sessions, and merge those with stored sessions.

Times are in microseconds. Sessions merge if one starts where the other ends.
"""

# mypy: disable-error-code="untyped-decorator,assignment,return-value,no-untyped-def,no-untyped-call"

from __future__ import annotations

import numpy as np
from numba import types

from millpond.kernels.compiled import helper, inlined, kernel
from millpond.kernels.memory import I64, INTS, INTS_IN, U64
from millpond.kernels.pointers import advance, same_key
from millpond.key_groups import KEY_GROUP_BITS
from millpond.layout import NEVER

CLOSED = -(1 << 63)
"""End time of a session that was emitted and is to be removed."""

_GROUP_BITS = np.uint64(64 - KEY_GROUP_BITS)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_FEW = 32


@helper
def _row(words_at, stride, row):
    return advance(words_at, row * stride * 8)


@kernel(types.void(INTS, I64, I64, INTS_IN))
def _by_start(order, begin, stop, starts):
    """Sort rows `begin` to `stop` of an order by their start (stable)."""
    if stop - begin > _FEW:
        part = order[begin:stop].copy()
        places = np.argsort(starts[part], kind="mergesort")
        for i in range(len(part)):
            order[begin + i] = part[places[i]]
        return
    for i in range(begin + 1, stop):
        row = order[i]
        start = starts[row]
        j = i
        while j > begin and starts[order[j - 1]] > start:
            order[j] = order[j - 1]
            j -= 1
        order[j] = row


@kernel(
    "int64(int64[::1], int64, int64, uint64, int64, uint64, uint64, int64, int64, uint64, int64[::1])",
)
def _by_key(order, begin, stop, words_at, stride, heap, null_mask, key_start, key_stop, references, spare):
    """Move the rows that have the first row's key to the front, among rows of one hash (stable); return their end."""
    leader = _row(words_at, stride, order[begin])
    to = begin + 1
    others = 0
    for i in range(begin + 1, stop):
        row = order[i]
        if same_key(leader, heap, _row(words_at, stride, row), heap, null_mask, key_start, key_stop, references):
            order[to] = row
            to += 1
        else:
            spare[others] = row
            others += 1
    for i in range(others):
        order[to + i] = spare[i]
    return to


@kernel(
    types.void(
        *(types.uint64[::1], INTS, INTS_IN, INTS_IN, U64, I64, U64, U64, I64, I64, U64),
        *(INTS, INTS, INTS, INTS, INTS),
    ),
)
def arrange(
    hashes,
    order,
    starts,
    ends,
    words_at,
    stride,
    heap,
    null_mask,
    key_start,
    key_stop,
    references,
    piece_rows,
    piece_starts,
    piece_ends,
    key_pieces,
    counts,
):
    """Order rows by key and start, and cut them into pieces of sessions.

    Args:
        hashes: the rows' hashes, ascending.
        order: the rows in the order of `hashes`; sorted within each hash here.
        starts, ends: of each row.
        words_at, stride, heap, null_mask, key_start, key_stop, references: the rows' keys; layout as for `same_key`.
        piece_rows: filled with each piece's first position in `order`, and one more entry at the end.
        piece_starts, piece_ends: filled with the times of each piece.
        key_pieces: filled with the first piece of each key, and one more entry.
        counts: filled with the numbers of keys and of pieces.
    """
    n = len(order)
    keys = 0
    pieces = 0
    spare = np.empty(n, np.int64)
    begin = 0
    while begin < n:
        stop = begin + 1
        while stop < n and hashes[stop] == hashes[begin]:
            stop += 1
        if stop - begin > 1:
            _by_start(order, begin, stop, starts)
        while begin < stop:
            end_of_key = begin + 1
            if stop - begin > 1:
                end_of_key = _by_key(
                    order, begin, stop, words_at, stride, heap, null_mask, key_start, key_stop, references, spare
                )
            key_pieces[keys] = pieces
            keys += 1
            for i in range(begin, end_of_key):
                row = order[i]
                if i == begin or starts[row] > piece_ends[pieces - 1]:
                    piece_rows[pieces] = i
                    piece_starts[pieces] = starts[row]
                    piece_ends[pieces] = ends[row]
                    pieces += 1
                elif ends[row] > piece_ends[pieces - 1]:
                    piece_ends[pieces - 1] = ends[row]
            begin = end_of_key
    piece_rows[pieces] = n
    key_pieces[keys] = pieces
    counts[0] = keys
    counts[1] = pieces


@kernel(
    "void(uint64[:, ::1], int64[::1], int64[::1], int64, int64[::1], int64[::1], int64[::1], int64[::1], uint8[::1])",
)
def classify(words, rows, keys, offset, key_pieces, piece_starts, piece_ends, stored, simple):
    """Find the keys that have at most one session before and exactly one after the batch.

    Args:
        words: the table's rows.
        rows: ids of the rows with the first session of each key.
        keys: index of each of these keys.
        offset: word of a session's start; its end, time of expiry and the key's number of sessions follow.
        key_pieces, piece_starts, piece_ends: results of `arrange`.
        stored: filled, by key index, with the number of stored sessions.
        simple: filled, by key index, with whether the key has at most one stored session and the batch's rows form
            one piece that merges with it.
    """
    for i in range(len(rows)):
        row = rows[i]
        count = np.int64(words[row, offset + 3])
        piece = key_pieces[keys[i]]
        single = key_pieces[keys[i] + 1] - piece == 1
        meets = count == 0 or (
            piece_starts[piece] <= np.int64(words[row, offset + 1])
            and np.int64(words[row, offset]) <= piece_ends[piece]
        )
        stored[keys[i]] = count
        simple[keys[i]] = single and count <= 1 and meets


@inlined
def _put(words, row, offset, start, end):
    words[row, offset] = np.uint64(start)
    words[row, offset + 1] = np.uint64(end)
    words[row, offset + 2] = np.uint64(-((-end) // 1000))


@kernel("void(uint64[:, ::1], int64[::1], int64, int64[::1], int64[::1])")
def extend(words, rows, offset, starts, ends):
    """Store each piece as a session, or extend the stored session by it."""
    for i in range(len(rows)):
        row = rows[i]
        if words[row, offset + 3] == np.uint64(0):
            words[row, offset + 3] = np.uint64(1)
            _put(words, row, offset, starts[i], ends[i])
        else:
            start = min(starts[i], np.int64(words[row, offset]))
            _put(words, row, offset, start, max(ends[i], np.int64(words[row, offset + 1])))


@kernel("void(uint64[:, ::1], int64[::1], int64, int64[::1], int64[::1])")
def put_sessions(words, rows, offset, starts, ends):
    """Write the times of sessions."""
    for i in range(len(rows)):
        _put(words, rows[i], offset, starts[i], ends[i])


@kernel("int64(uint64[:, ::1], int64[::1], int64, int64, uint8[::1])")
def mark_closed(words, rows, offset, ordinal, alone):
    """Mark sessions as closed if their key has other sessions; `alone` is filled with whether it has none."""
    marked = 0
    for i in range(len(rows)):
        row = rows[i]
        alone[i] = words[row, ordinal] == np.uint64(0) and words[row, offset + 3] <= np.uint64(1)
        if alone[i] == 0:
            words[row, offset] = np.uint64(0)
            words[row, offset + 1] = np.uint64(CLOSED)
            words[row, offset + 2] = np.uint64(NEVER)
            marked += 1
    return marked


@kernel("void(uint64[:, ::1], int64[::1], int64[::1], int64, uint64[:, ::1])")
def number_rows(heads, which, ordinals, offset, out):
    """Make key rows of sessions from those of their keys' first sessions and an ordinal.

    The first session of a key has the key's hash. The hashes of the others are spread over the key's key group. The
    result is stored with the state, so the formula is part of the format.

    Args:
        heads: key rows with ordinal 0.
        which: index in `heads` for each row.
        ordinals: of each row.
        offset: word of the ordinal.
        out: filled with the rows.
    """
    low = (np.uint64(1) << _GROUP_BITS) - np.uint64(1)
    for i in range(len(which)):
        for w in range(heads.shape[1]):
            out[i, w] = heads[which[i], w]
        hash_ = out[i, 0]
        out[i, 0] = (hash_ & ~low) | ((hash_ + np.uint64(ordinals[i]) * _SPREAD) & low)
        out[i, offset] = np.uint64(ordinals[i])


@kernel("void(uint64[:, ::1], int64)")
def head_rows(keys, offset):
    """Convert key rows of sessions, in place, to those of their keys' first sessions; the inverse of `number_rows`."""
    low = (np.uint64(1) << _GROUP_BITS) - np.uint64(1)
    for i in range(keys.shape[0]):
        hash_ = keys[i, 0]
        keys[i, 0] = (hash_ & ~low) | ((hash_ - keys[i, offset] * _SPREAD) & low)
        keys[i, offset] = np.uint64(0)


@kernel(
    "int64(int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1],"
    " int64[::1], int64[::1], uint8[::1], int64[::1], uint8[::1], int64[::1])",
)
def merge_sessions(
    key_stored,
    stored_starts,
    stored_ends,
    key_pieces,
    piece_starts,
    piece_ends,
    out_keys,
    out_slots,
    out_starts,
    out_ends,
    of_stored,
    stays,
    of_piece,
    changed,
    sizes,
):
    """Merge the stored sessions of keys with the pieces of a batch.

    A key's n sessions have the ordinals 0 to n − 1, before and after, in no order of time. A merged session keeps the
    lowest ordinal of its stored parts, if that is below the new n.

    Args:
        key_stored: the first stored session of each key, and one more entry; sessions are in the order of their
            ordinals.
        stored_starts, stored_ends: their times; an end of `CLOSED` means that the session is removed.
        key_pieces, piece_starts, piece_ends: likewise for pieces, in the order of their starts.
        out_keys, out_slots, out_starts, out_ends: filled with the resulting sessions: key, ordinal, times.
        of_stored: filled with the resulting session of each stored one, −1 if it is removed.
        stays: filled with whether the resulting session keeps the ordinal of the stored one.
        of_piece: filled with the resulting session of each piece.
        changed: filled with whether each resulting session differs from the stored one with its ordinal.
        sizes: filled with the number of resulting sessions of each key.

    Returns:
        Number of resulting sessions.
    """
    total = 0
    most = 0
    for key in range(len(sizes)):
        most = max(most, key_stored[key + 1] - key_stored[key] + key_pieces[key + 1] - key_pieces[key])
    starts, order, lowest = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    taken = np.empty(most, np.uint8)
    for key in range(len(sizes)):
        stored_begin = key_stored[key]
        stored_count = key_stored[key + 1] - stored_begin
        piece_begin = key_pieces[key]
        items = stored_count + key_pieces[key + 1] - piece_begin
        starts[:stored_count] = stored_starts[stored_begin : stored_begin + stored_count]
        starts[stored_count:items] = piece_starts[piece_begin : piece_begin + items - stored_count]
        for item in range(items):
            order[item] = item
            lowest[item] = items
        _by_start(order, 0, items, starts)
        first = total
        for place in range(items):
            item = order[place]
            if item < stored_count:
                start, end = starts[item], stored_ends[stored_begin + item]
                stays[stored_begin + item] = 0
                if end == CLOSED:
                    of_stored[stored_begin + item] = -1
                    continue
            else:
                start, end = starts[item], piece_ends[piece_begin + item - stored_count]
            if total == first or start > out_ends[total - 1]:
                out_keys[total] = key
                out_starts[total] = start
                out_ends[total] = end
                changed[total] = 0
                total += 1
            elif end > out_ends[total - 1]:
                out_ends[total - 1] = end
            if item < stored_count:
                of_stored[stored_begin + item] = total - 1
                if lowest[total - 1 - first] < items:
                    changed[total - 1] = 1
                lowest[total - 1 - first] = min(lowest[total - 1 - first], item)
            else:
                of_piece[piece_begin + item - stored_count] = total - 1
                changed[total - 1] = 1
        size = total - first
        sizes[key] = size
        taken[:size] = 0
        for session in range(size):
            slot = lowest[session]
            out_slots[first + session] = -1
            if slot < size and slot < stored_count:
                out_slots[first + session] = slot
                stays[stored_begin + slot] = 1
                taken[slot] = 1
        free = 0
        for session in range(first, total):
            if out_slots[session] < 0:
                while taken[free] == 1:
                    free += 1
                taken[free] = 1
                out_slots[session] = free
                changed[session] = 1
    return total
