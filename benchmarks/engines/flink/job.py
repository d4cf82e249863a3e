"""Process of the engines `flink-rocksdb` and `flink-forst`, in Flink's own virtual environment.

The harness starts it as `python job.py CONFIG.json EVENTS.jsonl`. It imports nothing of this project, which is not
installed there. It sends the same events as `benchmarks.engines.spark`; `measured` has samples of (time, rows taken by
the source) and the checkpoints instead of batches.
"""

import json
import os
import re
import socket
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def settings(config: Json, port: int) -> dict[str, str]:
    """Return Flink's best settings: incremental checkpoints, object reuse, asynchronous state access for ForSt."""
    backend = config["engine"].removeprefix("flink-")
    chosen = {
        "execution.runtime-mode": "STREAMING",
        "parallelism.default": str(config["partitions"]),
        "pipeline.object-reuse": "true",
        "pipeline.jars": Path(config["jar"]).as_uri(),
        "state.backend.type": backend,
        "execution.checkpointing.incremental": "true",
        "execution.checkpointing.interval": f"{int(config['checkpoint_seconds'] * 1000)} ms",
        "execution.checkpointing.mode": "EXACTLY_ONCE",
        "execution.checkpointing.dir": (Path(config["work"]) / "checkpoint").as_uri(),
        "execution.checkpointing.max-concurrent-checkpoints": "1",
        "io.tmp.dirs": os.environ["TMPDIR"],
        "taskmanager.numberOfTaskSlots": str(config["partitions"]),
        "taskmanager.memory.managed.size": config["managed_memory"],
        "taskmanager.memory.network.min": "128m",
        "taskmanager.memory.network.max": "128m",
        "rest.port": str(port),
        "rest.bind-port": str(port),
        "web.checkpoints.history": "10000",
        "metrics.fetcher.update-interval": "250",
        "table.local-time-zone": "UTC",
    }
    if backend == "forst":
        chosen["table.exec.async-state.enabled"] = "true"
    return {**chosen, **config["settings"]}


class Rest:
    """The job, seen through Flink's REST interface."""

    def __init__(self, port: int, job: str) -> None:
        self._base = f"http://127.0.0.1:{port}/jobs/{job}"
        self._source: tuple[str, str] | None = None

    def get(self, path: str = "") -> Any:
        """Return the answer to a request."""
        with urllib.request.urlopen(self._base + path, timeout=10) as response:
            return json.load(response)

    def rows(self) -> int:
        """Return the number of rows that the source has sent on."""
        if self._source is None:
            self._source = self._find_source()
        if self._source is None:
            return 0
        vertex, metric = self._source
        sums = self.get(f"/vertices/{vertex}/subtasks/metrics?get={urllib.parse.quote(metric)}&agg=sum")
        return int(sums[0]["sum"]) if sums else 0

    def _find_source(self) -> tuple[str, str] | None:
        for vertex in self.get()["vertices"]:
            for metric in self.get(f"/vertices/{vertex['id']}/subtasks/metrics"):
                if re.search(r"^Source__numbers\.numRecordsOut$", metric["id"]):
                    return vertex["id"], metric["id"]
        return None

    def checkpoints(self) -> list[list[float]]:
        """Return completed checkpoints: trigger time (s), end-to-end duration (ms), bytes of state, bytes written."""
        history = self.get("/checkpoints").get("history", [])
        return [
            [c["trigger_timestamp"] / 1000, c["end_to_end_duration"], c["state_size"], c["checkpointed_size"]]
            for c in history
            if c["status"] == "COMPLETED"
        ]


def main(arguments: list[str]) -> int:
    """Run one engine."""
    config = json.loads(Path(arguments[0]).read_text())
    out = open(arguments[1], "a", buffering=1)  # noqa: SIM115 - stays open as long as the process

    def send(kind: str, **fields: object) -> None:
        out.write(json.dumps({"event": kind, "time": time.time(), **fields}) + "\n")

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.setdefault("JAVA_TOOL_OPTIONS", f"-Xmx{config['driver_memory']}")
    from pyflink.common import Configuration, Types, WatermarkStrategy
    from pyflink.datastream import StreamExecutionEnvironment
    from pyflink.datastream.connectors.number_seq import NumberSequenceSource
    from pyflink.table import Schema, StreamTableEnvironment, TableDescriptor
    from pyflink.util.exceptions import TableException
    from pyflink.version import __version__

    chosen = Configuration()
    for key, value in settings(config, port).items():
        chosen.set_string(key, value)
    environment = StreamExecutionEnvironment.get_execution_environment(chosen)
    tables = StreamTableEnvironment.create(environment)
    # The SQL connector `datagen` keeps a whole sequence in memory; this source does not.
    sequence = NumberSequenceSource(0, config["last"] - 1)
    stream = environment.from_source(sequence, WatermarkStrategy.no_watermarks(), "numbers", Types.LONG())
    schema = Schema.new_builder().column_by_expression("m", "f0")
    if config["time"]:
        schema.column_by_expression("dateTime", config["time"])
        schema.watermark("dateTime", "`dateTime` - INTERVAL '4' SECOND")
    tables.create_temporary_view("sequence", tables.from_data_stream(stream, schema.build()))
    send("session")
    for statement in config["statements"]:
        tables.execute_sql(statement)
    sink = TableDescriptor.for_connector("blackhole").build()
    try:
        result = tables.sql_query(config["select"]).execute_insert(sink)
    except TableException as refusal:
        send("refused", reason=str(refusal).splitlines()[0])
        return 0
    client = result.get_job_client()
    rest = Rest(port, str(client.get_job_id()))
    send("started", version=f"Flink {__version__}")
    samples: list[tuple[float, int]] = []
    left_out, warm = config["left_out_rows"], time.time() + config["warmup_seconds"]
    deadline: float | None = None
    while True:
        time.sleep(0.25)
        status = rest.get()["state"]
        if status in ("FAILED", "CANCELED", "FINISHED"):
            raise RuntimeError(f"job {status}: {rest.get('/exceptions')}")
        samples.append((time.time(), rest.rows()))
        if deadline is None and samples[-1][1] >= left_out and samples[-1][0] >= warm:
            deadline = time.time() + config["seconds"]
            send("measuring")
            samples = samples[-1:]
        if deadline is not None and time.time() >= deadline:
            break
    done = [c for c in rest.checkpoints() if c[0] >= samples[0][0]]
    send("measured", samples=samples, checkpoints=done)
    client.cancel().result()
    send("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
