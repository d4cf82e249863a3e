"""The layout of a row of state in memory and in files: fixed 8-byte words, the same everywhere.

A row is `[hash, meta, null bits…, key columns…, value columns…]`. A `word` column takes one word, a `wide` one two
(128-bit decimals), a `bytes` one two: length and first four bytes, then either the next eight bytes (length ≤ 12) or
the offset of the whole value in the heap that accompanies the rows (Umbra's string layout, Arrow's string views).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

Kind = Literal["word", "wide", "bytes"]
Words = NDArray[np.uint64]
Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

HASH = 0
META = 1
NULLS = 2

INLINE = 12
"""Largest length, in bytes, of a `bytes` value that is stored inside the row."""

LENGTH = np.uint64(0xFFFFFFFF)
"""Mask of the first word of a `bytes` value: its length."""

NEVER = (1 << 63) - 1
"""The time of a row without a time: later than all other times."""

MAX_BATCH_BYTES = 1 << 30
"""Bytes from which record batches are divided: Arrow holds at most 2 GiB of text in a column."""

LAST_HASH = (1 << 64) - 1


class HashRange(NamedTuple):
    """A contiguous range of 64-bit hashes: `lo` included, `hi` (at most 2⁶⁴) excluded."""

    lo: int = 0
    hi: int = LAST_HASH + 1

    def meet(self, other: HashRange) -> HashRange:
        """Return the intersection with another range; an empty range if they are disjoint."""
        lo = max(self.lo, other.lo)
        return HashRange(lo, max(lo, min(self.hi, other.hi)))

    def has(self, other: HashRange) -> bool:
        """Return whether this range contains another one."""
        return self.lo <= other.lo and other.hi <= self.hi

    def meets(self, other: HashRange) -> bool:
        """Return whether the ranges overlap."""
        return max(self.lo, other.lo) < min(self.hi, other.hi)

    @property
    def whole(self) -> bool:
        """Whether the range contains all hashes."""
        return self.lo == 0 and self.hi > LAST_HASH

    def covers(self, hashes: Words) -> NDArray[np.bool_]:
        """Return a mask of the hashes that are in the range."""
        if self.lo >= self.hi:
            return np.zeros(len(hashes), np.bool_)
        inside: NDArray[np.bool_] = (hashes >= np.uint64(self.lo)) & (hashes <= np.uint64(self.hi - 1))
        return inside


class Column(msgspec.Struct, frozen=True):
    """A stored column: its name, its kind, and whether a new row has null there (else zeros)."""

    name: str
    kind: Kind
    null: bool = False


class TableSchema(msgspec.Struct, frozen=True):
    """The stored columns of one table: those of the key, which is compared as a whole, and those of the value."""

    keys: tuple[Column, ...]
    values: tuple[Column, ...]


@dataclass(frozen=True)
class RowLayout:
    """The position of each column of a `TableSchema` in a row.

    Attributes:
        width: words per row.
        null_words: words of null bits, from word `NULLS` on; bit *i* set means column *i* (keys first) is null.
        offsets: the first word of each column, keys first.
        key_start, key_stop: the range of words that hold the key columns (without null bits).
        bytes_columns: offsets of the `bytes` columns, keys first; `key_bytes` says how many of them belong to the key.
    """

    schema: TableSchema
    width: int = field(init=False)
    null_words: int = field(init=False)
    offsets: tuple[int, ...] = field(init=False)
    key_start: int = field(init=False)
    key_stop: int = field(init=False)
    bytes_columns: tuple[int, ...] = field(init=False)
    key_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        columns = self.schema.keys + self.schema.values
        null_words = max(1, -(-len(columns) // 64))
        offset = NULLS + null_words
        offsets, blobs = [], []
        key_stop = offset
        for index, column in enumerate(columns):
            offsets.append(offset)
            if column.kind == "bytes":
                blobs.append(offset)
            offset += 1 if column.kind == "word" else 2
            if index < len(self.schema.keys):
                key_stop = offset
        derived = {
            "width": offset,
            "null_words": null_words,
            "offsets": tuple(offsets),
            "key_start": NULLS + null_words,
            "key_stop": key_stop,
            "bytes_columns": tuple(blobs),
            "key_bytes": sum(1 for c in self.schema.keys if c.kind == "bytes"),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)


class Rows(NamedTuple):
    """Rows of one layout, and the heap that their long `bytes` values point into.

    `words` has shape (rows, width) and dtype uint64; `heap` is a contiguous array of uint8. The holder defines the
    order of rows. Methods that return rows share the heap. They copy words only where they must, so results may share
    words with these rows.
    """

    words: Words
    heap: Bytes

    @property
    def count(self) -> int:  # type: ignore[override]
        """Number of rows."""
        return len(self.words)

    def span(self, offset: int, width: int) -> Words:
        """Return `width` words of each row, from `offset` on, as packed uint64[n, width]."""
        return np.ascontiguousarray(self.words[:, offset : offset + width])

    def word(self, offset: int) -> Words:
        """Return one word of each row as packed uint64[n]."""
        return np.ascontiguousarray(self.words[:, offset])

    def ints(self, offset: int) -> Ints:
        """Return one word of each row as packed int64[n]."""
        return self.word(offset).view(np.int64)

    def floats(self, offset: int) -> NDArray[np.float64]:
        """Return one word of each row as packed float64[n]."""
        return self.word(offset).view(np.float64)

    def take(self, which: slice | NDArray[np.bool_] | NDArray[np.integer]) -> Rows:
        """Select rows: a slice refers to the same words, a mask or positions copy them, packed."""
        return Rows(self.words[which], self.heap)

    def pieces(self, size: int) -> Iterator[Rows]:
        """Yield the rows in pieces of at most `size` rows."""
        return (self.take(slice(start, start + size)) for start in range(0, self.count, size))

    def halves(self) -> tuple[Rows, Rows]:
        """Return the first half and the rest; of a single row, the first half is empty."""
        middle = self.count // 2
        return self.take(slice(middle)), self.take(slice(middle, None))

    def leading(self, width: int) -> Rows:
        """Return the first `width` words of each row, packed; with a layout's `key_stop`, the rows' keys."""
        return Rows(self.span(0, width), self.heap)

    def packed(self) -> Rows:
        """Return rows without gaps between them (C order); copy only if there are gaps."""
        return self if self.words.flags.c_contiguous else Rows(np.ascontiguousarray(self.words), self.heap)

    def contiguous(self) -> Rows:
        """Return rows each of which is contiguous, though there may be gaps between them; copy only if one is not."""
        words = contiguous(self.words)
        return self if words is self.words else Rows(words, self.heap)


def contiguous(words: Words) -> Words:
    """Return words of shape (rows, width) in which each row is contiguous; there may be gaps between rows."""
    return np.ascontiguousarray(words) if words.strides[1] != 8 or words.strides[0] % 8 else words
