"""Every example runs to its end, and gives what it says."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.servers.s3 import s3

ROOT = Path(__file__).parents[2]

RESULTS = {
    "counts": [(0, 40, 39_000), (1, 40, 39_001), (2, 40, 39_002)],
    "windows": [
        ("12:00", "north", 2, 3.0),
        ("12:00", "south", 1, 5.0),
        ("12:01", "north", 1, 1.0),
        ("12:02", "south", 1, 3.0),
        ("12:05", "north", 1, 1.0),
    ],
    "join": [(1, "12:00", "12:02"), (2, "12:01", None), (3, "12:04", "12:09"), (4, "13:00", "13:05")],
    "upsert": [("ann", 70), ("bob", 21), ("cid", 5)],
    "parquet": [(1, "one"), (2, "two"), (3, "three"), (4, "four")],
    "chained": {1: 2, 2: 1, 3: 1},
    "top_n": {("lamp", 1): ("cid", 15), ("lamp", 2): ("bob", 12), ("vase", 1): ("bob", 9), ("vase", 2): ("ann", 7)},
    "distinct": [("Apple", 6667, 999, 400, 298), ("Baidu", 6666, 997, 400, 287), ("Google", 6667, 1000, 400, 274)],
}
"""What `main` of each example gives; of those that need more than a session, see below."""


@pytest.mark.parametrize("name", RESULTS)
def test_it_gives_its_result(spark: SparkSession, tmp_path: Path, name: str) -> None:
    assert import_module(f"examples.{name}").main(spark, tmp_path) == RESULTS[name]


def test_state_on_s3() -> None:
    """As a program of its own: slots that run already would not see the store's address."""
    with s3() as bucket:
        command = [sys.executable, ROOT / "examples" / "state_on_s3.py", f"{bucket}/state"]
        done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"Row(key={key}, count=200)" for key in range(10)]


def test_all_are_run() -> None:
    elsewhere = {"state_on_s3", "delta_merge"}  # the latter by tests/smoke, where there is Delta Lake
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*RESULTS, *elsewhere}
