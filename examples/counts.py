"""Counts per key, with state on Millpond, and a restart that goes on with them: `python examples/counts.py`.

The only difference from plain Spark is `millpond.writeStream(counts)` where `counts.writeStream` would stand.
"""

import tempfile
from pathlib import Path

from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F

import millpond


def main(spark: SparkSession, folder: Path) -> list[Row]:
    events = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 20_000).load()
    counts = (
        events.groupBy((F.col("value") % 1_000).alias("key"))
        .agg(F.count("*").alias("count"), F.max("value").alias("newest"))
        .withColumn("rate", F.col("newest") / F.col("count"))
    )
    millpond.explain(counts, "update")
    for _ in range(2):  # each run is a batch; the second one finds the state of the first
        query = (
            millpond.writeStream(counts)
            .foreachBatch(lambda batch, number: batch.orderBy("key").show(3))
            .outputMode("update")
            .option("checkpointLocation", str(folder / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    return millpond.read_state(spark, str(folder / "checkpoint")).orderBy("key").limit(3).collect()


if __name__ == "__main__":
    session = SparkSession.builder.master("local[2,4]").config("spark.sql.shuffle.partitions", "2").getOrCreate()
    with tempfile.TemporaryDirectory() as temporary:
        print(*main(session, Path(temporary)), sep="\n")
    session.stop()
