"""The index of a hot table: linear probing in hash order, eight slots per cache line.

A slot holds the top bits of the hash (the fingerprint) and the row. Home slots increase with the hash, and entries
are kept in hash order. So a scan of the slots yields rows in hash order, and absent keys are detected as early as
present ones. Growth is incremental: entries move to the larger index in hash order, a few at a time, up to a
frontier. Fingerprints below the frontier are looked up in the larger index, the others in the smaller.
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
from millpond.kernels.pointers import advance, put_word, word, word_at
from millpond.layout import INLINE, LENGTH, NULLS

ROW_MASK = LOW_HALF
BITS = HALF
EMPTY = np.uint64(0)


@helper
def fingerprint(state, hash_):
    """Compute the fingerprint of a hash; it exceeds `state[LAST]` if the hash is outside the table's range."""
    return (hash_ - np.uint64(state[LOW])) >> np.uint64(state[SHIFT])


@helper
def home(state, mark):
    """Return the index (address) and slot at which the search for a fingerprint starts."""
    if mark < np.uint64(state[FRONTIER]):
        return np.uint64(state[NEXT_ENTRIES]), np.int64((mark * np.uint64(state[NEXT_SCALE])) >> BITS)
    return np.uint64(state[ENTRIES]), np.int64((mark * np.uint64(state[SCALE])) >> BITS)


@helper
def holds(state, references, at, key, key_heap):
    """Return whether the row at an address has the given key."""
    if (word(at, NULLS) ^ word(key, NULLS)) & np.uint64(state[KEY_NULLS]) != 0:
        return False
    for w in range(state[KEY_START], state[KEY_STOP]):
        own = word(at, w)
        other = word(key, w)
        if references[w] != 0:
            size = np.int64(word(at, w - 1) & LENGTH)
            if size > INLINE:
                if not _same_bytes(
                    advance(np.uint64(state[HEAP]), np.int64(own)), advance(key_heap, np.int64(other)), size
                ):
                    return False
                continue
        if own != other:
            return False
    return True


@helper
def _same_bytes(left, right, size):
    """Return whether `size` > 8 bytes at two addresses are equal."""
    different = word_at(left, size - 8) ^ word_at(right, size - 8)
    for i in range(size >> 3):
        different |= word(left, i) ^ word(right, i)
    return different == np.uint64(0)


@helper
def seek(state, references, mark, key, key_heap):
    """Search a key: return the index, the slot where its entry is or belongs, and its row or −1."""
    entries, slot = home(state, mark)
    hash_ = word(key, 0)
    while True:
        entry = word(entries, slot)
        other_mark = entry >> BITS
        if entry == EMPTY or other_mark > mark:
            return entries, slot, np.int64(-1)
        if other_mark == mark:
            row = np.int64(entry & ROW_MASK) - 1
            address = advance(state[SLAB], row * state[STRIDE])
            other = word(address, 0)
            if other > hash_:
                return entries, slot, np.int64(-1)
            if other == hash_ and holds(state, references, address, key, key_heap):
                return entries, slot, row
        slot += 1


@helper
def place(state, entries, slot, mark, row):
    """Insert an entry at a slot, shifting the entries behind it up to the next free slot."""
    entry = mark << BITS | np.uint64(row + 1)
    while entry != EMPTY:
        displaced = word(entries, slot)
        put_word(entries, slot, entry)
        entry = displaced
        slot += 1
    if entries == np.uint64(state[NEXT_ENTRIES]) and slot > state[NEXT_STOP]:
        state[NEXT_STOP] = slot


@kernel("int64(int64[::1], int64)")
def migrate(state, slots):
    """Move at least `slots` more slots into the larger index, up to the next free slot.

    Returns:
        1 when all entries have moved, else 0.
    """
    entries = np.uint64(state[ENTRIES])
    target = np.uint64(state[NEXT_ENTRIES])
    scale = np.uint64(state[NEXT_SCALE])
    slot = state[CURSOR]
    stop = min(slot + slots, state[SLOTS] + 1)  # beyond the last slot there are only shifted entries, without a gap
    target_slot = np.int64(0)
    while True:
        entry = word(entries, slot)
        slot += 1
        if entry != EMPTY:
            target_slot = max(target_slot, np.int64(((entry >> BITS) * scale) >> BITS))
            while word(target, target_slot) != EMPTY:
                target_slot += 1
            put_word(target, target_slot, entry)
            target_slot += 1
        elif slot >= stop:
            break
    state[NEXT_STOP] = max(state[NEXT_STOP], target_slot)
    state[CURSOR] = slot
    if slot > state[SLOTS]:
        state[FRONTIER] = state[LAST] + 1
        return 1
    # The slot before the cursor is free, so every entry whose home slot is before the cursor has moved.
    own = np.uint64(state[SCALE])
    state[FRONTIER] = np.int64(((np.uint64(slot) << BITS) + own - np.uint64(1)) // own)
    return 0


@kernel("int64(int64[::1], int64, uint32[::1])")
def walk(state, slot, rows):
    """Collect rows in hash order from the slots of an index that is not growing.

    Args:
        state: the table's state array; WALK is set to the slot at which to continue, −1 at the end.
        slot: first slot.
        rows: filled with row ids; the scan stops when it is full.

    Returns:
        Number of rows.
    """
    entries = np.uint64(state[ENTRIES])
    slots = state[SLOTS]
    count = 0
    while count < len(rows):
        entry = word(entries, slot)
        if entry != EMPTY:
            rows[count] = np.uint32((entry & ROW_MASK) - np.uint64(1))
            count += 1
        elif slot >= slots:  # entries shifted beyond the last slot are contiguous
            slot = np.int64(-1)
            break
        slot += 1
    state[WALK] = slot
    return count
