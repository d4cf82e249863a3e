"""The Stat table of the unaligned append store (FlowKV §4.2): what is known of every open window, in memory.

An open-addressing table of records, probed linearly. A window is known by a 64-bit id made from its key's hash and its
initial boundary.
"""

# mypy: disable-error-code="untyped-decorator,assignment,return-value,attr-defined"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import from_dtype, types
from numpy.typing import NDArray

from millpond.conf import KEY_GROUP_BITS
from millpond.kernels.compiled import inlined, kernel
from millpond.kernels.memory import BYTES, HALF, I64, INTS, LOW_HALF, SHORTS, UINTS, WORDS
from millpond.kernels.pointers import prefetch, step

WINDOW = np.dtype(
    [
        ("id", np.uint64),  # 0: no window
        ("time", np.int64),  # estimated trigger time, ms
        ("rows", np.int32),  # in segments
        ("born", np.int32),  # entries of older segments are of another, taken window
        ("head", np.int32),  # first and last row in the write buffer, or -1
        ("tail", np.int32),
        ("chunk", np.int32),  # of the prefetch buffer, or what the constants below say
        ("at", np.int32),  # first row there
    ]
)
NOWHERE = -1
WANTED = -2
"""In `chunk`: not in the prefetch buffer; being brought there, `at` being its number among those."""

_GROUP = np.uint64(((1 << KEY_GROUP_BITS) - 1) << (64 - KEY_GROUP_BITS))
_BINS = 4096
_AHEAD = 8

Array = NDArray[Any]
_TABLE = types.Array(from_dtype(WINDOW), 1, "C")


@kernel(types.void(types.Array(types.uint64, 1, "A"), types.Array(types.uint64, 1, "A"), UINTS))
def window_ids(hashes: Array, windows: Array, out: Array) -> None:
    """The ids of windows: their key's hash and initial boundary, mixed; never 0.

    The first bits are those of the hash, so that an id lies in the range of its key's partition.
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
    """Where a window is, or the free slot where it would go."""
    mask = np.uint64(len(table) - 1)
    at = id_ & mask
    while True:
        found = table[np.int64(at)].id
        if found == id_ or found == np.uint64(0):
            return np.int64(at)
        at = (at + np.uint64(1)) & mask


@kernel(I64(_TABLE, _TABLE))
def move(old: Array, new: Array) -> int:
    """Fill a larger, empty table."""
    count = 0
    for i in range(len(old)):
        if old[i].id != np.uint64(0):
            new[_slot(new, old[i].id)] = old[i]
            count += 1
    return count


@kernel(I64(_TABLE, UINTS, INTS, I64, I64, SHORTS, SHORTS))
def append(table: Array, ids: Array, times: Array, first: int, born: int, following: Array, evicted: Array) -> int:
    """Note rows that were put into the write buffer, from its row `first` on.

    Args:
        following: of each row in the buffer, the next one of its window (-1: none).
        evicted: for each chunk of the prefetch buffer, how many windows left it; added to.

    Returns:
        How many windows are new.
    """
    new = 0
    for i in range(len(ids)):
        if i + _AHEAD < len(ids):
            at = np.int64(ids[i + _AHEAD] & np.uint64(len(table) - 1))
            prefetch(np.uint64(table.ctypes.data), at * 40)
        at = _slot(table, ids[i])
        row = np.int32(first + i)
        following[row] = -1
        if table[at].id == np.uint64(0):
            new += 1
            table[at].id = ids[i]
            table[at].time = times[i]
            table[at].rows = 0
            table[at].born = born
            table[at].head = row
            table[at].tail = row
            table[at].chunk = NOWHERE
            table[at].at = 0
            continue
        table[at].time = max(table[at].time, times[i])
        if table[at].tail >= 0:
            following[table[at].tail] = row
        else:
            table[at].head = row
        table[at].tail = row
        if table[at].chunk >= 0:  # a wrong guess: the window lives on
            evicted[table[at].chunk] += 1
            table[at].chunk = NOWHERE
    return new


@kernel(types.void(_TABLE, UINTS, INTS, SHORTS))
def postpone(table: Array, ids: Array, times: Array, evicted: Array) -> None:
    """Note that windows are expected to be triggered later than was thought; `evicted` as for `append`."""
    for i in range(len(ids)):
        at = _slot(table, ids[i])
        if table[at].id != np.uint64(0) and table[at].time < times[i]:
            table[at].time = times[i]
            if table[at].chunk >= 0:
                evicted[table[at].chunk] += 1
                table[at].chunk = NOWHERE


@kernel(I64(_TABLE, UINTS, UINTS, INTS, I64))
def add_entries(table: Array, ids: Array, places: Array, times: Array, seq: int) -> int:
    """Note the entries of a segment's index, when a store is opened; returns how many windows are new."""
    new = 0
    for i in range(len(ids)):
        at = _slot(table, ids[i])
        if table[at].id == np.uint64(0):
            new += 1
            table[at].id = ids[i]
            table[at].time = times[i]
            table[at].rows = 0
            table[at].born = seq
            table[at].head = -1
            table[at].tail = -1
            table[at].chunk = NOWHERE
            table[at].at = 0
        table[at].time = max(table[at].time, times[i])
        table[at].rows += np.int32(places[i] & LOW_HALF)
    return new


