"""The index of a hot table: linear probing kept in hash order, eight slots to a cache line.

A slot holds the top bits of the hash (the fingerprint) and the row. Home slots rise with the hash and entries stand in
hash order, so that walking the slots yields rows in hash order, and absent keys are recognised as early as present
ones. Growth never pauses: entries move to the larger index in hash order, a few at a time, up to a frontier; a
fingerprint below it is looked for in the larger index, one above it in the smaller.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import numpy as np

from millpond.kernels.compiled import helper, kernel
from millpond.kernels.hot_table.state import (
    CURSOR,
    ENTRIES,
    FRONTIER,
    HEAP,
    KEY_NULLS,
    KEY_START,
    KEY_STOP,
    LAST,
    LOW,
    NEXT_ENTRIES,
    NEXT_SCALE,
    NEXT_STOP,
    SCALE,
    SHIFT,
    SLAB,
    SLOTS,
    STRIDE,
    WALK,
)
from millpond.kernels.memory import HALF, LOW_HALF
from millpond.kernels.pointers import put_word, step, word, word_at
from millpond.layout import INLINE, LENGTH, NULLS

ROW_MASK = LOW_HALF
BITS = HALF
EMPTY = np.uint64(0)


@helper
def fingerprint(state, hash_):
    """The fingerprint of a hash; greater than `state[LAST]` when the hash lies outside the table's range."""
    return (hash_ - np.uint64(state[LOW])) >> np.uint64(state[SHIFT])


@helper
def home(state, mark):
    """Index (its address) and slot at which the search for a fingerprint begins."""
    if mark < np.uint64(state[FRONTIER]):
        return np.uint64(state[NEXT_ENTRIES]), np.int64((mark * np.uint64(state[NEXT_SCALE])) >> BITS)
    return np.uint64(state[ENTRIES]), np.int64((mark * np.uint64(state[SCALE])) >> BITS)


@helper
def holds(state, references, at, key, key_heap):
    """Whether the row at an address has the given key."""
    if (word(at, NULLS) ^ word(key, NULLS)) & np.uint64(state[KEY_NULLS]) != 0:
        return False
    for w in range(state[KEY_START], state[KEY_STOP]):
        own = word(at, w)
        other = word(key, w)
        if references[w] != 0:
            size = np.int64(word(at, w - 1) & LENGTH)
            if size > INLINE:
                if not _same_bytes(step(np.uint64(state[HEAP]), np.int64(own)), step(key_heap, np.int64(other)), size):
                    return False
                continue
        if own != other:
            return False
    return True


@helper
def _same_bytes(left, right, size):
    """Whether `size` > 8 bytes at two addresses are equal."""
    different = word_at(left, size - 8) ^ word_at(right, size - 8)
    for i in range(size >> 3):
        different |= word(left, i) ^ word(right, i)
    return different == np.uint64(0)


@helper
def seek(state, references, mark, key, key_heap):
    """Look for a key: the index, the slot where it stands or belongs, its row or -1."""
    entries, slot = home(state, mark)
    hash_ = word(key, 0)
    while True:
        entry = word(entries, slot)
        found = entry >> BITS
        if entry == EMPTY or found > mark:
            return entries, slot, np.int64(-1)
        if found == mark:
            row = np.int64(entry & ROW_MASK) - 1
            at = step(state[SLAB], row * state[STRIDE])
            other = word(at, 0)
            if other > hash_:
                return entries, slot, np.int64(-1)
            if other == hash_ and holds(state, references, at, key, key_heap):
                return entries, slot, row
        slot += 1


@helper
def place(state, entries, slot, mark, row):
    """Put an entry at a slot, moving those behind it one slot on up to the next free one."""
    entry = mark << BITS | np.uint64(row + 1)
    while entry != EMPTY:
        other = word(entries, slot)
        put_word(entries, slot, entry)
        entry = other
        slot += 1
    if entries == np.uint64(state[NEXT_ENTRIES]) and slot > state[NEXT_STOP]:
        state[NEXT_STOP] = slot


@kernel("int64(int64[::1], int64)")
def migrate(state, slots):
    """Move at least `slots` more slots into the larger index, up to the next free one.

    Returns:
        1 when everything has moved, else 0.
    """
    entries = np.uint64(state[ENTRIES])
    target = np.uint64(state[NEXT_ENTRIES])
    scale = np.uint64(state[NEXT_SCALE])
    slot = state[CURSOR]
    stop = min(slot + slots, state[SLOTS] + 1)  # beyond that only pushed entries stand, without a gap
    to = np.int64(0)
    while True:
        entry = word(entries, slot)
        slot += 1
        if entry != EMPTY:
            to = max(to, np.int64(((entry >> BITS) * scale) >> BITS))
            while word(target, to) != EMPTY:
                to += 1
            put_word(target, to, entry)
            to += 1
        elif slot >= stop:
            break
    state[NEXT_STOP] = max(state[NEXT_STOP], to)
    state[CURSOR] = slot
    if slot > state[SLOTS]:
        state[FRONTIER] = state[LAST] + 1
        return 1
    # The slot before the cursor is free, so every entry whose home lies before the cursor has moved.
    own = np.uint64(state[SCALE])
    state[FRONTIER] = np.int64(((np.uint64(slot) << BITS) + own - np.uint64(1)) // own)
    return 0


@kernel("int64(int64[::1], int64, uint32[::1])")
def walk(state, slot, rows):
    """Collect rows in hash order from the slots of an index that is not being grown.

    Args:
        state: the table's state array; WALK is set to the slot to continue at, -1 at the end.
        slot: where to begin.
        rows: filled with row ids; the walk ends when it is full.

    Returns:
        How many rows were found.
    """
    entries = np.uint64(state[ENTRIES])
    slots = state[SLOTS]
    found = 0
    while found < len(rows):
        entry = word(entries, slot)
        if entry != EMPTY:
            rows[found] = np.uint32((entry & ROW_MASK) - np.uint64(1))
            found += 1
        elif slot >= slots:  # entries pushed beyond the last slot stand there without a gap
            slot = np.int64(-1)
            break
        slot += 1
    state[WALK] = slot
    return found
