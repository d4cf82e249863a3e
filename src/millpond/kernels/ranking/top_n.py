"""Top-N rows of each key in slots (see `packed_rows`): decide the changes by a block of rows."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,call-overload"

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import from_dtype, types
from numpy.typing import NDArray

from millpond.kernels.compiled import helper, kernel
from millpond.kernels.memory import I64, INTS, U64
from millpond.kernels.pointers import advance, byte_at, prefetch, put_byte_at, put_word, word
from millpond.kernels.ranking.compare import compare_rows, sort_rows
from millpond.kernels.ranking.grouping import KEY_BLOCK
from millpond.kernels.ranking.packed_rows import DELETED_AT, INSERTED_AT, KEEP, MARK_DELETED, RESTORE, long_bytes
from millpond.layout import LENGTH

ROW_NUMBER, RANK, DENSE_RANK = 0, 1, 2

ALL_ROWS, TOMBSTONES = 1, 2
"""Flags of a ranking: keep rows beyond the limit, because others may be deleted; keep tombstones."""

RANKING = np.dtype(
    [
        ("columns", np.uint64),  # address of the descriptor of a row's columns, those of the order first
        ("count", np.int64),  # number of columns
        ("ordering", np.int64),  # number of those that belong to the order
        ("stride", np.int64),  # bytes of a row
        ("limit", np.int64),  # greatest rank to keep
        ("function", np.int64),  # ROW_NUMBER, RANK or DENSE_RANK
        ("flags", np.int64),
    ]
)
"""Parameters of a ranking: one record in an array, made once per operator."""


class Entries(NamedTuple):
    """Resulting entries of groups, one group after another.

    Attributes:
        sources: in order, the number of an inserted row, or −1 − the number of a slot.
        fates: the fate of each entry.
        ends: end of each group's entries.
        sizes: bytes of each group's entries; 0 if nothing changes, −1 if no entry remains.
    """

    sources: NDArray[np.int64]
    fates: NDArray[np.int8]
    ends: NDArray[np.int64]
    sizes: NDArray[np.int64]


KINDS = types.Array(types.int8, 1, "C")
RANKING_IN = types.Array(from_dtype(RANKING), 1, "C")
"""Numba types of signs, fates and kinds of change, and of a ranking."""
_ENTRIES = types.NamedTuple((INTS, KINDS, INTS, INTS), Entries)
_FORGOTTEN = 3
"""Additional fate: the slot is removed, because no change depends on it any more."""
_PREFETCH_DISTANCE = 6


class _Ranking(NamedTuple):
    """The fields of a ranking as scalars, so that kernels do not read them from memory repeatedly."""

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
    """Return whether two rows are equal in the ranking's order."""
    return compare_rows(left, left_heap, right, right_heap, ranking.columns, 0, ranking.ordering) == 0


@helper
def _old_order(old, old_heap, new, heap, ranking, by_arrival, now):
    """Compare a stored row with a new one.

    If they are equal in the order, a row of an earlier batch is first with `by_arrival`; else the other columns
    decide.
    """
    order = compare_rows(old, old_heap, new, heap, ranking.columns, 0, ranking.ordering)
    if order == 0:
        if by_arrival and word(old, INSERTED_AT) != now:
            return -1
        order = compare_rows(old, old_heap, new, heap, ranking.columns, ranking.ordering, ranking.count)
    return order


@helper
def _equals_born(slots, start, held, row, heap, ranking, now):
    """Count the slots from `start` on that equal a deleted row and were inserted in this batch.

    These are deleted before older ones. So a row that is inserted and deleted within a batch leaves no trace among
    its equals.
    """
    count = np.int64(0)
    s = start
    while s < held:
        slot = advance(slots, s * ranking.stride)
        if _old_order(slot, slots, row, heap, ranking, False, now) != 0:
            break
        if word(slot, DELETED_AT) == 0 and word(slot, INSERTED_AT) == now:
            count += 1
        s += 1
    return count


@helper
def _prefetch_slots(row, arena, blob):
    """Prefetch the slots of a table row, up to 1 KB."""
    start = advance(arena, np.int64(word(row, blob + 1)))
    for line in range(0, min(np.int64(word(row, blob) & LENGTH), 1024), 64):
        prefetch(start, line)


