"""Merge of hash-ordered runs: the newest version of each key, in hash order."""

# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.compiled import kernel
from millpond.kernels.pointers import advance, same_key, word
from millpond.kernels.runs.search import lower_bound

_END = np.uint64(0xFFFFFFFFFFFFFFFF)


@kernel()
def _settle(
    s: int,
    first: NDArray[np.int64],
    rows_in: NDArray[np.int64],
    words_at: NDArray[np.uint64],
    width: int,
    highest: int,
    block: NDArray[np.int64],
    row: NDArray[np.int64],
    end: NDArray[np.int64],
    base: NDArray[np.uint64],
    head: NDArray[np.uint64],
    live: NDArray[np.uint8],
) -> None:
    # Advance a source to the block with its next row, and check whether that row is in the range.
    while row[s] == end[s]:
        block[s] += 1
        if block[s] == first[s + 1]:
            live[s] = 0
            return
        base[s] = words_at[block[s]]
        end[s] = rows_in[block[s]]
        row[s] = 0
    head[s] = word(base[s], row[s] * width)
    live[s] = 1 if head[s] <= highest else 0


@kernel(
    "int64(int64[::1], int64[::1], uint64[::1], uint64[::1], uint64, uint64, int64, uint64, int64, int64, uint64,"
    "boolean, uint64[::1], uint64[::1])",
)
def merge_order(
    first: NDArray[np.int64],
    rows_in: NDArray[np.int64],
    words_at: NDArray[np.uint64],
    heap_at: NDArray[np.uint64],
    lowest: int,
    highest: int,
    width: int,
    null_mask: int,
    key_start: int,
    key_stop: int,
    references: int,
    drop: bool,
    rows_out: NDArray[np.uint64],
    heaps_out: NDArray[np.uint64],
) -> int:
    """Merge sources: list the surviving rows in hash order.

    Args:
        first: source *s*, newest first, has the blocks `first[s]` to `first[s + 1]`.
        rows_in, words_at, heap_at: per block: number of rows, addresses of words and heap.
        lowest, highest: range of hashes to merge, both ends included.
        width, null_mask, key_start, key_stop, references: the layout, as for `same_key`; `width` in words.
        drop: leave out tombstones.
        rows_out, heaps_out: filled with the addresses of the surviving rows and of their heaps; large enough for all.

    Returns:
        Number of surviving rows.
    """
    sources = len(first) - 1
    block = np.empty(sources, np.int64)
    row = np.empty(sources, np.int64)
    end = np.empty(sources, np.int64)
    base = np.zeros(sources, np.uint64)
    head = np.full(sources, _END, np.uint64)
    live = np.zeros(sources, np.uint8)
    for s in range(sources):
        block[s] = first[s]
        row[s] = 0
        end[s] = 0
        if block[s] < first[s + 1]:
            base[s] = words_at[block[s]]
            row[s] = lower_bound(base[s], width, rows_in[block[s]], 0, lowest)
            end[s] = rows_in[block[s]]
            _settle(s, first, rows_in, words_at, width, highest, block, row, end, base, head, live)
    n = 0
    while True:
        # Find the lowest head, its newest source, and the next higher head.
        best = -1
        h = _END
        following = _END
        alone = True
        for s in range(sources):
            if live[s] != 0:
                other = head[s]
                if best < 0 or other < h:
                    if best >= 0:
                        following = h
                    best = s
                    h = other
                    alone = True
                elif other == h:
                    alone = False
                elif other < following:
                    following = other
        if best < 0:
            return n
        if alone:
            # Rows below the next head are in this source only, and a key occurs once per source: no keys need
            # comparing.
            heap = heap_at[block[best]]
            base_at = base[best]
            r = row[best]
            stop = end[best]
            while True:
                source = advance(base_at, r * width * 8)
                # Branch-free append: a dropped tombstone's entry is overwritten by the next row.
                rows_out[n] = source
                heaps_out[n] = heap
                n += 1 - np.int64(drop and (word(source, 1) & np.uint64(1)) != np.uint64(0))
                r += 1
                if r == stop:
                    break
                h = word(base_at, r * width)
                if h >= following or h > highest:
                    break
            row[best] = r
            head[best] = h
            if r == stop or h > highest:
                _settle(best, first, rows_in, words_at, width, highest, block, row, end, base, head, live)
            continue
        # Several sources have rows of this hash. A row survives unless a newer source has a row with the same key.
        group = n
        for s in range(best, sources):
            newer = n
            while live[s] != 0 and head[s] == h:
                candidate = advance(base[s], row[s] * width * 8)
                heap = heap_at[block[s]]
                hidden = False
                for other_row in range(group, newer):
                    if same_key(
                        candidate,
                        heap,
                        rows_out[other_row],
                        heaps_out[other_row],
                        null_mask,
                        key_start,
                        key_stop,
                        references,
                    ):
                        hidden = True
                        break
                if not hidden:
                    rows_out[n] = candidate
                    heaps_out[n] = heap
                    n += 1
                row[s] += 1
                if row[s] < end[s]:
                    head[s] = word(base[s], row[s] * width)
                if row[s] == end[s] or head[s] > highest:
                    _settle(s, first, rows_in, words_at, width, highest, block, row, end, base, head, live)
        if drop:
            kept = group
            for i in range(group, n):
                rows_out[kept] = rows_out[i]
                heaps_out[kept] = heaps_out[i]
                kept += 1 - np.int64((word(rows_out[i], 1) & np.uint64(1)) != np.uint64(0))
            n = kept
