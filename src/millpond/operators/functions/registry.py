"""The registry of accumulators for the aggregate functions of `spec.functions.FUNCTIONS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from millpond.kernels.aggregate import numeric
from millpond.operators.functions import retractable
from millpond.operators.functions.accumulators import (
    Accumulator,
    Average,
    Bits,
    Count,
    CountIf,
    Product,
    SumFloats,
    SumInts,
    TrySumInts,
)
from millpond.operators.functions.collect import ApproxCountDistinct, Collect
from millpond.operators.functions.count_min import CountMin
from millpond.operators.functions.decimal_sums import AverageDecimals, SumDecimals
from millpond.operators.functions.listagg import GatheredListAgg, ListAgg
from millpond.operators.functions.moments import (
    Correlation,
    Covariance,
    Determination,
    Kurtosis,
    ProductDeviations,
    Regression,
    Skewness,
    SquaredDeviations,
    Variance,
)
from millpond.operators.functions.order_statistics import Mode, Percentile
from millpond.operators.functions.quantiles import PercentileApprox
from millpond.operators.functions.retractable import Retractable
from millpond.operators.functions.selecting import Extreme, ExtremeBy, First, Last
from millpond.operators.functions.whole_groups import Gathered, WholeGroups
from millpond.spec.functions import ROWS, is_distinct
from millpond.spec.operators import AggregateCall
from millpond.spec.types import DataType


class Folded(NamedTuple):
    """The accumulators of one function, each made from a call and the types of its inputs.

    Attributes:
        by_row: folds the rows of a group as they come.
        of_group: takes all rows of a group at once, where only that works or where it is cheaper.
        retracting: also retracts rows.
    """

    by_row: Callable[[AggregateCall, Sequence[DataType]], Accumulator] | None = None
    of_group: Callable[[AggregateCall, Sequence[DataType]], WholeGroups] | None = None
    retracting: Callable[[AggregateCall, Sequence[DataType]], Retractable] | None = None


def _sum(call: AggregateCall, inputs: Sequence[DataType]) -> Accumulator:
    if inputs[0].name == "decimal":
        return SumDecimals(call, inputs)
    if inputs[0].machine == "float":
        return SumFloats(call, inputs)
    return (TrySumInts if call.options.get("eval_mode") == "try" else SumInts)(call, inputs)


def _average(call: AggregateCall, inputs: Sequence[DataType]) -> Accumulator:
    return (AverageDecimals if inputs[0].name == "decimal" else Average)(call, inputs)


def _extreme(call: AggregateCall, inputs: Sequence[DataType], *, greatest: bool) -> Accumulator:
    return (ExtremeBy if inputs[0].nested else Extreme)(call, inputs, greatest=greatest)


FOLDED: dict[str, Folded] = {
    "count": Folded(Count, retracting=retractable.Count),
    "count_if": Folded(CountIf, retracting=retractable.CountIf),
    "sum": Folded(_sum, retracting=retractable.summing),
    "avg": Folded(_average, retracting=retractable.averaging),
    "min": Folded(partial(_extreme, greatest=False)),
    "max": Folded(partial(_extreme, greatest=True)),
    "bit_and": Folded(partial(Bits, operation=numeric.AND)),
    "bit_or": Folded(partial(Bits, operation=numeric.OR)),
    "bit_xor": Folded(partial(Bits, operation=numeric.XOR), retracting=retractable.BitXor),
    "product": Folded(Product),
    "first": Folded(First),
    "last": Folded(Last),
    "any_value": Folded(First),
    "bool_and": Folded(partial(Extreme, greatest=False)),
    "bool_or": Folded(partial(Extreme, greatest=True)),
    "min_by": Folded(partial(ExtremeBy, greatest=False)),
    "max_by": Folded(partial(ExtremeBy, greatest=True)),
    "stddev_samp": Folded(partial(Variance, sample=True, root=True)),
    "stddev_pop": Folded(partial(Variance, sample=False, root=True)),
    "var_samp": Folded(partial(Variance, sample=True)),
    "var_pop": Folded(partial(Variance, sample=False)),
    "skewness": Folded(Skewness),
    "kurtosis": Folded(Kurtosis),
    "corr": Folded(Correlation),
    "covar_pop": Folded(partial(Covariance, sample=False)),
    "covar_samp": Folded(partial(Covariance, sample=True)),
    "regr_sxx": Folded(SquaredDeviations),
    "regr_sxy": Folded(ProductDeviations),
    "regr_slope": Folded(partial(Regression, intercept=False)),
    "regr_intercept": Folded(partial(Regression, intercept=True)),
    "regr_r2": Folded(Determination),
    "approx_count_distinct": Folded(ApproxCountDistinct),
    "percentile_approx": Folded(PercentileApprox),
    "count_min_sketch": Folded(CountMin),
    "collect_list": Folded(Collect, of_group=Gathered),
    "collect_set": Folded(Collect),
    "listagg": Folded(ListAgg, of_group=GatheredListAgg),
    "percentile": Folded(of_group=Percentile),
    "mode": Folded(of_group=Mode),
    ROWS: Folded(of_group=Gathered),
}


def accumulator(
    call: AggregateCall, inputs: Sequence[DataType], *, whole: bool = False, retracts: bool = False
) -> Accumulator:
    """Make the accumulator of a supported call.

    Args:
        call: the call.
        inputs: the types of its inputs.
        whole: whether all rows of each group are there.
        retracts: whether rows may be retracted.
    """
    folded = FOLDED[call.function]
    if retracts and folded.retracting is not None:
        return folded.retracting(call, inputs)
    if whole and folded.of_group is not None and not (folded.by_row is not None and is_distinct(call)):
        return folded.of_group(call, inputs)
    assert folded.by_row is not None
    return folded.by_row(call, inputs)
