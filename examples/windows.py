"""Trips per minute and city; each window is shown once, when the watermark has passed it: `python examples/windows.py`.

The last batch holds a late row: its window was shown before, so it is dropped, and counted in `late_rows`.
"""

import json
import os
import tempfile
from pathlib import Path

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

import millpond

BATCHES = [
    [("12:00:05", "north", 2.0), ("12:00:40", "south", 5.0), ("12:00:50", "north", 4.0)],
    [("12:01:10", "north", 1.0), ("12:02:30", "south", 3.0)],
    [("12:05:00", "north", 1.0)],
    [("12:00:55", "south", 9.0), ("12:09:00", "north", 6.0)],
]


def trips(spark: SparkSession, folder: Path) -> DataFrame:
    """A stream of four batches, one from each file."""
    folder.mkdir()
    for number, rows in enumerate(BATCHES, 1):
        file = folder / f"{number}.json"
        file.write_text("\n".join(json.dumps({"ts": f"2026-03-01 {at}", "city": c, "km": km}) for at, c, km in rows))
        os.utime(file, (number, number))  # Spark reads older files first
    return (
        spark.readStream.schema("ts timestamp, city string, km double")
        .option("maxFilesPerTrigger", 1)
        .json(str(folder))
    )


def main(spark: SparkSession, folder: Path) -> list[Row]:
    minutes = (
        trips(spark, folder / "input")
        .withWatermark("ts", "10 seconds")
        .groupBy(F.window("ts", "1 minute"), "city")
        .agg(F.count("*").alias("trips"), F.avg("km").alias("km"))
        .select(F.date_format("window.start", "HH:mm").alias("minute"), "city", "trips", "km")
    )
    query = (
        millpond.writeStream(minutes)
        .format("memory")
        .queryName("minutes")
        .outputMode("append")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    late = sum(progress["observedMetrics"]["millpond"]["late_rows"] or 0 for progress in query.recentProgress)
    print(f"dropped as late: {late}")
    return spark.table("minutes").orderBy("minute", "city").collect()


if __name__ == "__main__":
    session = SparkSession.builder.master("local[2,4]").config("spark.sql.shuffle.partitions", "2").getOrCreate()
    with tempfile.TemporaryDirectory() as temporary:
        print(*main(session, Path(temporary)), sep="\n")
    session.stop()
