"""The first rows of each key in an order, which stand in slots (see `packed_rows`): what a block of rows changes."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,call-overload"

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import from_dtype, types
from numpy.typing import NDArray

from millpond.kernels.compiled import helper, kernel
from millpond.kernels.memory import I64, INTS, U64
from millpond.kernels.pointers import byte_at, prefetch, put_byte_at, put_word, step, word
from millpond.kernels.ranking.compare import compare_rows, sort_rows
from millpond.kernels.ranking.grouping import KEY_BLOCK
from millpond.kernels.ranking.packed_rows import BORN, GOES, GONE, RETURNS, STAYS, long_bytes
from millpond.layout import LENGTH

ROW_NUMBER, RANK, DENSE_RANK = 0, 1, 2

ALL_ROWS, TOMBSTONES = 1, 2
"""Flags of a ranking: keep rows beyond the limit too, since others may go; keep tombstones."""

RANKING = np.dtype(
    [
        ("columns", np.uint64),  # address of the descriptor of a row's columns, those of the order first
        ("count", np.int64),  # how many columns there are
        ("ordering", np.int64),  # how many of them belong to the order
        ("stride", np.int64),  # bytes of a row
        ("limit", np.int64),  # rows are wanted whose rank
        ("function", np.int64),  # of this kind is at most the limit
        ("flags", np.int64),
    ]
)
"""How rows are ranked: the one record of an array, made once for an operator."""


class Entries(NamedTuple):
    """What groups have from now on, one group's entries after the other's.

    Attributes:
        sources: in order, the number of a row that comes, or −1 − the number of a slot; fates: what becomes of each.
        ends: for each group the end of its entries; sizes: the bytes that they take; 0 where nothing changes and −1
            where nothing remains.
    """

    sources: NDArray[np.int64]
    fates: NDArray[np.int8]
    ends: NDArray[np.int64]
    sizes: NDArray[np.int64]


KINDS = types.Array(types.int8, 1, "C")
RANKING_IN = types.Array(from_dtype(RANKING), 1, "C")
"""The types of signs, fates and kinds of change, and of a ranking."""
_ENTRIES = types.NamedTuple((INTS, KINDS, INTS, INTS), Entries)
_FORGOTTEN = 3
"""Beside the fates of entries: a slot that no longer tells anything."""
_AHEAD = 6


class _Ranking(NamedTuple):
    """The fields of a ranking as values of their own, which a kernel does not read from memory again and again."""

    columns: int
    count: int
    ordering: int
    stride: int
    limit: int
    function: int
    flags: int


@helper
def _in_registers(record):
    return _Ranking(
        record.columns,
        record.count,
        record.ordering,
        record.stride,
        record.limit,
        record.function,
        record.flags,
    )


@helper
def _same_order(left, left_heap, right, right_heap, ranking):
    """Whether two rows are equal in the order."""
    return compare_rows(left, left_heap, right, right_heap, ranking.columns, 0, ranking.ordering) == 0


@helper
def _old_order(old, old_heap, new, heap, ranking, by_arrival, now):
    """Order of a row that is held and one that comes: of equal ones the earlier first, within a batch by the rest."""
    order = compare_rows(old, old_heap, new, heap, ranking.columns, 0, ranking.ordering)
    if order == 0:
        if by_arrival and word(old, BORN) != now:
            return -1
        order = compare_rows(old, old_heap, new, heap, ranking.columns, ranking.ordering, ranking.count)
    return order


@helper
def _equals_born(slots, start, held, row, heap, ranking, now):
    """How many of the slots from `start` on, equal to a row that goes, came in this batch: these go before older ones.

    So a row that comes and goes within a batch leaves no trace beside its equals.
    """
    found = np.int64(0)
    s = start
    while s < held:
        slot = step(slots, s * ranking.stride)
        if _old_order(slot, slots, row, heap, ranking, False, now) != 0:
            break
        if word(slot, GONE) == 0 and word(slot, BORN) == now:
            found += 1
        s += 1
    return found


@helper
def _ask_for_slots(row, arena, blob):
    """Ask for the lines of the slots of a table's row."""
    start = step(arena, np.int64(word(row, blob + 1)))
    for line in range(0, min(np.int64(word(row, blob) & LENGTH), 1024), 64):
        prefetch(start, line)


