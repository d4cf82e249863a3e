"""Flink's functions make the rows that NumPy and Spark make. Needs `make engines`."""

import json
import os
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.engines.flink import jar, sql
from benchmarks.engines.flink.jar import FLINK_PYTHON
from benchmarks.nexmark.draws import draw, letters
from benchmarks.nexmark.generator import AUCTION, AUCTIONS, BID, EPOCH, PERSON, PERSONS, Nexmark, NexmarkConfig
from benchmarks.nexmark.queries import QUERIES
from benchmarks.workloads.config import RunConfig

SCRIPT = """
import json, sys
from pyflink.table import EnvironmentSettings, TableEnvironment
job = json.load(open(sys.argv[1]))
answers = []
for statements, query in job["runs"]:
    tables = TableEnvironment.create(EnvironmentSettings.in_streaming_mode())
    tables.get_config().set("pipeline.jars", job["jar"]).set("parallelism.default", "1")
    for statement in statements:
        tables.execute_sql(statement)
    if job["explain"]:
        try:
            answers.append(tables.explain_sql(query))
        except Exception as refusal:
            answers.append("refused: " + str(refusal))
    else:
        answers.append([[str(value) for value in row] for row in tables.execute_sql(query).collect()])
json.dump(answers, open(sys.argv[2], "w"))
"""
CONFIG = NexmarkConfig(seed=3, rate=7)
COUNT = 300
pytestmark = pytest.mark.skipif(not FLINK_PYTHON.exists(), reason="Flink is not installed (make engines)")


def numbers(event_time: str = "") -> str:
    """Return the statement for a table of the numbers 0 … COUNT − 1."""
    return (
        f"CREATE TEMPORARY TABLE numbers (n BIGINT NOT NULL{event_time}) WITH ('connector' = 'datagen',"
        f" 'fields.n.kind' = 'sequence', 'fields.n.start' = '0', 'fields.n.end' = '{COUNT - 1}')"
    )


def flink(tmp_path: Path, runs: list[tuple[list[str], str]], *, explain: bool = False) -> list[Any]:
    """Return the rows of each query as text, or its plan."""
    made = jar.build().as_uri()
    (tmp_path / "job.json").write_text(json.dumps({"jar": made, "runs": runs, "explain": explain}))
    command = [str(FLINK_PYTHON), "-c", SCRIPT, str(tmp_path / "job.json"), str(tmp_path / "answers.json")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TZ": "UTC"}, check=False)
    assert done.returncode == 0, "\n".join(line for line in done.stderr.splitlines() if not line.startswith("\tat"))
    return json.loads((tmp_path / "answers.json").read_text())


def as_text(value: Any) -> str:
    """Format a value as Flink does: seconds have a fraction only where it is not zero."""
    return str(value.replace(tzinfo=None)) if isinstance(value, datetime) else str(value)


def test_flink_makes_the_same_rows(tmp_path: Path) -> None:
    made = f"{CONFIG.seed}, {CONFIG.rate}, {CONFIG.base_time_ms}, 1023, n"
    texts = f"SELECT n, DRAW(1001, n), CAST(CUT({CONFIG.seed}, 500, MOD(n, 400), 10) AS STRING) FROM numbers"
    kinds = {"BIDS": BID, "AUCTIONS": AUCTION, "PERSONS": PERSON}
    selects = [
        f"SELECT n, made.* FROM numbers, LATERAL TABLE({function}({made})) AS"
        f" made({', '.join(f'`{name}`' for name in schema.names)})"
        for function, schema in kinds.items()
    ]
    before = [*sql.functions(), numbers()]
    drawn, *rows = flink(tmp_path, [(before, query) for query in (texts, *selects)])
    places = np.arange(COUNT, dtype=np.int64)
    answers = {int(row[0]): row[1:] for row in drawn}
    assert [int(answers[n][0]) for n in range(COUNT)] == draw(places, 1, 1).tolist()
    text = letters(500, CONFIG.seed).decode()
    assert [answers[n][1] for n in range(COUNT)] == [text[n : n + 10] for n in range(COUNT)]
    generator, kind = Nexmark(CONFIG), np.digitize(places % EPOCH, (PERSONS, PERSONS + AUCTIONS))
    for index, make in enumerate((generator.bids, generator.auctions, generator.persons)):
        chosen = places[kind == 2 - index]
        batch, ordered = make(chosen), sorted(rows[index], key=lambda row: int(row[0]))
        assert [int(row[0]) for row in ordered] == chosen.tolist()
        assert [row[1:] for row in ordered] == [[as_text(v) for v in row.values()] for row in batch.to_pylist()]


def test_flink_accepts_every_query_but_one(tmp_path: Path) -> None:
    runs = []
    for name in QUERIES:
        config = RunConfig(engine="x", workload="nexmark", query=name, work="")
        time = "CAST(TO_TIMESTAMP_LTZ(n, 3) AS TIMESTAMP(3))"
        event_time = f", `dateTime` AS {time}, WATERMARK FOR `dateTime` AS `dateTime` - INTERVAL '4' SECOND"
        before = [*sql.functions(), numbers(event_time if sql.time(config) else "")]
        runs.append(([*before, *sql.views(config)], sql.select(config)))
    plans = dict(zip(QUERIES, flink(tmp_path, runs, explain=True), strict=True))
    refused = {name: plan for name, plan in plans.items() if plan.startswith("refused")}
    assert refused.keys() == {"q6"}, refused
