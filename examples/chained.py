"""How many customers have bought how often, an aggregate over an aggregate: `python examples/chained.py`.

Spark refuses that on streams, since it cannot take back what it has counted: a customer's second purchase has to leave
the count of those who bought once. `spark.millpond.changes=all` shows counts that are gone, too, in the column `_op`.
"""

import json
import os
import tempfile
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import millpond

BATCHES = [["ann", "bob", "cid"], ["ann", "dan"], ["ann", "bob"]]


def purchases(spark: SparkSession, folder: Path) -> DataFrame:
    """A stream of three batches, one from each file."""
    folder.mkdir()
    for number, customers in enumerate(BATCHES, 1):
        file = folder / f"{number}.json"
        file.write_text("\n".join(json.dumps({"customer": customer}) for customer in customers))
        os.utime(file, (number, number))  # Spark reads older files first
    return spark.readStream.schema("customer string").option("maxFilesPerTrigger", 1).json(str(folder))


def main(spark: SparkSession, folder: Path) -> dict[int, int]:
    often = purchases(spark, folder / "input").groupBy("customer").agg(F.count("*").alias("times"))
    customers = often.groupBy("times").agg(F.count("*").alias("customers"))
    result: dict[int, int] = {}

    def keep(batch: DataFrame, number: int) -> None:
        """Deletions come before what is new: a key may have both in one batch."""
        rows = batch.collect()
        for row in rows:
            if row["_op"] == "D":
                del result[row["times"]]
        result.update({row["times"]: row["customers"] for row in rows if row["_op"] != "D"})
        print(f"after batch {number}: {dict(sorted(result.items()))}")

    spark.conf.set("spark.millpond.changes", "all")
    try:
        query = (
            millpond.writeStream(customers)
            .foreachBatch(keep)
            .outputMode("update")
            .option("checkpointLocation", str(folder / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
    finally:
        spark.conf.unset("spark.millpond.changes")
    query.awaitTermination()
    return result


if __name__ == "__main__":
    session = SparkSession.builder.master("local[2,4]").config("spark.sql.shuffle.partitions", "2").getOrCreate()
    with tempfile.TemporaryDirectory() as temporary:
        main(session, Path(temporary))
    session.stop()