@helper
def _drop_worse(slots, held, members, low, high, rows, heap, ranking, now):
    """Leave out rows of a group that come behind the last one wanted, if so many are held; the end of the others.

    `members`, as in all phases, is an address, from which on the group's are those from `low` to `high`.
    """
    live = 0
    last = np.int64(-1)
    for s in range(held):
        if word(step(slots, s * ranking.stride), GONE) == 0:
            live += 1
            last = s
    if live < ranking.limit:
        return high
    worst = step(slots, last * ranking.stride)
    kept = low
    for m in range(low, high):
        new = step(rows, np.int64(word(members, m)) * ranking.stride)
        if ranking.function == ROW_NUMBER:
            behind = _old_order(worst, slots, new, heap, ranking, True, now) <= 0
        else:
            behind = compare_rows(worst, slots, new, heap, ranking.columns, 0, ranking.ordering) < 0
        if not behind:
            put_word(members, kept, word(members, m))
            kept += 1
    return kept


@helper
def _count_equals(members, low, high, signs, net, rows, heap, ranking):
    """Make rows of a group that are equal, in order, one with a count in `net`; the end of what is left."""
    fresh = low
    for m in range(low, high):
        sign = np.int64(1)
        if signs != np.uint64(0):
            sign = np.int64(np.int8(byte_at(signs, np.int64(word(members, m)))))
            if fresh > low:
                before = step(rows, np.int64(word(members, fresh - 1)) * ranking.stride)
                row = step(rows, np.int64(word(members, m)) * ranking.stride)
                if compare_rows(before, heap, row, heap, ranking.columns, 0, ranking.count) == 0:
                    put_word(net, fresh - 1, np.uint64(np.int64(word(net, fresh - 1)) + sign))
                    continue
        put_word(members, fresh, word(members, m))
        put_word(net, fresh, np.uint64(sign))
        fresh += 1
    return fresh


@helper
def _fate(slots, s, held, order, row, heap, count, ranking, now):
    """What becomes of a slot beside the next row that comes.

    Args:
        slots, s, held: the slots of the group, the one asked for, how many there are.
        order: of the slot and the row; below 0 also if there is no row.
        row, heap, count: the row; how many of it come, or go if below 0.

    Returns:
        The fate, `_FORGOTTEN` if the slot has none, and what it adds to the row's count.
    """
    slot = step(slots, s * ranking.stride)
    gone = word(slot, GONE)
    if gone != 0:
        if gone != now:
            return _FORGOTTEN, 0  # a tombstone of an earlier batch
        if order == 0 and count > 0:
            return RETURNS, -1
        return GOES, 0
    if order == 0 and count < 0 and _equals_born(slots, s + 1, held, row, heap, ranking, now) < -count:
        if word(slot, BORN) == now:
            return _FORGOTTEN, 1
        return GOES, 1
    return STAYS, 0


@helper
def _merge(slots, held, members, net, low, high, rows, heap, ranking, blobs, long_columns, now, sources, fates, start):
    """Merge the slots of a group with the rows that come, and cut off what is not wanted.

    Args:
        slots, held: of the group.
        members, net, low, high: its rows in order, with their counts.
        blobs, long_columns: the columns of byte strings, for `long_bytes`.
        sources, fates, start: of the entries, filled from there on.

    Returns:
        The end of the entries (−1 if a row is to go that is not there), their bytes, whether anything changed.
    """
    stride = ranking.stride
    everything = (ranking.flags & ALL_ROWS) != 0
    filled = start
    size = np.int64(0)
    changed = False
    s = np.int64(0)
    m = low
    position = np.int64(0)
    rank = np.int64(0)
    dense = np.int64(0)
    last = np.uint64(0)  # the last row that is there
    last_heap = np.uint64(0)
    over = False
    while True:
        while m < high and word(net, m) == np.uint64(0):
            m += 1
        if over:
            m = high
        if s >= held and m >= high:
            break
        order = np.int64(-1)
        new = np.uint64(0)
        count = np.int64(0)
        if m < high:
            order = np.int64(1)
            new = step(rows, np.int64(word(members, m)) * stride)
            count = np.int64(word(net, m))
            if s < held:
                order = _old_order(step(slots, s * stride), slots, new, heap, ranking, not everything, now)
        if order <= 0:
            entry = step(slots, s * stride)
            at = slots
            source = -1 - s
            fate, taken = _fate(slots, s, held, order, new, heap, count, ranking, now)
            s += 1
            if taken != 0:
                put_word(net, m, np.uint64(count + taken))
                changed = True
            if fate == _FORGOTTEN:
                continue
        else:
            if count < 0:
                return np.int64(-1), size, changed
            entry = new
            at = heap
            source = np.int64(word(members, m))
            fate = STAYS
            put_word(net, m, np.uint64(count - 1))
        if fate != GOES:
            position += 1
            if ranking.function == ROW_NUMBER:
                rank = position
            elif last == 0 or not _same_order(last, last_heap, entry, at, ranking):
                dense += 1
                rank = dense if ranking.function == DENSE_RANK else position
            if everything or rank <= ranking.limit:
                last = entry
                last_heap = at
                if source >= 0:
                    changed = True
            else:
                over = True
                if source >= 0:
                    continue
                changed = True
                if word(entry, BORN) == now or (ranking.flags & TOMBSTONES) == 0:
                    continue
                fate = GOES
        put_word(sources, filled, np.uint64(source))
        put_byte_at(fates, filled, np.uint8(fate))
        filled += 1
        size += stride + long_bytes(entry, blobs, long_columns)
    return filled, size, changed


