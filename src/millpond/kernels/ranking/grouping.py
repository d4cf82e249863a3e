"""Rows by their keys: which of a block's rows have the same one, and rows put in order within each."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,call-overload"

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from millpond.kernels.compiled import kernel
from millpond.kernels.memory import HALF, INTS
from millpond.kernels.pointers import step
from millpond.kernels.ranking.compare import compare_rows, sort_rows

_MIX = np.uint64(0x9E3779B97F4A7C15)


class KeyBlock(NamedTuple):
    """Rows of a block by key.

    Attributes:
        groups: the row id of each key; starts: where its members begin, and their number at the end.
        members: positions of rows.
    """

    groups: NDArray[np.int64]
    starts: NDArray[np.int64]
    members: NDArray[np.int64]


KEY_BLOCK = types.NamedUniTuple(INTS, 3, KeyBlock)
"""The type of a `KeyBlock`."""


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
