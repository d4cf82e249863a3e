"""The first rows of each key in an order, which stand in slots (see `packed_rows`): what a block of rows changes."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,call-overload"

from __future__ import annotations

import numpy as np

from millpond.kernels.compiled import helper, kernel
from millpond.kernels.memory import HALF
from millpond.kernels.pointers import prefetch, put_word, step, word
from millpond.kernels.ranking.compare import compare_rows, sort_rows
from millpond.kernels.ranking.packed_rows import BORN, GOES, GONE, RETURNS, STAYS, long_bytes
from millpond.layout import LENGTH

ROW_NUMBER, RANK, DENSE_RANK = 0, 1, 2

ALL_ROWS, TOMBSTONES = 1, 2
"""Flags of `decide`: keep rows beyond the limit too, since others may go; keep tombstones."""

_MIX = np.uint64(0x9E3779B97F4A7C15)
_AHEAD = 6


@kernel("int64(int64[::1], int64[::1], int64[::1], int64[::1], int64[::1])")
def group(rows, table, groups, starts, members):
    """Group the positions of a block by row id, in the order of their first occurrence.

    Args:
        rows: row ids.
        table: scratch, zero throughout, a power of two of at least twice as many entries as rows.
        groups: filled with the row id of each group; starts: with the first of its `members`, one more at the end;
            members: with positions.

    Returns:
        The number of groups.
    """
    mask = len(table) - 1
    count = 0
    n = len(rows)
    number = np.empty(n, np.int64)
    sizes = np.zeros(n + 1, np.int64)
    for i in range(n):
        at = np.int64((np.uint64(rows[i]) * _MIX) >> HALF) & mask
        while table[at] != 0 and groups[table[at] - 1] != rows[i]:
            at = (at + 1) & mask
        if table[at] == 0:
            groups[count] = rows[i]
            count += 1
            table[at] = count
        number[i] = table[at] - 1
        sizes[table[at]] += 1
    starts[0] = 0
    for g in range(count):
        starts[g + 1] = starts[g] + sizes[g + 1]
        sizes[g] = starts[g]
    for i in range(n):
        g = number[i]
        members[sizes[g]] = i
        sizes[g] += 1
    return count


@helper
def _old_order(old, old_heap, new, heap, columns, ordering, count, by_arrival, now):
    """Order of a row that is held and one that comes: of equal ones the earlier first, within a batch by the rest."""
    order = compare_rows(old, old_heap, new, heap, columns, 0, ordering)
    if order == 0:
        if by_arrival and word(old, BORN) != now:
            return -1
        order = compare_rows(old, old_heap, new, heap, columns, ordering, count)
    return order


@helper
def _equals_born(slots, start, held, width, row, heap, columns, ordering, count, now):
    """How many of the slots from `start` on, equal to a row that goes, came in this batch: these go before older ones.

    So a row that comes and goes within a batch leaves no trace beside its equals.
    """
    found = np.int64(0)
    s = start
    while s < held and _old_order(step(slots, s * width), slots, row, heap, columns, ordering, count, False, now) == 0:
        if word(step(slots, s * width), GONE) == 0 and word(step(slots, s * width), BORN) == now:
            found += 1
        s += 1
    return found


@kernel(
    "int64(uint64, int64, uint64, int64, int64[::1], int64[::1], int64[::1], uint64, int64, uint64, int8[::1],"
    " int64[:, ::1], int64, int64[::1], int64, int64, int64, int64,"
    " int64[::1], int8[::1], int64[::1], int64[::1], int64[::1])"
)
def decide(
    slab,
    slab_stride,
    arena,
    blob,
    groups,
    starts,
    members,
    rows,
    stride,
    heap,
    signs,
    descriptor,
    ordering,
    blobs,
    limit,
    function,
    flags,
    version,
    sources,
    fates,
    ends,
    sizes,
    spare,
):
    """Decide what a block's rows change in the slots of their keys.

    Args:
        slab, slab_stride, arena: where the table's rows and their long values are.
        blob: the word of a table row at which its slots are; the word after these two counts them.
        groups, starts, members: what `group` gave; members are put in order here.
        rows, stride, heap: address of the first row that comes, bytes from one to the next, and their long values.
        signs: 1 or −1 for each row (comes, goes); empty if all come.
        descriptor: the columns of a row, those of the order first, then the rest.
        ordering: how many belong to the order.
        blobs: first words of the columns of byte strings.
        limit, function: which rows are wanted: those with a rank of this kind up to the limit.
        flags: ALL_ROWS, TOMBSTONES.
        version: of the batch.
        sources: filled with the entries that each changed group has from now on, in order: the number of a row that
            comes, or −1 − the number of a slot. fates: with what becomes of them.
        ends: for each group the end of its entries. sizes: the bytes that they take; 0 where nothing changes and
            −1 where nothing remains.
        spare: scratch, as long as members.

    Returns:
        The number of changed groups, or −1 if a row is to go that is not there.
    """
    columns = np.uint64(descriptor.ctypes.data)
    count = len(descriptor)
    width = stride
    now = np.uint64(version + 1)
    everything = (flags & ALL_ROWS) != 0
    tombstones = (flags & TOMBSTONES) != 0
    by_arrival = not everything
    signed = len(signs) != 0
    changed_groups = 0
    filled = 0
    net = np.empty(len(members), np.int64)
    for g in range(len(groups)):
        if g + _AHEAD < len(groups):
            ahead = step(slab, groups[g + _AHEAD] * slab_stride)
            size = np.int64(word(ahead, blob) & LENGTH)
            start = step(arena, np.int64(word(ahead, blob + 1)))
            for line in range(0, min(size, 1024), 64):
                prefetch(start, line)
        row = step(slab, groups[g] * slab_stride)
        held = np.int64(word(row, blob + 2))
        slots = step(arena, np.int64(word(row, blob + 1)))
        low = starts[g]
        high = starts[g + 1]
        # Rows behind the last one wanted need not be looked at.
        if not everything and function != DENSE_RANK and held >= limit:
            live = 0
            last = np.int64(-1)
            for s in range(held):
                if word(step(slots, s * width), GONE) == 0:
                    live += 1
                    last = s
            if live >= limit:
                worst = step(slots, last * width)
                kept = low
                for m in range(low, high):
                    new = step(rows, members[m] * stride)
                    if function == ROW_NUMBER:
                        order = _old_order(worst, slots, new, heap, columns, ordering, count, True, now)
                        behind = order <= 0
                    else:
                        behind = compare_rows(worst, slots, new, heap, columns, 0, ordering) < 0
                    if not behind:
                        members[kept] = members[m]
                        kept += 1
                high = kept
        if high - low > 1:
            sort_rows(members, low, high, spare, rows, stride, heap, columns, count)
        # Rows that are equal are one with a count.
        fresh = low
        for m in range(low, high):
            sign = np.int64(signs[members[m]]) if signed else np.int64(1)
            if signed and fresh > low:
                before = step(rows, members[fresh - 1] * stride)
                if compare_rows(before, heap, step(rows, members[m] * stride), heap, columns, 0, count) == 0:
                    net[fresh - 1] += sign
                    continue
            members[fresh] = members[m]
            net[fresh] = sign
            fresh += 1
        first = filled
        bytes_ = np.int64(0)
        changed = False
        s = np.int64(0)
        m = low
        position = np.int64(0)
        rank = np.int64(0)
        dense = np.int64(0)
        last_row = np.uint64(0)
        last_heap = np.uint64(0)
        over = False
        while True:
            while m < fresh and net[m] == 0:
                m += 1
            if over:
                m = fresh
            if s >= held and m >= fresh:
                break
            if s >= held:
                order = np.int64(1)
            elif m >= fresh:
                order = np.int64(-1)
            else:
                order = _old_order(
                    step(slots, s * width),
                    slots,
                    step(rows, members[m] * stride),
                    heap,
                    columns,
                    ordering,
                    count,
                    by_arrival,
                    now,
                )
            if order <= 0:
                entry = step(slots, s * width)
                at = slots
                source = -1 - s
                s += 1
                gone = word(entry, GONE)
                fate = STAYS
                if gone != 0:
                    if gone != now:
                        continue  # a tombstone of an earlier batch
                    if order == 0 and net[m] > 0:
                        fate = RETURNS
                        net[m] -= 1
                        changed = True
                    else:
                        fate = GOES
                elif (
                    order == 0
                    and net[m] < 0
                    and _equals_born(
                        slots, s, held, width, step(rows, members[m] * stride), heap, columns, ordering, count, now
                    )
                    < -net[m]
                ):
                    fate = GOES
                    net[m] += 1
                    changed = True
                    if word(entry, BORN) == now:
                        continue
            else:
                if net[m] < 0:
                    return -1
                entry = step(rows, members[m] * stride)
                at = heap
                source = members[m]
                fate = STAYS
                net[m] -= 1
            if fate != GOES:
                position += 1
                if function != ROW_NUMBER:
                    tied = last_row != 0 and (compare_rows(last_row, last_heap, entry, at, columns, 0, ordering) == 0)
                    if not tied:
                        rank = position
                        dense += 1
                else:
                    rank = position
                if not everything and (dense if function == DENSE_RANK else rank) > limit:
                    over = True
                    if source >= 0:
                        continue
                    changed = True
                    if word(entry, BORN) == now or not tombstones:
                        continue
                    fate = GOES
                else:
                    last_row = entry
                    last_heap = at
                    if source >= 0:
                        changed = True
            sources[filled] = source
            fates[filled] = fate
            filled += 1
            bytes_ += width + long_bytes(entry, blobs)
        if changed:
            changed_groups += 1
            sizes[g] = bytes_ if filled > first else -1
        else:
            filled = first
            sizes[g] = 0
        ends[g] = filled
    return changed_groups


@kernel(
    "int64(uint64, int64, uint64, int64, int64[::1], int64[::1], int64[::1], uint64, int64, uint64,"
    " int64[:, ::1], int64, int64, int64[::1])"
)
def best(
    slab, slab_stride, arena, place, groups, starts, members, rows, stride, heap, descriptor, ordering, version, winners
):
    """For each group of a block, the first of its rows in the order, if it comes before the one held.

    Args:
        place: the word of a table row from which on the one row of its key is held.
        winners: filled with the row that wins for each group, or −1.
        The others are as for `decide`.

    Returns:
        The number of groups that change.
    """
    columns = np.uint64(descriptor.ctypes.data)
    count = len(descriptor)
    now = np.uint64(version + 1)
    changed = 0
    for g in range(len(groups)):
        top = members[starts[g]]
        for m in range(starts[g] + 1, starts[g + 1]):
            challenger = members[m]
            if (
                compare_rows(step(rows, challenger * stride), heap, step(rows, top * stride), heap, columns, 0, count)
                < 0
            ):
                top = challenger
        held = step(slab, groups[g] * slab_stride + place * 8)
        winners[g] = -1
        if word(held, BORN) == 0 or (
            _old_order(held, arena, step(rows, top * stride), heap, columns, ordering, count, True, now) > 0
        ):
            winners[g] = top
            changed += 1
    return changed


@kernel("void(uint64, int64, int64, int64[::1], int64[::1], uint64, int64, int64[::1], int64)")
def put_best(slab, slab_stride, place, groups, winners, rows, stride, skipped, version):
    """Write winning rows over those held, but for the words in which `skipped` is not 0 (byte strings)."""
    now = np.uint64(version + 1)
    width = stride >> 3
    for k in range(len(groups)):
        target = step(slab, groups[k] * slab_stride + place * 8)
        source = step(rows, winners[k] * stride)
        for w in range(width):
            if skipped[w] == 0:
                put_word(target, w, word(source, w))
        put_word(target, BORN, now)
        put_word(target, GONE, np.uint64(0))


@kernel("int64(int64[::1], int64[::1], uint64, int64, uint64, int64[:, ::1], int64, int64[::1])")
def order_rows(hashes, positions, rows, stride, heap, descriptor, keys, starts):
    """Order rows that are ordered by hash already by all their columns, and find where each key begins.

    Args:
        hashes: of the rows, in order. positions: row numbers in that order; put in order within equal hashes.
        rows, stride, heap: address of row 0, bytes from one to the next, and their long values.
        descriptor: the columns, those of the key first. keys: how many of them are the key.
        starts: filled with the first place of each key, and the number of rows at the end.

    Returns:
        The number of keys.
    """
    columns = np.uint64(descriptor.ctypes.data)
    spare = np.empty(len(positions), np.int64)
    found = 0
    low = 0
    before = rows
    n = len(positions)
    while low < n:
        high = low + 1
        while high < n and hashes[high] == hashes[low]:
            high += 1
        if high - low > 1:
            sort_rows(positions, low, high, spare, rows, stride, heap, columns, len(descriptor))
        for i in range(low, high):
            at = step(rows, positions[i] * stride)
            if i == low or compare_rows(before, heap, at, heap, columns, 0, keys) != 0:
                starts[found] = i
                found += 1
            before = at
        low = high
    starts[found] = n
    return found
