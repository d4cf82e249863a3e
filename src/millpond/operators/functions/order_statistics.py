"""Aggregate functions that need all values of a group at once: percentiles and modes (FlowKV's append pattern).

They follow Spark's `Percentile`, `PercentileDisc` and `Mode`. Nulls do not count. The percentile at share *p* of *n*
values is interpolated at position (n − 1) · p, computed in doubles. The discrete percentile is the first value up to
which at least n · p values are counted. Of equally frequent values, `mode` takes the least, or on request the greatest;
where Spark takes any, it takes the least.
"""

# ruff: noqa: D102 (the methods are documented in `Accumulator`, `WholeGroups` and `OrderStatistic`)

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from decimal import Context, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millpond.errors import NumericRangeError
from millpond.kernels.aggregate import order_statistics as kernels
from millpond.kernels.runs.sort import order_by_hash
from millpond.layout import INLINE, LENGTH, Rows
from millpond.operators.columns.decode import bytes_column, nested_column, to_arrow
from millpond.operators.columns.encode import (
    ALL,
    NO_HEAP,
    Mask,
    Operand,
    and_masks,
    concatenate_masks,
    normalised,
    order_key_operand,
)
from millpond.operators.columns.order_keys import ORDER_KEY
from millpond.operators.functions.whole_groups import WholeGroups
from millpond.spec.operators import AggregateCall
from millpond.spec.types import DataType

_SIGN = np.uint64(1 << 63)
_MAX_EXACT_INT = 1 << 53
_MAX_EXACT_SCALE = 22
_CONTEXT = Context(prec=60)


class OrderStatistic(WholeGroups):
    """A call over the values of groups whose rows are all there."""

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType]) -> None:
        super().__init__(call, inputs)
        self._operands: list[list[Operand]] = []
        self._counts: list[Mask] = []
        self._results: pa.Array | None = None

    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        self._operands.append(list(operands))
        self._counts.append(counts)

    def result(self, rows: Rows) -> pa.Array:
        if self._results is None:
            self._results = self._compute_results()
        return self._results.take(pa.array(self.numbers(rows)))

    def _compute_results(self) -> pa.Array:
        operands = [_concat_operands(list(parts)) for parts in zip(*self._operands, strict=True)]
        counts = concatenate_masks(self._counts, [len(parts[0].values) for parts in self._operands])
        return self.results(self.groups, self.count, operands, counts)

    @abstractmethod
    def results(self, groups: NDArray[np.int64], count: int, operands: Sequence[Operand], counts: Mask) -> pa.Array:
        """Return the results of groups 0 to `count`.

        Args:
            groups: the number of each row's group.
            count: the number of groups.
            operands: the inputs.
            counts: the rows that count (filter).
        """


