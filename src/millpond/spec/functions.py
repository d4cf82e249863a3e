"""Table of the aggregate functions: planning, state layout and the documentation read it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from millpond.errors import UsageError
from millpond.spec.operators import AggregateCall, Field
from millpond.spec.types import DataType, has_duplicate_fields, leaves, parse_type

FUNCTION = "MP-FUNCTION"
"""Reason code: the function is unknown here, or not supported with these arguments or options."""
INPUT_TYPE = "MP-INPUT-TYPE"
"""Reason code: the function does not support this input type."""
KEY_TYPE = "MP-KEY-TYPE"
"""Reason code: Millpond cannot compare the type of a grouping key, or of a distinct aggregate's input."""
KEY_COLUMNS = "MP-KEYS"
"""Reason code: more than 64 key columns, where a struct counts with all its fields."""

WHOLE_WINDOWS = "MP-WHOLE"
"""Reason code: a function of all values of a group, outside append mode with event time.

Only in append mode is a group shown once, when its window closes.
"""

SESSION_DISTINCT = "MP-SESSION-DISTINCT"
"""Reason code: an aggregate over distinct inputs in sessions that are not shown once, when they close."""

MAX_KEY_COLUMNS = 64

INTEGERS = ("tinyint", "smallint", "int", "bigint")
FLOATS = ("float", "double")
NUMBERS = (*INTEGERS, *FLOATS, "decimal")
TIMES = ("date", "timestamp", "timestamp_ntz")
ATOMIC = (*NUMBERS, "string", "binary", "boolean", *TIMES)
"""Atomic types by Spark's names; strings only with the binary collation."""
COMPARED = (*ATOMIC, "struct", "array")
"""Types whose values Millpond can compare, including structs and arrays of such types."""
COLLATED = "collated string"
KEPT = (*COMPARED, COLLATED, "map")
"""Types whose values Millpond can store and return."""


class Function(NamedTuple):
    """Properties of an aggregate function that hold wherever it runs.

    The accumulator of a function is in `operators.functions.registry`, under the same name. `plan.reading.functions`
    reads its options from Spark's plan, if it has any.

    Attributes:
        arguments: the accepted types of each argument.
        catalyst_classes: Catalyst's classes for the function.
        aliases: SQL aliases.
        variadic: whether it takes any number of arguments, all typed as the first.
        distinct: whether DISTINCT changes the result (otherwise it is ignored).
        optional: the number of trailing arguments that may be left out.
        sorts: whether values may arrive in structs: the value first, then its sort columns (option `order`).
        whole: whether it needs all values of a group at once.
        ordered: whether its result depends on the arrival order of rows.
        collects: whether it keeps its input as it is, so that the result is as long as the input.
        distinct_only: whether only distinct inputs ever count.
        retractable: whether a row can be retracted in a later batch.
        over: whether it is supported over the last rows of a key (window functions).
        casts: types of the first argument that Spark casts first → the type after the cast; the keys never arrive here.
    """

    arguments: tuple[tuple[str, ...], ...]
    catalyst_classes: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    variadic: bool = False
    distinct: bool = True
    optional: int = 0
    sorts: bool = False
    whole: bool = False
    ordered: bool = False
    collects: bool = False
    distinct_only: bool = False
    retractable: bool = False
    over: bool = False
    casts: Mapping[str, str] = MappingProxyType({})


ROWS = "rows"
"""Pseudo function: all rows of a group as a list of structs, the input of a user's own functions."""

_STRING_CASTS = {"string": "double", COLLATED: "double"}
_TEXT_CASTS = dict.fromkeys((*NUMBERS, "boolean", *TIMES), "string")
_SUM_CASTS = _STRING_CASTS | {"timestamp": "double"}
_BOOLEAN_CASTS = {"string": "boolean", COLLATED: "boolean"}  # in ANSI mode; else Spark refuses them
_DOUBLES = Function(((*INTEGERS, *FLOATS),), over=True, casts={"decimal": "double"} | _STRING_CASTS)
_PAIRS = _DOUBLES._replace(arguments=_DOUBLES.arguments * 2)
_BITS = Function((INTEGERS,), over=True)
_BOOLEAN = Function((("boolean",),), distinct=False, over=True, casts=_BOOLEAN_CASTS)
_KEPT = Function((KEPT,), distinct=False, ordered=True)
_BY = Function((KEPT, COMPARED), distinct=False, ordered=True)

