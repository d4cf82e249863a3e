"""The program of the test of cache tiers, an application of its own: wide aggregates by key, until all is read.

`python tiers_job.py INPUT OUTPUT CHECKPOINT` writes each batch's rows below OUTPUT, and prints its figures as JSON.
`LOCATION` is where state lies, `DISK` what may be on the local disk; the rest is as in `tests/chaos/job.py`.
"""

import json
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import millpond
from tests.chaos.job import session

VALUES = 12


def copies() -> int:
    """Bytes of local copies of files, of all queries and slots, and of those being written."""
    size = 0
    for path in Path(tempfile.gettempdir()).glob("millpond-*/copies/*/*/*.*"):
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def main(source: str, output: str, checkpoint: str) -> None:
    spark = session()
    spark.conf.set("spark.millpond.onUnsupported", "error")
    spark.conf.set("spark.millpond.state.location", os.environ["LOCATION"])
    if "DISK" in os.environ:
        spark.conf.set("spark.millpond.cache.disk", os.environ["DISK"])
    held: dict[int, int] = {}

    def write(rows: DataFrame, batch: int) -> None:
        pq.write_table(rows.toArrow(), f"{output}/{batch}.parquet")
        held[batch] = copies()

    columns = ", ".join(f"v{number} bigint" for number in range(VALUES))
    rows = spark.readStream.schema(f"key bigint, {columns}").option("maxFilesPerTrigger", 1).parquet(source)
    wide = rows.groupBy("key").agg(F.count("*").alias("n"), *(F.sum(f"v{i}").alias(f"v{i}") for i in range(VALUES)))
    writer = millpond.writeStream(wide).outputMode("update").foreachBatch(write)
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
    for progress in query.recentProgress:
        if "millpond" in progress.observedMetrics:
            figures = progress.observedMetrics["millpond"].asDict()
            print(json.dumps(figures | {"batch": progress.batchId, "held": held[progress.batchId]}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
