"""Sliding windows from panes: order each key's panes by time, and find the panes of each window."""

# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.compiled import kernel
from millpond.kernels.pointers import same_key


@kernel(
    "int64(uint64[::1], int64[::1], int64[::1], uint64[::1], uint64[::1], uint64, int64, int64, int64, uint64,"
    "int64[::1])",
)
def order_panes(
    ordered: NDArray[np.uint64],
    order: NDArray[np.int64],
    panes: NDArray[np.int64],
    rows_at: NDArray[np.uint64],
    heaps_at: NDArray[np.uint64],
    null_mask: int,
    key_start: int,
    key_stop: int,
    place: int,
    references: int,
    ends: NDArray[np.int64],
) -> int:
    """Reorder rows that are ordered by hash by (key, pane).

    Args:
        ordered: the hashes, ascending.
        order: positions of the rows; rearranged.
        panes, rows_at, heaps_at: by position: start of the row's pane, address of the row, address of its heap.
        null_mask, key_start, key_stop, references: the layout, as for `same_key`.
        place: the word of the key that holds the pane's start.
        ends: filled with the end of each key in `order`; as long as `order`.

    Returns:
        Number of keys.
    """
    count = len(order)
    keys = 0
    begin = 0
    while begin < count:
        end = begin + 1
        while end < count and ordered[end] == ordered[begin]:
            end += 1
        while begin < end:  # nearly always one pass: hash collisions are rare
            first = order[begin]
            stop = begin + 1
            for i in range(begin + 1, end):
                row = order[i]
                left, left_heap, right, right_heap = rows_at[first], heaps_at[first], rows_at[row], heaps_at[row]
                if not same_key(left, left_heap, right, right_heap, null_mask, key_start, place, references):
                    continue
                if not same_key(left, left_heap, right, right_heap, 0, place + 1, key_stop, references):
                    continue
                order[i] = order[stop]
                j = stop
                while j > begin and panes[order[j - 1]] > panes[row]:
                    order[j] = order[j - 1]
                    j -= 1
                order[j] = row
                stop += 1
            ends[keys] = stop
            keys += 1
            begin = stop
    return keys


@kernel(
    "int64(int64[::1], int64[::1], int64[::1], int64, int64, int64, int64, int64, int64[::1],"
    "int64[::1], int64[::1], int64[::1])",
)
def span(
    order: NDArray[np.int64],
    panes: NDArray[np.int64],
    ends: NDArray[np.int64],
    size: int,
    slide: int,
    low: int,
    high: int,
    most: int,
    at: NDArray[np.int64],
    firsts: NDArray[np.int64],
    counts: NDArray[np.int64],
    begins: NDArray[np.int64],
) -> int:
    """List the next windows key by key, as many as fit into the output.

    Args:
        order, ends: results of `order_panes`.
        panes: start of the row's pane, by position.
        size, slide: of the windows.
        low, high: first and last start of the windows to list, both included.
        most: limit of the total number of panes, unless a single window exceeds it.
        at: iteration state: key, its first row (−1 inside a key), first row that later windows can contain, start of
            the next window. Initially zero; advanced.
        firsts, counts, begins: filled with the position of a window's first pane in `order`, the number of its panes,
            and its start.

    Returns:
        Number of windows.
    """
    windows = 0
    total = 0
    key, first, row, begin = at[0], at[1], at[2], at[3]
    fresh = row == first
    while key < len(ends):
        end = ends[key]
        if fresh:
            begin = panes[order[row]] - (size - slide)
            if begin < low:
                begin += -((begin - low) // slide) * slide
        while begin <= high:
            while row < end and panes[order[row]] < begin:
                row += 1
            if row == end:
                break
            begin = max(begin, panes[order[row]] - (size - slide))  # the windows before contain no pane
            if begin > high:
                break
            stop = row
            while stop < end and panes[order[stop]] < begin + size:
                stop += 1
            if windows == len(firsts) or (windows > 0 and total + stop - row > most):
                at[0], at[1], at[2], at[3] = key, -1, row, begin
                return windows
            firsts[windows], counts[windows], begins[windows] = row, stop - row, begin
            windows += 1
            total += stop - row
            begin += slide
        key += 1
        first = row = end
        fresh = True
    at[0], at[1], at[2], at[3] = key, row, row, begin
    return windows


@kernel("void(int64[::1], int64[::1], int64[::1], int64[::1], int64[::1])")
def following(
    order: NDArray[np.int64],
    firsts: NDArray[np.int64],
    counts: NDArray[np.int64],
    rows: NDArray[np.int64],
    windows: NDArray[np.int64],
) -> None:
    """List all panes of windows except each window's first: row positions, and indices of the windows."""
    filled = 0
    for window in range(len(firsts)):
        for i in range(firsts[window] + 1, firsts[window] + counts[window]):
            rows[filled] = order[i]
            windows[filled] = window
            filled += 1