@helper
def _drop_worse(slots, held, members, low, high, rows, heap, ranking, now):
    """Remove a group's rows that sort behind the last of `limit` live slots; return the new end.

    `members` is an address, as in all phases; the group's members are those from `low` to `high`.
    """
    live = 0
    last = np.int64(-1)
    for s in range(held):
        if word(advance(slots, s * ranking.stride), DELETED_AT) == 0:
            live += 1
            last = s
    if live < ranking.limit:
        return high
    worst = advance(slots, last * ranking.stride)
    kept = low
    for m in range(low, high):
        new = advance(rows, np.int64(word(members, m)) * ranking.stride)
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
    """Merge equal rows of a sorted group into one with a count in `net`; return the new end."""
    fresh = low
    for m in range(low, high):
        sign = np.int64(1)
        if signs != np.uint64(0):
            sign = np.int64(np.int8(byte_at(signs, np.int64(word(members, m)))))
            if fresh > low:
                before = advance(rows, np.int64(word(members, fresh - 1)) * ranking.stride)
                row = advance(rows, np.int64(word(members, m)) * ranking.stride)
                if compare_rows(before, heap, row, heap, ranking.columns, 0, ranking.count) == 0:
                    put_word(net, fresh - 1, np.uint64(np.int64(word(net, fresh - 1)) + sign))
                    continue
        put_word(members, fresh, word(members, m))
        put_word(net, fresh, np.uint64(sign))
        fresh += 1
    return fresh


@helper
def _fate(slots, s, held, order, row, heap, count, ranking, now):
    """Determine the fate of a slot, given the next row of the batch.

    Args:
        slots, s, held: the group's slots, the slot, number of slots.
        order: comparison of slot and row; negative if there is no row.
        row, heap, count: the row, its heap, and how many of it are inserted, or deleted if negative.
        ranking, now: the ranking, and the batch's mark.

    Returns:
        The fate, or `_FORGOTTEN`, and the number to add to the row's count.
    """
    slot = advance(slots, s * ranking.stride)
    gone = word(slot, DELETED_AT)
    if gone != 0:
        if gone != now:
            return _FORGOTTEN, 0  # a tombstone of an earlier batch
        if order == 0 and count > 0:
            return RESTORE, -1
        return MARK_DELETED, 0
    if order == 0 and count < 0 and _equals_born(slots, s + 1, held, row, heap, ranking, now) < -count:
        if word(slot, INSERTED_AT) == now:
            return _FORGOTTEN, 1
        return MARK_DELETED, 1
    return KEEP, 0


@helper
def _merge(slots, held, members, net, low, high, rows, heap, ranking, blobs, long_columns, now, sources, fates, start):
    """Merge the slots of a group with the batch's rows, and cut off rows beyond the limit.

    Args:
        slots, held: the group's slots.
        members, net, low, high: its rows, sorted, with their counts.
        rows, heap, ranking, now: as for `_fate`; `rows` is the address of the first row.
        blobs, long_columns: the byte columns, for `long_bytes`.
        sources, fates, start: the entries, filled from `start` on.

    Returns:
        End of the entries (−1 if a deleted row does not exist), their bytes, whether anything changed.
    """
    stride = ranking.stride
    keep_all = (ranking.flags & ALL_ROWS) != 0
    filled = start
    size = np.int64(0)
    changed = False
    s = np.int64(0)
    m = low
    position = np.int64(0)
    rank = np.int64(0)
    dense = np.int64(0)
    last = np.uint64(0)  # the last row that exists
    last_heap = np.uint64(0)
    beyond = False
    while True:
        while m < high and word(net, m) == np.uint64(0):
            m += 1
        if beyond:
            m = high
        if s >= held and m >= high:
            break
        order = np.int64(-1)
        new = np.uint64(0)
        count = np.int64(0)
        if m < high:
            order = np.int64(1)
            new = advance(rows, np.int64(word(members, m)) * stride)
            count = np.int64(word(net, m))
            if s < held:
                order = _old_order(advance(slots, s * stride), slots, new, heap, ranking, not keep_all, now)
        if order <= 0:
            entry = advance(slots, s * stride)
            entry_heap = slots
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
            entry_heap = heap
            source = np.int64(word(members, m))
            fate = KEEP
            put_word(net, m, np.uint64(count - 1))
        if fate != MARK_DELETED:
            position += 1
            if ranking.function == ROW_NUMBER:
                rank = position
            elif last == 0 or not _same_order(last, last_heap, entry, entry_heap, ranking):
                dense += 1
                rank = dense if ranking.function == DENSE_RANK else position
            if keep_all or rank <= ranking.limit:
                last = entry
                last_heap = entry_heap
                if source >= 0:
                    changed = True
            else:
                beyond = True
                if source >= 0:
                    continue
                changed = True
                if word(entry, INSERTED_AT) == now or (ranking.flags & TOMBSTONES) == 0:
                    continue
                fate = MARK_DELETED
        put_word(sources, filled, np.uint64(source))
        put_byte_at(fates, filled, np.uint8(fate))
        filled += 1
        size += stride + long_bytes(entry, blobs, long_columns)
    return filled, size, changed


