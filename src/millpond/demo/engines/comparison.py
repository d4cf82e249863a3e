"""Comparison of the results of two engines, batch by batch and row by row."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq


class Comparison(msgspec.Struct, frozen=True):
    """The number of rows of each side, and the first difference, if any."""

    left: int = 0
    right: int = 0
    difference: str = ""

    @property
    def equal(self) -> bool:
        """Whether there are rows, and all of them are equal."""
        return bool(self.left) and not self.difference

    def line(self) -> str:
        """Return the result in one line."""
        if self.difference:
            return f"rows differ: {self.difference}"
        return f"rows equal: {self.left:,} = {self.right:,}" if self.left else "no rows to compare"


def rows(folder: Path) -> pa.Table:
    """Return the rows of one batch, sorted by all columns. A missing folder has no rows."""
    table = pq.read_table(folder) if folder.exists() else pa.table({})
    names = sorted(table.column_names)
    return (
        table.select(names).sort_by([(name, "ascending") for name in names]).combine_chunks() if len(table) else table
    )


def compare(pairs: list[tuple[Path, Path]]) -> Comparison:
    """Compare pairs of batches: every column of every row, without missing or additional rows on either side."""
    left = right = 0
    difference = ""
    for mine, other in pairs:
        a, b = rows(mine), rows(other)
        left, right = left + len(a), right + len(b)
        if not difference and not same(a, b):
            difference = _first(a, b, mine.name)
    return Comparison(left, right, difference)


def same(a: pa.Table, b: pa.Table) -> bool:
    """Return whether two tables have the same columns and values; the nullability of columns is ignored."""
    if len(a) == len(b) == 0:
        return True
    fields = [(f.name, f.type) for f in a.schema]
    if fields != [(f.name, f.type) for f in b.schema] or len(a) != len(b):
        return False
    return all(mine.equals(other) for mine, other in zip(a.columns, b.columns, strict=True))


def _first(a: pa.Table, b: pa.Table, batch: str) -> str:
    columns, others = ([f"{f.name} {f.type}" for f in table.schema] for table in (a, b))
    if len(a) and len(b) and columns != others:
        return f"{batch}: columns {columns} and {others}"
    for mine, other in zip(a.to_pylist(), b.to_pylist(), strict=False):
        if mine != other:
            return f"{batch}: {mine} and {other}"
    return f"{batch}: {len(a)} and {len(b)} rows"
