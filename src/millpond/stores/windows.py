"""Rows of a file that belong to other partitions: windows of hashes tell which ones count (see `RunRef.window`)."""

from __future__ import annotations

import numpy as np

from millpond.files.refs import Axis
from millpond.layout import HASH, HashRange, RowLayout, Rows


def axis_word(layout: RowLayout, axis: Axis) -> int:
    """The word of a row by which it belongs to a partition: its hash, or its first value, the hash of its group."""
    return layout.offsets[len(layout.schema.keys)] if axis == "group" else HASH


def inside(rows: Rows, window: HashRange, word: int = HASH) -> Rows:
    """The rows that a window has, in the order given; `word` as `axis_word` gives it."""
    if window.whole:
        return rows
    count = window.covers(rows.words[:, word])
    return rows if count.all() else Rows(np.ascontiguousarray(rows.words[count]), rows.heap)
