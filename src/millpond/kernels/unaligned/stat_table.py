"""The Stat table of the unaligned append store (FlowKV §4.2): statistics of every open window, in memory.

It is an open-addressing hash table with linear probing. A window has a 64-bit id, computed from its key's hash and
its initial boundary.
"""

# mypy: disable-error-code="untyped-decorator,assignment,return-value,attr-defined"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import from_dtype, types
from numpy.typing import NDArray

from millpond.kernels.compiled import inlined, kernel
from millpond.kernels.memory import BYTES, HALF, I64, INTS, LOW_HALF, SHORTS, UINTS, WORDS
from millpond.kernels.pointers import advance, prefetch
from millpond.key_groups import KEY_GROUP_BITS

WINDOW = np.dtype(
    [
        ("id", np.uint64),  # 0: no window
        ("time", np.int64),  # estimated trigger time, ms
        ("rows", np.int32),  # number of rows in segments
        ("born", np.int32),  # entries of older segments belong to an earlier window with this id, which has been taken
        ("head", np.int32),  # first and last row in the write buffer, or -1
        ("tail", np.int32),
        ("chunk", np.int32),  # chunk of the prefetch buffer, or one of the constants below
        ("at", np.int32),  # first row in that chunk
    ]
)
NOWHERE = -1
LOADING = -2
"""Values of `chunk`: not in the prefetch buffer; being loaded into it (`at` is then its index in the request)."""

_GROUP = np.uint64(((1 << KEY_GROUP_BITS) - 1) << (64 - KEY_GROUP_BITS))
_BINS = 4096
_PREFETCH_DISTANCE = 8

Array = NDArray[Any]
_TABLE = types.Array(from_dtype(WINDOW), 1, "C")


@kernel(types.void(types.Array(types.uint64, 1, "A"), types.Array(types.uint64, 1, "A"), UINTS))
def window_ids(hashes: Array, windows: Array, out: Array) -> None:
    """Compute the ids of windows: key hash and initial boundary, mixed; never 0.

    The key group bits are those of the hash, so that an id is in the range of its key's partition.
    """
    for i in range(len(hashes)):
        x = (windows[i] + np.uint64(0x632BE59BD9B4E019)) * np.uint64(0xFF51AFD7ED558CCD)
        x ^= x >> np.uint64(33)
        x = (x * np.uint64(0xC4CEB9FE1A85EC53)) ^ hashes[i]
        x ^= x >> HALF
        x *= np.uint64(0xD6E8FEB86659FD93)
        x ^= x >> HALF
        x *= np.uint64(0xD6E8FEB86659FD93)
        x ^= x >> HALF
        out[i] = max((hashes[i] & _GROUP) | (x & ~_GROUP), np.uint64(1))


@inlined
def _slot(table: Array, id_: int) -> int:
    """Find the slot of a window, or the free slot for it."""
    mask = np.uint64(len(table) - 1)
    slot = id_ & mask
    while True:
        other = table[np.int64(slot)].id
        if other == id_ or other == np.uint64(0):
            return np.int64(slot)
        slot = (slot + np.uint64(1)) & mask


@kernel(I64(_TABLE, _TABLE))
def move(old: Array, new: Array) -> int:
    """Copy all records into a larger, empty table."""
    count = 0
    for i in range(len(old)):
        if old[i].id != np.uint64(0):
            new[_slot(new, old[i].id)] = old[i]
            count += 1
    return count


