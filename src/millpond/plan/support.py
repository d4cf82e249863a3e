"""Which functions run over which types, and which types can be keys: the table that decides."""

from __future__ import annotations

from pyspark.sql.types import DataType, StructType

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
}
"""Catalyst's class of each supported function → the name that operators know it by."""

DISTINCT = frozenset({"count", "sum", "avg"})
"""Functions whose DISTINCT form is run; for `min`, `max` and the like it changes nothing and is dropped."""

IDEMPOTENT = frozenset({"min", "max", "bool_and", "bool_or", "collect_set", "approx_count_distinct", "any_value"})
"""Functions that give the same result with and without DISTINCT."""

_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_TIMES = ("date", "timestamp", "timestamp_ntz")
_ATOMIC = frozenset({*_INTEGERS, *_TIMES, "float", "double", "string", "binary", "boolean"})


def atomic(type_: str) -> bool:
    """Whether a type (as DDL) can be stored: Spark's atomic types; strings of the binary collation only."""
    return type_ in _ATOMIC or type_.startswith("decimal(")


def hashable(type_: DataType) -> bool:
    """Whether values can be keys: atomic ones, and structs of keys."""
    if isinstance(type_, StructType):
        return bool(type_.fields) and all(hashable(part.dataType) for part in type_.fields)
    return atomic(type_.simpleString())