@kernel(types.void(_TABLE, UINTS, _TABLE))
def look(table: Array, ids: Array, out: Array) -> None:
    """Copy the records of some windows; those that are not there have the id 0."""
    for i in range(len(ids)):
        at = _slot(table, ids[i])
        out[i] = table[at]


@kernel(I64(_TABLE, UINTS, SHORTS))
def remove(table: Array, ids: Array, left: Array) -> int:
    """Remove windows; `left` is added to as `evicted` in `append`. Returns how many were there."""
    mask = len(table) - 1
    count = 0
    for i in range(len(ids)):
        at = _slot(table, ids[i])
        if table[at].id == np.uint64(0):
            continue
        count += 1
        if table[at].chunk >= 0:
            left[table[at].chunk] += 1
        hole = at
        scan = (at + 1) & mask
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
    """The windows nearest to their trigger time that have rows in segments and none in the prefetch buffer.

    Args:
        most: how many at most; most_rows: how many rows they may have together.

    Returns:
        How many ids were put into `out`. Of windows of equal time, which are taken depends on the table's order.
    """
    low = np.int64(1) << 62
    high = -low
    for i in range(len(table)):
        if table[i].id != np.uint64(0) and table[i].rows > 0 and table[i].chunk == NOWHERE:
            low = min(low, table[i].time)
            high = max(high, table[i].time)
    if high < low or most <= 0:
        return 0
    counts = np.empty(_BINS, np.int64)
    rows = np.empty(_BINS, np.int64)
    taken = 0
    taken_rows = 0
    while True:
        # All below `low` are in; those from `low` to `high` are not all wanted, or it is not known yet.
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
    found = 0
    rows_found = 0
    for pass_ in range(2):
        for i in range(len(table)):
            if table[i].id == np.uint64(0) or table[i].rows == 0 or table[i].chunk != NOWHERE:
                continue
            time = table[i].time
            if (pass_ == 0 and time >= low) or (pass_ == 1 and not low <= time <= high):
                continue
            if found == most or rows_found + table[i].rows > most_rows:
                continue
            out[found] = table[i].id
            found += 1
            rows_found += table[i].rows
    return found


@kernel(I64(_TABLE, UINTS, INTS))
def want(table: Array, ids: Array, rows: Array) -> int:
    """Mark windows that are about to be brought in, `rows` being filled; returns their latest trigger time."""
    latest = np.int64(0)
    for i in range(len(ids)):
        at = _slot(table, ids[i])
        table[at].chunk = WANTED
        table[at].at = i
        rows[i] = table[at].rows
        latest = max(latest, table[at].time)
    return latest


