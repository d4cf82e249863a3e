"""LR2, LR4, CM1 and CM2 (MiSA, table 2) over a stream of records, as Spark DataFrames that both engines run.

Windows are of event time. LR4 and CM2 give each window's rows once, when it closes (append mode). CM1 is ordered, which
Spark allows in complete mode alone, so both engines run it with ORDER BY in complete mode. CM1-ranked gives its rows as
ranks within each window, in update mode, which Spark does not run on streams. Neither mode closes CM1's windows here,
so they have no watermark.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from benchmarks.misa.streams import cluster, road
from benchmarks.misa.streams.records import Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WATERMARK = "1 second"
"""Delay of the watermark: records come in the order of their seconds, and a batch may end within a second."""
RANGE = "30 seconds"
"""Range of event time in which LR2 joins a report with earlier reports of its vehicle."""


def lr2(records: DataFrame) -> DataFrame:
    """Each report, once for every report of its vehicle in the 30 seconds up to it.

    Reports have whole seconds, so the range needs no evaluation between them.
    """
    from pyspark.sql import functions as f

    earlier = records.select(f.col("vehicle").alias("a_vehicle"), f.col("timestamp").alias("a_timestamp"))
    columns = ["timestamp", "vehicle", "speed", "highway", "lane", "direction", "segment"]
    within = f.expr(f"a_timestamp BETWEEN timestamp - INTERVAL {RANGE} AND timestamp")
    return records.select(*columns).join(earlier, (f.col("vehicle") == f.col("a_vehicle")) & within).select(*columns)


def lr4(records: DataFrame) -> DataFrame:
    """Count the vehicles' reports of each segment in windows of 20 seconds, one every 5 seconds."""
    from pyspark.sql import functions as f

    window = f.window("timestamp", "20 seconds", "5 seconds")
    counted = records.groupBy(window, "highway", "direction", "segment").agg(f.count("vehicle").alias("numVehicle"))
    return counted.select(f.col("window.end").alias("timestamp"), "highway", "direction", "segment", "numVehicle")


def cpu_by_category(records: DataFrame) -> DataFrame:
    """Add up the CPU that each category's events ask for in windows of 60 seconds, one every 10 seconds."""
    from pyspark.sql import functions as f

    summed = records.groupBy(f.window("timestamp", "60 seconds", "10 seconds"), "category").agg(
        f.sum("cpu").alias("totalCpu")
    )
    return summed.select(f.col("window.end").alias("timestamp"), "category", "totalCpu")


def cm1(records: DataFrame) -> DataFrame:
    """Order the categories of each window by their CPU."""
    return cpu_by_category(records).orderBy("timestamp", "totalCpu", "category")


def cm1_ranked(records: DataFrame) -> DataFrame:
    """Number the categories of each window by their CPU: CM1's rows as they change, with their places."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    place = f.row_number().over(Window.partitionBy("timestamp").orderBy("totalCpu", "category"))
    return cpu_by_category(records).withColumn("place", place).where(f"place <= {cluster.CATEGORIES}")


def cm2(records: DataFrame) -> DataFrame:
    """Average the CPU that scheduled tasks of each job ask for, in windows of 30 seconds, one every second."""
    from pyspark.sql import functions as f

    scheduled = records.where(f"eventType = {cluster.SCHEDULE}")
    averaged = scheduled.groupBy(f.window("timestamp", "30 seconds", "1 second"), "jobId").agg(
        f.avg("cpu").alias("avgCpu")
    )
    return averaged.select(f.col("window.end").alias("timestamp"), "jobId", "avgCpu")


@dataclass(frozen=True)
class Query:
    """A query and its stream.

    Attributes:
        stream: makes its records, by their rate and a seed. schema: theirs.
        over: the query over records. mode: its output mode.
    """

    stream: Callable[[float, int], Stream]
    schema: pa.Schema
    over: Callable[[DataFrame], DataFrame]
    mode: str = "append"

    def records(self, spark: SparkSession, path: str, files_per_batch: int = 0) -> DataFrame:
        """Read a stream of files of records.

        Args:
            path: a folder, or a pattern of folders.
            files_per_batch: the most in a batch; 0 = all that have come.
        """
        from pyspark.sql.pandas.types import from_arrow_schema

        reader = spark.readStream.schema(from_arrow_schema(self.schema))
        if files_per_batch:
            reader = reader.option("maxFilesPerTrigger", files_per_batch)
        rows = reader.parquet(path)
        return rows.withWatermark("timestamp", WATERMARK) if self.mode == "append" else rows


def _tasks(_rate: float, seed: int) -> Stream:
    return cluster.TaskEvents(seed)


QUERIES = {
    "LR2": Query(road.SegSpeedStr, road.SCHEMA, lr2),
    "LR4": Query(road.SegSpeedStr, road.SCHEMA, lr4),
    "CM1": Query(_tasks, cluster.SCHEMA, cm1, "complete"),
    "CM1-ranked": Query(_tasks, cluster.SCHEMA, cm1_ranked, "update"),
    "CM2": Query(_tasks, cluster.SCHEMA, cm2),
}
