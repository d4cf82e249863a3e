"""Fixtures that all tests share: one Spark session per worker, servers, and checks that no threads are left behind."""

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import settings

from tests import selection
from tests.differential import recorded

_FILE_MANAGER = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"

_WORKER_MEMORY = 2 << 30
"""Bytes that a worker takes with its JVM, slots and Python workers."""

_BEGUN = time.monotonic()

HOSTS = int(os.environ.get("MILLPOND_HOSTS", "0"))

# PySpark returns local times: recorded answers and live answers must have one time zone.
os.environ["TZ"] = "UTC"
time.tzset()
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
# Most of the JVM's code runs once here: the second compiler would take more CPU time than the queries.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=400m -XX:+UseSerialGC")

# Drawn cases are the same in each run, except in `make chaos`.
settings.register_profile("millpond", derandomize="MILLPOND_SCHEDULES" not in os.environ)
settings.load_profile("millpond")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return one worker more than cores, because Spark's batches wait now and then; fewer if memory is short."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores + 1, psutil.virtual_memory().total // _WORKER_MEMORY))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    selection.mark(items)
    selection.drawn(items)
    selection.longest_first(items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() - _BEGUN > selection.SECONDS:
        pytest.skip(f"not begun: {selection.SECONDS:.0f} seconds are over")
    recorded.begin("" if item.get_closest_marker("slow") else selection.plain(item.nodeid))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Save recorded answers, in the process that starts the workers or runs without workers."""
    config = session.config
    if recorded.USE is recorded.Use.WRITE and not hasattr(config, "workerinput"):
        recorded.finish(whole=not config.option.keyword and not any("::" in name for name in config.args))


@pytest.fixture(autouse=True)
def _committers_end() -> Iterator[None]:
    """Wait until the test's committers have ended: a committer that goes on slows all later tests down."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name == "millpond-committer":
            thread.join(60)
            assert not thread.is_alive(), "a committer was not closed"


@pytest.fixture(scope="module")
def own_slots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give a module slots of its own, because an application's first query decides how much memory its slots have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("slots")))
        yield


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the endpoint of a real S3 server. Its tests are one group, `seaweedfs`, so that one server runs in all."""
    from tests.servers.process import Unavailable
    from tests.servers.seaweedfs import running, weed

    try:
        program = weed()
    except Unavailable as reason:
        pytest.skip(str(reason))
    with running(program, tmp_path_factory.mktemp("seaweedfs")) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Yield a real HDFS. Its tests are one group, `hdfs`, so that one cluster runs in all."""
    from tests.servers.hdfs import HADOOP, running
    from tests.servers.jars import jars
    from tests.servers.process import Unavailable

    try:
        jars(HADOOP)
    except Unavailable as reason:
        pytest.skip(str(reason))
    with running(tmp_path_factory.mktemp("hdfs")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def spark_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of Spark's master: this process, or a cluster of MILLPOND_HOSTS hosts on this machine."""
    from tests.support.cluster import hosts

    if HOSTS:
        with hosts(tmp_path_factory.mktemp("hosts"), HOSTS) as cluster:
            yield cluster.url
    else:
        yield "local[2,4]"


@pytest.fixture(scope="session")
def spark(spark_master: str) -> Iterator[object]:
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master(spark_master)
        .appName("millpond-tests")
        .config("spark.executor.memory", "512m")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        # Spark's default starts two or three processes (chmod, readlink) for each file that a batch writes.
        .config("spark.sql.streaming.checkpointFileManagerClass", _FILE_MANAGER)
        .config("spark.millpond.slot.memory", "256m")
        .config("spark.millpond.prefetch", "on")  # so that hints are sent beside everything else, too
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    while session.sparkContext._jsc.sc().getExecutorMemoryStatus().size() < HOSTS + 1:  # the driver is one of them
        time.sleep(0.1)
    yield session
    session.stop()
