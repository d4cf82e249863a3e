"""Rows of a key in *slots*: layout, visibility, write and read.

A slot is a row whose first two words are the version that inserted the row, plus one, and the version that deleted
it, plus one (0: not deleted). A deleted row stays as a tombstone for the rest of the batch, so that the state before
the batch can still be read. The slots of a key are contiguous in the heap, sorted, and followed by their long values.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,call-overload"

from __future__ import annotations

import numpy as np

from millpond.kernels.compiled import helper, kernel
from millpond.kernels.memory import HALF
from millpond.kernels.pointers import advance, copy_bytes, prefetch, put_word, word
from millpond.layout import INLINE, LENGTH

KEEP, MARK_DELETED, RESTORE = 0, 1, 2
"""Fate of an entry: it stays, is deleted in this batch, or is restored after it was deleted in this batch."""

INSERTED_AT, DELETED_AT = 0, 1
"""Words of a slot: the batches in which its row was inserted and deleted; `DELETED_AT` is 0 for a row that exists."""

_PREFETCH_DISTANCE = 6


@helper
def visible(slot, now, before):
    """Return whether a slot's row existed before the batch (`before`), or exists after it."""
    gone = word(slot, DELETED_AT)
    if before:
        return word(slot, INSERTED_AT) != now and (gone == 0 or gone == now)
    return gone == 0


@helper
def long_bytes(row, blobs, count):
    """Return the bytes of a row's long values; `blobs` is the address of the first words of `count` byte columns."""
    total = np.int64(0)
    for c in range(count):
        size = np.int64(word(row, np.int64(word(blobs, c))) & LENGTH)
        if size > INLINE:
            total += size
    return total


@helper
def _put(out, at, tail, row, heap, words, blobs):
    """Copy a row to `out + at` and its long values to `out + tail`; their heap offsets are relative to `out`."""
    target = advance(out, at)
    copy_bytes(target, row, words * 8)
    for c in range(len(blobs)):
        size = np.int64(word(row, blobs[c]) & LENGTH)
        if size > INLINE:
            copy_bytes(advance(out, tail), advance(heap, np.int64(word(row, blobs[c] + 1))), size)
            put_word(target, blobs[c] + 1, np.uint64(tail))
            tail += size
    return tail


@kernel(
    "void(uint64, int64, uint64, int64, int64[::1], int64[::1], int64[::1], int64[::1], int8[::1], int64[::1],"
    " uint64, int64, uint64, int64[::1], int64, uint64, uint64[:, ::1], int64[::1])"
)
def write_slots(
    slab,
    slab_stride,
    arena,
    blob,
    changed,
    groups,
    firsts,
    ends,
    fates,
    sources,
    rows,
    stride,
    heap,
    blobs,
    version,
    out,
    pairs,
    starts,
):
    """Write the slots of changed groups.

    Args:
        slab, slab_stride, arena, blob, rows, heap, blobs, version: as for `top_n.decide`.
        changed: numbers of the changed groups.
        groups: row id of the key, for each of these.
        firsts, ends: first and last + 1 entry of each group, by group number.
        fates, sources: the entries.
        stride: bytes of a slot.
        out: address of the memory to write to.
        pairs: filled, for each changed group, with the value of the blob column.
        starts: offset in `out` of each changed group, and one more at the end.
    """
    now = np.uint64(version + 1)
    words = stride >> 3
    for k in range(len(changed)):
        if k + _PREFETCH_DISTANCE < len(changed):
            ahead = advance(slab, groups[k + _PREFETCH_DISTANCE] * slab_stride)
            prefetch(advance(arena, np.int64(word(ahead, blob + 1))), 0)
        g = changed[k]
        row = advance(slab, groups[k] * slab_stride)
        slots = advance(arena, np.int64(word(row, blob + 1)))
        base = advance(out, starts[k])
        entries = ends[g] - firsts[g]
        tail = entries * stride
        for e in range(entries):
            source = sources[firsts[g] + e]
            fate = fates[firsts[g] + e]
            target = advance(base, e * stride)
            if source >= 0:
                tail = _put(base, e * stride, tail, advance(rows, source * stride), heap, words, blobs)
                put_word(target, INSERTED_AT, now)
                put_word(target, DELETED_AT, np.uint64(0))
            else:
                slot = advance(slots, (-1 - source) * stride)
                tail = _put(base, e * stride, tail, slot, slots, words, blobs)
                if fate == MARK_DELETED:
                    put_word(target, DELETED_AT, now)
                elif fate == RESTORE:
                    put_word(target, DELETED_AT, np.uint64(0))
        size = starts[k + 1] - starts[k]
        if size == 0:
            pairs[k, 0] = np.uint64(0)
            pairs[k, 1] = np.uint64(0)
        else:
            pairs[k, 0] = np.uint64(size) | (word(base, 0) << HALF)
            pairs[k, 1] = np.uint64(starts[k])


