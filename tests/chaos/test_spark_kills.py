"""Real Spark, killed for real: the driver, its workers and its slots die at random moments; the rows come out right."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

JOB = Path(__file__).with_name("job.py")
FILES = 8
SCHEDULES = int(os.environ.get("MILLPOND_SPARK_SCHEDULES", "10"))


def write_input(folder: Path, seed: int) -> pa.Table:
    """One Parquet file a batch, in a fixed order; returns all rows with the batch they belong to."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    tables = []
    for number in range(FILES):
        rows = int(rng.integers(1, 4_000))
        key = rng.integers(0, 300, rows)
        table = pa.table(
            {
                "key": pa.array(key, mask=key == 7),
                "name": pa.array([None if k % 11 == 0 else f"name of key {k % 40}" for k in key.tolist()]),
                "amount": pa.array(rng.integers(-50, 50, rows)),
            }
        )
        path = folder / f"part-{number:03d}.parquet"
        pq.write_table(table, path)
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
        tables.append(table.append_column("batch", pa.array(np.full(rows, number))))
    return pa.concat_tables(tables)


def expected_updates(rows: pa.Table) -> list[tuple]:
    """What each batch must emit in update mode: every key it touches, with all its rows so far."""
    emitted = []
    for batch in range(FILES):
        so_far = rows.filter(pa.compute.less_equal(rows["batch"], batch)).to_pandas()
        touched = rows.filter(pa.compute.equal(rows["batch"], batch)).to_pandas()[["key", "name"]].drop_duplicates()
        grouped = (
            so_far.groupby(["key", "name"], dropna=False)["amount"].agg(["count", "sum", "nunique"]).reset_index()
        )
        emitted += [
            (batch, *row) for row in grouped.merge(touched, on=["key", "name"]).astype(object).itertuples(index=False)
        ]
    return sorted(emitted, key=repr)


def normal(value: object) -> object:
    return None if value is None or value != value else int(value) if isinstance(value, float) else value


class Run:
    """One life of the job: started, killed somewhere, or finished."""

    def __init__(self, query: str, folder: Path) -> None:
        self.log = folder / "log.txt"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(JOB), query, *(str(folder / part) for part in ("in", "out", "checkpoint"))],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def family(self) -> list[psutil.Process]:
        """The driver, its JVM, Python workers; slots live in a session of their own and are found by their command."""
        try:
            own = [self.process, *psutil.Process(self.process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            own = []
        return [psutil.Process(p.pid) for p in own if psutil.pid_exists(p.pid)]

    def kill(self, what: str, rng: random.Random) -> None:
        family = self.family()
        if what == "driver":
            for process in family:
                _signal(process, signal.SIGKILL)
        elif what == "worker":
            workers = [p for p in family if _is(p, "pyspark.daemon")]
            if workers:
                _signal(rng.choice(workers), signal.SIGKILL)
        else:
            slots = slots_of(family)
            if slots:
                _signal(rng.choice(slots), signal.SIGKILL)

    def wait(self) -> bool:
        """Whether the job ran to its end."""
        output, _ = self.process.communicate(timeout=180)
        return "done" in output


def slots_of(family: list[psutil.Process]) -> list[psutil.Process]:
    """The slot processes that serve one of the given JVMs (all of them, if none is given)."""
    return [p for p in psutil.process_iter() if _is(p, "millpond.slot")]


def _is(process: psutil.Process, name: str) -> bool:
    try:
        return any(name in part for part in process.cmdline())
    except psutil.Error:
        return False


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.Error:
        pass


@pytest.mark.xdist_group("kills")
@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_rows_are_right_after_kills(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    rows = write_input(tmp_path / "in", seed)
    query = ("aggregate", "deduplicate")[seed % 2]
    kills = [rng.choice(["driver", "driver", "slot", "worker"]) for _ in range(3)]
    finished = False
    while not finished:
        run = Run(query, tmp_path)
        if kills:
            time.sleep(rng.uniform(4.0, 10.0))
            what = kills.pop()
            run.kill(what, rng)
        finished = run.wait()
        assert finished or kills or run.process.returncode != 0
        if run.process.returncode not in (0, -9) and not kills:
            text = run.log.read_text()
            assert "Traceback" in text
            if sum(1 for _ in tmp_path.glob("failed*")) > 3:
                pytest.fail(text[-4000:])
            (tmp_path / f"failed{time.monotonic_ns()}").touch()
    if query == "aggregate":
        out = [
            (batch, *(normal(v) for v in row.values()))
            for batch in range(FILES)
            for row in pq.read_table(tmp_path / "out" / f"batch={batch}", partitioning=None).to_pylist()
        ]
        want = [(b, *(normal(v) for v in rest)) for b, *rest in expected_updates(rows)]
        assert sorted(out, key=repr) == sorted(want, key=repr)
    else:
        log = tmp_path / "out" / "_spark_metadata"
        parts = {line.split('"path":"')[1].split('"')[0].removeprefix("file://") for f in log.iterdir()
                 if f.name.isdigit() or f.name.endswith(".compact") for line in f.read_text().splitlines()[1:]}
        out = [tuple(row.values()) for path in parts for row in pq.read_table(path, partitioning=None).to_pylist()]
        want = {(k, n) for k, n in zip(rows["key"].to_pylist(), rows["name"].to_pylist(), strict=True)}
        assert sorted(out, key=repr) == sorted(want, key=repr)
