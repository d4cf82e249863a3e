"""Distinct counts on a stream, which Spark itself refuses: NEXMark's q16. `python examples/distinct.py`."""

import tempfile
from pathlib import Path

from pyspark.sql import Row, SparkSession

import millpond
from millpond.workloads.nexmark_spark import numbers
from millpond.workloads.queries import QUERIES


def main(spark: SparkSession, folder: Path) -> list[Row]:
    channels = QUERIES["q16"].over(numbers(spark, rows_per_batch=20_000, partitions=2))
    google = channels.where("channel = 'Google'").select("day", "total_bids", "total_bidders", "total_auctions")
    query = (
        millpond.writeStream(google)
        .format("memory")
        .queryName("google")
        .outputMode("update")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return spark.table("google").collect()


if __name__ == "__main__":
    session = (
        SparkSession.builder.master("local[2,4]")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    with tempfile.TemporaryDirectory() as temporary:
        print(*main(session, Path(temporary)), sep="\n")
    session.stop()
