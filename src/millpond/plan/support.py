"""Which of Catalyst's aggregate functions operators know, by which names; their catalogue has the types."""

from __future__ import annotations

FUNCTIONS = {
    "Count": "count",
    "CountIf": "count_if",
    "Sum": "sum",
    "Average": "avg",
    "Min": "min",
    "Max": "max",
    "First": "first",
    "Last": "last",
    "AnyValue": "any_value",
    "BoolAnd": "bool_and",
    "BoolOr": "bool_or",
    "StddevSamp": "stddev_samp",
    "StddevPop": "stddev_pop",
    "VarianceSamp": "var_samp",
    "VariancePop": "var_pop",
    "MinBy": "min_by",
    "MaxBy": "max_by",
    "HyperLogLogPlusPlus": "approx_count_distinct",
    "CollectList": "collect_list",
    "CollectSet": "collect_set",
    "Median": "percentile",
    "Percentile": "percentile",
    "PercentileCont": "percentile",
    "PercentileDisc": "percentile",
    "Mode": "mode",
}
"""Catalyst's class of each function → the name in `millpond.spec.functions`."""

SMALL = frozenset({"tinyint", "smallint", "int", "bigint", "float", "double", "boolean", "date"})
"""Types cheap enough to be sent as they are where only their nulls count."""
