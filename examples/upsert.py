"""Balances kept in a database by `foreachBatch`: a batch that comes twice changes nothing. `python examples/upsert.py`.

In update mode a batch has the new image of each key that changed, so writing it over the old one is enough.
"""

import json
import os
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import millpond

BATCHES = [[("ann", 100), ("bob", 20)], [("ann", -30), ("cid", 5)], [("bob", 1)]]


def payments(spark: SparkSession, folder: Path) -> DataFrame:
    """A stream of three batches, one from each file."""
    folder.mkdir()
    for number, rows in enumerate(BATCHES, 1):
        file = folder / f"{number}.json"
        file.write_text("\n".join(json.dumps({"account": account, "amount": amount}) for account, amount in rows))
        os.utime(file, (number, number))  # Spark reads older files first
    return spark.readStream.schema("account string, amount long").option("maxFilesPerTrigger", 1).json(str(folder))


def main(spark: SparkSession, folder: Path) -> list[tuple[str, int]]:
    database = folder / "balances.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE balances (account TEXT PRIMARY KEY, balance INTEGER)")

    def upsert(batch: DataFrame, number: int) -> None:
        rows = [tuple(row) for row in batch.select("account", "balance").collect()]
        with closing(sqlite3.connect(database)) as connection, connection:
            connection.executemany("INSERT OR REPLACE INTO balances VALUES (?, ?)", rows)

    balances = payments(spark, folder / "input").groupBy("account").agg(F.sum("amount").alias("balance"))
    query = (
        millpond.writeStream(balances)
        .foreachBatch(upsert)
        .outputMode("update")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute("SELECT account, balance FROM balances ORDER BY account").fetchall()


if __name__ == "__main__":
    session = SparkSession.builder.master("local[2,4]").config("spark.sql.shuffle.partitions", "2").getOrCreate()
    with tempfile.TemporaryDirectory() as temporary:
        print(*main(session, Path(temporary)), sep="\n")
    session.stop()
