"""Real Spark, killed for real: the driver, its workers and its slots die at random moments; the rows come out right.

Each start draws how many partitions the state has.
"""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from tests.chaos.truth import (
    expected_pairs,
    expected_updates,
    expected_windows,
    read_file_sink,
    read_updates,
    write_input,
)
from tests.s3 import s3

JOB = Path(__file__).with_name("job.py")
SCHEDULES = int(os.environ.get("MILLPOND_SPARK_SCHEDULES", "4"))
LIVES = 12
QUERIES = ("aggregate", "deduplicate", "windows", "join", "aggregate")


class Life:
    """One life of the job: it is killed a moment after a given line, or ends by itself."""

    def __init__(self, query: str, folder: Path, partitions: int) -> None:
        self.log = folder / "log.txt"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(JOB), query, *(str(folder / part) for part in ("in", "out", "checkpoint"))],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**os.environ, "PARTITIONS": str(partitions)},
            )
        self.known: set[int] = set()

    def run(self, victim: str | None, rng: random.Random) -> tuple[bool, bool]:
        """Whether the kill was carried out, and whether the job ran to its end."""
        assert self.process.stdout is not None
        lines_left, pause, killed, done = rng.randint(1, 3), rng.uniform(0.0, 0.4), False, False
        for line in self.process.stdout:
            self._look_around()
            done = done or line.strip() == "done"
            lines_left -= 1
            if victim and not killed and not done and lines_left <= 0:
                time.sleep(pause)  # anywhere in the batch that runs now
                killed = self._kill(victim, rng)
        self.process.wait()
        return killed, done

    def _look_around(self) -> None:
        with suppress(psutil.Error):
            self.known |= {p.pid for p in psutil.Process(self.process.pid).children(recursive=True)}

    def _kill(self, victim: str, rng: random.Random) -> bool:
        self._look_around()
        if victim == "driver":
            targets = [*self.known, self.process.pid]
        else:
            named = {"slot": "millpond.slot.template", "worker": "millpond.slot.pipe.daemon"}[victim]
            candidates = [p.pid for p in psutil.process_iter() if _says(p, named) and self._ours(p)]
            targets = [rng.choice(sorted(candidates))] if candidates else []
        for pid in targets:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(targets)

    def _ours(self, process: psutil.Process) -> bool:
        """Slots leave the job's session, but inherit its environment."""
        with suppress(psutil.Error):
            return process.pid in self.known or process.environ().get("MILLPOND_TEST_JOB") == str(os.getpid())
        return False


def _says(process: psutil.Process, name: str) -> bool:
    with suppress(psutil.Error):
        return any(name in part for part in process.cmdline())
    return False


@pytest.mark.xdist_group("kills")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_rows_are_right_after_kills(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_TEST_JOB", str(os.getpid()))
    with s3() if seed % 2 else nullcontext() as bucket:
        if bucket:
            monkeypatch.setenv("LOCATION", f"{bucket}/state")
        kill_until_done(seed, tmp_path)


def kill_until_done(seed: int, folder: Path) -> None:
    """Two kills, each start with other partitions; then the rows are compared."""
    rng = random.Random(seed)
    rows = write_input(folder / "in", seed)
    query = QUERIES[seed % len(QUERIES)]
    victims = [rng.choice(["driver", "driver", "slot", "worker"]) for _ in range(2)]
    lives, done = 0, False
    while not done:
        lives += 1
        life = Life(query, folder, rng.randint(1, 4))
        assert lives <= LIVES, life.log.read_text()[-4000:]
        killed, done = life.run(victims[0] if victims else None, rng)
        if killed:
            victims.pop(0)
        assert done or killed, life.log.read_text()[-4000:]
    if query == "aggregate":
        assert read_updates(folder / "out") == expected_updates(rows, folder / "checkpoint")
        return
    expected = {"deduplicate": distinct_keys, "windows": expected_windows, "join": expected_pairs}[query](rows)
    assert expected
    assert read_file_sink(folder / "out") == expected


def distinct_keys(rows: pa.Table) -> list[tuple[object, ...]]:
    keys = {(k, n) for k, n in zip(rows["key"].to_pylist(), rows["name"].to_pylist(), strict=True)}
    return sorted(keys, key=repr)