@kernel(I64(_TABLE, UINTS, INTS, I64, I64, SHORTS, SHORTS))
def append(table: Array, ids: Array, times: Array, first: int, born: int, following: Array, evicted: Array) -> int:
    """Add rows that were appended to the write buffer, from its row `first` on.

    Args:
        table: the table.
        ids, times: window and estimated trigger time of each row.
        first: first of the rows in the buffer.
        born: sequence number for new windows; entries of older segments do not belong to them.
        following: by row of the buffer, the next row of its window (−1: none).
        evicted: by chunk of the prefetch buffer, number of windows that left it; incremented.

    Returns:
        Number of new windows.
    """
    new = 0
    for i in range(len(ids)):
        if i + _PREFETCH_DISTANCE < len(ids):
            slot = np.int64(ids[i + _PREFETCH_DISTANCE] & np.uint64(len(table) - 1))
            prefetch(np.uint64(table.ctypes.data), slot * 40)  # bytes of a record
        slot = _slot(table, ids[i])
        row = np.int32(first + i)
        following[row] = -1
        if table[slot].id == np.uint64(0):
            new += 1
            table[slot].id = ids[i]
            table[slot].time = times[i]
            table[slot].rows = 0
            table[slot].born = born
            table[slot].head = row
            table[slot].tail = row
            table[slot].chunk = NOWHERE
            table[slot].at = 0
            continue
        table[slot].time = max(table[slot].time, times[i])
        if table[slot].tail >= 0:
            following[table[slot].tail] = row
        else:
            table[slot].head = row
        table[slot].tail = row
        if table[slot].chunk >= 0:  # the predicted trigger time was wrong: the window continues
            evicted[table[slot].chunk] += 1
            table[slot].chunk = NOWHERE
    return new


@kernel(types.void(_TABLE, UINTS, INTS, SHORTS))
def postpone(table: Array, ids: Array, times: Array, evicted: Array) -> None:
    """Raise the estimated trigger times of windows; `evicted` as for `append`."""
    for i in range(len(ids)):
        slot = _slot(table, ids[i])
        if table[slot].id != np.uint64(0) and table[slot].time < times[i]:
            table[slot].time = times[i]
            if table[slot].chunk >= 0:
                evicted[table[slot].chunk] += 1
                table[slot].chunk = NOWHERE


@kernel(I64(_TABLE, UINTS, UINTS, INTS, I64))
def add_entries(table: Array, ids: Array, places: Array, times: Array, seq: int) -> int:
    """Add the entries of a segment's index when a store is opened; return the number of new windows."""
    new = 0
    for i in range(len(ids)):
        slot = _slot(table, ids[i])
        if table[slot].id == np.uint64(0):
            new += 1
            table[slot].id = ids[i]
            table[slot].time = times[i]
            table[slot].rows = 0
            table[slot].born = seq
            table[slot].head = -1
            table[slot].tail = -1
            table[slot].chunk = NOWHERE
            table[slot].at = 0
        table[slot].time = max(table[slot].time, times[i])
        table[slot].rows += np.int32(places[i] & LOW_HALF)
    return new


@kernel(types.void(_TABLE, UINTS, _TABLE))
def copy_records(table: Array, ids: Array, out: Array) -> None:
    """Copy the records of windows; absent windows have the id 0."""
    for i in range(len(ids)):
        slot = _slot(table, ids[i])
        out[i] = table[slot]


@kernel(I64(_TABLE, UINTS, SHORTS))
def remove(table: Array, ids: Array, left: Array) -> int:
    """Remove windows; `left` is incremented like `evicted` in `append`. Return the number of removed windows."""
    mask = len(table) - 1
    count = 0
    for i in range(len(ids)):
        slot = _slot(table, ids[i])
        if table[slot].id == np.uint64(0):
            continue
        count += 1
        if table[slot].chunk >= 0:
            left[table[slot].chunk] += 1
        # Shift later records of the probe sequence back, so that no gap hides them.
        hole = slot
        scan = (slot + 1) & mask
        while table[scan].id != np.uint64(0):
            home = np.int64(table[scan].id & np.uint64(mask))
            if ((scan - home) & mask) >= ((scan - hole) & mask):
                table[hole] = table[scan]
                hole = scan
            scan = (scan + 1) & mask
        table[hole].id = np.uint64(0)
    return count


