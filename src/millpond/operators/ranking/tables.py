"""The tables that hold the rows of each key."""

from __future__ import annotations

from millpond.layout import Column
from millpond.operators.ranking.packed_rows import PackedRows
from millpond.operators.tables.keyed import Keyed, keyed
from millpond.spec.kinds.over import OverSpec
from millpond.spec.kinds.rank import RankSpec


def rank_table(spec: RankSpec) -> Keyed:
    """Return the layout of the first rows of each key: the one row itself, or all of them in one value."""
    if spec.single:
        return keyed(spec.key_fields, [(column, False) for column in PackedRows(spec.columns, spec.order).columns()])
    return rows_table(spec)


def rows_table(spec: RankSpec | OverSpec) -> Keyed:
    """Return the layout of the rows of each key in one value, with their number."""
    return keyed(spec.key_fields, [(Column("slots", "bytes"), False), (Column("count", "word"), False)])