class Percentile(OrderStatistic):
    """`percentile`, `median`, `percentile_cont` and `percentile_disc`, of one share or several.

    Between two values the result is the lower one plus a part of the gap. With the option `weighted`, which follows
    from the version of Spark, it is the weighted sum of both.
    """

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType]) -> None:
        super().__init__(call, inputs)
        self._shares = [float(share) for share in call.options["percentages"]]
        self._reverse = bool(call.options.get("reverse", False))
        discrete = kernels.LOWER if call.options.get("legacy") else kernels.DISCRETE
        self._weighted = bool(call.options.get("weighted", False))
        self._kind = discrete if call.options.get("discrete") else kernels.CONTINUOUS

    def results(self, groups: NDArray[np.int64], count: int, operands: Sequence[Operand], counts: Mask) -> pa.Array:
        values = operands[0]
        counts = and_masks(counts, *(column.valid for column in operands))
        frequencies = None
        if len(operands) > 1:
            frequencies = operands[1].values.astype(np.int64, copy=False)
            used = frequencies[counts.astype(np.bool_)] if counts.size else frequencies
            if (used < 0).any():
                raise NumericRangeError(
                    "a frequency of a percentile is negative.",
                    action="Filter such rows. SQLSTATE: 22003 (VALUE_OUT_OF_RANGE)",
                )
            counts = and_masks(counts, (frequencies > 0).view(np.uint8))
        order, codes, starts = sort_values(groups, count, values, self.inputs[0], counts)
        weights = np.ones(len(order), np.int64) if frequencies is None else frequencies[order]
        totals = np.cumsum(weights)
        columns = [self._percentiles(share, order, codes, starts, totals, values) for share in self._shares]
        empty = starts[1:] == starts[:-1]
        valid: Mask = (~empty).view(np.uint8) if empty.any() else ALL
        if not self.call.options.get("array"):
            return to_arrow(columns[0], valid, self.type)
        # An empty group's list is null, without elements.
        kept = np.stack(columns, 1)[~empty].reshape(-1)
        offsets = np.zeros(count + 1, np.int64)
        np.cumsum(np.where(empty, 0, len(columns)), out=offsets[1:])
        mask = pa.array(empty) if empty.any() else None
        field = self.type.arrow.value_field
        listed = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(kept, pa.float64()), mask=mask)
        return listed.cast(pa.list_(field))

    def _percentiles(
        self,
        share: float,
        order: NDArray[np.int64],
        codes: NDArray[np.int64],
        starts: NDArray[np.int64],
        totals: NDArray[np.int64],
        values: Operand,
    ) -> NDArray[np.float64]:
        count = len(starts) - 1
        lower, upper = np.empty(count, np.int64), np.empty(count, np.int64)
        fraction = np.empty(count)
        kernels.percentile(starts, totals, share, self._reverse, self._kind, lower, upper, fraction)
        out = np.zeros(count)
        nonempty = np.flatnonzero(lower >= 0)
        low, high = lower[nonempty], upper[nonempty]
        out[nonempty] = low_values = doubles(values.values[order[low]], self.inputs[0])
        between = np.flatnonzero((fraction[nonempty] != 0.0) & (codes[low] != codes[high]))
        if len(between):
            targets, least = nonempty[between], low_values[between]
            high_values = doubles(values.values[order[high[between]]], self.inputs[0])
            with np.errstate(invalid="ignore", over="ignore"):
                if self._weighted:
                    out[targets] = (1.0 - fraction[targets]) * least + fraction[targets] * high_values
                else:
                    out[targets] = least + fraction[targets] * (high_values - least)
        return out


class Mode(OrderStatistic):
    """`mode`: the most frequent value."""

    def results(self, groups: NDArray[np.int64], count: int, operands: Sequence[Operand], counts: Mask) -> pa.Array:
        counted = and_masks(counts, operands[0].valid)
        order, codes, starts = sort_values(groups, count, operands[0], self.inputs[0], counted)
        values = normalised(operands[0], self.inputs[0])  # of 0.0 and −0.0, which count as one value, Spark shows 0.0
        rows = np.empty(count, np.int64)
        kernels.mode(starts, codes, bool(self.call.options.get("greatest", False)), rows)
        picked = order[np.maximum(rows, 0)] if len(order) else np.zeros(count, np.int64)
        present = (rows >= 0).view(np.uint8)
        if not len(order):
            return pa.nulls(count, self.type.arrow)
        if self.inputs[0].kind == "bytes":
            pairs = np.where(present[:, None], values.values[picked], np.uint64(0))
            column = nested_column if self.type.nested else bytes_column
            return column(Rows(pairs, values.heap), 0, present, self.type)
        return to_arrow(values.values[picked], present, self.type)


def _concat_operands(parts: Sequence[Operand]) -> Operand:
    """Concatenate the columns of several batches."""
    if len(parts) == 1:
        return parts[0]
    values = np.concatenate([part.values for part in parts])
    valid = concatenate_masks([part.valid for part in parts], [len(part.values) for part in parts])
    heap = NO_HEAP
    if any(part.heap.size for part in parts):
        heap = np.concatenate([part.heap for part in parts])
        shifts = np.cumsum([0, *(part.heap.size for part in parts[:-1])]).astype(np.uint64)
        shift = np.repeat(shifts, [len(part.values) for part in parts])
        long = (values[:, 0] & LENGTH) > INLINE
        # Long values refer to their batch's heap, which now lies behind those of earlier batches.
        values[long, 1] += shift[long]
    arrays = [part.array for part in parts]
    return Operand(values, valid, heap, None if arrays[0] is None else pa.concat_arrays(arrays))