@kernel(I64(_TABLE, I64, I64, UINTS))
def nearest(table: Array, most: int, most_rows: int, out: Array) -> int:
    """Select the windows nearest to their trigger time that have rows in segments and none in the prefetch buffer.

    Ties are resolved by position in the table.

    Args:
        table: the table.
        most: largest number of windows.
        most_rows: largest total number of rows.
        out: filled with ids.

    Returns:
        Number of ids.
    """
    low = np.int64(1) << 62
    high = -low
    for i in range(len(table)):
        if table[i].id != np.uint64(0) and table[i].rows > 0 and table[i].chunk == NOWHERE:
            low = min(low, table[i].time)
            high = max(high, table[i].time)
    if high < low or most <= 0:
        return 0
    # Find the cut-off time by repeated histograms: windows before `low` are taken; then as many of the bin at `low`
    # as fit.
    counts = np.empty(_BINS, np.int64)
    rows = np.empty(_BINS, np.int64)
    taken = 0
    taken_rows = 0
    while True:
        # All windows before `low` are taken. Those from `low` to `high` are not all taken, or this is not known yet.
        width = (high - low) // _BINS + 1
        counts[:] = 0
        rows[:] = 0
        for i in range(len(table)):
            if table[i].id == np.uint64(0) or table[i].rows == 0 or table[i].chunk != NOWHERE:
                continue
            if low <= table[i].time <= high:
                b = (table[i].time - low) // width
                counts[b] += 1
                rows[b] += table[i].rows
        b = 0
        while b < _BINS and taken + counts[b] <= most and taken_rows + rows[b] <= most_rows:
            taken += counts[b]
            taken_rows += rows[b]
            b += 1
        if b == _BINS:
            low = high + 1
            break
        low += b * width
        high = min(high, low + width - 1)
        if width == 1 or counts[b] <= 1:
            break
    count = 0
    rows_found = 0
    for pass_ in range(2):
        for i in range(len(table)):
            if table[i].id == np.uint64(0) or table[i].rows == 0 or table[i].chunk != NOWHERE:
                continue
            time = table[i].time
            if (pass_ == 0 and time >= low) or (pass_ == 1 and not low <= time <= high):
                continue
            if count == most or rows_found + table[i].rows > most_rows:
                continue
            out[count] = table[i].id
            count += 1
            rows_found += table[i].rows
    return count


@kernel(I64(_TABLE, UINTS, INTS))
def mark_loading(table: Array, ids: Array, rows: Array) -> int:
    """Mark windows as being loaded, and fill `rows` with their number of rows; return their latest trigger time."""
    latest = np.int64(0)
    for i in range(len(ids)):
        slot = _slot(table, ids[i])
        table[slot].chunk = LOADING
        table[slot].at = i
        rows[i] = table[slot].rows
        latest = max(latest, table[slot].time)
    return latest


@kernel(types.void(_TABLE, UINTS, INTS, I64))
def set_chunk(table: Array, ids: Array, starts: Array, chunk: int) -> None:
    """Record that the rows of requested windows are in a chunk (if negative, in none), from the given rows on."""
    for i in range(len(ids)):
        slot = _slot(table, ids[i])
        table[slot].chunk = chunk
        table[slot].at = starts[i]


@kernel(
    I64(_TABLE, WORDS, INTS, I64, INTS, INTS, BYTES, INTS, INTS, INTS),
)
def scan(
    table: Array,
    entries: Array,
    bounds: Array,
    seq: int,
    fill: Array,
    alive: Array,
    bits: Array,
    starts: Array,
    counts: Array,
    dests: Array,
) -> int:
    """Scan blocks of a segment's index: mark entries of open windows, and list the rows of requested ones.

    Args:
        table: the table.
        entries: the blocks' entries: id, axis, first row << 32 | rows.
        bounds: number of entries before each block, and in total.
        seq: sequence number of the segment.
        fill: by requested window, the destination of its next rows; advanced.
        alive: filled, by block, with the number of rows of open windows.
        bits: filled, by entry, with whether its window is open.
        starts, counts, dests: filled with first row, number of rows and destination of requested entries.

    Returns:
        Number of requested entries.
    """
    requested = 0
    for block in range(len(bounds) - 1):
        rows_alive = 0
        for i in range(bounds[block], bounds[block + 1]):
            slot = _slot(table, entries[i, 0])
            bits[i] = 0
            if table[slot].id == np.uint64(0) or table[slot].born > seq:
                continue
            bits[i] = 1
            count = np.int64(entries[i, 2] & LOW_HALF)
            rows_alive += count
            if table[slot].chunk == LOADING:
                window = table[slot].at
                starts[requested] = np.int64(entries[i, 2] >> HALF)
                counts[requested] = count
                dests[requested] = fill[window]
                fill[window] += count
                requested += 1
        alive[block] = rows_alive
    return requested


