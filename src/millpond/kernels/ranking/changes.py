"""Changelog of ranks: the changes of a batch to the ranks of rows in slots."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,call-overload"

from __future__ import annotations

import numpy as np
from numba import types

from millpond.kernels.compiled import helper, kernel
from millpond.kernels.memory import I64, INTS, SHORTS, U64, WORDS
from millpond.kernels.pointers import advance, word
from millpond.kernels.ranking.compare import compare_rows
from millpond.kernels.ranking.packed_rows import visible
from millpond.kernels.ranking.top_n import DENSE_RANK, KINDS, RANKING_IN, ROW_NUMBER

INSERT, UPDATE_AFTER, DELETE, UPDATE_BEFORE = 1, 2, -1, -2
"""Kinds of changes: insert, update (new row), delete, update (old row)."""


@helper
def _note(at, row, slot, rank, kind, rows, slots, ranks, kinds):
    rows[at] = row
    slots[at] = slot
    ranks[at] = rank
    kinds[at] = kind
    return at + 1


@kernel(I64(WORDS, U64, I64, RANKING_IN, I64, types.boolean, INTS, INTS, SHORTS, KINDS))
def changes(words, heap, blob, ranking, version, before_images, rows, slots, ranks, kinds):
    """List the changes of a batch to the ranks of keys' rows.

    A result is identified by key and row number for `ROW_NUMBER`, and by the row for other ranks.

    Args:
        words: rows of the table.
        heap: address of their long values.
        blob, ranking: as for `decide`.
        version: of the batch.
        before_images: include deletes and the old rows of updates.
        rows, slots, ranks, kinds: filled with the changes: row of the table, slot, rank, kind of change.

    Returns:
        Number of changes.
    """
    ranked = ranking[0]
    columns = ranked.columns
    count = ranked.count
    stride = ranked.stride
    limit = ranked.limit
    function = ranked.function
    now = np.uint64(version + 1)
    filled = 0
    for i in range(len(words)):
        row = np.uint64(words.ctypes.data + i * words.shape[1] * 8)
        held = np.int64(word(row, blob + 2))
        base = advance(heap, np.int64(word(row, blob + 1)))
        if function == ROW_NUMBER:
            before = np.int64(0)
            after = np.int64(0)
            for number in range(1, held + 1):
                if number > limit:
                    break
                while before < held and not visible(advance(base, before * stride), now, True):
                    before += 1
                while after < held and not visible(advance(base, after * stride), now, False):
                    after += 1
                if before >= held and after >= held:
                    break
                if after >= held:
                    if before_images:
                        filled = _note(filled, i, before, number, DELETE, rows, slots, ranks, kinds)
                elif before >= held:
                    filled = _note(filled, i, after, number, INSERT, rows, slots, ranks, kinds)
                elif before != after and (
                    compare_rows(
                        advance(base, before * stride), base, advance(base, after * stride), base, columns, 0, count
                    )
                    != 0
                ):
                    if before_images:
                        filled = _note(filled, i, before, number, UPDATE_BEFORE, rows, slots, ranks, kinds)
                    filled = _note(filled, i, after, number, UPDATE_AFTER, rows, slots, ranks, kinds)
                before += 1
                after += 1
            continue
        positions = np.zeros(2, np.int64)
        current = np.zeros(2, np.int64)
        dense = np.zeros(2, np.int64)
        last = np.full(2, -1)
        for s in range(held):
            slot = advance(base, s * stride)
            side_ranks = np.zeros(2, np.int64)
            for side in range(2):
                if not visible(slot, now, side == 0):
                    continue
                positions[side] += 1
                if last[side] < 0 or (
                    compare_rows(advance(base, last[side] * stride), base, slot, base, columns, 0, ranked.ordering) != 0
                ):
                    current[side] = positions[side]
                    dense[side] += 1
                last[side] = s
                rank = dense[side] if function == DENSE_RANK else current[side]
                if rank <= limit:
                    side_ranks[side] = rank
            if side_ranks[0] == side_ranks[1]:
                continue
            if side_ranks[0] != 0 and before_images:
                kind = UPDATE_BEFORE if side_ranks[1] != 0 else DELETE
                filled = _note(filled, i, s, side_ranks[0], kind, rows, slots, ranks, kinds)
            if side_ranks[1] != 0:
                kind = UPDATE_AFTER if side_ranks[0] != 0 else INSERT
                filled = _note(filled, i, s, side_ranks[1], kind, rows, slots, ranks, kinds)
    return filled
