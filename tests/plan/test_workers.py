"""Which Python runs Millpond's functions, and what it says when it cannot."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import SparkConf, cloudpickle
from pyspark.sql import SparkSession

import millpond
from millpond.plan.exchange import workers
from millpond.plan.exchange.workers import named_function, portable, preload_workers
from millpond.worker.exchange import ExchangeWrite
from millpond.worker.slot_stage import SlotStage


def echo(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def test_functions_are_portable() -> None:
    function = cloudpickle.loads(cloudpickle.dumps(portable(echo)))
    batch = pa.record_batch({"a": [1]})
    assert list(function(iter([batch]))) == [batch]
    assert function.__name__ == "echo"


def test_a_worker_without_millpond_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "function").write_bytes(cloudpickle.dumps(portable(named_function(echo, "count", 2))))
    program = (
        "import pickle, sys; sys.modules['millpond'] = None\n"
        f"function = pickle.load(open({str(tmp_path / 'function')!r}, 'rb'))\n"
        "list(function(iter([])))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False).stderr
    assert f"Millpond cannot be loaded by Spark's Python worker {sys.executable}" in said.splitlines()[-1]
    assert "Install millpond there" in said


@pytest.mark.parametrize("kind", [ExchangeWrite, SlotStage])
def test_a_worker_loads_no_kernels(kind: type, tmp_path: Path) -> None:
    """Forty megabytes and half a second in each of Spark's workers, of which a query has several."""
    function = named_function(object.__new__(kind), "count", 1)
    (tmp_path / "function").write_bytes(cloudpickle.dumps(function))
    program = (
        "import pickle, sys\n"
        f"pickle.load(open({str(tmp_path / 'function')!r}, 'rb'))\n"
        "print(*({'numba', 'pandas', 'obstore', 'millpond.plan'} & sys.modules.keys()), 'millpond.slot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]


def test_workers_of_this_python_are_forked_from_what_has_loaded_all(spark: SparkSession) -> None:
    preload_workers(spark.sparkContext)
    assert spark.sparkContext._jsc.sc().conf().get("spark.python.daemon.module") == "millpond.worker.daemon"


def test_workers_are_forked_by_what_has_no_threads() -> None:
    """A fork copies one thread only, and the locks that the others hold for ever."""
    program = (
        "import os, sys, millpond.worker.daemon as daemon\n"
        "before = dict(os.environ)\n"
        "daemon.load()\n"
        "import numpy as np, pyarrow as pa\n"
        "pa.array(np.empty(0))\n"
        "assert dict(os.environ) == before\n"
        "assert {'pandas', 'millpond.worker.slot_stage'} <= sys.modules.keys() and 'numba' not in sys.modules\n"
        "print(len(os.listdir('/proc/self/task')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"]


def test_each_worker_draws_other_numbers() -> None:
    program = (
        "import os, millpond.worker.daemon as daemon\n"
        "daemon.load()\n"
        "import numpy as np\n"
        "for _ in range(2):\n"
        "    if not os.fork():\n"
        "        print(np.random.rand(), flush=True)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert len(set(done.stdout.split())) == 2


class Context:
    """The attributes of Spark's context that say which Python runs its workers."""

    master = "local[2]"
    pythonExec = "a-python-of-the-users"

    def getConf(self) -> SparkConf:
        return SparkConf(loadDefaults=False)


@pytest.fixture
def nobody_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)


def test_another_start_does_not_see_which_python_runs_a_function(nobody_chose: None) -> None:
    """It would have all workers of the application forked by a daemon that the user's Python does not have."""
    context: Any = Context()
    with ThreadPoolExecutor(1) as other:
        with workers._with_driver_python(context):
            assert context.pythonExec == sys.executable
            asked = other.submit(workers._all_run_driver_python, context)
            wait([asked], timeout=0.5)
        assert asked.result() is False


def test_two_starts_at_once_leave_the_users_python_as_it_was(nobody_chose: None) -> None:
    context: Any = Context()
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with workers._with_driver_python(context):
            first_in.set()
            second_in.wait(0.5)
        first_out.set()

    def second() -> None:
        first_in.wait()
        with workers._with_driver_python(context):
            second_in.set()
            first_out.wait()

    with ThreadPoolExecutor(2) as both:
        for done in [both.submit(first), both.submit(second)]:
            done.result()
    assert context.pythonExec == Context.pythonExec


class DaemonContext:
    """A context whose daemon is not chosen yet."""

    master = "local[2]"
    pythonExec = sys.executable

    def __init__(self) -> None:
        self.chosen: dict[str, str] = {}
        self._jsc = self

    def sc(self) -> "DaemonContext":
        return self

    def conf(self) -> "DaemonContext":
        return self

    def contains(self, name: str) -> bool:
        return name in self.chosen

    def set(self, name: str, value: str) -> None:
        self.chosen[name] = value


@pytest.mark.parametrize("beside", [True, False])
def test_a_daemon_must_find_millpond(beside: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The daemon does not search the script's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(Path(millpond.__file__).parents[1] if beside else tmp_path), *sys.path])
    context: Any = DaemonContext()
    preload_workers(context)
    assert bool(context.chosen) is not beside


PROGRAM = """
import sys
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
import millpond

builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = builder.config("spark.sql.shuffle.partitions", "1").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
rows = spark.readStream.schema("key bigint").parquet(sys.argv[1]).groupBy("key").count()
writer = millpond.writeStream(rows).outputMode("update").format("noop").option("checkpointLocation", sys.argv[2])
writer.trigger(availableNow=True).start().awaitTermination()
daemon = spark.sparkContext._jsc.sc().conf().get("spark.python.daemon.module", "its own")
print(millpond.read_state(spark, sys.argv[2]).count(), spark.sparkContext.pythonExec, daemon)
"""


@pytest.mark.timeout(300)
def test_a_local_query_needs_no_activated_environment(tmp_path: Path) -> None:
    """The PATH's `python3` has not even PySpark."""
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"key": [1, 2, 2]}), tmp_path / "in" / "a.parquet")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "python3").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PYSPARK_PYTHON"}
    environment["PATH"] = f"{tmp_path / 'bin'}:{environment['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "in"), str(tmp_path / "checkpoint")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    # The user's functions run in another Python, which need not have Millpond: its workers stay Spark's.
    assert done.stdout.split() == ["2", "python3", "its", "own"], done.stderr[-3000:]
