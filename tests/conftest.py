"""What all tests share: one Spark session a worker, and nothing left behind."""

import os
import sys
import tempfile
import threading
from collections.abc import Iterator

import pytest
from hypothesis import settings

_FILE_MANAGER = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
# Most of the JVM's work here runs once: the second compiler would take more of the cores than the queries do.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=400m -XX:+UseSerialGC")

# Drawn cases are the same in each run, but for `make chaos`.
settings.register_profile("millpond", derandomize="MILLPOND_SCHEDULES" not in os.environ)
settings.load_profile("millpond")


@pytest.fixture(autouse=True)
def _committers_end() -> Iterator[None]:
    """No test leaves a committer behind: what goes on in a worker slows all later tests down."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name == "millpond-committer":
            thread.join(60)
            assert not thread.is_alive(), "a committer was not closed"


@pytest.fixture(scope="module")
def own_slots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Slots that no other tests have: how much memory they have, an application's first query says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("slots")))
        yield


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of a real S3 server. Who uses it is in the group `seaweedfs`: one server, not one a worker."""
    from tests.real_s3 import Unavailable, running, weed

    try:
        program = weed()
    except Unavailable as reason:
        pytest.skip(str(reason))
    with running(program, tmp_path_factory.mktemp("seaweedfs")) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A real HDFS. Who uses it is in the group `hdfs`: one, not one a worker."""
    from tests.jars import Unavailable, jars
    from tests.real_hdfs import HADOOP, running

    try:
        jars(HADOOP)
    except Unavailable as reason:
        pytest.skip(str(reason))
    with running(tmp_path_factory.mktemp("hdfs")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def spark() -> Iterator[object]:
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[2,4]")
        .appName("millpond-tests")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        # The default starts two or three processes (chmod, readlink) for each file that a batch writes.
        .config("spark.sql.streaming.checkpointFileManagerClass", _FILE_MANAGER)
        .config("spark.millpond.slot.memory", "256m")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
