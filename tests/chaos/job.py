"""The program that the kill tests run in a process of its own: one query over a folder's files, until all are read.

`python job.py QUERY INPUT OUTPUT CHECKPOINT` prints `batch <n>` when Spark has finished a batch and `done` at the end.
`MASTER` is the cluster's URL and `DRIVER` this program's address there, `LOCATION` where state lies if not in the
checkpoint, `PARTITIONS` how many it has, `CONFS` more settings, as JSON, `EXECUTORS` how many the query waits for,
`PAUSE` seconds that `foreachBatch` takes.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle, StreamingQueryListener

import millpond

SCHEMA = "key bigint, name string, amount bigint, at timestamp"
DELAY = "15 seconds"


class Announce(StreamingQueryListener):
    def onQueryStarted(self, event: Any) -> None:
        print("started", flush=True)

    def onQueryProgress(self, event: Any) -> None:
        print(f"batch {event.progress.batchId}", flush=True)

    def onQueryIdle(self, event: Any) -> None:
        pass

    def onQueryTerminated(self, event: Any) -> None:
        pass


def session() -> SparkSession:
    builder = (
        SparkSession.builder.master(os.environ.get("MASTER", "local[2,4]"))
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", os.environ.get("DRIVER", "127.0.0.1"))
        .config("spark.driver.bindAddress", os.environ.get("DRIVER", "127.0.0.1"))
        .config("spark.driver.memory", "1g")
        .config("spark.executor.memory", "512m")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.millpond.slot.memory", "64m")
    )
    if "LOCATION" in os.environ:
        builder.config("spark.millpond.state.location", os.environ["LOCATION"])
    for name, value in json.loads(os.environ.get("CONFS", "{}")).items():
        builder.config(name, value)
    if "PARTITIONS" in os.environ:
        builder.config("spark.millpond.partitions", os.environ["PARTITIONS"])
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    spark.streams.addListener(Announce())
    while "EXECUTORS" in os.environ and executors(spark) < int(os.environ["EXECUTORS"]):
        time.sleep(0.1)
    return spark


def executors(spark: SparkSession) -> int:
    context = spark.sparkContext._jsc.sc()
    return int(context.getExecutorMemoryStatus().size()) - 1  # the driver is one of them


def aggregate(rows: DataFrame) -> DataFrame:
    """Touches every key again and again: a batch applied twice, or not at all, shows in every sum."""
    return rows.groupBy("key", "name").agg(
        F.count("*").alias("rows"), F.sum("amount").alias("total"), F.count_distinct("amount").alias("amounts")
    )


def deduplicate(rows: DataFrame) -> DataFrame:
    """For sinks that only append, and skip the batch ids they have."""
    return rows.dropDuplicates(["key", "name"]).select("key", "name")


def windows(rows: DataFrame) -> DataFrame:
    """State that is closed by the watermark and dropped: what comes out comes once."""
    return (
        rows.withWatermark("at", DELAY)
        .groupBy(F.window("at", "20 seconds"), "name")
        .agg(F.count("*").alias("rows"), F.sum("amount").alias("total"))
        .select(F.unix_seconds("window.start").alias("start"), "name", "rows", "total")
    )


def join(rows: DataFrame) -> DataFrame:
    """Pairs of rows within three seconds, each once."""
    left = rows.where("amount > 35").withWatermark("at", DELAY).alias("l")
    right = rows.where("amount < -35").withWatermark("at", DELAY).alias("r")
    near = F.expr("l.key = r.key AND r.at >= l.at AND r.at <= l.at + INTERVAL 3 SECONDS")
    return left.join(right, near).selectExpr("l.key", "l.amount", "r.amount AS other", "unix_micros(l.at) AS at")


class Windows(StatefulProcessor):
    """The same as `windows`: what is known of a window is in a variable of each kind, and a timer gives it out."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.open = handle.getValueState("open", "windows int")
        self.amounts = handle.getListState("amounts", "start bigint, amount bigint")
        self.totals = handle.getMapState("totals", "start bigint", "total bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            start = row.second - row.second % 20
            total = self.totals.getValue((start,))
            if total is None:
                self.open.update(((self.open.get() or (0,))[0] + 1,))
                self.handle.registerTimer((start + 20) * 1000)
            self.totals.updateValue((start,), ((total.total if total else 0) + row.amount,))
            self.amounts.appendValue((start, row.amount))
        yield from ()

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        start = expiredTimerInfo.getExpiryTimeInMs() // 1000 - 20
        amounts = list(self.amounts.get())
        mine = [amount for at, amount in amounts if at == start]
        left = [one for one in amounts if one[0] != start]
        total, windows = self.totals.getValue((start,)).total, self.open.get()[0]
        if sum(mine) != total or windows != len(list(self.totals.iterator())):
            raise ValueError(f"window {start} of {key}: {sum(mine)}, {total}, {windows}")
        self.totals.removeKey((start,))
        self.amounts.put(left) if left else self.amounts.clear()
        self.open.update((windows - 1,)) if windows > 1 else self.open.clear()
        yield Row(start=start, name=key["name"], rows=len(mine), total=total)


def processor(rows: DataFrame) -> DataFrame:
    """A processor of the user's: one that loses or doubles anything of its state gives out other rows, or fails."""
    seconds = rows.withColumn("second", F.unix_seconds("at"))
    later = F.expr("at + INTERVAL 1 SECOND")  # a row of the very first moment would be late, as in Spark
    seconds = seconds.withColumn("at", later).withWatermark("at", DELAY)
    shown = "start bigint, name string, rows bigint, total bigint"
    return seconds.groupBy("name").transformWithState(Windows(), shown, "append", "eventTime")


APPENDING = {"deduplicate": deduplicate, "windows": windows, "join": join, "processor": processor}


def main(query: str, source: str, output: str, checkpoint: str) -> None:
    spark = session()
    rows = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(source)
    if query in ("aggregate", "windows_by_batch"):

        def write(batch: DataFrame, number: int) -> None:
            batch.write.mode("overwrite").parquet(str(Path(output) / f"batch={number}"))
            time.sleep(float(os.environ.get("PAUSE", "0")))

        frame, mode = (aggregate(rows), "update") if query == "aggregate" else (windows(rows), "append")
        writer = millpond.writeStream(frame).outputMode(mode).foreachBatch(write)
    else:
        writer = (
            millpond.writeStream(APPENDING[query](rows)).outputMode("append").format("parquet").option("path", output)
        )
    running = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    running.awaitTermination()
    print("done", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
