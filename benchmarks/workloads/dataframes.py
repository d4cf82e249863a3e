"""The workloads as streaming DataFrames: a source of batches of exact size, and a query over it.

Sources are `rate-micro-batch`, or `rate` where the clock decides, with columns computed by Spark's generated code. They
make about 15 million rows/s on two cores, without Python, and can be replayed by construction. Every engine computes
the same columns from the same event numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.nexmark.draws import bits_sql, draw_sql, letters
from benchmarks.nexmark.generator import NexmarkConfig
from benchmarks.nexmark.processors import PROCESSORS as NEXMARK_PROCESSORS
from benchmarks.nexmark.queries import QUERIES
from benchmarks.nexmark.queries.query import Query
from benchmarks.nexmark.spark import WATERMARK, numbers
from benchmarks.workloads.config import RunConfig
from benchmarks.workloads.processors import (
    ENTRIES,
    counting,
    counting_frames,
    looking,
    looking_ahead,
    reminding,
    session_counts,
    waiting,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NEXMARK: dict[str, Query] = QUERIES | NEXMARK_PROCESSORS
"""The queries of NEXMark, those that are processors among them."""

PADDING = 100
POOL = 16_384
FEW = 100
"""Rows in a batch of `processor_timers`, after the first rows."""


class Stream:
    """Stream numbers of the draws."""

    KEY, VALUE, OFFSET, ENTRY = 1, 2, 3, 4


def key_sql(config: RunConfig) -> str:
    """Return SQL for the key of event `n`: uniform or Zipf over `keys`, after one round of all keys if `preload`.

    The Zipf ranks come from the inverse of the bounded Pareto distribution: Zipf's law for a continuous rank.
    """
    draw = draw_sql("n", config.seed, Stream.KEY)
    if config.zipf:
        share = f"({bits_sql(draw, 0, 53)} / {float(1 << 53)!r}D)"
        power = 1.0 - config.zipf
        if abs(power) < 1e-9:
            rank = f"exp({share} * ln({config.keys}D))"
        else:
            rank = f"pow(({config.keys**power - 1.0!r}D) * {share} + 1.0D, {1.0 / power!r}D)"
        key = f"least(cast({rank} as bigint) - 1L, {config.keys - 1}L)"
    else:
        key = f"({draw} % {config.keys}L)"
    if config.preload:
        key = f"if(n < {config.keys}L, n, {key})"
    if config.key_type == "string":
        return f"concat('k', cast({key} + 1000000000000000000L as string))"
    return key


def arriving(spark: SparkSession, config: RunConfig) -> DataFrame:
    """Return the event numbers, column `n`, as they arrive."""
    if not config.rate:
        return numbers(spark, config.rows_per_batch, config.partitions)
    source = spark.readStream.format("rate").option("rowsPerSecond", config.rate)
    source = source.option("rampUpTime", f"{config.warmup_seconds / 2:.0f}s").option("numPartitions", config.partitions)
    return source.load().selectExpr("value as n")


def rmw_columns(config: RunConfig) -> tuple[str, str]:
    """Return SQL for the columns `key`, `amount` of event `n`."""
    return f"{key_sql(config)} as key", f"{draw_sql('n', config.seed, Stream.VALUE)} % 1000000L as amount"


def rmw_source(spark: SparkSession, config: RunConfig) -> DataFrame:
    """Return columns `key`, `amount`, as they arrive."""
    return arriving(spark, config).selectExpr(*rmw_columns(config))


def rmw(source: DataFrame) -> DataFrame:
    """Return count, sum and max per key: read-modify-write."""
    from pyspark.sql import functions as f

    return source.groupBy("key").agg(
        f.count("*").alias("count"), f.sum("amount").alias("sum"), f.max("amount").alias("max")
    )


def read_write_source(spark: SparkSession, config: RunConfig) -> DataFrame:
    """Return columns `id`, `padding` (100 bytes): the stream of "A Performance Evaluation …" (APSys, section 3.1)."""
    from pyspark.sql import functions as f

    offset = f.expr(f"cast({draw_sql('n', config.seed, Stream.OFFSET)} % {POOL - PADDING}L + 1L as int)")
    padding = f.substring(f.lit(bytearray(letters(POOL, config.seed))), offset, f.lit(PADDING))
    return arriving(spark, config).select(f.expr(key_sql(config)).alias("id"), padding.alias("padding"))


def read_write(source: DataFrame) -> DataFrame:
    """Return the count of each id, and its last padding."""
    from pyspark.sql import functions as f

    return source.groupBy("id").agg(f.count("*").alias("count"), f.last("padding").alias("padding"))


def timed_source(spark: SparkSession, config: RunConfig) -> DataFrame:
    """Return columns `key`, `time`; times are in order."""
    base = NexmarkConfig().base_time_ms
    rows = arriving(spark, config).selectExpr(
        f"{key_sql(config)} as key", f"timestamp_millis({base}L + n * 1000 div {config.event_rate}) as time"
    )
    return rows.withWatermark("time", WATERMARK)


def waiting_source(spark: SparkSession, config: RunConfig) -> DataFrame:
    """Return columns `key`, `time`, `due`. The first rows bring every key with the time at which its timer is due.

    Later rows, `FEW` in a batch, have no `due`; they move the watermark. No timer is due by the time of the last of the
    first rows. From then on, one timer is due in each millisecond.
    """
    base = NexmarkConfig().base_time_ms
    first = base + config.keys * 1000 // config.event_rate
    rows = arriving(spark, config).where(f"n < {config.keys}L or n % {max(1, config.rows_per_batch // FEW)}L = 0")
    rows = rows.selectExpr(
        f"{key_sql(config)} as key",
        f"timestamp_millis({base}L + n * 1000 div {config.event_rate}) as time",
        f"if(n < {config.keys}L, {first}L + n, null) as due",
    )
    return rows.withWatermark("time", WATERMARK)


def looking_source(spark: SparkSession, config: RunConfig) -> DataFrame:
    """Return columns `key`, `first`, `at`: first rows bring every key, each later row asks for an entry of a map."""
    return arriving(spark, config).selectExpr(
        f"{key_sql(config)} as key",
        f"n < {config.keys}L as first",
        f"cast({draw_sql('n', config.seed, Stream.ENTRY)} % {ENTRIES}L as int) as at",
    )


def sliding(source: DataFrame) -> DataFrame:
    """Return the count of each key in windows of ten seconds, one every two seconds."""
    from pyspark.sql import functions as f

    return source.groupBy(f.window("time", "10 seconds", "2 seconds"), "key").count()


def session(source: DataFrame) -> DataFrame:
    """Return the count of each key before each pause of ten seconds."""
    from pyspark.sql import functions as f

    return source.groupBy(f.session_window("time", "10 seconds"), "key").count()


_TIMED = {"sliding": sliding, "session": session, "processor_reminders": reminding, "group_state": session_counts}
_PROCESSORS: dict[str, Callable[[DataFrame], DataFrame]] = {
    "processor": counting,
    "processor_frames": counting_frames,
    "processor_silent": partial(counting_frames, silent=True),
}


def nexmark(spark: SparkSession, config: RunConfig) -> DataFrame:
    """Return a NEXMark query over the events of the stream."""
    stream = NexmarkConfig(seed=config.seed, rate=config.event_rate)
    return NEXMARK[config.query].over(arriving(spark, config), stream)


def output_mode(config: RunConfig) -> str:
    """Return the output mode in which the workload's query runs."""
    if config.workload == "nexmark":
        return NEXMARK[config.query].mode
    return "append" if config.workload in ("sliding", "session", "group_state") else "update"


def event_time(config: RunConfig) -> bool:
    """Return whether the workload's query needs event times."""
    return config.workload in (*_TIMED, "processor_timers") or (
        config.workload == "nexmark" and NEXMARK[config.query].event_time
    )


def build(spark: SparkSession, config: RunConfig) -> DataFrame:
    """Return the workload's streaming query, ready to be written."""
    if config.workload == "nexmark":
        return nexmark(spark, config)
    if config.workload in _TIMED:
        return _TIMED[config.workload](timed_source(spark, config))
    if config.workload in _PROCESSORS:
        return _PROCESSORS[config.workload](rmw_source(spark, config))
    if config.workload == "processor_timers":
        return waiting(waiting_source(spark, config), keys=config.keys)
    if config.workload == "processor_map":
        return looking(looking_source(spark, config))
    if config.workload == "processor_map_async":
        return looking_ahead(looking_source(spark, config))
    if config.workload == "rmw":
        return rmw(rmw_source(spark, config))
    return read_write(read_write_source(spark, config))
