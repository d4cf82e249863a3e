"""State several times as large as memory, in an object store; a local disk for a twentieth of it, for none, for all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millpond.metrics import REQUEST_METRICS, TIER_METRICS
from tests.integration.tiers_job import VALUES

JOB = Path(__file__).with_name("tiers_job.py")
MEMORY = 16 << 20
FRESH = 70_000
"""New keys of each of the first batches."""
GROWING, MIXED, HOT = 7, 4, 20
"""Batches of new keys; of old ones, all over the state; of the same few, until flushes and compactions have ended."""
KEYS = GROWING * FRESH
STATE = KEYS * 8 * (3 + 1 + 1 + VALUES)
"""Bytes of the rows."""


def keys_of(batch: int) -> np.ndarray:
    rng = np.random.default_rng(batch)
    if batch < GROWING:
        old = rng.integers(0, max(1, batch * FRESH), 5_000)
        return np.concatenate([np.arange(batch * FRESH, (batch + 1) * FRESH), old])
    if batch < GROWING + MIXED:
        return rng.integers(0, KEYS, 20_000)
    return np.arange(0, KEYS, KEYS // 200)


def write_input(folder: Path, batches: range) -> None:
    folder.mkdir(exist_ok=True)
    for batch in batches:
        keys = keys_of(batch)
        rng = np.random.default_rng(1000 + batch)
        values = {f"v{i}": rng.integers(-(1 << 50), 1 << 50, len(keys)) for i in range(VALUES)}
        path = folder / f"{batch:03d}.parquet"
        pq.write_table(pa.table({"key": keys, **values}), path)
        os.utime(path, (1_700_000_000 + batch, 1_700_000_000 + batch))


def live(folder: Path, disk: int | None) -> list[dict[str, float]]:
    """One application, until all input is read: the figures of its batches."""
    disks = {} if disk is None else {"DISK": str(disk)}
    (folder / "tmp").mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(JOB.parents[2]), *sys.path]),
        "LOCATION": f"faults+file:{folder}/store",
        "PARTITIONS": "2",
        "TMPDIR": str(folder / "tmp"),
        "CONFS": json.dumps({"spark.millpond.slot.memory": str(MEMORY), "spark.millpond.slots": "1"}),
        **disks,
    }
    command = [sys.executable, str(JOB), *(str(folder / part) for part in ("in", "out", "checkpoint"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check_rows(folder: Path) -> None:
    """Each batch has given what its keys came to, of all batches so far."""
    counts, sums = np.zeros(KEYS, np.int64), np.zeros((VALUES, KEYS), np.int64)
    for batch in range(GROWING + MIXED + HOT):
        table = pq.read_table(folder / "in" / f"{batch:03d}.parquet")
        keys = table["key"].to_numpy()
        np.add.at(counts, keys, 1)
        for i in range(VALUES):
            np.add.at(sums[i], keys, table[f"v{i}"].to_numpy())
        given = pq.read_table(folder / "out" / f"{batch}.parquet").sort_by("key")
        wanted = np.unique(keys)
        assert (given["key"].to_numpy() == wanted).all()
        assert (given["n"].to_numpy() == counts[wanted]).all()
        for i in range(VALUES):
            assert (given[f"v{i}"].to_numpy() == sums[i][wanted]).all()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("disk", [STATE // 20, 0, None], ids=["a twentieth", "none", "enough"])
def test_rows_are_right_and_figures_tell_of_each_tier(tmp_path: Path, disk: int | None) -> None:
    assert STATE > 3 * MEMORY
    (tmp_path / "out").mkdir()
    write_input(tmp_path / "in", range(GROWING))
    told = live(tmp_path, disk)
    write_input(tmp_path / "in", range(GROWING, GROWING + MIXED + HOT))
    told += live(tmp_path, disk)
    check_rows(tmp_path)
    assert [each["batch"] for each in told] == list(range(GROWING + MIXED + HOT))
    assert told[-1]["state_rows"] == KEYS
    totals = {name: sum(each[name] for each in told) for name in (*TIER_METRICS, *REQUEST_METRICS)}
    assert totals["put_bytes"] > STATE // 2
    assert totals["remote_blocks"] or disk is None
    assert bool(totals["disk_blocks"]) == (disk != 0)
    steady = told[-HOT + 1 :]
    assert all((each["cache_hits"], each["cache_misses"]) == (200, 0) for each in steady)
    assert min(each["puts"] for each in steady) <= 1, "but for what is flushed and compacted, a batch is one put"
    assert not any(each["lists"] for each in steady)
    if disk is None:
        warm = [each for each in told if each["batch"] not in (0, GROWING)]  # those have opened the state
        assert not any(each["gets"] or each["get_bytes"] for each in warm)
        assert not totals["remote_blocks"]
        assert not totals["memory_blocks"], "mapped copies are not kept in memory twice"
        assert not totals["copied_bytes"], "the second application has found the copies"
    else:
        assert totals["memory_blocks"] > 0
        assert totals["gets"] > 0
        # Beside the copies, one may just be on its way for each thread that writes runs.
        assert max(each["held"] for each in told) <= 4 * disk
        assert totals["copied_bytes"] <= totals["get_bytes"] * 4
