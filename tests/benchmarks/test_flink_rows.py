"""Flink's functions make the rows that NumPy and Spark make. Needs `make engines`."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from benchmarks.harness import FLINK_PYTHON

from benchmarks import flink_jar, flink_sql
from millpond.workloads.draws import draw, letters
from millpond.workloads.nexmark import EPOCH, Nexmark, NexmarkConfig

SCRIPT = """
import json, sys
from pyflink.table import EnvironmentSettings, TableEnvironment
job = json.load(open(sys.argv[1]))
tables = TableEnvironment.create(EnvironmentSettings.in_streaming_mode())
tables.get_config().set("pipeline.jars", job["jar"]).set("parallelism.default", "1")
for statement in job["statements"]:
    tables.execute_sql(statement)
rows = [[str(value) for value in row] for row in tables.execute_sql(job["select"]).collect()]
json.dump(rows, open(sys.argv[2], "w"))
"""


def collect(tmp_path: Path, select: str, count: int) -> list[list[str]]:
    """The rows of a query over the numbers 0 … count − 1, as text."""
    job = {
        "jar": flink_jar.build(FLINK_PYTHON.parent.parent).as_uri(),
        "statements": [
            *flink_sql.functions(),
            "CREATE TEMPORARY TABLE numbers (n BIGINT NOT NULL) WITH ('connector' = 'datagen',"
            f" 'fields.n.kind' = 'sequence', 'fields.n.start' = '0', 'fields.n.end' = '{count - 1}')",
        ],
        "select": select,
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    command = [str(FLINK_PYTHON), "-c", SCRIPT, str(tmp_path / "job.json"), str(tmp_path / "rows.json")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TZ": "UTC"}, check=False)
    assert done.returncode == 0, "\n".join(line for line in done.stderr.splitlines() if not line.startswith("\tat"))
    return json.loads((tmp_path / "rows.json").read_text())


@pytest.mark.skipif(not FLINK_PYTHON.exists(), reason="Flink is not installed (make engines)")
def test_flink_makes_the_same_rows(tmp_path: Path) -> None:
    count, config = 300, NexmarkConfig(seed=3, rate=7)
    arguments = f"{config.seed}, {config.rate}, {config.base_time_ms}, 127, n"
    select = (
        "SELECT n, DRAW(1001, n), CAST(CUT(3, 500, MOD(n, 400), 10) AS STRING), b.* FROM numbers"
        f" LEFT JOIN LATERAL TABLE(BIDS({arguments})) AS b(auction, bidder, price, channel, url, tm, extra) ON TRUE"
    )
    found = {int(row[0]): row[1:] for row in collect(tmp_path, select, count)}
    numbers = np.arange(count, dtype=np.int64)
    assert [int(found[n][0]) for n in range(count)] == draw(numbers, 1, 1).tolist()
    text = letters(500, 3).decode()
    assert [found[n][1] for n in range(count)] == [text[n : n + 10] for n in range(count)]
    chosen = numbers[numbers % EPOCH >= 4]
    for n, bid in zip(chosen.tolist(), Nexmark(config).bids(chosen).to_pylist(), strict=True):
        auction, bidder, price, channel, url, time, extra = found[n][2:]
        assert (int(auction), int(bidder), int(price)) == (bid["auction"], bid["bidder"], bid["price"])
        assert (channel, url, extra) == (bid["channel"], bid["url"], bid["extra"])
        assert time[:19] == str(bid["dateTime"])[:19]
    assert found[0][2] == "None"
