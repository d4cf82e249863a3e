"""Look ahead in a Kafka source as records come, and print the values of each look."""

import json
import os

from pyspark.sql import SparkSession

from millpond.files.locations.opening import open_filesystem
from millpond.plan.catalyst.jvm import Catalyst
from millpond.query.lookahead.sources import upcoming_rows


def main() -> None:
    """Look, write, look again."""
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    for name, value in json.loads(os.environ["CONFS"]).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    address = os.environ["KAFKA"]

    def write(start: int, stop: int) -> None:
        rows = spark.range(start, stop).selectExpr("cast(id as string) as key", "cast(id as string) as value")
        rows.write.format("kafka").option("kafka.bootstrap.servers", address).option("topic", "numbers").save()

    write(0, 10)
    source = spark.readStream.format("kafka").option("kafka.bootstrap.servers", address)
    stream = source.option("subscribe", "numbers").option("startingOffsets", "earliest").load()
    node = next(one for one in Catalyst(spark).analyzed(stream).walk() if one.kind.startswith("StreamingRelation"))
    ahead = upcoming_rows(node, open_filesystem("/tmp"))
    assert ahead is not None
    looks: list[list[int] | None] = []

    def look(offset: str) -> None:
        rows = ahead.after(spark, offset)
        found = None if rows is None else rows.selectExpr("cast(cast(value as string) as int) as v").collect()
        looks.append(None if found is None else sorted(row.v for row in found))

    begin = json.dumps({"numbers": {"0": 0, "1": 0}})
    look(begin)
    look(begin)
    write(10, 15)
    look(begin)  # the rest of the batch behind that offset
    rows = spark.read.format("kafka").option("kafka.bootstrap.servers", address).option("subscribe", "numbers").load()
    ends = {
        str(row.partition): row.n for row in rows.groupBy("partition").count().withColumnRenamed("count", "n").collect()
    }
    write(15, 17)
    look(json.dumps({"numbers": {"0": 0, "1": 0} | ends}))
    look(json.dumps({"numbers": {"0": 0, "1": 0} | ends}))
    print(json.dumps(looks))
    spark.stop()


if __name__ == "__main__":
    main()
