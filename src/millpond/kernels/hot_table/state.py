"""Constants of the hot table's kernels: indices into its state array, and flags of a row's META word.

A hot table consists of a slab of rows, an index of their hashes and an arena of long values. Each has its own
mapping, whose address is fixed while it is in use. Addresses and counters are in one `int64` array, so that a kernel
call takes few arguments.
"""

from __future__ import annotations

# The slab: row `i` is at SLAB + i * STRIDE.
SLAB = 0
STRIDE = 1  # bytes
WIDTH = 2  # words of a row
HIGH = 3  # row ids below have been in use
FREE = 4  # number of entries on the stack of free rows
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
NEXT_ENTRIES = 16  # the larger index during growth: it has the fingerprints below FRONTIER
NEXT_SLOTS = 17
NEXT_SCALE = 18
FRONTIER = 19
CURSOR = 20  # slots of ENTRIES below have moved to NEXT_ENTRIES
NEXT_STOP = 21  # slots of NEXT_ENTRIES from here on have never been used
# The arena of long values.
HEAP = 22
HEAP_TOP = 23  # bytes below have been in use
HEAP_FREE = 24  # bytes of those that are on free lists
# Changes.
TOUCHED_ROWS = 25
DIRTY_ROWS = 26
WALK = 27  # slot at which a scan continues
COPIED = 28  # bytes of long values that an eviction copied
DEAD = 29  # number of tombstones
LOST = 30  # lowest expiry (as access time) of evicted clean rows, since it was last read
EXPIRY = 31  # word of a row's time of expiry, 0 if rows do not expire
SIZE = 32

NOTHING_LOST = 1 << 62

TOMBSTONE = 1  # the key was removed: its row holds no values, but runs may hold older ones
DIRTY = 2  # changed since it was last copied into a run
TOUCHED = 4  # changed in this batch
FRESH = 8  # created before the upsert that is to see it as new
EXPIRING = 16  # in the list of rows that expire soon
FLAGS = 0xFFFF
ACCESS_TIME_SHIFT = 16