@kernel(I64(U64, I64, U64, I64, KEY_BLOCK, U64, U64, KINDS, RANKING_IN, INTS, I64, INTS, INTS, _ENTRIES))
def decide(slab, slab_stride, arena, blob, block, rows, heap, signs, ranking, blobs, version, net, spare, entries):
    """Decide the changes of a block's rows to the slots of their keys.

    Args:
        slab, slab_stride, arena: address of the table's rows, bytes of a row, address of the heap of their long
            values.
        blob: first of the two words of the slots in a table row; the word after these is the number of slots.
        block: result of `grouping.group`; members are sorted here.
        rows, heap: address of the batch's first row, and of their long values.
        signs: 1 (insert) or −1 (delete) for each row; empty if all are inserts.
        ranking: as `RANKING`.
        blobs: first words of the byte columns.
        version: of the batch.
        net, spare: scratch, a number per row.
        entries: filled.

    Returns:
        Number of changed groups, or −1 if a deleted row does not exist.
    """
    groups, starts, members = block
    _, _, ends, sizes = entries
    ranked = _in_registers(ranking[0])
    now = np.uint64(version + 1)
    cuts = (ranked.flags & ALL_ROWS) == 0 and ranked.function != DENSE_RANK
    # Phases take addresses: references to arrays would be counted for each group. The arrays must be the caller's,
    # because Numba frees a local array after its last use, even if its address is still used.
    members_at = np.uint64(members.ctypes.data)
    net_at = np.uint64(net.ctypes.data)
    signs_at = np.uint64(signs.ctypes.data) if len(signs) != 0 else np.uint64(0)
    blobs_at = np.uint64(blobs.ctypes.data)
    sources = np.uint64(entries.sources.ctypes.data)
    fates = np.uint64(entries.fates.ctypes.data)
    changed_groups = 0
    filled = np.int64(0)
    for g in range(len(groups)):
        if g + _PREFETCH_DISTANCE < len(groups):
            _prefetch_slots(advance(slab, groups[g + _PREFETCH_DISTANCE] * slab_stride), arena, blob)
        row = advance(slab, groups[g] * slab_stride)
        held = np.int64(word(row, blob + 2))
        slots = advance(arena, np.int64(word(row, blob + 1)))
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
    """Find, for each group of a block, its first row in the order, if it sorts before the stored one.

    Args:
        slab, slab_stride, arena, block, rows, heap, ranking, version: as for `decide`.
        place: first word, in a table row, of the stored row.
        winners: filled with the winning row of each group, or −1.

    Returns:
        Number of changed groups.
    """
    groups, starts, members = block
    ranked = _in_registers(ranking[0])
    stride = ranked.stride
    now = np.uint64(version + 1)
    changed = 0
    for g in range(len(groups)):
        top = members[starts[g]]
        for m in range(starts[g] + 1, starts[g + 1]):
            challenger = advance(rows, members[m] * stride)
            if compare_rows(challenger, heap, advance(rows, top * stride), heap, ranked.columns, 0, ranked.count) < 0:
                top = members[m]
        held = advance(slab, groups[g] * slab_stride + place * 8)
        winners[g] = -1
        if (
            word(held, INSERTED_AT) == 0
            or _old_order(held, arena, advance(rows, top * stride), heap, ranked, True, now) > 0
        ):
            winners[g] = top
            changed += 1
    return changed
