"""The program that the tests of compactors run in a process of its own: a query over a folder's files as they come.

`python compaction_job.py FOLDER` reads `in/`, writes each batch's rows to `out/` and its figures to `figures/`, and
goes on until there is a file `stop`. `CONFS` has settings, as JSON.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQueryListener

import millpond


class Figures(StreamingQueryListener):
    """Writes what each batch reports, whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def onQueryStarted(self, event: Any) -> None:
        pass

    def onQueryProgress(self, event: Any) -> None:
        progress = event.progress
        if "millpond" in progress.observedMetrics:
            path = self.folder / f"{os.getpid()}-{progress.batchId}"
            path.write_text(json.dumps(progress.observedMetrics["millpond"].asDict()))
            path.rename(path.with_suffix(".json"))

    def onQueryIdle(self, event: Any) -> None:
        pass

    def onQueryTerminated(self, event: Any) -> None:
        pass


def main(folder: Path) -> None:
    builder = (
        SparkSession.builder.master("local[2,4]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.sql.shuffle.partitions", "2")
    )
    for name, value in json.loads(os.environ["CONFS"]).items():
        builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    spark.streams.addListener(Figures(folder / "figures"))
    rows = spark.readStream.schema("key bigint, amount bigint, part int").option("maxFilesPerTrigger", 1)
    groups = rows.parquet(str(folder / "in")).groupBy("key").agg(F.count("*"), F.sum("amount"), F.max("part"))

    def write(batch: DataFrame, number: int) -> None:
        batch.write.mode("overwrite").parquet(str(folder / "out" / f"batch={number}"))

    writer = millpond.writeStream(groups.toDF("key", "rows", "amount", "part")).outputMode("update").foreachBatch(write)
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).start()
    while query.isActive and not (folder / "stop").exists():
        time.sleep(0.05)
    query.stop()
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
