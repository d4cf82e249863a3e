"""How a query's end looks to the user: an error in their own code, and Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext
from pyspark.errors import StreamingQueryException
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

import millpond
from millpond.query.running.handle import RunningQuery, _interruptible
from millpond.slot.process.lifecycle import SlotDirectory
from tests.support.waiting import wait_until


@pytest.fixture
def session(spark: SparkSession) -> SparkSession:
    session = spark.newSession()
    session.conf.set("spark.sql.shuffle.partitions", 2)
    return session


README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize("wait", [RunningQuery.awaitTermination, RunningQuery.processAllAvailable])
def test_an_error_of_the_users_function_is_not_followed_by_the_rewritten_plan(
    session: SparkSession, tmp_path: Path, wait: Any
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("my own mistake")

    rows = session.readStream.format("rate").option("rowsPerSecond", 100).load().groupBy("value").count()
    writer = millpond.writeStream(rows).outputMode("update").foreachBatch(fail)
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    with pytest.raises(StreamingQueryException, match="my own mistake") as raised:
        wait(query)
    for error in (raised.value, query.exception()):
        said = str(error).partition("JVM stacktrace:")[0]
        assert said.rstrip().endswith("Thread State: RUNNABLE")
        assert "my own mistake" in said
        assert "MapInArrow" not in said


def of_spark(*_: Any) -> None:
    raise AssertionError("it would cancel all jobs, on the connection that waits")


of_spark.__module__ = SparkContext.__module__


def test_ctrl_c_ends_a_wait_and_nothing_else() -> None:
    waiting, ended = threading.Event(), threading.Event()

    def wait() -> None:
        waiting.set()
        ended.wait(60)

    def interrupt() -> None:
        waiting.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, of_spark)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            _interruptible(wait)
        assert signal.getsignal(signal.SIGINT) is of_spark
    finally:
        ended.set()
        signal.signal(signal.SIGINT, before)


def test_a_handler_of_the_users_own_is_left_alone() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert _interruptible(threading.current_thread) is threading.main_thread()
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_ends_a_wait_is_its_outcome() -> None:
    before = signal.signal(signal.SIGINT, of_spark)
    try:
        assert _interruptible(lambda: "over") == "over"
        with pytest.raises(ZeroDivisionError):
            _interruptible(lambda: 1 / 0)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.timeout(240)
def test_ctrl_c_in_the_quickstart_prints_few_lines(tmp_path: Path) -> None:
    (code, *_) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "quickstart.py").write_text(code)
    log = tmp_path / "stderr"
    with log.open("wb") as errors:
        program = subprocess.Popen(
            [sys.executable, "quickstart.py"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
    try:
        for line in program.stdout:
            if line.startswith("Batch: 1"):
                break
        (directory,) = (path for path in tmp_path.glob("millpond-*/*") if (path / "owners").is_dir())
        before = log.stat().st_size
        os.killpg(program.pid, signal.SIGINT)
        program.communicate(timeout=60)
    finally:
        program.kill()
    assert program.returncode == -signal.SIGINT
    said = log.read_bytes()[before:].decode()
    lines = [line for line in said.splitlines() if line.strip() and "[Stage" not in line]
    assert said.count("Traceback") == 1
    assert "KeyboardInterrupt" in said
    assert not re.search(r"^\tat |py4j|pyspark", said, re.MULTILINE)
    assert len(lines) < 16, said
    wait_until(lambda: not directory.exists())


class KillsSlots(StatefulProcessor):  # type: ignore[misc]
    """Kills the slots of its application while one of them waits for it."""

    def __init__(self, directory: SlotDirectory) -> None:
        self.directory = directory

    def init(self, handle: Any) -> None:
        """No state."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for name, process in self.directory.running().items():
            if name != "template":
                process.kill()
        yield Row(k=1)

    def close(self) -> None:
        """Nothing is open."""


def test_the_error_of_a_query_has_the_end_of_the_slots_log(session: SparkSession, tmp_path: Path) -> None:
    directory = SlotDirectory.named(tempfile.gettempdir(), session.sparkContext.applicationId)
    rows = session.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load().groupBy("value")
    killing = rows.transformWithState(KillsSlots(directory), "k int", "append", "none")
    query = millpond.writeStream(killing).start(format="noop", checkpointLocation=str(tmp_path))
    try:
        with pytest.raises(StreamingQueryException) as caught:
            query.awaitTermination()
    finally:
        query.stop()
    for error in (caught.value, query.exception()):
        assert re.search(
            rf"(?s)Slot process (\d+) died.*See {directory.path}/log on host .* It ends:\n"
            r".*slot-\d+ \(process \1\) died of signal 9 \(Killed\)",
            str(error),
        )


def test_a_run_that_has_ended_leaves_no_exchanged_rows(session: SparkSession, tmp_path: Path) -> None:
    if not session.sparkContext.master.startswith("local"):
        pytest.skip("rows pass Spark's shuffle on a cluster")
    directory = SlotDirectory.named(tempfile.gettempdir(), session.sparkContext.applicationId)
    source = str(tmp_path / "source")
    session.range(10).write.parquet(source)
    rows = session.readStream.schema("id bigint").parquet(source).dropDuplicates(["id"])
    query = millpond.writeStream(rows).start(format="noop", checkpointLocation=str(tmp_path / "checkpoint"))

    def exchanged() -> list[Path]:
        return list((directory.path / "exchange").glob(f"{query.id}-*"))

    try:
        query.processAllAvailable()
        assert exchanged()
        for name, process in directory.running().items():
            if name != "template":
                process.kill()  # what a slot leaves does not stay either
    finally:
        query.stop()
    wait_until(lambda: not exchanged())