@kernel(types.void(_TABLE, UINTS, INTS, I64))
def arrived(table: Array, ids: Array, starts: Array, chunk: int) -> None:
    """The rows of wanted windows are in a chunk (or, if it is negative, nowhere), from these rows on."""
    for i in range(len(ids)):
        at = _slot(table, ids[i])
        table[at].chunk = chunk
        table[at].at = starts[i]


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
    """Scan blocks of a segment's index: which entries are of open windows, and where are the rows of those wanted?

    Args:
        entries: the blocks' entries: id, axis, first row << 32 | rows.
        bounds: entries before each block, and their number.
        fill: for each wanted window, where its next rows go; advanced.
        alive: for each block, how many rows of open windows it has; filled.
        bits: for each entry, whether its window is open; filled.
        starts, counts, dests: filled with the first row, number of rows and destination of wanted entries.

    Returns:
        How many of these there are.
    """
    found = 0
    for block in range(len(bounds) - 1):
        rows_alive = 0
        for i in range(bounds[block], bounds[block + 1]):
            at = _slot(table, entries[i, 0])
            bits[i] = 0
            if table[at].id == np.uint64(0) or table[at].born > seq:
                continue
            bits[i] = 1
            count = np.int64(entries[i, 2] & LOW_HALF)
            rows_alive += count
            if table[at].chunk == WANTED:
                window = table[at].at
                starts[found] = np.int64(entries[i, 2] >> HALF)
                counts[found] = count
                dests[found] = fill[window]
                fill[window] += count
                found += 1
        alive[block] = rows_alive
    return found


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
    """The addresses of all rows of some windows, one after another: prefetched ones, then those in the write buffer.

    Args:
        records: copies of the windows' records.
        chunk_words, chunk_heaps: addresses of the chunks of the prefetch buffer.
        buffer, buffer_heap: addresses of the write buffer's rows and heap.

    Returns:
        How many rows there are. With no room in `rows_at`, they are only counted.
    """
    found = 0
    room = len(rows_at)
    for i in range(len(records)):
        if records[i].id == np.uint64(0):
            continue
        chunk = records[i].chunk
        if records[i].rows > 0 and chunk >= 0:
            if room:
                for row in range(records[i].rows):
                    rows_at[found + row] = step(chunk_words[chunk], (records[i].at + row) * width * 8)
                    heaps_at[found + row] = chunk_heaps[chunk]
            found += records[i].rows
        row = np.int64(records[i].head)
        while row >= 0:
            if room:
                rows_at[found] = step(buffer, row * width * 8)
                heaps_at[found] = buffer_heap
            found += 1
            row = np.int64(following[row])
    return found


@kernel(I64(_TABLE))
def count_lists(table: Array) -> int:
    """How many windows have rows in the write buffer."""
    found = 0
    for i in range(len(table)):
        if table[i].id != np.uint64(0) and table[i].head >= 0:
            found += 1
    return found


@kernel(types.void(_TABLE, INTS, UINTS))
def list_slots(table: Array, slots: Array, axis: Array) -> None:
    """The slots of the windows that have rows in the write buffer, and where each goes on the axis of time."""
    found = 0
    for i in range(len(table)):
        if table[i].id != np.uint64(0) and table[i].head >= 0:
            slots[found] = i
            axis[found] = np.uint64(table[i].time) << np.uint64(16) | table[i].id >> np.uint64(48)
            found += 1


@kernel(I64(_TABLE, INTS, UINTS, types.uint64, I64, SHORTS, SHORTS, UINTS, UINTS, WORDS))
def unlist(
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
    """Take the rows of some windows (slots, in order) out of the write buffer: addresses, and the segment's index."""
    found = 0
    for i in range(len(slots)):
        at = slots[i]
        begin = found
        row = np.int64(table[at].head)
        while row >= 0:
            rows_at[found] = step(buffer, row * width * 8)
            row_axis[found] = axis[i]
            found += 1
            row = np.int64(following[row])
        entries[i, 0] = table[at].id
        entries[i, 1] = axis[i]
        entries[i, 2] = np.uint64(begin) << HALF | np.uint64(found - begin)
        table[at].rows += np.int32(found - begin)
        table[at].head = -1
        table[at].tail = -1
        if table[at].chunk >= 0:  # what was brought in is not all any more
            evicted[table[at].chunk] += 1
            table[at].chunk = NOWHERE
    return found
