"""A running window count as a user sees it: its plan in Spark, and its state."""

from datetime import datetime, timedelta
from pathlib import Path

from docs.plan_picture import NOTES, PICTURE, drawn, plan, shown, window_count
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import millpond

HELPER = "millpond_no_data_batches"


def test_the_plan_names_what_millpond_has_put_into_it(spark: SparkSession, tmp_path: Path) -> None:
    query = window_count(spark, tmp_path)
    assert query.lastProgress is not None
    assert query.lastProgress["batchId"] == 1  # the one without data, which closes windows
    text = plan(query)
    for odd in ("CartesianProduct", "nothing", "moment", "Coalesce"):
        assert odd not in text
    assert f"StreamingDeduplicate [{HELPER}" in text
    assert "Scan ExistingRDD millpond[no-data batches]" in text
    assert "millpond_marker" in text
    labels = [node.label for node in shown(text)]
    for begin in NOTES:
        assert sum(label.startswith(begin) for label in labels) == 1, begin
    assert PICTURE.read_text() == drawn(list(shown(text))), "draw it again: python -m docs.plan_picture"
    (helper,) = query.lastProgress["stateOperators"]
    assert helper["numStateStoreInstances"] == 0


def test_the_state_is_shown_under_the_newest_aliases(spark: SparkSession, tmp_path: Path) -> None:
    window_count(spark, tmp_path).stop()
    state = millpond.read_state(spark, tmp_path / "checkpoint")
    assert state.dtypes == [
        ("window", "struct<start:timestamp,end:timestamp>"),
        ("user", "bigint"),
        ("clicks", "bigint"),
    ]
    rows = state.collect()
    assert {row.window.end - row.window.start for row in rows} == {timedelta(minutes=1)}
    assert {row.window.start for row in rows} == {datetime.fromtimestamp(60)}
    assert sum(row.clicks for row in rows) == 40

    stream = spark.readStream.schema("at timestamp, user bigint").parquet(str(tmp_path / "in"))
    grouped = stream.withWatermark("at", "10 seconds").groupBy(
        F.window("at", "1 minute").alias("minute"), F.col("user").alias("who")
    )
    writer = millpond.writeStream(grouped.agg(F.count("*").alias("n"))).outputMode("append").format("noop")
    again = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
    again.awaitTermination()
    state = millpond.read_state(spark, tmp_path / "checkpoint")
    assert state.columns == ["minute", "who", "n"]
    assert sum(row.n for row in state.collect()) == 40
