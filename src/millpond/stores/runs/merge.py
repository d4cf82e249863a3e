"""Merging runs, interval by interval of the hash axis, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from millpond.files.formats.blocks import BlockSource, shape_of
from millpond.kernels.runs.gather import gather_rows
from millpond.kernels.runs.merge import merge_order
from millpond.layout import LAST_HASH, RowLayout, Rows

PIECE_ROWS = 65536


def merge(
    sources: Sequence[BlockSource],
    layout: RowLayout,
    *,
    drop_tombstones: bool,
    lowest: int = 0,
    highest: int = LAST_HASH,
    size: int = PIECE_ROWS,
) -> Iterator[Rows]:
    """The newest version of each key of some runs, in hash order.

    Args:
        sources: the runs, newest first; within one run each key occurs once.
        layout: the layout of their rows.
        drop_tombstones: leave out deleted keys; right only if no older run lies below.
        lowest, highest: the interval of hashes wanted, both ends included.
        size: rows in a piece, roughly; a piece never splits the rows of one hash.

    Yields:
        Non-empty pieces, each with its own compact heap.
    """
    shape = shape_of(layout)
    current = lowest
    for boundary in _boundaries(sources, lowest, highest, size) if sources else ():
        pieces = []
        for source in sources:
            begin, end = source.index.span(current, boundary - 1)
            source.expect_blocks(begin, min(begin + 2 * (end - begin), source.index.count))
            pieces.append((begin, end, source.blocks(np.arange(begin, end))))
        first = np.zeros(len(sources) + 1, np.int64)
        np.cumsum([end - begin for begin, end, _ in pieces], out=first[1:])
        if first[-1]:
            rows_in = np.concatenate(
                [np.diff(s.index.starts[b : e + 1]) for s, (b, e, _) in zip(sources, pieces, strict=True)]
            )
            words_at = np.concatenate([table.words_at[b:e] for b, e, table in pieces])
            heap_at = np.concatenate([table.heap_at[b:e] for b, e, table in pieces])
            room = int(rows_in.sum())
            rows_at, heaps_at = np.empty(room, np.uint64), np.empty(room, np.uint64)
            count = merge_order(
                first, rows_in, words_at, heap_at, current, boundary - 1, *shape[:5], drop_tombstones, rows_at, heaps_at
            )
            if count:
                yield Rows(*gather_rows(rows_at[:count], heaps_at[:count], shape.width, shape.blobs))
        current = boundary


def _boundaries(sources: Sequence[BlockSource], lowest: int, highest: int, size: int) -> Iterator[int]:
    """Where to cut an interval (each the end of a part, excluded) so that the parts hold about `size` rows."""
    spans = [(source.index, *source.index.span(lowest, highest)) for source in sources]
    fences = np.concatenate([index.fence[begin:end] for index, begin, end in spans])
    rows = np.concatenate([np.diff(index.starts[begin : end + 1]) for index, begin, end in spans])
    order = np.argsort(fences, kind="stable")
    before = np.cumsum(rows[order]) - rows[order]
    cuts = np.searchsorted(before, np.arange(size, int(rows.sum()), size), "left")
    # Rows of one hash may fill blocks: they stay together.
    for fence in np.unique(fences[order[cuts[cuts < len(order)]]]).tolist():
        if fence > lowest:
            yield fence
    yield highest + 1
