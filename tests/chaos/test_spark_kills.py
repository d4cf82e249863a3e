"""Real Spark, killed for real: the driver, its workers and its slots die at random moments; the rows come out right.

Each start draws how many partitions the state has. `MILLPOND_SPARK_KILLS` first batches are killed only to see that no
process lives on: none by default, as `tests/slot/test_kills.py` asks the same without Spark.
"""

import os
import random
import time
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from tests.chaos.life import Life
from tests.chaos.truth import EXPECTED, expected_updates, read_file_sink, read_updates, write_input
from tests.selection import scaled
from tests.servers.s3 import s3

KILLS = int(os.environ.get("MILLPOND_SPARK_KILLS", "0"))
SCHEDULES = int(os.environ.get("MILLPOND_SPARK_SCHEDULES", scaled(5)))
LIVES = 12
QUERIES = ("aggregate", "deduplicate", "windows", "join", "processor")


@pytest.mark.every
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
    expected = EXPECTED[query](rows)
    assert expected
    assert read_file_sink(folder / "out") == expected


@pytest.mark.xdist_group("kills")
@pytest.mark.parametrize("seed", range(KILLS))
def test_nothing_lives_on_when_a_first_batch_is_killed(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Driver and JVM alone are killed: the workers, which may be starting, are orphans then."""
    rng = random.Random(seed)
    monkeypatch.setenv("MILLPOND_TEST_JOB", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    write_input(tmp_path / "in", seed)
    life = Life("deduplicate", tmp_path, 2)
    assert life.process.stdout is not None
    assert life.process.stdout.readline() == "started\n"
    pause = rng.uniform(0, 2.0)
    time.sleep(pause)
    (jvm,) = (child for child in psutil.Process(life.process.pid).children() if child.name() == "java")
    life.process.kill()
    jvm.kill()
    life.process.wait()
    life.process.stdout.close()
    deadline = time.monotonic() + 90
    while left := [process for process in psutil.process_iter(["environ"]) if belongs(process, tmp_path)]:
        if time.monotonic() > deadline:
            for process in left:
                process.kill()
            pytest.fail(f"after {pause:.2f} s: {len(left)} processes were left")
        time.sleep(0.1)


def belongs(process: psutil.Process, job: Path) -> bool:
    return (process.info["environ"] or {}).get("MILLPOND_TEST_JOB") == str(job)
