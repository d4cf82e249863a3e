"""Session settings that a transplanted query needs while it starts: a query runs in a copy of its session."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from pyspark.sql import SparkSession

from millpond.conf import Settings
from millpond.plan.catalyst.jvm import Catalyst
from millpond.spec.kinds.union import OperatorSpec
from millpond.spec.types import leaves, parse_type

_MOST_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
_UNLIMITED = str((1 << 31) - 1)
"""Any smaller limit makes Spark add up the sizes of all columns after each row: 0.3 µs a row, most of its edge."""

_ROWS_OF_ANY_LENGTH = 4096
"""Rows of one Arrow batch if they have strings, or sketches when they are combined: without a limit of bytes, 2 GB of a
column have to hold them."""

_STORES = "spark.sql.streaming.internal.stateStore.partitions"

_WATCHING = {
    "spark.sql.streaming.statefulOperator.allowMultiple": "false",
    _STORES: "1",
    "spark.sql.streaming.stateStore.checkpointFormatVersion": "1",
}
"""What the operator of Spark's own needs that watches the watermark (see `Catalyst.watching_watermark`)."""

PLANNING = {
    "spark.sql.streaming.unsupportedOperationCheck",
    "spark.sql.adaptive.streaming.stateless.enabled",
    *_WATCHING,
}
"""What counts only while queries are started and batches planned: a batch's rows come alike without it."""

_STARTING = threading.RLock()
"""Two starts must not see, or restore, each other's settings."""


def running_settings(settings: Settings, specs: Sequence[OperatorSpec], given: Mapping[str, str]) -> dict[str, str]:
    """The session settings under which a transplanted query runs.

    Args:
        settings: Millpond's.
        specs: the operators.
        given: the session's settings.
    """
    closing = any(spec.closes for spec in specs)
    fields = [field for spec in specs for field in (*spec.input_fields, *spec.output_fields)]
    of_any_length = any(leaf.machine in (None, "bytes") for f in fields for leaf in leaves(parse_type(f.type)))
    sketches = any(call.function == "approx_count_distinct" for spec in specs for call in spec.calls)
    rows = min(settings.batch_rows, _ROWS_OF_ANY_LENGTH) if of_any_length or sketches else settings.batch_rows
    return {
        # Spark checked the query that the user wrote; the transplanted one looks stateless and would be judged as such.
        "spark.sql.streaming.unsupportedOperationCheck": "false",
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(rows),
        _MOST_BYTES: given.get(_MOST_BYTES, _UNLIMITED),
        # As for Spark's own stateful queries: re-planning between stages takes longer than a small batch's stages.
        "spark.sql.adaptive.streaming.stateless.enabled": "false",
        "spark.sql.execution.arrow.useLargeVarTypes": "false",
    } | (_WATCHING if closing else {})


def first_stores(settings: Mapping[str, str]) -> int:
    """Into how many partitions Spark divides the state stores of a query that begins under these session settings."""
    return int(settings.get(_STORES) or settings.get("spark.sql.shuffle.partitions") or 200)


def outside(around: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str | None]:
    """What a `foreachBatch` function finds of the session in place of `running_settings`: it may start other queries.

    Args:
        around: the running settings. given: the session's settings.
    """
    return {name: given.get(name) for name in around if name in PLANNING}


@contextmanager
def starting(spark: SparkSession, wanted: Mapping[str, str]) -> Iterator[None]:
    """Change a session's settings while a query starts, and put back what was there."""
    with _STARTING:
        before = Catalyst(spark).settings
        with changed(spark, wanted, {name: before.get(name) for name in wanted}):
            yield


@contextmanager
def changed(spark: SparkSession, wanted: Mapping[str, str | None], before: Mapping[str, str | None]) -> Iterator[None]:
    """Change a session's settings within this context, then to what was there before; None: not set."""
    try:
        _set(spark, wanted)
        yield
    finally:
        _set(spark, before)


def _set(spark: SparkSession, values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, value)
