"""Window frames over the ordered rows of a key: rows whose results a batch may have changed, and the changes.

Rows are in slots, as in `kernels.ranking.packed_rows`. A key has two *sequences* of rows: the slots that existed
before the batch, and those that exist after it.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,call-overload"

from __future__ import annotations

import numpy as np

from millpond.kernels.compiled import helper, kernel
from millpond.kernels.pointers import advance, word
from millpond.kernels.ranking.changes import DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE
from millpond.kernels.ranking.compare import compare_rows
from millpond.kernels.ranking.packed_rows import DELETED_AT, INSERTED_AT

IN_BEFORE, IN_AFTER, ASKED = 1, 2, 4
"""Marks of a slot: its row is read in the sequence before the batch; in that after it; its own result is needed."""


@helper
def _sides(slot, now):
    """Return in which sequences a slot's row is."""
    gone = word(slot, DELETED_AT)
    sides = 0
    if gone == 0:
        sides = IN_AFTER
    if word(slot, INSERTED_AT) != now and (gone == 0 or gone == now):
        sides |= IN_BEFORE
    return sides


@kernel("void(uint64[:, ::1], uint64, int64, int64, int64, int64, uint8[::1], int64[:, ::1])")
def mark(words, heap, blob, stride, version, most, marks, counts):
    """Mark the rows whose results a batch may have changed, and the rows in their frames.

    The result of an inserted or deleted row changes, and may change for the next `most` rows that stayed.

    Args:
        words: rows of the table.
        heap: address of their long values.
        blob: first of the two words of the slots in a table row; the word after these is the number of slots.
        stride: bytes of a slot.
        version: of the batch.
        most: number of preceding rows in the longest frame.
        marks: filled for all slots of all keys, one after another.
        counts: filled, by key and sequence, with the number of rows to read.
    """
    now = np.uint64(version + 1)
    first = np.int64(0)
    for i in range(len(words)):
        row = np.uint64(words.ctypes.data + i * words.shape[1] * 8)
        held = np.int64(word(row, blob + 2))
        base = advance(heap, np.int64(word(row, blob + 1)))
        stayed = most + 1  # rows since the last inserted or deleted one
        for s in range(held):
            sides = _sides(advance(base, s * stride), now)
            marks[first + s] = sides
            if sides == 0:
                continue
            stayed = stayed + 1 if sides == IN_BEFORE | IN_AFTER else 0
            if stayed <= most:
                marks[first + s] |= ASKED
        for side in range(2):
            bit = IN_AFTER if side else IN_BEFORE
            pending = np.int64(0)
            read = np.int64(0)
            for s in range(held - 1, -1, -1):
                if marks[first + s] & bit == 0:
                    continue
                if marks[first + s] & ASKED != 0:
                    pending = most + 1
                if pending > 0:
                    read += 1
                    pending -= 1
                else:
                    marks[first + s] ^= bit
            counts[i, side] = read
        first += held


@kernel(
    "int64(uint64[:, ::1], uint64, int64, int64, int64, int64[:, ::1], int64, uint8[::1], int64, int64, int64,"
    " int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64)"
)
def sequence(
    words,
    heap,
    blob,
    stride,
    version,
    descriptor,
    most,
    marks,
    start,
    stop,
    side,
    rows,
    slots,
    asked,
    before,
    runs,
    base_of,
):
    """List the marked rows of one sequence, for a range of keys.

    Args:
        words, heap, blob, stride, version, most: as for `mark`.
        descriptor: columns of a row, those of the order first.
        marks: from the first slot of the first key on.
        start, stop: the keys.
        side: 0 for the sequence before the batch, 1 for that after it.
        rows, slots: filled with the table row and the slot of each row to read.
        asked: filled with the indices of those whose results are needed, plus `base_of`.
        before: filled with the number of rows before each of these, at most `most`.
        runs: filled with a number that is equal, in both sequences, for rows with equal columns; ascending.
        base_of: first index.

    Returns:
        Number of results needed.
    """
    columns = np.uint64(descriptor.ctypes.data)
    count = len(descriptor)
    now = np.uint64(version + 1)
    bit = IN_AFTER if side else IN_BEFORE
    first = np.int64(0)
    run = np.int64(-1)
    result_count = np.int64(0)
    filled = np.int64(0)
    for i in range(start, stop):
        row = np.uint64(words.ctypes.data + i * words.shape[1] * 8)
        held = np.int64(word(row, blob + 2))
        base = advance(heap, np.int64(word(row, blob + 1)))
        passed = np.int64(0)
        last = np.int64(-1)
        for s in range(held):
            slot = advance(base, s * stride)
            marked = marks[first + s]
            if marked & ASKED != 0:
                # Equal rows are adjacent, in whichever sequence they are.
                if last < 0 or compare_rows(advance(base, last * stride), base, slot, base, columns, 0, count) != 0:
                    run += 1
                last = s
            if marked & bit != 0:
                rows[filled] = i
                slots[filled] = s
                if marked & ASKED != 0:
                    asked[result_count] = base_of + filled
                    before[result_count] = min(passed, most)
                    runs[result_count] = run
                    result_count += 1
                filled += 1
            if _sides(slot, now) & bit != 0:
                passed += 1
        first += held
    return result_count


@kernel("void(int64[::1], int64[::1], uint64, int64, int64[:, ::1], int8[::1])")
def differences(old_runs, new_runs, results, stride, descriptor, kinds):
    """Compute the changes of results. Equal rows with equal results on both sides cancel each other out.

    Args:
        old_runs, new_runs: runs of the rows before and after the batch, ascending.
        results: address of the results, those before the batch first.
        stride: bytes of a result.
        descriptor: the columns of a result.
        kinds: filled, for each result, with the kind of the change, 0 for none.
    """
    columns = np.uint64(descriptor.ctypes.data)
    count = len(descriptor)
    olds = len(old_runs)
    i = 0
    j = 0
    while i < olds or j < len(new_runs):
        run = old_runs[i] if j >= len(new_runs) or (i < olds and old_runs[i] < new_runs[j]) else new_runs[j]
        old_stop = i
        while old_stop < olds and old_runs[old_stop] == run:
            old_stop += 1
        new_stop = j
        while new_stop < len(new_runs) and new_runs[new_stop] == run:
            new_stop += 1
        # All changes among equal rows are inserts or deletes. So one of the two sides is no longer than a frame.
        removed = old_stop - i
        added = new_stop - j
        for new in range(j, new_stop):
            kinds[olds + new] = INSERT
        for old in range(i, old_stop):
            kinds[old] = DELETE
            for new in range(j, new_stop):
                if kinds[olds + new] != 0 and (
                    compare_rows(
                        advance(results, old * stride),
                        results,
                        advance(results, (olds + new) * stride),
                        results,
                        columns,
                        0,
                        count,
                    )
                    == 0
                ):
                    kinds[old] = 0
                    kinds[olds + new] = 0
                    removed -= 1
                    added -= 1
                    break
        pairs = min(removed, added)
        changed = pairs
        for old in range(i, old_stop):
            if kinds[old] != 0 and changed > 0:
                kinds[old] = UPDATE_BEFORE
                changed -= 1
        changed = pairs
        for new in range(j, new_stop):
            if kinds[olds + new] != 0 and changed > 0:
                kinds[olds + new] = UPDATE_AFTER
                changed -= 1
        i = old_stop
        j = new_stop
