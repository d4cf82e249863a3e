"""Options of Spark's aggregate functions that only its JVM objects know."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

from pyspark import SparkContext

from millpond.plan.catalyst.nodes import Expression
from millpond.plan.catalyst.versions import weights_percentiles


@lru_cache
def sketch_tables(precision: int) -> dict[str, Any]:
    """Return Spark's own tables that correct HyperLogLog++ estimates at a precision of 4 to 18 bits.

    For other precisions Spark has no tables; the result is empty.
    """
    context = SparkContext._active_spark_context
    assert context is not None
    if not 4 <= precision <= 18:
        return {}
    jvm: Any = context._jvm
    helper = jvm.org.apache.spark.sql.catalyst.util.HyperLogLogPlusPlusHelper

    def numbers(array: Any) -> list[float]:  # as text: one call instead of one per number
        return [float(part) for part in str(jvm.java.util.Arrays.toString(array)).strip("[]").split(",")]

    return {
        "raw_estimates": numbers(helper.RAW_ESTIMATE_DATA()[precision - 4]),
        "biases": numbers(helper.BIAS_DATA()[precision - 4]),
        "threshold": float(helper.THRESHOLDS()[precision - 4]),
    }


def percentile_options(aggregate: Expression) -> dict[str, Any]:
    """Return the options of a percentile function (`Median`, `Percentile`, …)."""
    weighted = {"weighted": True} if weights_percentiles() else {}
    if aggregate.kind == "Median":
        return {"percentages": [0.5]} | weighted
    shares = aggregate.children[1]
    value = shares.java.eval(None)
    several = shares.type.startswith("array")
    options: dict[str, Any] = {
        "percentages": [float(share) for share in value.toDoubleArray()] if several else [float(value)],
        "array": several,
        "reverse": bool(aggregate.get("reverse")),
    }
    if aggregate.kind == "PercentileDisc":
        options |= {"discrete": True, "legacy": bool(aggregate.get("legacyCalculation"))}
    return options | weighted


def count_min_options(aggregate: Expression) -> dict[str, Any]:
    """Return the options of a `CountMinSketchAgg`: its row width in counters, and each row's hash multiplier."""
    empty = bytes(aggregate.java.eval(aggregate.java.createAggregationBuffer()))
    depth, width = struct.unpack_from(">ii", empty, 12)
    return {"width": width, "multipliers": list(struct.unpack_from(f">{depth}q", empty, 20))}