FUNCTIONS: dict[str, Function] = {
    "count": Function((KEPT,), ("Count",), variadic=True, retractable=True, over=True),
    "count_if": Function((("boolean",),), ("CountIf",), retractable=True, over=True, casts=_BOOLEAN_CASTS),
    "sum": Function((NUMBERS,), ("Sum",), ("try_sum",), retractable=True, over=True, casts=_SUM_CASTS),
    "avg": Function((NUMBERS,), ("Average",), ("mean", "try_avg"), retractable=True, over=True, casts=_SUM_CASTS),
    "min": Function((COMPARED,), ("Min",), distinct=False, over=True),
    "max": Function((COMPARED,), ("Max",), distinct=False, over=True),
    "bit_and": _BITS._replace(catalyst_classes=("BitAndAgg",), distinct=False),
    "bit_or": _BITS._replace(catalyst_classes=("BitOrAgg",), distinct=False),
    "bit_xor": _BITS._replace(catalyst_classes=("BitXorAgg",), retractable=True),
    "product": _DOUBLES._replace(catalyst_classes=("Product",)),
    "first": _KEPT._replace(catalyst_classes=("First",), aliases=("first_value",)),
    "last": _KEPT._replace(catalyst_classes=("Last",), aliases=("last_value",)),
    "any_value": _KEPT._replace(catalyst_classes=("AnyValue",)),
    "bool_and": _BOOLEAN._replace(catalyst_classes=("BoolAnd",), aliases=("every",)),
    "bool_or": _BOOLEAN._replace(catalyst_classes=("BoolOr",), aliases=("any", "some")),
    "min_by": _BY._replace(catalyst_classes=("MinBy",)),
    "max_by": _BY._replace(catalyst_classes=("MaxBy",)),
    "stddev_samp": _DOUBLES._replace(catalyst_classes=("StddevSamp",), aliases=("stddev", "std")),
    "stddev_pop": _DOUBLES._replace(catalyst_classes=("StddevPop",)),
    "var_samp": _DOUBLES._replace(catalyst_classes=("VarianceSamp",), aliases=("variance",)),
    "var_pop": _DOUBLES._replace(catalyst_classes=("VariancePop",)),
    "skewness": _DOUBLES._replace(catalyst_classes=("Skewness",)),
    "kurtosis": _DOUBLES._replace(catalyst_classes=("Kurtosis",)),
    "corr": _PAIRS._replace(catalyst_classes=("Corr",)),
    "covar_pop": _PAIRS._replace(catalyst_classes=("CovPopulation",)),
    "covar_samp": _PAIRS._replace(catalyst_classes=("CovSample",)),
    "regr_sxx": _DOUBLES._replace(catalyst_classes=("RegrReplacement",), aliases=("regr_syy",)),
    "regr_sxy": _PAIRS._replace(catalyst_classes=("RegrSXY",)),
    "regr_slope": _PAIRS._replace(catalyst_classes=("RegrSlope",)),
    "regr_intercept": _PAIRS._replace(catalyst_classes=("RegrIntercept",)),
    "regr_r2": _PAIRS._replace(catalyst_classes=("RegrR2",)),
    "approx_count_distinct": Function((("bigint",),), ("HyperLogLogPlusPlus",), distinct=False),
    "percentile_approx": Function(
        ((*INTEGERS, *FLOATS, *TIMES),), ("ApproximatePercentile",), ("approx_percentile",), casts=_STRING_CASTS
    ),
    "count_min_sketch": Function(((*INTEGERS, "string", "binary"),), ("CountMinSketchAgg",)),
    "collect_list": Function((KEPT,), ("CollectList",), ("array_agg",), ordered=True, collects=True),
    "collect_set": Function((COMPARED,), ("CollectSet",), collects=True, distinct_only=True),
    "listagg": Function(
        (("string", "binary"),),
        ("ListAgg",),
        ("string_agg",),
        sorts=True,
        ordered=True,
        collects=True,
        casts=_TEXT_CASTS,
    ),
    "percentile": Function(
        (NUMBERS, INTEGERS),
        ("Median", "Percentile", "PercentileCont", "PercentileDisc"),
        ("median", "percentile_cont", "percentile_disc"),
        optional=1,
        whole=True,
        casts=_STRING_CASTS,
    ),
    "mode": Function((COMPARED,), ("Mode",), whole=True),
    ROWS: Function((KEPT,), variadic=True, distinct=False, whole=True, ordered=True),
}

