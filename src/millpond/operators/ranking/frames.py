"""Aggregates over frames: the results of each row over itself and a number of rows before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.layout import Rows, Words
from millpond.operators.columns.encode import ALL, NO_HEAP, Mask, Operand, is_true
from millpond.operators.tables.bound import accumulators, bind, state_columns
from millpond.operators.tables.keyed import keyed
from millpond.spec.kinds.over import OverSpec


@dataclass
class _States:
    """Accumulator rows, one for each result, in the place of a table."""

    words: Words


class Frames:
    """The calls of an `OverSpec`.

    Attributes:
        inputs: positions of the columns that the calls read.
        max_preceding: the number of rows before the current one in the longest frame.
    """

    def __init__(self, spec: OverSpec) -> None:
        self.inputs = sorted({p for call in spec.calls for p in (*call.inputs, *_filter(call.filter))})
        self.max_preceding = max(spec.preceding)
        self._spec = spec
        self._calls = accumulators(spec.calls, spec.columns)
        state = keyed((), state_columns(self._calls))
        bind(self._calls, state.values)
        self._fresh = state.initial

    def results(
        self, columns: Mapping[int, Operand], rows: NDArray[np.int64], before: NDArray[np.int64]
    ) -> list[pa.Array]:
        """Compute the calls' results for rows of sequences.

        Args:
            columns: the inputs, by their positions, for all rows of the sequences.
            rows: positions of the rows to compute results for.
            before: for each of them, the number of rows before it in its sequence; larger values mean the same as
                `max_preceding`.
        """
        states = _States(np.tile(self._fresh, (len(rows), 1)))
        # From a frame's first row to its last: floating-point sums depend on the order.
        for lag in range(min(self.max_preceding, int(before.max(initial=0))), -1, -1):
            reach = np.flatnonzero(before >= lag)
            taken = rows[reach] - lag
            for call, spec, preceding in zip(self._calls, self._spec.calls, self._spec.preceding, strict=True):
                if lag > preceding or not len(reach):
                    continue
                counts = ALL
                if spec.filter is not None:
                    counts = is_true(columns[spec.filter])[taken]
                call.load([_take(columns[position], taken) for position in spec.inputs], counts)
                call.update(states, reach, 0)  # type: ignore[arg-type]
        return [call.result(Rows(states.words, NO_HEAP)) for call in self._calls]


def _filter(position: int | None) -> tuple[int, ...]:
    return () if position is None else (position,)


def _take(column: Operand, rows: NDArray[np.int64]) -> Operand:
    valid: Mask = column.valid[rows] if column.valid.size else ALL
    values = column.values[rows] if len(column.values) else column.values
    return Operand(values, valid)
