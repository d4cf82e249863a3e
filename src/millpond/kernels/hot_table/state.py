"""What the hot table's kernels share: the numbers in its state array, the flags in a row's META word.

A hot table is a slab of rows, an index of its hashes and an arena of long values, each in a mapping of its own whose
address never changes while it is in use. Their addresses and counters stand in one `int64` array, so that a kernel call
takes few arguments.
"""

from __future__ import annotations

# The slab: row `i` stands at SLAB + i * STRIDE.
SLAB = 0
STRIDE = 1  # bytes
WIDTH = 2  # words of a row
HIGH = 3  # rows below have been in use
FREE = 4  # entries on the stack of free rows
INITIAL = 5  # address of the template of a fresh row
# The key within a row.
KEY_START = 6
KEY_STOP = 7
KEY_NULLS = 8  # mask of the key's null bits
# The index: slots of `fingerprint << 32 | row + 1`, 0 = free, ordered by hash.
COUNT = 9
LOW = 10  # first hash of the table's range (bits of a uint64)
SHIFT = 11  # fingerprint = (hash - LOW) >> SHIFT
LAST = 12  # greatest fingerprint
ENTRIES = 13
SLOTS = 14
SCALE = 15  # slot = fingerprint * SCALE >> 32
NEXT_ENTRIES = 16  # the index being grown into: holds the fingerprints below FRONTIER
NEXT_SLOTS = 17
NEXT_SCALE = 18
FRONTIER = 19
CURSOR = 20  # slots of ENTRIES below have moved
NEXT_STOP = 21  # slots of NEXT_ENTRIES from here on were never used
# The arena of values longer than a row holds.
HEAP = 22
HEAP_TOP = 23  # bytes below have been in use
HEAP_FREE = 24  # bytes of them on free lists
# What changed.
TOUCHED_ROWS = 25
DIRTY_ROWS = 26
WALK = 27  # slot at which a walk goes on
COPIED = 28  # bytes of long values that an eviction copied
DEAD = 29  # tombstones among the rows
LOST = 30  # lowest stamp of an unchanged row that expires and was evicted, since this was looked at
EXPIRY = 31  # the word of a row's time of expiry, 0 if rows do not expire
SIZE = 32

NOTHING_LOST = 1 << 62

TOMBSTONE = 1  # the key was removed: its row holds no values, and runs may hold older ones
DIRTY = 2  # changed since it was last copied into a run
TOUCHED = 4  # changed in this batch
FRESH = 8  # made ahead of the upsert that is to find it new
FILED = 16  # in the list of rows that expire soon
FLAGS = 0xFFFF
STAMP_SHIFT = 16
