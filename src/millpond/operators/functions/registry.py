"""Which accumulator computes which function of the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millpond.operators.functions.accumulators import (
    Accumulator,
    Average,
    Count,
    Moments,
    SumFloats,
    SumInts,
)
from millpond.operators.functions.collect import Collect, Sketch
from millpond.operators.functions.decimal_sums import AverageDecimals, SumDecimals
from millpond.operators.functions.order_statistics import Mode, Percentile
from millpond.operators.functions.selecting import Extreme, ExtremeBy, FirstLast
from millpond.operators.functions.whole_groups import Gathered
from millpond.spec.functions import ROWS, is_distinct
from millpond.spec.operators import AggregateCall
from millpond.spec.types import DataType

Make = Callable[[AggregateCall, Sequence[DataType]], Accumulator]


def _sum(call: AggregateCall, inputs: Sequence[DataType]) -> Accumulator:
    if inputs[0].name == "decimal":
        return SumDecimals(call, inputs)
    return (SumFloats if inputs[0].machine == "float" else SumInts)(call, inputs)


def _average(call: AggregateCall, inputs: Sequence[DataType]) -> Accumulator:
    return (AverageDecimals if inputs[0].name == "decimal" else Average)(call, inputs)


_EXTREMES = ("min", "max", "bool_and", "every", "bool_or", "some")

ACCUMULATORS: dict[str, Make] = {
    "count": Count,
    "count_if": Count,
    "sum": _sum,
    "avg": _average,
    "stddev_samp": Moments,
    "stddev_pop": Moments,
    "var_samp": Moments,
    "var_pop": Moments,
    "min_by": ExtremeBy,
    "max_by": ExtremeBy,
    "first": FirstLast,
    "any_value": FirstLast,
    "last": FirstLast,
    "collect_list": Collect,
    "collect_set": Collect,
    "approx_count_distinct": Sketch,
    **dict.fromkeys(_EXTREMES, Extreme),
}
"""Those that take the rows of a group as they come."""

OF_WHOLE_GROUPS: dict[str, Make] = {
    "collect_list": Gathered,
    "percentile": Percentile,
    "mode": Mode,
    ROWS: Gathered,
}
"""Those that take all rows of a group at once: what only they compute, and what they compute with less work."""


def accumulator(call: AggregateCall, inputs: Sequence[DataType], *, whole: bool = False) -> Accumulator:
    """The accumulator of a supported call; `whole`: the rows of each group are all there."""
    if whole and call.function in OF_WHOLE_GROUPS and not (call.function == "collect_list" and is_distinct(call)):
        return OF_WHOLE_GROUPS[call.function](call, inputs)
    return ACCUMULATORS[call.function](call, inputs)
