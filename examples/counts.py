"""Counts per key, with state on Millpond: `python examples/counts.py`.

The only difference from plain Spark is `millpond.writeStream(counts)` where `counts.writeStream` would stand.
"""

import tempfile

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import millpond


def main() -> None:
    spark = SparkSession.builder.master("local[2,4]").config("spark.sql.shuffle.partitions", "2").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    events = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 100_000).load()
    counts = (
        events.groupBy((F.col("value") % 1_000).alias("key"))
        .agg(F.count("*").alias("count"), F.max("value").alias("newest"))
        .withColumn("rate", F.col("newest") / F.col("count"))
    )
    millpond.explain(counts)
    with tempfile.TemporaryDirectory() as checkpoint:
        query = (
            millpond.writeStream(counts)
            .foreachBatch(lambda batch, number: batch.orderBy("key").show(3))
            .outputMode("update")
            .option("checkpointLocation", checkpoint)
            .start()
        )
        query.awaitTermination(20)
        query.stop()
        millpond.read_state(spark, checkpoint).orderBy("key").show(3)
    spark.stop()


if __name__ == "__main__":
    main()
