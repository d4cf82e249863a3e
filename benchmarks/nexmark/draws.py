"""Random draws that are a pure function of (seed, stream, event number), equal in NumPy and in Spark.

A draw is Spark's `xxhash64` of the stream and the event number. So any range of events can be generated repeatedly,
on any host and in any order, without generator state. Spark computes draws inside the stage that uses them, without
Python.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Longs = NDArray[np.int64]
_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(p)
    for p in (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
)
_STREAMS = 1_000


def stream_id(seed: int, stream: int) -> int:
    """Return the number that separates one column's draws from another's. `stream` is below 1,000."""
    return seed * _STREAMS + stream


def hash_longs(values: NDArray[np.uint64], seed: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    """Compute xxHash64 of 8-byte values (as `org.apache.spark.sql.catalyst.expressions.XXH64.hashLong`)."""
    mixed = values * _P2
    mixed = ((mixed << np.uint64(31)) | (mixed >> np.uint64(33))) * _P1
    mixed ^= seed + (_P5 + np.uint64(8))
    mixed = ((mixed << np.uint64(27)) | (mixed >> np.uint64(37))) * _P1 + _P4
    mixed ^= mixed >> np.uint64(33)
    mixed *= _P2
    mixed ^= mixed >> np.uint64(29)
    mixed *= _P3
    mixed ^= mixed >> np.uint64(32)
    return mixed


def draw(numbers: Longs, seed: int, stream: int) -> Longs:
    """Draw 63 random bits per event number, as non-negative int64[n]. Use `bits` to take fields of them."""
    with np.errstate(over="ignore"):
        state = hash_longs(np.array([stream_id(seed, stream)], dtype=np.uint64), np.uint64(42))
        return (hash_longs(numbers.view(np.uint64), state) >> np.uint64(1)).view(np.int64)


def bits(drawn: Longs, shift: int, width: int) -> Longs:
    """Extract `width` bits of draws from bit `shift` on: uniform integers below 2^width."""
    return (drawn >> shift) & ((1 << width) - 1)


def draw_sql(number: str, seed: int, stream: int) -> str:
    """Format `draw` as a Spark SQL expression of type bigint."""
    return f"shiftrightunsigned(xxhash64({stream_id(seed, stream)}L, {number}), 1)"


def bits_sql(drawn: str, shift: int, width: int) -> str:
    """Format `bits` as a Spark SQL expression of type bigint."""
    return f"(shiftright({drawn}, {shift}) & {(1 << width) - 1}L)"


def letters(length: int, seed: int, alphabet: bytes = b"abcdefghijklmnopqrstuvwxyz") -> bytes:
    """Make a fixed text of random letters, from which strings are cut."""
    picks = draw(np.arange(length, dtype=np.int64), seed, _STREAMS - 1) % len(alphabet)
    return np.frombuffer(alphabet, dtype=np.uint8)[picks].tobytes()
