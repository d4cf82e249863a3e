"""Key groups: the fixed parts of the key space. A partition owns a contiguous range of them."""

from __future__ import annotations

from itertools import pairwise

from millpond.layout import HashRange

KEY_GROUP_BITS = 15
"""Number of leading bits of a key hash that are its key group."""
KEY_GROUPS = 1 << KEY_GROUP_BITS
IN_GROUP_BITS = 64 - KEY_GROUP_BITS
"""Number of its remaining bits."""


def partition_of(key_hash: int, partitions: int) -> int:
    """Return the partition of a key hash (signed or unsigned 64 bits)."""
    group = (key_hash & 0xFFFF_FFFF_FFFF_FFFF) >> IN_GROUP_BITS
    return group * partitions >> KEY_GROUP_BITS


def partition_sql(key_hash: str, partitions: int) -> str:
    """Return SQL that computes `partition_of`; `key_hash` is SQL for the hash, a bigint."""
    return f"cast(shiftright(shiftrightunsigned({key_hash}, {IN_GROUP_BITS}) * {partitions}L, {KEY_GROUP_BITS}) as int)"


def split_key_groups(partitions: int, key_groups: int = KEY_GROUPS) -> tuple[tuple[int, int], ...]:
    """Return the key groups `[first, stop)` of each partition, by `partition = group * partitions // key_groups`."""
    # The first key group of a partition, rounded up: the inverse of the formula.
    bounds = [-(-partition * key_groups // partitions) for partition in range(partitions + 1)]
    return tuple(pairwise(bounds))


def hash_range_of(groups: tuple[int, int], key_groups: int = KEY_GROUPS) -> HashRange:
    """Return the range of hashes of key groups `[first, stop)`."""
    shift = 64 - (key_groups - 1).bit_length()
    return HashRange(groups[0] << shift, groups[1] << shift)


def hash_ranges(partitions: int) -> list[HashRange]:
    """Return the range of hashes of each partition."""
    return [hash_range_of(groups) for groups in split_key_groups(partitions)]


def as_signed(key_hash: int) -> int:
    """Return an unsigned 64-bit hash as a signed one, Spark's bigint."""
    return key_hash - (1 << 64) if key_hash >= 1 << 63 else key_hash
