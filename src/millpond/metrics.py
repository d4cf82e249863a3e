"""The figures that slots report with each batch, how they travel to Spark's listeners, and what commits keep of them.

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

READ_AHEAD = ("read_ahead_hits", "read_ahead_misses", "fetched_rows", "taken_rows")
"""Figures added up likewise, of operators that keep rows until a session closes: lists on disk that were asked for and
had been read ahead, or had not; rows read from disk, for those that closed and ahead of time; rows on disk of lists
that were asked for. The hit ratio is hits / (hits + misses), the read amplification fetched / taken rows."""

OBSERVED = ("appending", "moved_rows", "left_rows")
"""Figures added up likewise, of operators whose store is chosen while they run: partitions whose rows are appended;
appended rows that the batch has made groups of; those that are still to become groups."""

COUNTED = ("input_rows", "output_rows", "late_rows", "cache_hits", "cache_misses")
"""Of the figures, those that count what happened in a batch: they add up over batches."""

FIGURES = SUMMED + GREATEST
"""What every operator reports."""

DURABLE = ("late_rows", "state_rows", "memory_bytes", "cache_hits", "cache_misses", "process_ms")
"""Figures that a partition's manifest keeps beside its input rows, for those who look from outside: `memory_bytes` of
the state in memory; `process_ms`, how long the operator took over the batch."""

_NUMBERED = FIGURES + READ_AHEAD + OBSERVED


def observation(operator: int) -> str:
    """Under which name Spark's `observedMetrics` have an operator's figures."""
    return f"millpond-{operator}" if operator else "millpond"


def pack(metrics: Mapping[str, float]) -> list[int]:
    """The `__figure` values of one partition's figures; unknown ones are left out."""
    return [int(metrics[name]) << _BITS | number for number, name in enumerate(_NUMBERED) if name in metrics]


def unpacking(name: str) -> str:
    """SQL that gives one figure from the column of its partitions' values."""
    mine = f"{FIGURE_COLUMN} & {(1 << _BITS) - 1} = {_NUMBERED.index(name)}"
    value = f"if({mine}, shiftright({FIGURE_COLUMN}, {_BITS}), null)"
    return f"{'max' if name in GREATEST else 'sum'}({value})"
