"""Rows of a table that had other columns: each value is where its column is now."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.files.formats.conversion import Conversion, convertible
from millpond.layout import HASH, INLINE, META, NULLS, Column, RowLayout, Rows, TableSchema

KINDS = ("word", "wide", "bytes")
VALUES = {
    "word": st.integers(-(1 << 63), (1 << 63) - 1),
    "wide": st.integers(-(1 << 127), (1 << 127) - 1),
    "bytes": st.binary(max_size=INLINE + 20),
}
_MASK = (1 << 64) - 1


def put(words: np.ndarray, heap: bytearray, layout: RowLayout, number: int, kind: str, value: Any) -> None:
    """Write the value of a column into a row; None is null."""
    at = layout.offsets[number]
    if value is None:
        words[NULLS + number // 64] |= np.uint64(1 << number % 64)
    elif kind == "bytes":
        head = len(value) | int.from_bytes(value[:4].ljust(4, b"\0"), "little") << 32
        tail = int.from_bytes(value[4:12].ljust(8, b"\0"), "little") if len(value) <= INLINE else len(heap)
        words[at], words[at + 1] = np.uint64(head), np.uint64(tail)
        heap += value if len(value) > INLINE else b""
    else:
        words[at] = np.uint64(value & _MASK)
        if kind == "wide":
            words[at + 1] = np.uint64(value >> 64 & _MASK)


def get(rows: Rows, row: int, layout: RowLayout, number: int, kind: str) -> Any:
    """The value of a column."""
    words, at = rows.words[row], layout.offsets[number]
    if int(words[NULLS + number // 64]) >> number % 64 & 1:
        return None
    low = int(words[at])
    if kind == "word":
        return low - (1 << 64) if low >> 63 else low
    high = int(words[at + 1])
    if kind == "wide":
        value = low | high << 64
        return value - (1 << 128) if value >> 127 else value
    length = low & 0xFFFFFFFF
    if length > INLINE:
        return bytes(rows.heap[high : high + length])
    return (low.to_bytes(8, "little")[4:] + high.to_bytes(8, "little"))[:length]


@st.composite
def changes(draw: st.DrawFn) -> tuple[TableSchema, TableSchema, list[dict[str, Any]]]:
    """A schema, one that rows of it can be converted to, and rows: values by column, the hash as `#`."""
    keys = tuple(Column(f"key{n}", draw(st.sampled_from(KINDS))) for n in range(draw(st.integers(1, 3))))
    # Around 64 columns, the null bits take another word, and all columns move.
    many = draw(st.sampled_from([0, 0, 55, 70]))
    before = [
        Column(f"{n}.0", draw(st.sampled_from(KINDS)), draw(st.booleans())) for n in range(draw(st.integers(0, 6)))
    ]
    before += [Column(f"m{n}.0", "word", n % 2 == 0) for n in range(many)]
    kept = [column for column in before if draw(st.booleans())]
    kept = [
        Column(column.name, "wide", column.null) if column.kind == "word" and draw(st.booleans()) else column
        for column in kept
    ]
    new = [
        Column(f"new{n}.0", draw(st.sampled_from(KINDS)), draw(st.booleans())) for n in range(draw(st.integers(0, 6)))
    ]
    now = draw(st.permutations(kept + new))
    columns = [*keys, *before]
    values = {c.name: VALUES[c.kind] if c.name.startswith("m") else st.none() | VALUES[c.kind] for c in columns}
    rows = draw(st.lists(st.fixed_dictionaries({"#": st.integers(0, _MASK), **values}), max_size=4))
    return TableSchema(keys, tuple(before)), TableSchema(keys, tuple(now)), rows


def written(schema: TableSchema, rows: list[dict[str, Any]]) -> Rows:
    layout, heap = RowLayout(schema), bytearray(b"before")
    words = np.zeros((len(rows), layout.width), np.uint64)
    for at, row in enumerate(rows):
        words[at, HASH], words[at, META] = np.uint64(row["#"]), np.uint64(at << 16)
        for number, column in enumerate((*schema.keys, *schema.values)):
            put(words[at], heap, layout, number, column.kind, row[column.name])
    return Rows(words, np.frombuffer(bytes(heap), np.uint8))


def checked(rows: Rows, schema: TableSchema, wanted: list[dict[str, Any]]) -> None:
    layout, empty = RowLayout(schema), {"word": 0, "wide": 0, "bytes": b""}
    assert rows.words.shape == (len(wanted), layout.width)
    for at, row in enumerate(wanted):
        assert (int(rows.words[at, HASH]), int(rows.words[at, META])) == (row["#"], at << 16)
        for number, column in enumerate((*schema.keys, *schema.values)):
            fresh = None if column.null else empty[column.kind]
            assert get(rows, at, layout, number, column.kind) == row.get(column.name, fresh), column


@settings(deadline=None, max_examples=300)
@given(changes())
def test_columns_keep_their_values_wherever_they_go(
    changed: tuple[TableSchema, TableSchema, list[dict[str, Any]]],
) -> None:
    before, now, rows = changed
    assert convertible(before, now)
    old = written(before, rows)
    copy = old.words.copy()
    checked(Conversion(RowLayout(before), RowLayout(now))(old), now, rows)
    assert (old.words == copy).all(), "what others read is left as it is"


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (Column("0.0", "wide"), Column("0.0", "word")),
        (Column("0.0", "bytes"), Column("0.0", "word")),
        (Column("0.0", "wide"), Column("0.0", "bytes")),
    ],
)
def test_what_has_become_another_kind_is_not_convertible(before: Column, now: Column) -> None:
    key = Column("k", "word")
    assert not convertible(TableSchema((key,), (before,)), TableSchema((key,), (now,)))


def test_other_keys_are_not_convertible() -> None:
    value = Column("0.0", "word")
    schemas = [TableSchema(keys, (value,)) for keys in ((Column("k", "word"),), (Column("k", "wide"),), ())]
    assert [[convertible(one, other) for other in schemas] for one in schemas] == np.eye(3, dtype=bool).tolist()
