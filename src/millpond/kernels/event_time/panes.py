"""Windows put together from panes: the panes of each key in order of time, and which of them each window spans."""

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
    """Bring rows that are in order of their keys' hashes into the order of key and pane.

    Args:
        ordered: the hashes. order: the positions of the rows, which are rearranged.
        panes, rows_at, heaps_at: by position, where a row's pane begins, and the addresses of row and heap.
        null_mask, key_start, key_stop, references: the layout, as for `same_key`.
        place: the word of a key that says where its pane begins.
        ends: filled with where each key ends in `order`; as large as that.

    Returns:
        The number of keys.
    """
    count = len(order)
    keys = 0
    begin = 0
    while begin < count:
        end = begin + 1
        while end < count and ordered[end] == ordered[begin]:
            end += 1
        while begin < end:  # nearly always once: different keys rarely have the same hash
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
    """The next windows, key by key: as many as there is room for.

    Args:
        order, ends: as made by `order_panes`. panes: by position, where a row's pane begins.
        size, slide: of the windows.
        low, high: windows that begin in between, both included, are wanted.
        most: panes of all the windows together, but for a single one.
        at: the key to go on with, its first row, its first row that matters still, and its next window, if there is
            one yet; moved on. All zero to begin with.
        firsts, counts, begins: filled: where the panes of a window stand in `order`, their number, where it begins.

    Returns:
        How many windows there are.
    """
    found = 0
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
            begin = max(begin, panes[order[row]] - (size - slide))  # none of the windows before has a pane
            if begin > high:
                break
            stop = row
            while stop < end and panes[order[stop]] < begin + size:
                stop += 1
            if found == len(firsts) or (found > 0 and total + stop - row > most):
                at[0], at[1], at[2], at[3] = key, -1, row, begin
                return found
            firsts[found], counts[found], begins[found] = row, stop - row, begin
            found += 1
            total += stop - row
            begin += slide
        key += 1
        first = row = end
        fresh = True
    at[0], at[1], at[2], at[3] = key, row, row, begin
    return found


@kernel("void(int64[::1], int64[::1], int64[::1], int64[::1], int64[::1])")
def following(
    order: NDArray[np.int64],
    firsts: NDArray[np.int64],
    counts: NDArray[np.int64],
    rows: NDArray[np.int64],
    windows: NDArray[np.int64],
) -> None:
    """All panes of some windows but each one's first: the positions of their rows, and the numbers of the windows."""
    found = 0
    for window in range(len(firsts)):
        for i in range(firsts[window] + 1, firsts[window] + counts[window]):
            rows[found] = order[i]
            windows[found] = window
            found += 1