BY_CATALYST = {kind: name for name, function in FUNCTIONS.items() for kind in function.catalyst_classes}
"""Catalyst's class of each function → the function's name here."""


def unsupported_call(call: AggregateCall, inputs: Sequence[str]) -> str | None:
    """Return the reason code why a call over inputs of these types (DDL) is not supported; None if it is."""
    function = FUNCTIONS.get(call.function)
    if function is None:
        return FUNCTION
    arguments = function.arguments * (len(inputs) if function.variadic else 1)
    if not len(arguments) - function.optional <= len(inputs) <= len(arguments):
        return FUNCTION
    # Lists in the state have no place for nulls.
    if function.collects and call.options.get("ignore_nulls") is False:
        return FUNCTION
    for accepted, ddl in zip(arguments[: len(inputs)], inputs, strict=True):
        reason = unsupported_key(ddl) if is_distinct(call) else None
        if reason:
            return reason
        ordered = function.sorts and "order" in call.options and _accepts(("struct", *ATOMIC), ddl)
        if not _accepts(accepted, ddl) and not ordered:
            return INPUT_TYPE
    return None


def accepts_type(accepted: Sequence[str], dtype: DataType) -> bool:
    """Whether `accepted` names the type and every type nested in it."""
    name = COLLATED if dtype.collation else dtype.name
    return (
        name in accepted
        and not has_duplicate_fields(dtype)
        and all(accepts_type(accepted, inner) for _, inner in dtype.fields)
    )


def is_distinct(call: AggregateCall) -> bool:
    """Whether the accumulator must receive each distinct input once."""
    function = FUNCTIONS[call.function]
    return function.distinct_only or (call.distinct and bool(call.inputs) and function.distinct)


def is_by_value(call: AggregateCall, inputs: Sequence[str]) -> bool:
    """Whether rows may be pre-combined by value: the result depends on the set of inputs alone.

    For such calls Spark has no partial result to update in place.

    Args:
        call: the call.
        inputs: the types of its inputs, as DDL.
    """
    function = FUNCTIONS[call.function]
    if function.ordered:
        return False
    return is_distinct(call) or (not function.distinct and inputs[0] in ("string", "binary"))


def count_only_inputs(calls: Sequence[AggregateCall]) -> set[int]:
    """Return the positions of inputs that only `count` uses, so that only their null flags matter."""
    used = {position for call in calls for position in call.inputs}
    return used - {position for call in calls if call.function != "count" for position in call.inputs}


def sketch_precision(options: Mapping[str, Any]) -> int:
    """Return how many hash bits choose a register of `approx_count_distinct`; `relative_sd` is 5 % by default."""
    # Spark's formula: sketches that Spark combined before the exchange must have as many registers.
    return math.ceil(2.0 * math.log(1.106 / float(options.get("relative_sd", 0.05))) / math.log(2.0))


def sketch_words(options: Mapping[str, Any]) -> int:
    """Return the number of state words of `approx_count_distinct`, with ten registers per word."""
    return (1 << sketch_precision(options)) // 10 + 1


def unsupported_key(ddl: str) -> str | None:
    """Return the reason code why values of this type (DDL) cannot be keys; None if they can."""
    return None if _accepts(COMPARED, ddl) else KEY_TYPE


def unsupported_value(ddl: str) -> str | None:
    """Return the reason code why values of this type (DDL) cannot be stored; None if they can."""
    return None if _accepts(KEPT, ddl) else INPUT_TYPE


def _accepts(accepted: Sequence[str], ddl: str) -> bool:
    try:
        return accepts_type(accepted, parse_type(ddl))
    except UsageError:  # a type that only Spark knows
        return False


def key_width(fields: Sequence[Field]) -> int:
    """Count the stored columns of a key with these fields."""
    return sum(1 for field in fields for _ in leaves(parse_type(field.type)))
