"""The program of the Kafka test, a process of its own: queries from a topic to others, until all is read.

`python kafka_job.py spark|millpond INPUT OUTPUT CHECKPOINT`: the input topic, which `spark` fills, is called like the
last part of INPUT; who comes to the end puts what is in its own topics into files below OUTPUT. `KAFKA` is the broker's
address; the rest is as in `tests/chaos/job.py`.
"""

import io
import json
import os
import random
import sys
from contextlib import redirect_stdout
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import millpond
from tests.chaos.job import session

DELAY = "10 seconds"
TRANSACTIONS = 8
ROWS = 300
ABORTED = (2, 5)
POISON = 10**9
"""An amount that only transactions have that are aborted."""


def fill(spark: SparkSession, topic: str) -> None:
    """Transactions of five seconds of event time each, some rows late by far, two of them aborted."""
    jvm = spark._jvm
    rng = random.Random(11)
    settings = jvm.java.util.HashMap()
    settings.put("bootstrap.servers", os.environ["KAFKA"])
    settings.put("transactional.id", "tests")
    for part in ("key", "value"):
        settings.put(f"{part}.serializer", "org.apache.kafka.common.serialization.StringSerializer")
    producer = jvm.org.apache.kafka.clients.producer.KafkaProducer(settings)
    producer.initTransactions()
    for number in range(TRANSACTIONS):
        producer.beginTransaction()
        for _ in range(ROWS):
            key = rng.randrange(40)
            at = 1_700_000_000_000 + number * 5_000 + rng.randrange(5_000) - (60_000 if rng.random() < 0.05 else 0)
            amount = POISON if number in ABORTED else rng.randrange(-50, 50)
            value = None if rng.random() < 0.02 else str(amount)
            name = None if key == 7 else f"key {key}"
            producer.send(jvm.org.apache.kafka.clients.producer.ProducerRecord(topic, key % 2, at, name, value))
        if number in ABORTED:
            producer.flush()
            producer.abortTransaction()
        else:
            producer.commitTransaction()
    producer.close()


def read(spark: SparkSession, topic: str) -> DataFrame:
    """A topic as a batch, what is committed."""
    return spark.read.format("kafka").options(**_source(topic)).load()


def _source(topic: str) -> dict[str, str]:
    broker = os.environ["KAFKA"]
    return {"kafka.bootstrap.servers": broker, "subscribe": topic, "kafka.isolation.level": "read_committed"}


def keys(rows: DataFrame) -> DataFrame:
    """Totals that change: a batch that counts twice, or not at all, shows in all that follow. The key stays binary."""
    totals = rows.groupBy("key").agg(
        F.count("*").alias("rows"),
        F.sum(F.col("value").cast("string").cast("long")).alias("total"),
        F.max("offset").alias("offset"),
        F.max("timestamp").alias("newest"),
        F.max_by("value", F.struct("timestamp", "offset")).alias("last"),
    )
    return totals.select("key", F.to_json(F.struct("rows", "total", "offset", "newest", "last")).alias("value"))


def windows(rows: DataFrame) -> DataFrame:
    """Windows over Kafka's own timestamps, closed by their watermark."""
    counted = (
        rows.withWatermark("timestamp", DELAY)
        .groupBy(F.window("timestamp", "6 seconds", "3 seconds"), "key", "topic")
        .agg(F.count("*").alias("rows"), F.sum(F.length("value")).alias("size"), F.collect_set("partition").alias("of"))
    )
    return counted.select("key", F.to_json(F.struct("window", "topic", "rows", "size", "of")).alias("value"))


QUERIES = {"keys": (keys, "update"), "windows": (windows, "append")}


def main(engine: str, source: str, output: str, checkpoint: str) -> None:
    spark = session()
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    spark.conf.set("spark.millpond.onUnsupported", "error")
    topic = Path(source).name
    if engine == "spark":
        fill(spark, topic)
    options = {**_source(topic), "startingOffsets": "earliest", "maxOffsetsPerTrigger": "400"}
    running = []
    for name, (query, mode) in QUERIES.items():
        rows = query(spark.readStream.format("kafka").options(**options).load())
        if engine == "millpond":
            with redirect_stdout(io.StringIO()) as told:
                millpond.explain(rows, mode)
            print(told.getvalue(), file=sys.stderr)
            assert "MP-" not in told.getvalue()  # no reason to stay on Spark
        writer = millpond.writeStream(rows) if engine == "millpond" else rows.writeStream
        writer = writer.format("kafka").option("kafka.bootstrap.servers", os.environ["KAFKA"]).outputMode(mode)
        writer = writer.option("topic", f"{engine}-{name}").option(
            "checkpointLocation", f"{checkpoint}/{engine}-{name}"
        )
        running.append(writer.trigger(availableNow=True).start())
    for query in running:
        query.awaitTermination()
    Path(output).mkdir(exist_ok=True)
    for name in QUERIES:
        found = read(spark, f"{engine}-{name}").select(F.col("key").cast("string"), F.col("value").cast("string"))
        Path(output, f"{engine}-{name}").write_text("\n".join(json.dumps(list(row)) for row in found.collect()))
    print("done", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
