"""Rows without their repetitions, into Parquet files that have each of them once: `python examples/parquet.py`.

The query is stopped and started again: Spark's file sink notes the batches that it has, and Millpond the keys.
"""

import json
import os
import tempfile
from pathlib import Path

from pyspark.sql import DataFrame, Row, SparkSession

import millpond


def deliver(folder: Path, number: int, rows: list[tuple[int, str]]) -> None:
    """Put a file where the stream reads."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{number}.json"
    file.write_text("\n".join(json.dumps({"id": id, "text": text}) for id, text in rows))
    os.utime(file, (number, number))  # Spark reads older files first


def main(spark: SparkSession, folder: Path) -> list[Row]:
    messages = spark.readStream.schema("id long, text string").option("maxFilesPerTrigger", 1)
    deliver(folder / "input", 1, [(1, "one"), (2, "two")])
    deliver(folder / "input", 2, [(2, "two"), (3, "three")])

    def run(stream: DataFrame) -> None:
        query = (
            millpond.writeStream(stream.dropDuplicates(["id"]))
            .format("parquet")
            .option("path", str(folder / "output"))
            .option("checkpointLocation", str(folder / "checkpoint"))
            .outputMode("append")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    run(messages.json(str(folder / "input")))
    deliver(folder / "input", 3, [(1, "one"), (3, "three"), (4, "four")])
    run(messages.json(str(folder / "input")))
    return spark.read.parquet(str(folder / "output")).orderBy("id").collect()


if __name__ == "__main__":
    session = SparkSession.builder.master("local[2,4]").config("spark.sql.shuffle.partitions", "2").getOrCreate()
    with tempfile.TemporaryDirectory() as temporary:
        print(*main(session, Path(temporary)), sep="\n")
    session.stop()
