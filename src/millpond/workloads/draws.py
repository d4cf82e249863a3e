"""Random draws that are a pure function of (seed, stream, event number), the same in NumPy and in Spark.

A draw is Spark's own `xxhash64` of the stream and the event number. So any range of events can be made anywhere, in any
order and again, without a generator's state; and Spark computes it inside the stage that uses it, without Python.
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
    """The number that tells one column's draws from another's. `stream` is below 1,000."""
    return seed * _STREAMS + stream


def hash_longs(values: NDArray[np.uint64], seed: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    """xxHash64 of one 8-byte value each (as `org.apache.spark.sql.catalyst.expressions.XXH64.hashLong`)."""
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
    """63 random bits per event number, as int64[n] that is not negative. Take `bits` of them."""
    with np.errstate(over="ignore"):
        state = hash_longs(np.array([stream_id(seed, stream)], dtype=np.uint64), np.uint64(42))
        return (hash_longs(numbers.view(np.uint64), state) >> np.uint64(1)).view(np.int64)


def bits(drawn: Longs, shift: int, width: int) -> Longs:
    """`width` of the drawn bits, from bit `shift` on: a uniform integer below 2^width."""
    return (drawn >> shift) & ((1 << width) - 1)


def draw_sql(number: str, seed: int, stream: int) -> str:
    """`draw` as a Spark SQL expression of type bigint."""
    return f"shiftrightunsigned(xxhash64({stream_id(seed, stream)}L, {number}), 1)"


def bits_sql(drawn: str, shift: int, width: int) -> str:
    """`bits` as a Spark SQL expression of type bigint."""
    return f"(shiftright({drawn}, {shift}) & {(1 << width) - 1}L)"


def letters(length: int, seed: int, alphabet: bytes = b"abcdefghijklmnopqrstuvwxyz") -> bytes:
    """A fixed text of random letters, to cut strings from."""
    picks = draw(np.arange(length, dtype=np.int64), seed, _STREAMS - 1) % len(alphabet)
    return np.frombuffer(alphabet, dtype=np.uint8)[picks].tobytes()
