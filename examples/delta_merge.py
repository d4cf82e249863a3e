"""Balances in a Delta table, merged by `foreachBatch`: `pip install delta-spark`, `python examples/delta_merge.py`.

That installs Spark 4.2, the newest that Delta Lake runs on. In update mode a batch has the new balance of each account
that changed, so that `MERGE` by the account gives the same table when a batch comes twice. Appended rows would come
twice: Delta drops those of a batch that it has already, by `txnAppId` (the query) and `txnVersion` (the batch).
"""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import millpond

BATCHES = [[("ann", 100), ("bob", 20)], [("ann", -30), ("cid", 5)], [("bob", 1)]]

MERGE = """
    MERGE INTO delta.`{table}` AS old USING changed AS new ON old.account = new.account
    WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *
"""


def write_payments(folder: Path, numbers: range) -> None:
    """Write files of the input, each of which becomes a batch."""
    folder.mkdir(exist_ok=True)
    for number in numbers:
        file = folder / f"{number}.json"
        rows = BATCHES[number]
        file.write_text("\n".join(json.dumps({"account": account, "amount": amount}) for account, amount in rows))
        os.utime(file, (number + 1, number + 1))  # Spark reads older files first


def merging(folder: Path) -> Callable[[DataFrame, int], None]:
    """The function that writes a batch: to the table of balances, and to the one of all changes."""

    def merge(batch: DataFrame, number: int) -> None:
        batch.createOrReplaceTempView("changed")
        batch.sparkSession.sql(MERGE.format(table=folder / "balances"))
        changes = batch.withColumn("batch", F.lit(number))
        once = {"txnAppId": "balances", "txnVersion": number}
        changes.write.format("delta").mode("append").options(**once).save(str(folder / "changes"))

    return merge


def run(spark: SparkSession, folder: Path, write: Callable[[DataFrame, int], None]) -> None:
    """Run the query over the payments that are new."""
    payments = spark.readStream.schema("account string, amount long").option("maxFilesPerTrigger", 1)
    balances = payments.json(str(folder / "input")).groupBy("account").agg(F.sum("amount").alias("balance"))
    query = (
        millpond.writeStream(balances)
        .foreachBatch(write)
        .outputMode("update")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def main(spark: SparkSession, folder: Path) -> list[tuple[str, int]]:
    balances = f"delta.`{folder / 'balances'}`"
    spark.sql(f"CREATE TABLE {balances} (account STRING, balance LONG) USING delta")
    for numbers in (range(2), range(2, 3)):  # the second run goes on with the state of the first
        write_payments(folder / "input", numbers)
        run(spark, folder, merging(folder))
    return [tuple(row) for row in spark.sql(f"SELECT * FROM {balances} ORDER BY account").collect()]


if __name__ == "__main__":
    from delta import configure_spark_with_delta_pip

    builder = (
        SparkSession.builder.master("local[2,4]")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
        .config("spark.databricks.delta.snapshotPartitions", "2")  # the table is small: 50 tasks a batch, by default
    )
    session = configure_spark_with_delta_pip(builder).getOrCreate()  # downloads Delta's jars the first time
    with tempfile.TemporaryDirectory() as temporary:
        print(*main(session, Path(temporary)), sep="\n")
    session.stop()