@kernel(I64(U64, I64, U64, I64, KEY_BLOCK, U64, U64, KINDS, RANKING_IN, INTS, I64, INTS, INTS, _ENTRIES))
def decide(slab, slab_stride, arena, blob, block, rows, heap, signs, ranking, blobs, version, net, spare, entries):
    """Decide what a block's rows change in the slots of their keys.

    Args:
        slab, slab_stride, arena: where the table's rows and their long values are.
        blob: the word of a table row at which its slots are; the word after these two counts them.
        block: what `grouping.group` gave; members are put in order here.
        rows, heap: address of the first row that comes, and of their long values.
        signs: 1 or −1 for each row (comes, goes); empty if all come.
        ranking: as `RANKING`. blobs: first words of the columns of byte strings.
        version: of the batch.
        net, spare: room for a number for each row.
        entries: filled.

    Returns:
        The number of changed groups, or −1 if a row is to go that is not there.
    """
    groups, starts, members = block
    _, _, ends, sizes = entries
    ranked = _in_registers(ranking[0])
    now = np.uint64(version + 1)
    cuts = (ranked.flags & ALL_ROWS) == 0 and ranked.function != DENSE_RANK
    # Phases take addresses: references to arrays would be counted for each group. They are of the caller's arrays: one
    # that is made here is freed behind its last mention, though its address is still in use.
    members_at = np.uint64(members.ctypes.data)
    net_at = np.uint64(net.ctypes.data)
    signs_at = np.uint64(signs.ctypes.data) if len(signs) != 0 else np.uint64(0)
    blobs_at = np.uint64(blobs.ctypes.data)
    sources = np.uint64(entries.sources.ctypes.data)
    fates = np.uint64(entries.fates.ctypes.data)
    changed_groups = 0
    filled = np.int64(0)
    for g in range(len(groups)):
        if g + _AHEAD < len(groups):
            _ask_for_slots(step(slab, groups[g + _AHEAD] * slab_stride), arena, blob)
        row = step(slab, groups[g] * slab_stride)
        held = np.int64(word(row, blob + 2))
        slots = step(arena, np.int64(word(row, blob + 1)))
        low = starts[g]
        high = starts[g + 1]
        if cuts and held >= ranked.limit:
            high = _drop_worse(slots, held, members_at, low, high, rows, heap, ranked, now)
        if high - low > 1:
            sort_rows(members, low, high, spare, rows, ranked.stride, heap, ranked.columns, ranked.count)
        high = _count_equals(members_at, low, high, signs_at, net_at, rows, heap, ranked)
        stop, size, changed = _merge(
            slots,
            held,
            members_at,
            net_at,
            low,
            high,
            rows,
            heap,
            ranked,
            blobs_at,
            len(blobs),
            now,
            sources,
            fates,
            filled,
        )
        if stop < 0:
            return -1
        sizes[g] = 0
        if changed:
            changed_groups += 1
            sizes[g] = size if stop > filled else -1
            filled = stop
        ends[g] = filled
    return changed_groups


@kernel(I64(U64, I64, U64, I64, KEY_BLOCK, U64, U64, RANKING_IN, I64, INTS))
def best(slab, slab_stride, arena, place, block, rows, heap, ranking, version, winners):
    """For each group of a block, the first of its rows in the order, if it comes before the one held.

    Args:
        place: the word of a table row from which on the one row of its key is held.
        winners: filled with the row that wins for each group, or −1.
        The others are as for `decide`.

    Returns:
        The number of groups that change.
    """
    groups, starts, members = block
    ranked = _in_registers(ranking[0])
    stride = ranked.stride
    now = np.uint64(version + 1)
    changed = 0
    for g in range(len(groups)):
        top = members[starts[g]]
        for m in range(starts[g] + 1, starts[g + 1]):
            challenger = step(rows, members[m] * stride)
            if compare_rows(challenger, heap, step(rows, top * stride), heap, ranked.columns, 0, ranked.count) < 0:
                top = members[m]
        held = step(slab, groups[g] * slab_stride + place * 8)
        winners[g] = -1
        if word(held, BORN) == 0 or _old_order(held, arena, step(rows, top * stride), heap, ranked, True, now) > 0:
            winners[g] = top
            changed += 1
    return changed
