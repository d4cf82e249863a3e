"""State on an object store, checkpoint beside the application: `python examples/state_on_s3.py s3://bucket/folder`.

Credentials come from the environment (`AWS_ACCESS_KEY_ID` …, see docs/guides/state-on-s3.md). They have to be there
before the session is, since the processes that hold the state inherit them.
"""

import sys
import tempfile
from pathlib import Path

from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F

import millpond


def main(spark: SparkSession, folder: Path, location: str) -> list[Row]:
    spark.conf.set("spark.millpond.state.location", location)
    events = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1_000).load()
    counts = events.groupBy((F.col("value") % 10).alias("key")).agg(F.count("*").alias("count"))
    for _ in range(2):  # each run is a batch; the second one finds the state of the first on the store
        query = (
            millpond.writeStream(counts)
            .format("noop")
            .outputMode("update")
            .option("checkpointLocation", str(folder / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    return millpond.read_state(spark, f"{location}/{query.id}").orderBy("key").collect()


if __name__ == "__main__":
    session = SparkSession.builder.master("local[2,4]").config("spark.sql.shuffle.partitions", "2").getOrCreate()
    with tempfile.TemporaryDirectory() as temporary:
        print(*main(session, Path(temporary), sys.argv[1].rstrip("/")), sep="\n")
    session.stop()