def sort_values(
    groups: NDArray[np.int64], count: int, values: Operand, dtype: DataType, counts: Mask
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Sort rows by group and value.

    Args:
        groups: the number of each row's group.
        count: the number of groups.
        values: the values of the rows.
        dtype: their type.
        counts: a mask of the rows that count.

    Returns:
        The rows that count, in order; for each of them a number that equal values of a group share (−0.0 equals 0.0,
        NaN equals NaN and is greater than all); and the first row of each group, with the number of rows at the end.
    """
    rows = np.flatnonzero(counts) if counts.size else np.arange(len(groups))
    ranks = ranks_of(values, dtype)
    for rank in ranks:  # a stable radix sort, from the least significant word
        _, order = order_by_hash(rank[rows])
        rows = rows[order]
    _, order = order_by_hash(groups[rows].view(np.uint64))
    rows = rows[order]
    different = np.zeros(len(rows), np.bool_)
    for rank in ranks:
        ranked = rank[rows]
        different[1:] |= ranked[1:] != ranked[:-1]
    starts = np.searchsorted(groups[rows], np.arange(count + 1), "left").astype(np.int64)
    return rows, np.cumsum(different), starts


def ranks_of(values: Operand, dtype: DataType) -> list[NDArray[np.uint64]]:
    """Return unsigned words that order as the values do, the least significant first.

    Rows that do not count hold any value.
    """
    if dtype.nested:
        values, dtype = order_key_operand(values, dtype), ORDER_KEY
    plain = values.values
    if dtype.machine == "float":
        # One NaN, and no −0.0: they are equal in Spark.
        bits = np.where(np.isnan(plain), np.nan, plain + 0.0).view(np.uint64)
        # Negative numbers order in reverse, so all their bits are flipped; of others only the sign.
        return [np.where(bits & _SIGN != 0, ~bits, bits | _SIGN)]
    if dtype.machine == "wide":
        return [plain[:, 0], plain[:, 1] ^ _SIGN]
    if dtype.machine == "bytes":
        text = bytes_column(Rows(plain, values.heap), 0, ALL, DataType("binary"))
        encoded = text.dictionary_encode()
        rank = np.empty(len(encoded.dictionary), np.uint64)
        order = pc.array_sort_indices(encoded.dictionary)
        rank[order.to_numpy()] = np.arange(len(rank), dtype=np.uint64)
        return [rank[encoded.indices.to_numpy()]]
    return [plain.astype(np.int64, copy=False).view(np.uint64) ^ _SIGN]


def doubles(values: NDArray[Any], dtype: DataType) -> NDArray[np.float64]:
    """Convert values to doubles; decimals round to the nearest, as in Java's `BigDecimal.doubleValue`."""
    if dtype.name != "decimal":
        return values.astype(np.float64)
    if values.ndim == 1 and dtype.scale <= _MAX_EXACT_SCALE:
        # Both operands are exact, so only the division rounds.
        out: NDArray[np.float64] = values.astype(np.float64) / 10.0**dtype.scale
        inexact = np.flatnonzero(np.abs(values) > _MAX_EXACT_INT)
    else:
        out, inexact = np.empty(len(values)), np.arange(len(values))
    for row in inexact.tolist():  # a group needs one or two values
        unscaled = (
            int(values[row]) if values.ndim == 1 else (int(values[row, 1].view(np.int64)) << 64) | int(values[row, 0])
        )
        out[row] = float(Decimal(unscaled).scaleb(-dtype.scale, _CONTEXT))
    return out
