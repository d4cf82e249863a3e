"""Grouping of rows: a block's rows by key, and sorted rows by key."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,call-overload"

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from millpond.kernels.compiled import kernel
from millpond.kernels.memory import HALF, INTS
from millpond.kernels.pointers import advance
from millpond.kernels.ranking.compare import compare_rows, sort_rows

_MIX = np.uint64(0x9E3779B97F4A7C15)


class KeyBlock(NamedTuple):
    """Rows of a block by key.

    Attributes:
        groups: row id of each key.
        starts: first member of each key, and the number of members at the end.
        members: positions of rows.
    """

    groups: NDArray[np.int64]
    starts: NDArray[np.int64]
    members: NDArray[np.int64]


KEY_BLOCK = types.NamedUniTuple(INTS, 3, KeyBlock)
"""Numba type of a `KeyBlock`."""


@kernel("int64(int64[::1], int64[::1], int64[::1], int64[::1], int64[::1])")
def group(rows, table, groups, starts, members):
    """Group the positions of a block by row id, in the order of first occurrence.

    Args:
        rows: row ids.
        table: scratch, zeroed; its length is a power of two, at least twice the number of rows.
        groups: filled with the row id of each group.
        starts: filled with the first of its `members`, and one more entry at the end.
        members: filled with positions.

    Returns:
        Number of groups.
    """
    mask = len(table) - 1
    count = 0
    n = len(rows)
    number = np.empty(n, np.int64)
    sizes = np.zeros(n + 1, np.int64)
    for i in range(n):
        entry = np.int64((np.uint64(rows[i]) * _MIX) >> HALF) & mask
        while table[entry] != 0 and groups[table[entry] - 1] != rows[i]:
            entry = (entry + 1) & mask
        if table[entry] == 0:
            groups[count] = rows[i]
            count += 1
            table[entry] = count
        number[i] = table[entry] - 1
        sizes[table[entry]] += 1
    starts[0] = 0
    for g in range(count):
        starts[g + 1] = starts[g] + sizes[g + 1]
        sizes[g] = starts[g]
    for i in range(n):
        g = number[i]
        members[sizes[g]] = i
        sizes[g] += 1
    return count


@kernel("int64(int64[::1], int64[::1], uint64, int64, uint64, int64[:, ::1], int64, int64[::1])")
def order_rows(hashes, positions, rows, stride, heap, descriptor, keys, starts):
    """Sort rows, which are sorted by hash already, by all their columns, and find the first row of each key.

    Args:
        hashes: of the rows, ascending.
        positions: row numbers in that order; sorted within equal hashes here.
        rows, stride, heap: address of row 0, bytes from one to the next, and the address of their heap.
        descriptor: the columns, those of the key first.
        keys: number of key columns.
        starts: filled with the first index of each key, and the number of rows at the end.

    Returns:
        Number of keys.
    """
    columns = np.uint64(descriptor.ctypes.data)
    spare = np.empty(len(positions), np.int64)
    key_count = 0
    low = 0
    previous = rows
    n = len(positions)
    while low < n:
        high = low + 1
        while high < n and hashes[high] == hashes[low]:
            high += 1
        if high - low > 1:
            sort_rows(positions, low, high, spare, rows, stride, heap, columns, len(descriptor))
        for i in range(low, high):
            address = advance(rows, positions[i] * stride)
            if i == low or compare_rows(previous, heap, address, heap, columns, 0, keys) != 0:
                starts[key_count] = i
                key_count += 1
            previous = address
        low = high
    starts[key_count] = n
    return key_count
