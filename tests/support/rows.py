"""Conversion of rows to plain Python values and back, and random rows."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from millpond.layout import Column, RowLayout, Rows, TableSchema

Value = int | bytes | None


class Entry(NamedTuple):
    """One row: key and value columns as integers (word, wide) or bytes; None is null."""

    hash: int
    key: tuple[Value, ...]
    value: tuple[Value, ...]
    stamp: int = 0
    dead: bool = False


def layout(keys: str, values: str) -> RowLayout:
    """Return a layout; each letter is a column: w(ord), d (wide), b(ytes)."""
    kinds = {"w": "word", "d": "wide", "b": "bytes"}
    columns = [Column(f"c{i}", kinds[c]) for i, c in enumerate(keys + values)]
    return RowLayout(TableSchema(tuple(columns[: len(keys)]), tuple(columns[len(keys) :])))


FIXED = layout("w", "ww")
MIXED = layout("wbdb", "bw")
MANY = layout("b", "w" * 70 + "b")
LAYOUTS = (FIXED, MIXED, MANY)


def encode(entries: Iterable[Entry], shape: RowLayout) -> Rows:
    """Return rows whose heap has the values in row order, with some bytes between them."""
    entries = list(entries)
    words = np.zeros((len(entries), shape.width), np.uint64)
    heap = bytearray(b"--")
    columns = shape.schema.keys + shape.schema.values
    for row, entry in zip(words, entries, strict=True):
        row[0] = entry.hash
        row[1] = entry.stamp << 16 | entry.dead
        for i, (column, value) in enumerate(zip(columns, entry.key + entry.value, strict=True)):
            at = shape.offsets[i]
            if value is None:
                row[2 + i // 64] |= np.uint64(1 << (i % 64))
            elif column.kind == "word":
                row[at] = value
            elif column.kind == "wide":
                row[at], row[at + 1] = value & (2**64 - 1), value >> 64
            else:
                row[at] = len(value) | int.from_bytes(value[:4], "little") << 32
                if len(value) <= 12:
                    row[at + 1] = int.from_bytes(value[4:], "little")
                else:
                    row[at + 1] = len(heap)
                    heap += value + b"-"
    return Rows(words, np.frombuffer(bytes(heap), np.uint8))


def decode(rows: Rows, shape: RowLayout) -> list[Entry]:
    """Return the rows as plain values; check that null columns hold zeroes."""
    columns = shape.schema.keys + shape.schema.values
    heap = rows.heap.tobytes()
    result = []
    for row in rows.words.tolist():
        values: list[Value] = []
        for i, column in enumerate(columns):
            at = shape.offsets[i]
            second = row[at + 1] if column.kind != "word" else 0
            if row[2 + i // 64] >> (i % 64) & 1:
                assert row[at] == 0
                assert second == 0
                values.append(None)
            elif column.kind == "word":
                values.append(row[at])
            elif column.kind == "wide":
                values.append(row[at] | second << 64)
            else:
                size = row[at] & 0xFFFFFFFF
                if size <= 12:
                    values.append(((row[at] >> 32) | second << 32).to_bytes(12, "little")[:size])
                else:
                    assert second + size <= len(heap)
                    assert heap[second : second + 4] == (row[at] >> 32).to_bytes(4, "little")
                    values.append(heap[second : second + size])
        cut = len(shape.schema.keys)
        result.append(Entry(row[0], tuple(values[:cut]), tuple(values[cut:]), row[1] >> 16, bool(row[1] & 1)))
    return result


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Return entries in hash order, the last one of each key."""
    newest = {(e.hash, e.key): e for e in entries}
    return sorted(newest.values(), key=lambda e: e.hash)


_short = st.binary(max_size=3)
_bytes = st.one_of(
    _short,
    st.sampled_from([b"a" * 12, b"a" * 13, b"a" * 12 + b"b", b"x" * 40, b"x" * 39 + b"y"]),
    st.binary(max_size=30),
)


def values(columns: Sequence[Column], *, small: bool) -> st.SearchStrategy[tuple[Value, ...]]:
    """Return a strategy for values of some columns; with `small`, few different ones, so that keys are equal."""
    kinds = {
        "word": st.integers(0, 3 if small else 2**64 - 1),
        "wide": st.integers(0, 3).map(lambda n: n << 63) if small else st.integers(0, 2**128 - 1),
        "bytes": st.sampled_from([b"", b"k", b"k" * 12, b"k" * 13, b"k" * 12 + b"l"]) if small else _bytes,
    }
    return st.tuples(*(st.none() | kinds[c.kind] for c in columns))


def entries(shape: RowLayout, hashes: st.SearchStrategy[int]) -> st.SearchStrategy[Entry]:
    """Return a strategy for single rows of a layout."""
    return st.builds(
        Entry,
        hashes,
        values(shape.schema.keys, small=True),
        values(shape.schema.values, small=False),
        st.integers(0, 2**48 - 1),
        st.booleans(),
    )


HASHES = st.one_of(
    st.integers(0, 255),
    st.integers(0, 255).map(lambda h: h << 56),
    st.sampled_from([0, 1, 2**63, 2**64 - 1]),
    st.integers(0, 2**64 - 1),
)


def random_rows(count: int, shape: RowLayout, seed: int, *, bits: int = 64, longest: int = 30) -> Rows:
    """Return rows with distinct keys; each column of bytes has a random length.

    Args:
        count: number of rows.
        bits: only the highest bits of a hash are random, the others are 0.
        longest: bytes of a value, at most.
    """
    rng = np.random.default_rng(seed)
    words = np.zeros((count, shape.width), np.uint64)
    words[:, 0] = rng.integers(0, 2**64, count, np.uint64) >> np.uint64(64 - bits) << np.uint64(64 - bits)
    words[:, 1] = rng.integers(0, 2**40, count, np.uint64) << np.uint64(16)
    heap = rng.integers(97, 123, max(1, count * longest), np.uint8)
    for i, column in enumerate(shape.schema.keys + shape.schema.values):
        at = shape.offsets[i]
        words[:, at] = np.arange(count, dtype=np.uint64) + np.uint64(seed << 32)
        if column.kind == "bytes":
            sizes = rng.integers(13, longest + 1, count, np.uint64)
            offsets = np.arange(count, dtype=np.uint64) * np.uint64(longest)
            prefix = np.lib.stride_tricks.sliding_window_view(heap, 4)[offsets].copy().view(np.uint32)[:, 0]
            words[:, at] = sizes | prefix.astype(np.uint64) << np.uint64(32)
            words[:, at + 1] = offsets
    return Rows(words, heap)
