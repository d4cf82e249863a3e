"""The two best bids of each auction, which Spark itself does not keep on streams: `python examples/top_n.py`."""

import json
import os
import tempfile
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

import millpond

BATCHES = [
    [("lamp", "ann", 10), ("lamp", "bob", 12), ("vase", "ann", 7)],
    [("lamp", "cid", 15), ("vase", "dan", 6)],
    [("lamp", "dan", 11), ("vase", "bob", 9)],
]


def bids(spark: SparkSession, folder: Path) -> DataFrame:
    """A stream of three batches, one from each file."""
    folder.mkdir()
    for number, rows in enumerate(BATCHES, 1):
        file = folder / f"{number}.json"
        file.write_text("\n".join(json.dumps({"auction": a, "bidder": b, "price": p}) for a, b, p in rows))
        os.utime(file, (number, number))  # Spark reads older files first
    schema = "auction string, bidder string, price long"
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(str(folder))


def main(spark: SparkSession, folder: Path) -> dict[tuple[str, int], tuple[str, int]]:
    place = F.row_number().over(Window.partitionBy("auction").orderBy(F.desc("price")))
    best = bids(spark, folder / "input").withColumn("place", place).where("place <= 2")
    result: dict[tuple[str, int], tuple[str, int]] = {}

    def keep(batch: DataFrame, number: int) -> None:
        """A new image takes the place of the old one of its key: the auction and the place."""
        result.update({(row["auction"], row["place"]): (row["bidder"], row["price"]) for row in batch.collect()})
        print(f"after batch {number}: {dict(sorted(result.items()))}")

    query = (
        millpond.writeStream(best)
        .foreachBatch(keep)
        .outputMode("update")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return result


if __name__ == "__main__":
    session = SparkSession.builder.master("local[2,4]").config("spark.sql.shuffle.partitions", "2").getOrCreate()
    with tempfile.TemporaryDirectory() as temporary:
        main(session, Path(temporary))
    session.stop()