@kernel(I64(_TABLE, UINTS, UINTS, types.uint64, types.uint64, I64, SHORTS, UINTS, UINTS))
def collect(
    records: Array,
    chunk_words: Array,
    chunk_heaps: Array,
    buffer: int,
    buffer_heap: int,
    width: int,
    following: Array,
    rows_at: Array,
    heaps_at: Array,
) -> int:
    """List the addresses of windows' rows, window by window: prefetched rows, then those in the write buffer.

    Args:
        records: copies of the windows' records.
        chunk_words, chunk_heaps: addresses of the chunks of the prefetch buffer.
        buffer, buffer_heap: addresses of the write buffer's rows and heap.
        width: words of a row.
        following: as for `append`.
        rows_at, heaps_at: filled with addresses; if empty, rows are only counted.

    Returns:
        Number of rows.
    """
    count = 0
    room = len(rows_at)
    for i in range(len(records)):
        if records[i].id == np.uint64(0):
            continue
        chunk = records[i].chunk
        if records[i].rows > 0 and chunk >= 0:
            if room:
                for row in range(records[i].rows):
                    rows_at[count + row] = advance(chunk_words[chunk], (records[i].at + row) * width * 8)
                    heaps_at[count + row] = chunk_heaps[chunk]
            count += records[i].rows
        row = np.int64(records[i].head)
        while row >= 0:
            if room:
                rows_at[count] = advance(buffer, row * width * 8)
                heaps_at[count] = buffer_heap
            count += 1
            row = np.int64(following[row])
    return count


@kernel(I64(_TABLE))
def count_lists(table: Array) -> int:
    """Count the windows that have rows in the write buffer."""
    count = 0
    for i in range(len(table)):
        if table[i].id != np.uint64(0) and table[i].head >= 0:
            count += 1
    return count


@kernel(types.void(_TABLE, INTS, UINTS))
def list_slots(table: Array, slots: Array, axis: Array) -> None:
    """List the slots of windows with rows in the write buffer, and their sort keys by time."""
    count = 0
    for i in range(len(table)):
        if table[i].id != np.uint64(0) and table[i].head >= 0:
            slots[count] = i
            axis[count] = np.uint64(table[i].time) << np.uint64(16) | table[i].id >> np.uint64(48)
            count += 1


@kernel(I64(_TABLE, INTS, UINTS, types.uint64, I64, SHORTS, SHORTS, UINTS, UINTS, WORDS))
def drain_buffer(
    table: Array,
    slots: Array,
    axis: Array,
    buffer: int,
    width: int,
    following: Array,
    evicted: Array,
    rows_at: Array,
    row_axis: Array,
    entries: Array,
) -> int:
    """Remove the rows of windows (slots, in order) from the write buffer; list addresses and index entries."""
    count = 0
    for i in range(len(slots)):
        slot = slots[i]
        begin = count
        row = np.int64(table[slot].head)
        while row >= 0:
            rows_at[count] = advance(buffer, row * width * 8)
            row_axis[count] = axis[i]
            count += 1
            row = np.int64(following[row])
        entries[i, 0] = table[slot].id
        entries[i, 1] = axis[i]
        entries[i, 2] = np.uint64(begin) << HALF | np.uint64(count - begin)
        table[slot].rows += np.int32(count - begin)
        table[slot].head = -1
        table[slot].tail = -1
        if table[slot].chunk >= 0:  # the prefetched rows are no longer all rows of the window
            evicted[table[slot].chunk] += 1
            table[slot].chunk = NOWHERE
    return count
