"""Rows ordered by (hash, time): sort them, and find the rows of a key within a time interval.

A part of an ordered table is a sequence of blocks of rows in the order of (hash, time, number). Blocks may be in any
memory: kernels take their addresses, as those of `kernels.runs.search` do. Times are signed 64-bit microseconds.
`NEVER` is the time of rows without a time, which are last.
"""

# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import from_dtype, types
from numpy.typing import NDArray

from millpond.kernels.compiled import helper, kernel
from millpond.kernels.memory import I64, INTS, INTS_IN, U64, UINTS, WORDS
from millpond.kernels.pointers import advance, byte_at, prefetch, same_bytes, word
from millpond.layout import INLINE, LENGTH

MATCHED = 1 << 8
"""Bit of the meta word: the row has matched."""
MARK = 1 << 9
"""Bit of the meta word: not a row, but a record that the row with the same hash, time and number has matched."""

_BEGINNING = np.int64(-(1 << 63))
_LATEST_STAMP = (1 << 48) - 1
_SMALL = 32  # up to as many rows of one hash, insertion sort is used
_NEAR = 8  # within as many rows, a linear search beats interpolation
_PREFETCH_DISTANCE = 8


class PartBlocks(NamedTuple):
    """Consecutive blocks of a part.

    Attributes:
        words_at, heap_at: addresses of the blocks' words and heaps.
        starts: number of rows before each block, and of all blocks at the end.
        bases: position in the part of each block's first row.
        fence: hash of each block's first row.
    """

    words_at: NDArray[np.uint64]
    heap_at: NDArray[np.uint64]
    starts: NDArray[np.int64]
    bases: NDArray[np.int64]
    fence: NDArray[np.uint64]


class Pairs(NamedTuple):
    """Pairs of probes and rows of one part.

    Attributes:
        probes: indices of the probes.
        rows_at, heaps_at: addresses of the rows and of their heaps, valid until the next pairs are requested.
        positions: of the rows in their part.
    """

    probes: NDArray[np.int64]
    rows_at: NDArray[np.uint64]
    heaps_at: NDArray[np.uint64]
    positions: NDArray[np.int64]


ORDERED_PLACES = np.dtype(
    [
        ("stride", np.int64),  # bytes of a row
        ("time", np.int64),  # word of the time
        ("key_start", np.int64),  # first word of the key
        ("key_words", np.int64),
        ("null_mask", np.uint64),  # the key's null bits
        ("references", np.uint64),  # address of a byte for each word of the key: whether it refers to the heap
    ]
)
"""Layout of a part's rows: one record in an array, made once per layout."""

_BLOCKS = types.NamedTuple((UINTS, UINTS, INTS, INTS, UINTS), PartBlocks)
_PAIRS = types.NamedTuple((INTS, UINTS, UINTS, INTS), Pairs)
_PLACES = types.Array(from_dtype(ORDERED_PLACES), 1, "C")