@kernel("void(uint64[:, ::1], uint64, int64, int64, boolean[::1])")
def find_empty(words, heap, blob, stride, empty):
    """Mark the keys that have no slots, or only tombstones.

    Args:
        words: rows of the table.
        heap: address of their long values.
        blob: word of the slots in a row; the number of slots follows.
        stride: bytes of a slot.
        empty: filled: whether a key is without rows.
    """
    for i in range(len(words)):
        row = np.uint64(words.ctypes.data + i * words.shape[1] * 8)
        base = advance(heap, np.int64(word(row, blob + 1)))
        held = np.int64(word(row, blob + 2))
        slot = 0
        while slot < held and word(advance(base, slot * stride), DELETED_AT) != 0:
            slot += 1
        empty[i] = slot == held


@kernel("int64(uint64[:, ::1], uint64, int64, int64, int64[::1], int64[::1], int64[::1])")
def long_slots(words, heap, blob, stride, blobs, rows, slots):
    """Return the bytes of the long values of slots."""
    total = np.int64(0)
    blobs_at = np.uint64(blobs.ctypes.data)
    for i in range(len(rows)):
        row = np.uint64(words.ctypes.data + rows[i] * words.shape[1] * 8)
        slot = advance(advance(heap, np.int64(word(row, blob + 1))), slots[i] * stride)
        total += long_bytes(slot, blobs_at, len(blobs))
    return total


@kernel("void(uint64[:, ::1], uint64, int64, int64, int64[::1], int64[::1], int64[::1], uint64[:, ::1], uint8[::1])")
def read_slots(words, heap, blob, stride, blobs, rows, slots, out, out_heap):
    """Copy slots out of their keys' rows: the words to `out`, and the long values to `out_heap`."""
    tail = np.int64(0)
    for i in range(len(rows)):
        row = np.uint64(words.ctypes.data + rows[i] * words.shape[1] * 8)
        base = advance(heap, np.int64(word(row, blob + 1)))
        slot = advance(base, slots[i] * stride)
        target = np.uint64(out.ctypes.data + i * stride)
        copy_bytes(target, slot, stride)
        for c in range(len(blobs)):
            size = np.int64(word(slot, blobs[c]) & LENGTH)
            if size > INLINE:
                copy_bytes(
                    advance(np.uint64(out_heap.ctypes.data), tail),
                    advance(base, np.int64(word(slot, blobs[c] + 1))),
                    size,
                )
                out[i, blobs[c] + 1] = np.uint64(tail)
                tail += size


@kernel("void(uint64, int64, int64, int64[::1], int64[::1], uint64, int64, int64[::1], int64)")
def put_best(slab, slab_stride, place, groups, winners, rows, stride, skipped, version):
    """Write winning rows over the stored ones, except the words whose `skipped` is not 0 (byte strings)."""
    now = np.uint64(version + 1)
    width = stride >> 3
    for k in range(len(groups)):
        target = advance(slab, groups[k] * slab_stride + place * 8)
        source = advance(rows, winners[k] * stride)
        for w in range(width):
            if skipped[w] == 0:
                put_word(target, w, word(source, w))
        put_word(target, INSERTED_AT, now)
        put_word(target, DELETED_AT, np.uint64(0))
