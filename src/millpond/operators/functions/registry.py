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
from millpond.operators.functions.whole_groups import GatheredRows, WholeGroups
from millpond.spec.functions import ROWS, is_distinct
from millpond.spec.operators import AggregateCall
from millpond.spec.types import DataType


class Accumulators(NamedTuple):
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


ACCUMULATORS: dict[str, Accumulators] = {
    "count": Accumulators(Count, retracting=retractable.RetractableCount),
    "count_if": Accumulators(CountIf, retracting=retractable.RetractableCountIf),
    "sum": Accumulators(_sum, retracting=retractable.retractable_sum),
    "avg": Accumulators(_average, retracting=retractable.retractable_average),
    "min": Accumulators(partial(_extreme, greatest=False)),
    "max": Accumulators(partial(_extreme, greatest=True)),
    "bit_and": Accumulators(partial(Bits, operation=numeric.AND)),
    "bit_or": Accumulators(partial(Bits, operation=numeric.OR)),
    "bit_xor": Accumulators(partial(Bits, operation=numeric.XOR), retracting=retractable.RetractableBitXor),
    "product": Accumulators(Product),
    "first": Accumulators(First),
    "last": Accumulators(Last),
    "any_value": Accumulators(First),
    "bool_and": Accumulators(partial(Extreme, greatest=False)),
    "bool_or": Accumulators(partial(Extreme, greatest=True)),
    "min_by": Accumulators(partial(ExtremeBy, greatest=False)),
    "max_by": Accumulators(partial(ExtremeBy, greatest=True)),
    "stddev_samp": Accumulators(partial(Variance, sample=True, root=True)),
    "stddev_pop": Accumulators(partial(Variance, sample=False, root=True)),
    "var_samp": Accumulators(partial(Variance, sample=True)),
    "var_pop": Accumulators(partial(Variance, sample=False)),
    "skewness": Accumulators(Skewness),
    "kurtosis": Accumulators(Kurtosis),
    "corr": Accumulators(Correlation),
    "covar_pop": Accumulators(partial(Covariance, sample=False)),
    "covar_samp": Accumulators(partial(Covariance, sample=True)),
    "regr_sxx": Accumulators(SquaredDeviations),
    "regr_sxy": Accumulators(ProductDeviations),
    "regr_slope": Accumulators(partial(Regression, intercept=False)),
    "regr_intercept": Accumulators(partial(Regression, intercept=True)),
    "regr_r2": Accumulators(Determination),
    "approx_count_distinct": Accumulators(ApproxCountDistinct),
    "percentile_approx": Accumulators(PercentileApprox),
    "count_min_sketch": Accumulators(CountMin),
    "collect_list": Accumulators(Collect, of_group=GatheredRows),
    "collect_set": Accumulators(Collect),
    "listagg": Accumulators(ListAgg, of_group=GatheredListAgg),
    "percentile": Accumulators(of_group=Percentile),
    "mode": Accumulators(of_group=Mode),
    ROWS: Accumulators(of_group=GatheredRows),
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
    factories = ACCUMULATORS[call.function]
    if retracts and factories.retracting is not None:
        return factories.retracting(call, inputs)
    if whole and factories.of_group is not None and not (factories.by_row is not None and is_distinct(call)):
        return factories.of_group(call, inputs)
    assert factories.by_row is not None
    return factories.by_row(call, inputs)
