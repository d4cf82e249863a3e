"""The figures that slots report with each batch, and how they travel to Spark's listeners.

A pipe ends its output with rows that are null but for one column, `__figure`; the transplanted plan observes that
column and filters the rows out again. Packing a figure's number and value into one nullable bigint keeps the cost for
ordinary rows at one null check per figure (about 8 ns a row and figure; a struct costs twice that, a string more).
"""

from __future__ import annotations

from collections.abc import Mapping

FIGURE_COLUMN = "__figure"
_BITS = 4

SUMMED = ("input_rows", "output_rows", "late_rows", "state_rows", "state_bytes", "cache_hits", "cache_misses")
"""Figures added up over partitions: rows in and out in this batch, and dropped as late; rows and bytes of the state;
keys that were looked for and were in memory; those that were sought in files."""

GREATEST = ("commit_lag_ms",)
"""Figures of which the greatest counts: how long the batch waited for the commit of the one before."""

FIGURES = SUMMED + GREATEST


def pack(metrics: Mapping[str, float]) -> list[int]:
    """The `__figure` values of one partition's figures; unknown ones are left out."""
    return [int(metrics[name]) << _BITS | number for number, name in enumerate(FIGURES) if name in metrics]


def unpacking(name: str) -> str:
    """SQL that gives one figure from the column of its partitions' values."""
    mine = f"{FIGURE_COLUMN} & {(1 << _BITS) - 1} = {FIGURES.index(name)}"
    value = f"if({mine}, shiftright({FIGURE_COLUMN}, {_BITS}), null)"
    return f"{'sum' if name in SUMMED else 'max'}({value})"
