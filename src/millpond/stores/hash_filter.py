"""Filtering rows of shared files by hash: after rescaling, some belong to other partitions (see `RunRef.visible`)."""

from __future__ import annotations

from millpond.files.refs import Axis
from millpond.layout import HASH, HashRange, RowLayout, Rows


def axis_word(layout: RowLayout, axis: Axis) -> int:
    """Return the word that assigns a row to a partition: its hash, or its first value, the hash of its group."""
    return layout.offsets[len(layout.schema.keys)] if axis == "group" else HASH


def inside(rows: Rows, range_: HashRange, word: int = HASH) -> Rows:
    """Select the rows inside a hash range, in the same order; `word` comes from `axis_word`."""
    if range_.whole:
        return rows
    count = range_.covers(rows.words[:, word])
    return rows if count.all() else rows.take(count)
