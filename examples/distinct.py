"""Distinct counts on a stream, which Spark itself refuses, as in NEXMark's q16. `python examples/distinct.py`."""

import tempfile
from pathlib import Path

from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F

import millpond


def main(spark: SparkSession, folder: Path) -> list[Row]:
    numbers = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 20_000).load()
    bids = numbers.selectExpr(
        "element_at(array('Google', 'Apple', 'Baidu'), cast(1 + value % 3 as int)) as channel",
        "abs(hash(value)) % 1000 as bidder",
        "value div 50 as auction",
        "abs(hash(value, 1)) % 20000 as price",
    )
    channels = bids.groupBy("channel").agg(
        F.count("*").alias("bids"),
        F.count_distinct("bidder").alias("bidders"),
        F.count_distinct("auction").alias("auctions"),
        F.expr("count(distinct bidder) filter (where price < 1000)").alias("low_bidders"),
    )
    query = (
        millpond.writeStream(channels)
        .format("memory")
        .queryName("channels")
        .outputMode("update")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return spark.table("channels").orderBy("channel").collect()


if __name__ == "__main__":
    session = SparkSession.builder.master("local[2,4]").config("spark.sql.shuffle.partitions", "2").getOrCreate()
    with tempfile.TemporaryDirectory() as temporary:
        print(*main(session, Path(temporary)), sep="\n")
    session.stop()
