"""Ads shown and the clicks on them within ten minutes; those without a click come too, once none can follow any more.

`python examples/join.py`
"""

import json
import os
import tempfile
from pathlib import Path

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

import millpond

SHOWN = [[("12:00", 1), ("12:01", 2)], [("12:04", 3)], [("13:00", 4)], [("13:01", 5)]]
CLICKED = [[("12:02", 1)], [("12:09", 3)], [("12:30", 2)], [("13:05", 4)]]
"""Batches of minutes and ads. The click on ad 2 comes too late after it."""


def stream(spark: SparkSession, folder: Path, batches: list[list[tuple[str, int]]]) -> DataFrame:
    """A stream of times and ads, one batch from each file."""
    folder.mkdir()
    for number, rows in enumerate(batches, 1):
        file = folder / f"{number}.json"
        file.write_text("\n".join(json.dumps({"ts": f"2026-03-01 {at}:00", "ad": ad}) for at, ad in rows))
        os.utime(file, (number, number))  # Spark reads older files first
    return spark.readStream.schema("ts timestamp, ad long").option("maxFilesPerTrigger", 1).json(str(folder))


def main(spark: SparkSession, folder: Path) -> list[Row]:
    shown = stream(spark, folder / "shown", SHOWN).withWatermark("ts", "1 minute").alias("shown")
    clicked = stream(spark, folder / "clicked", CLICKED).withWatermark("ts", "1 minute").alias("clicked")
    both = shown.join(
        clicked,
        F.expr("shown.ad = clicked.ad AND clicked.ts BETWEEN shown.ts AND shown.ts + INTERVAL 10 MINUTES"),
        "leftOuter",
    ).selectExpr("shown.ad", "date_format(shown.ts, 'HH:mm') AS shown", "date_format(clicked.ts, 'HH:mm') AS clicked")
    query = (
        millpond.writeStream(both)
        .format("memory")
        .queryName("ads")
        .outputMode("append")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return spark.table("ads").orderBy("ad").collect()


if __name__ == "__main__":
    session = SparkSession.builder.master("local[2,4]").config("spark.sql.shuffle.partitions", "2").getOrCreate()
    with tempfile.TemporaryDirectory() as temporary:
        print(*main(session, Path(temporary)), sep="\n")
    session.stop()
