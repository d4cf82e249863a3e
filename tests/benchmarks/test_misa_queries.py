"""The rows of MiSA's queries through Millpond are those of Spark's batch SQL over the same records."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from benchmarks.misa.queries import QUERIES
from benchmarks.misa.stream_files import FILES, files

import millpond

RATE, SECONDS, SEED = 20, 75, 3

SQL = {
    "LR2": """
        SELECT L.timestamp, L.vehicle, L.speed, L.highway, L.lane, L.direction, L.segment
        FROM records A, records L
        WHERE A.vehicle = L.vehicle AND A.timestamp BETWEEN L.timestamp - INTERVAL 30 SECONDS AND L.timestamp""",
    "LR4": """
        SELECT window.end AS timestamp, highway, direction, segment, count(vehicle) AS numVehicle
        FROM records GROUP BY window(timestamp, '20 seconds', '5 seconds'), highway, direction, segment""",
    "CM1": """
        SELECT window.end AS timestamp, category, sum(cpu) AS totalCpu
        FROM records GROUP BY window(timestamp, '60 seconds', '10 seconds'), category
        ORDER BY timestamp, totalCpu, category""",
    "CM2": """
        SELECT window.end AS timestamp, jobId, avg(cpu) AS avgCpu
        FROM records WHERE eventType = 1 GROUP BY window(timestamp, '30 seconds', '1 second'), jobId""",
}


def answers(spark: Any, name: str, made: list[Path]) -> tuple[list[tuple[Any, ...]], datetime]:
    """Return the rows of a query in batch, and the time of the last record."""
    records = spark.read.parquet(str(made[0].parent))
    records.createOrReplaceTempView("records")
    rows = spark.sql(SQL[name.removesuffix("-ranked")]).collect()
    return [tuple(row) for row in rows], records.agg({"timestamp": "max"}).first()[0]


def streamed(spark: Any, name: str, source: Path, folder: Path) -> list[list[tuple[Any, ...]]]:
    """Return the rows of a query through Millpond, batch by batch."""
    batches: list[list[tuple[Any, ...]]] = []
    query = QUERIES[name]

    def keep(batch: Any, _: int) -> None:
        batches.append([tuple(row) for row in batch.collect()])

    frame = query.over(query.records(spark, str(source), files_per_batch=25 * FILES))
    writer = millpond.writeStream(frame).foreachBatch(keep).outputMode(query.mode)
    running = writer.option("checkpointLocation", str(folder)).trigger(availableNow=True).start()
    running.awaitTermination()
    assert running.exception() is None
    return batches


@pytest.mark.parametrize("name", QUERIES)
def test_rows_equal_those_of_batch_sql(spark: Any, tmp_path: Path, name: str) -> None:
    made = files(tmp_path / "streams", name, RATE, SECONDS, SEED)
    expected, last = answers(spark, name, made)
    batches = streamed(spark, name, made[0].parent, tmp_path / "checkpoint")
    assert len(batches) >= 3
    assert expected
    rows = [row for batch in batches for row in batch]
    if name == "CM1":  # each batch gives all windows, in order
        assert batches[-1] == expected
    elif name == "CM1-ranked":  # batches give changed places; those of the last batches stand
        places = {(row[0], row[3]): row[:3] for row in rows}
        assert [places[place] for place in sorted(places)] == expected
    elif name == "LR2":
        assert sorted(rows) == sorted(expected)
    else:  # each window once, when the watermark has closed it
        assert sorted(rows) == sorted(row for row in expected if row[0] <= last - timedelta(seconds=1))
