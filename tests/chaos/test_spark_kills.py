"""Real Spark, killed for real: the driver, its workers and its slots die at random moments; the rows come out right.

Each start draws how many partitions the state has.
"""

import os
import random
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pytest

from tests.chaos.life import Life
from tests.chaos.truth import (
    expected_pairs,
    expected_updates,
    expected_windows,
    read_file_sink,
    read_updates,
    write_input,
)
from tests.s3 import s3
from tests.selection import scaled

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
    expected = {
        "deduplicate": distinct_keys,
        "windows": expected_windows,
        "processor": expected_windows,
        "join": expected_pairs,
    }[query](rows)
    assert expected
    assert read_file_sink(folder / "out") == expected


def distinct_keys(rows: pa.Table) -> list[tuple[object, ...]]:
    keys = {(k, n) for k, n in zip(rows["key"].to_pylist(), rows["name"].to_pylist(), strict=True)}
    return sorted(keys, key=repr)
