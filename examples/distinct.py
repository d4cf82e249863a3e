"""Distinct counts on a stream, which Spark itself refuses: NEXMark's q16. `python examples/distinct.py`."""

import tempfile

from pyspark.sql import SparkSession

import millpond
from millpond.workloads.nexmark_spark import numbers
from millpond.workloads.queries import QUERIES


def main() -> None:
    spark = (
        SparkSession.builder.master("local[2,4]")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    channels = QUERIES["q16"].over(numbers(spark, rows_per_batch=20_000, partitions=2))
    with tempfile.TemporaryDirectory() as checkpoint:
        query = (
            millpond.writeStream(channels.where("channel = 'Google'"))
            .format("console")
            .outputMode("update")
            .option("checkpointLocation", checkpoint)
            .start()
        )
        query.awaitTermination(30)
        query.stop()
    spark.stop()


if __name__ == "__main__":
    main()