@kernel(types.void(WORDS, INTS_IN, I64, I64, I64))
def put_times(words: NDArray[np.uint64], times: NDArray[np.int64], time_word: int, seq_word: int, first: int) -> None:
    """Write the time and access time of each row, and its number (from `first` on) unless `seq_word` is 0."""
    for i in range(words.shape[0]):
        t = times[i]
        stamp = min(max(t // 1000, 0), _LATEST_STAMP)
        words[i, 1] = np.uint64(stamp) << np.uint64(16)
        words[i, time_word] = np.uint64(t)
        if seq_word:
            words[i, seq_word] = np.uint64(first + i)


@kernel("void(uint64[::1], int64[::1], int64[::1])")
def order_times(hashes: NDArray[np.uint64], order: NDArray[np.int64], times: NDArray[np.int64]) -> None:
    """Sort `order`, in which rows are sorted by hash, by time within each hash (stable).

    Args:
        hashes: ascending.
        order: the row of each hash; sorted in place.
        times: of the rows.
    """
    n = len(hashes)
    begin = 0
    while begin < n:
        end = begin + 1
        while end < n and hashes[end] == hashes[begin]:
            end += 1
        if end - begin > _SMALL:
            group = order[begin:end].copy()
            sorted_ = np.argsort(times[group], kind="mergesort")
            for i in range(end - begin):
                order[begin + i] = group[sorted_[i]]
        else:
            for i in range(begin + 1, end):
                source = order[i]
                t = times[source]
                j = i
                while j > begin and times[order[j - 1]] > t:
                    order[j] = order[j - 1]
                    j -= 1
                order[j] = source
        begin = end


@helper
def _before(row: int, time_word: int, h: int, t: int) -> bool:
    """Return whether a row sorts before (h, t)."""
    own = word(row, 0)
    return own < h or (own == h and np.int64(word(row, time_word)) < t)


@kernel()
def _seek(
    words_at: NDArray[np.uint64],
    starts: NDArray[np.int64],
    fence: NDArray[np.uint64],
    stride: int,
    time_word: int,
    density: float,
    b: int,
    pos: int,
    h: int,
    t: int,
) -> tuple[int, int]:
    """Find the first row from (block b, position pos) on that does not sort before (h, t): gallop, then bisect."""
    blocks = len(words_at)
    if b + 1 < blocks and fence[b + 1] <= h:
        # The last block whose first row sorts before (h, t), if it is after `b`.
        low = b
        high = blocks
        while high - low > 1:
            middle = (low + high) >> 1
            if fence[middle] < h or (fence[middle] == h and _before(words_at[middle], time_word, h, t)):
                low = middle
            else:
                high = middle
        if low > b:
            b = low
            pos = starts[b]
    base = words_at[b]
    first = starts[b]
    end = starts[b + 1]
    if pos >= end or not _before(advance(base, (pos - first) * stride), time_word, h, t):
        if pos >= end and b + 1 < blocks:
            return b + 1, end
        return b, pos
    low = pos  # invariant: `low` sorts before (h, t), `high` does not
    high = end
    guess = pos + 1
    own = word(advance(base, (pos - first) * stride), 0)
    # Bounded before the cast, as a product beyond int64 would overflow.
    estimate = np.int64(min(np.float64(h - own) * density, np.float64(end - 1 - pos)))
    if estimate > _NEAR:
        guess = pos + estimate
    reach = 1
    if _before(advance(base, (min(guess, end - 1) - first) * stride), time_word, h, t):
        low = min(guess, end - 1)
        while low + reach < end and _before(advance(base, (low + reach - first) * stride), time_word, h, t):
            low += reach
            reach *= 2
        high = min(low + reach, end)
    else:
        high = guess
        while high - reach > low and not _before(advance(base, (high - reach - first) * stride), time_word, h, t):
            high -= reach
            reach *= 2
        low = max(low, high - reach)
    while high - low > 1:
        middle = (low + high) >> 1
        if _before(advance(base, (middle - first) * stride), time_word, h, t):
            low = middle
        else:
            high = middle
    if high == end and b + 1 < blocks:
        return b + 1, high
    return b, high


@helper
def _same_key(probe: int, probe_heap: int, probe_start: int, row: int, heap: int, places: Any) -> bool:
    if (word(probe, 2) ^ word(row, 2)) & places.null_mask != 0:
        return False
    for w in range(places.key_words):
        a = word(probe, probe_start + w)
        c = word(row, places.key_start + w)
        if byte_at(places.references, w) != 0:
            size = np.int64(word(probe, probe_start + w - 1) & LENGTH)
            if size > INLINE:
                if not same_bytes(advance(probe_heap, np.int64(a)), advance(heap, np.int64(c)), size):
                    return False
                continue
        if a != c:
            return False
    return True


@kernel(
    I64(U64, U64, I64, I64, I64, INTS, INTS, _BLOCKS, _PLACES, types.float64, INTS, _PAIRS)
)  # fmt: skip
def match(
    probes: int,
    probe_heap: int,
    probe_stride: int,
    probe_start: int,
    count: int,
    lo: NDArray[np.int64],
    hi: NDArray[np.int64],
    part: PartBlocks,
    layout: NDArray[Any],
    density: float,
    state: NDArray[np.int64],
    pairs: Pairs,
) -> int:
    """Pair probes (rows in hash order) with the rows of a part that have their key and a time from `lo` to `hi`.

    Args:
        probes, probe_heap, probe_stride, probe_start, count: address of the first probe and of the heap, bytes of a
            probe, first word of the key, number of probes.
        lo, hi: time interval of each probe, both ends included; empty if `lo` > `hi`.
        part: blocks of the part.
        layout: its rows' layout, as `ORDERED_PLACES`.
        density: rows per unit of hash.
        state: where to continue; initially zero except `state[3]` = −1.
        pairs: filled.

    Returns:
        Number of pairs. If it equals the capacity there may be more: call again.
    """
    words_at, heap_at, starts, bases, fence = part
    out_probe, out_at, out_heap, out_position = pairs
    places = layout[0]
    stride = places.stride
    time_word = places.time
    i = state[0]
    b = state[1]
    pos = state[2]
    resume_block = state[4]
    resume = state[3]
    total = starts[len(words_at)]
    room = len(out_probe)
    pair_count = 0
    last_hash = np.uint64(0)
    known = False
    while i < count:
        if lo[i] > hi[i]:
            i += 1
            continue
        probe = advance(probes, i * probe_stride)
        h = word(probe, 0)
        if resume >= 0:
            qb = resume_block
            q = resume
            resume = -1
        else:
            # Probes of the same hash start from the same row, since each of them may match all rows of that hash.
            if not known or h != last_hash:
                b, pos = _seek(words_at, starts, fence, stride, time_word, density, b, pos, h, _BEGINNING)
                last_hash = h
                known = True
            if pos >= total:
                i = count
                break
            row = advance(words_at[b], (pos - starts[b]) * stride)
            if i + _PREFETCH_DISTANCE < count:
                near = b
                ahead = pos + _PREFETCH_DISTANCE * 2
                if ahead < starts[near + 1]:
                    prefetch(advance(words_at[near], (ahead - starts[near]) * stride), 0)
            if word(row, 0) != h:
                i += 1
                continue
            qb = b
            q = pos
            if np.int64(word(row, time_word)) < lo[i]:
                qb, q = _seek(words_at, starts, fence, stride, time_word, 0.0, b, pos, h, lo[i])
        while q < total:
            if q >= starts[qb + 1]:
                qb += 1
            row = advance(words_at[qb], (q - starts[qb]) * stride)
            if word(row, 0) != h or np.int64(word(row, time_word)) > hi[i]:
                break
            if _same_key(probe, probe_heap, probe_start, row, heap_at[qb], places):
                if pair_count == room:
                    state[0] = i
                    state[1] = b
                    state[2] = pos
                    state[3] = q
                    state[4] = qb
                    return pair_count
                out_probe[pair_count] = i
                out_at[pair_count] = row
                out_heap[pair_count] = heap_at[qb]
                out_position[pair_count] = bases[qb] + (q - starts[qb])
                pair_count += 1
            q += 1
        i += 1
    state[0] = count
    state[3] = -1
    return pair_count


@kernel(
    "int64(uint64[::1], int64[::1], int64[::1], int64,"
    "uint64[::1], int64[::1], int64[::1], uint64[::1], int64, int64, int64, float64, uint64[::1], int64[::1])",
)
def mark_named(
    hashes: NDArray[np.uint64],
    times: NDArray[np.int64],
    numbers: NDArray[np.int64],
    count: int,
    words_at: NDArray[np.uint64],
    starts: NDArray[np.int64],
    bases: NDArray[np.int64],
    fence: NDArray[np.uint64],
    stride: int,
    time_word: int,
    seq_word: int,
    density: float,
    marks: NDArray[np.uint64],
    missing: NDArray[np.int64],
) -> int:
    """Set the matched bits of rows that are named by (hash, time, number), in this order.

    Args:
        hashes, times, numbers, count: the names.
        words_at, starts, bases, fence, stride, time_word, seq_word, density: the part's blocks and layout.
        marks: matched bits of the part, by row position.
        missing: filled with the indices of names that are not in the part.

    Returns:
        Number of missing names.
    """
    b = 0
    pos = 0
    total = starts[len(words_at)]
    lost = 0
    for i in range(count):
        if pos < total:
            b, pos = _seek(words_at, starts, fence, stride, time_word, density, b, pos, hashes[i], times[i])
        qb = b
        q = pos
        found = False
        while q < total:
            if q >= starts[qb + 1]:
                qb += 1
            row = advance(words_at[qb], (q - starts[qb]) * stride)
            if word(row, 0) != hashes[i] or np.int64(word(row, time_word)) != times[i]:
                break
            if np.int64(word(row, seq_word)) == numbers[i]:
                position = bases[qb] + (q - starts[qb])
                marks[position >> 6] |= np.uint64(1) << np.uint64(position & 63)
                found = True
                # Names are sorted, so the search for the next one starts here.
                b = qb
                pos = q
                break
            q += 1
        if not found:
            missing[lost] = i
            lost += 1
    return lost


def density_of(count: int, lowest: Any, highest: Any) -> float:
    """Return the rows per unit of hash, for interpolation."""
    return count / max(1.0, float(highest) - float(lowest))
