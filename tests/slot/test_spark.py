"""Pipes in Spark's own workers: whose slots they are, what reaches the driver, what happens when the JVM dies."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import msgspec
import pytest
from pyspark.errors import PySparkException

from millpond.slot.process.client import drain
from millpond.slot.process.identity import Process
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.worker.slot_stage import Coverage, SlotStage
from tests.support.waiting import wait_until

from .conftest import GROUPED, begin, with_tests_on_path

ROWS = 20_000
KEYS = 500


@pytest.fixture
def task(task):
    """A real counting operator of two partitions."""
    task = msgspec.structs.replace(
        task, application=uuid.uuid4().hex, spec=GROUPED, partitions=2, slots=2, template="millpond.slot.template"
    )
    begin(task)
    return task


def piped(spark, task, coverage=None, rows=ROWS):
    """Counts and sums of `v` by `k`, through slots."""
    frame = spark.range(rows).selectExpr(f"id % {KEYS} as k", "id as v")
    partition = "cast(shiftright(__hash, 63) & 1 as int)"
    marked = frame.selectExpr("xxhash64(k) as __hash", "false as __mark", "k", "v").union(
        spark.range(2).selectExpr(
            "shiftleft(id, 63) | 1700000000000", "true", "cast(null as bigint)", "cast(null as bigint)"
        )
    )
    by_range = marked.repartitionById(2, spark_expr(partition))
    return by_range.mapInArrow(SlotStage(task, coverage), "k bigint, count bigint, sum bigint")


def spark_expr(text):
    from pyspark.sql.functions import expr

    return expr(text)


def run(spark, frame, batch):
    spark.sparkContext.setLocalProperty("streaming.sql.batchId", str(batch))
    try:
        return {row.k: (row["count"], row["sum"]) for row in frame.collect()}
    finally:
        spark.sparkContext.setLocalProperty("streaming.sql.batchId", None)


def _owners(directory):
    return [Process(*map(int, entry.name.split("-"))) for entry in (directory.path / "owners").iterdir()]


def truth(batches):
    each = ROWS // KEYS
    return {k: (each * batches, batches * sum(range(k, ROWS, KEYS))) for k in range(KEYS)}


def plan(task, batches):
    """Write Spark's offset log for batches whose markers have the time that `piped` gives them."""
    Path(task.offsets).mkdir(parents=True)
    for batch in range(batches):
        times = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": 1_700_000_000_000})
        (Path(task.offsets) / str(batch)).write_text(f"v1\n{times}\n")


def test_batches_through_spark_workers(spark, task):
    plan(task, 5)
    coverage = spark.sparkContext.accumulator([], Coverage())
    frame = piped(spark, task, coverage)
    assert run(spark, frame, 0) == truth(1)
    assert run(spark, frame, 0) == truth(1), "a second action on one batch"
    assert run(spark, frame, 1) == truth(2)
    done = {(each.operator, each.batch, each.partition) for each in coverage.value}
    assert done == {(0, batch, partition) for batch in (0, 1) for partition in (0, 1)}
    assert sum(each.metrics["input_rows"] for each in coverage.value if each.batch == 1) == ROWS

    directory = SlotDirectory.of(task)
    assert _owners(directory) == [Process(*task.jvm)]
    assert set(directory.running()) == {"template", "slot-0", "slot-1"}

    for process in directory.running().values():
        process.kill()
    assert run(spark, frame, 2) == truth(3)
    assert run(spark, frame.limit(1), 3)
    run(spark, frame, 3)
    assert run(spark, frame, 4) == truth(5)
    assert drain(task, 10) == {(0, 0): 5, (0, 1): 5}


def test_two_readers_of_a_batch_joined_in_one_task(spark, task):
    one, two = piped(spark, task), piped(spark, task)
    run(spark, one, 0)
    joined = one.join(two.selectExpr("k as j", "count as c", "sum as s"), spark_expr("k = j"))
    assert run(spark, joined, 1) == truth(2)


def test_the_slots_error_reaches_the_driver(spark, task):
    lost = msgspec.structs.replace(task, settings=msgspec.structs.replace(task.settings, open_timeout=0.1))
    with pytest.raises(Exception, match=r"not durable.*query-1, operator 0, partition") as caught:
        run(spark, piped(spark, lost), 7)
    assert "Restart the query" in str(caught.value)


def commanded(spark, task, command):
    """Run a batch whose slot does what `tests.slot.echo` has for a command; return the error that the driver raises."""
    marker = "shiftleft(id, 63) | 1700000000000 as __hash", "true as __mark", f"id as {command}"
    frame = spark.range(1).selectExpr(*marker).coalesce(1)
    echoed = frame.mapInArrow(
        SlotStage(msgspec.structs.replace(task, template="tests.slot.echo")),
        f"__hash bigint, __mark boolean, {command} bigint",
    )
    with pytest.raises(PySparkException) as caught:
        echoed.collect()
    return str(caught.value)


FAILURES = [
    ("die", r"(?s)Slot process (\d+) died.*See .*/log on host .* It ends:.*slot-0 \(process \1\) died of signal 9"),
    ("busy", r"(?s)The store is busy.*See .*/log on host .* It ends:.* slot-0: try 99 failed"),
    ("crash", r"(?s)A slot failed unexpectedly.*ZeroDivisionError: made to crash"),
]
"""Commands of `tests.slot.echo`, and what the driver's error says of them."""


@pytest.mark.parametrize(("command", "text"), FAILURES)
def test_the_end_of_the_slots_log_reaches_the_driver(spark, task, command, text):
    assert re.search(text, commanded(spark, task, command))


_DRIVER = """
    import pickle, sys, time
    from pyspark.sql import SparkSession
    from tests.slot.test_spark import piped, run
    spark = (SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1").getOrCreate())
    task = pickle.loads(sys.stdin.buffer.read())
    run(spark, piped(spark, task, rows=1000), 0)
    print("answered", flush=True)
    time.sleep(600)
"""


def test_nothing_is_left_when_the_driver_is_killed(task, tmp_path):
    with open(tmp_path / "stderr", "wb") as errors:
        driver = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_DRIVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**with_tests_on_path(), "PYSPARK_PYTHON": sys.executable},
        )
    driver.stdin.write(pickle.dumps(msgspec.structs.replace(task, jvm=None)))  # its own JVM, which it finds
    driver.stdin.close()
    assert driver.stdout.readline() == b"answered\n", (tmp_path / "stderr").read_text()
    directory = SlotDirectory.of(task)
    running = directory.running()
    assert set(running) == {"template", "slot-0", "slot-1"}
    (jvm,) = _owners(directory)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    # The JVM sees that its driver has gone, and takes its time over its shutdown hooks.
    wait_until(lambda: not jvm.alive(), timeout=120)
    wait_until(lambda: not any(process.alive() for process in running.values()), timeout=30)
    wait_until(lambda: not directory.path.exists())
