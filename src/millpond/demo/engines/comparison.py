"""Row by row: the same batches of two engines."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq


class Comparison(msgspec.Struct, frozen=True):
    """How many rows each side wrote, and the first difference, if any."""

    left: int = 0
    right: int = 0
    difference: str = ""

    @property
    def equal(self) -> bool:
        """Whether there were rows, and all of them were equal."""
        return bool(self.left) and not self.difference

    def line(self) -> str:
        """As the demo prints it."""
        if self.difference:
            return f"rows differ: {self.difference}"
        return f"rows equal: {self.left:,} = {self.right:,}" if self.left else "no rows to compare"


def rows(folder: Path) -> pa.Table:
    """The rows of one batch, in order. A folder that is not there has none."""
    table = pq.read_table(folder) if folder.exists() else pa.table({})
    names = sorted(table.column_names)
    return (
        table.select(names).sort_by([(name, "ascending") for name in names]).combine_chunks() if len(table) else table
    )


def compare(pairs: list[tuple[Path, Path]]) -> Comparison:
    """Compare batches pairwise; every column of every row, nothing more and nothing less on either side."""
    left = right = 0
    difference = ""
    for mine, other in pairs:
        a, b = rows(mine), rows(other)
        left, right = left + len(a), right + len(b)
        if not difference and not same(a, b):
            difference = _first(a, b, mine.name)
    return Comparison(left, right, difference)


def same(a: pa.Table, b: pa.Table) -> bool:
    """Whether both have the same columns with the same values (whether a column might be null is not data)."""
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
