"""Run an engine in a process tree of its own, measure it from outside, and kill what is left of the tree."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec
from tests.servers.seaweedfs import client_environment

from benchmarks import ROOT
from benchmarks.engines.flink import jar, sql
from benchmarks.measuring.compactors import Compactors
from benchmarks.measuring.limits import MemoryGroup, drop_page_cache
from benchmarks.measuring.objects import ObjectCounter
from benchmarks.measuring.process import ProcessTree, python_environment
from benchmarks.measuring.report import summary
from benchmarks.measuring.requests import RequestCounter, counted
from benchmarks.measuring.result import Batch, Machine, Restart, Result, Spread
from benchmarks.measuring.timing import batch_end, batch_start
from benchmarks.workloads.config import RunConfig
from millpond.demo.processes import tree_bytes
from millpond.setting_values import parse_size

SILENCE_SECONDS = 900.0
"""An engine that sends no event for this time has hung."""


class EngineFailed(Exception):
    """The engine's process ended before it was measured. The message ends with the last lines of its log."""


class EngineRefused(Exception):
    """The engine does not run this query. The message is the engine's own reason."""


class EngineRun:
    """One start of an engine's process, with the events that it has sent.

    Args:
        config: what to run.
        restarted: measure the first batches on an existing checkpoint.
        group: control group with a memory limit, if any.
    """

    def __init__(self, config: RunConfig, *, restarted: bool = False, group: MemoryGroup | None = None) -> None:
        work = Path(config.work)
        name = "restarted" if restarted else "first"
        self.log = work / f"{name}.log"
        self._events_path = work / f"{name}.jsonl"
        self._events_path.write_text("")
        config_path = work / "config.json"
        flink = config.engine.startswith("flink")
        config_path.write_bytes(msgspec.json.encode(_flink_job(config) if flink else config))
        self.events: dict[str, dict[str, Any]] = {}
        self._read = 0
        python = str(jar.FLINK_PYTHON) if flink else sys.executable
        script = [str(ROOT / "benchmarks/engines/flink/job.py")] if flink else ["-m", "benchmarks.engines.spark"]
        command = [python, *script, str(config_path), str(self._events_path), *(["--restarted"] if restarted else [])]
        self.tree = ProcessTree(
            command,
            log=self.log,
            env=_environment(config),
            cwd=work,
            cgroup=group.entrance if group is not None else None,
        )

    def poll(self) -> dict[str, dict[str, Any]]:
        """Read new events, and return the latest of each kind."""
        text = self._events_path.read_text()
        complete = text.rfind("\n") + 1
        for line in text[self._read : complete].splitlines():
            event = json.loads(line)
            self.events[event["event"]] = event
        self._read = complete
        return self.events

    def wait(
        self, kind: str, timeout: float = SILENCE_SECONDS, meanwhile: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """Wait for an event; call `meanwhile` again and again until it comes.

        Raises:
            EngineRefused: the engine does not run this query.
            EngineFailed: the process ended first, or the event did not come in time.
        """
        deadline = time.monotonic() + timeout
        while kind not in self.poll():
            if "refused" in self.events:
                raise EngineRefused(str(self.events["refused"]["reason"]))
            if not self.tree.running() and kind not in self.poll():
                raise EngineFailed(
                    f"ended with status {self.tree.process.returncode} before '{kind}'; {self.log}:\n{self.tail()}"
                )
            if time.monotonic() > deadline:
                raise EngineFailed(f"no '{kind}' within {timeout:.0f} s; {self.log}:\n{self.tail()}")
            if meanwhile is not None:
                meanwhile()
            time.sleep(0.2)
        return self.events[kind]

    def tail(self, lines: int = 25) -> str:
        """Return the last lines of the log; empty if there is no log."""
        with suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""


def _flink_job(config: RunConfig) -> dict[str, Any]:
    """Return the configuration of Flink's process, with SQL and sizes worked out: Millpond is not installed there."""
    try:
        built = jar.build()
    except jar.NoCompiler as error:
        raise EngineFailed(str(error)) from error
    return {
        **msgspec.to_builtins(config),
        "jar": str(built),
        "statements": sql.statements(config),
        "select": sql.select(config),
        "time": sql.time(config),
        "last": sql.LAST,
        "left_out_rows": config.left_out * config.rows_per_batch,
        "managed_memory": f"{parse_size(config.slot_memory) * config.cores >> 20}m",
    }


def _environment(config: RunConfig) -> dict[str, str]:
    local = local_folder(config)
    local.mkdir(parents=True, exist_ok=True)
    return {
        **python_environment(),
        "TMPDIR": str(local),
        **(client_environment(config.s3) if config.s3 else {}),
    }


def local_folder(config: RunConfig) -> Path:
    """Return the folder for an engine's working files. Its path is short: names of sockets have at most 107 bytes."""
    folder = Path(config.work) / "local"
    if len(os.fsencode(folder)) <= 48:
        return folder
    return Path("/tmp") / f"mb-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}"


def state_folders(config: RunConfig) -> list[Path]:
    """Return the folders with an engine's durable state."""
    work = Path(config.work)
    if config.engine == "millpond":
        return [work / "checkpoint" / "millpond", work / "store"]
    return [work / "checkpoint" / "state"] if config.engine == "spark" else [work / "checkpoint"]


def run(config: RunConfig, *, keep: bool = False) -> Result:
    """Measure one engine. A failure becomes `Result.error`, a query that it does not run `Result.refused`.

    Args:
        keep: keep the run's folder. Else it is removed with its logs, unless the run failed.
    """
    work = Path(config.work)
    shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(local_folder(config), ignore_errors=True)
    work.mkdir(parents=True)
    result = _blank(config)
    group: MemoryGroup | None = None
    try:
        if config.memory_limit:
            try:
                group = MemoryGroup(config.memory_limit)
            except OSError as error:
                result.extra["memory_limit"] = f"no control group ({error}); page cache dropped every second instead"
                config = msgspec.structs.replace(config, drop_cache=config.drop_cache or 1.0)
        _measure(config, result, group)
    except EngineRefused as refusal:
        result.refused = str(refusal)
    except EngineFailed as error:
        result.error = str(error)
    finally:
        if group is not None:
            group.close()
        if not keep:
            shutil.rmtree(local_folder(config), ignore_errors=True)
    if not keep and result.error is None:
        shutil.rmtree(work, ignore_errors=True)
    return result


def measure_and_report(config: RunConfig, *, keep: bool) -> Result:
    """Measure one engine; print the run at its start, and its result."""
    rate = f" at {config.rate:,} rows/s" if config.rate else ""
    print(f"{config.name} on {config.engine}{rate} …", file=sys.stderr, flush=True)
    result = run(config, keep=keep)
    print(f"  {summary(result)}", file=sys.stderr, flush=True)
    return result


def _blank(config: RunConfig) -> Result:
    return Result(
        engine=config.engine,
        workload=config.workload,
        query=config.query,
        rows_per_batch=config.rows_per_batch,
        rate=config.rate,
        keys=config.keys,
        key_type=config.key_type,
        zipf=config.zipf,
        seed=config.seed,
        partitions=config.partitions,
        left_out=config.left_out,
        memory_limit_bytes=config.memory_limit,
        machine=Machine.here(),
    )


def _measure(config: RunConfig, result: Result, group: MemoryGroup | None) -> None:
    with counted(config) if config.count_requests else nullcontext((config, None)) as (config, requests):
        _measure_one(config, result, group, requests)


def _measure_one(config: RunConfig, result: Result, group: MemoryGroup | None, requests: RequestCounter | None) -> None:
    run = EngineRun(config, group=group)
    objects = ObjectCounter(state_folders(config))
    compactors = Compactors(config, _environment(config))
    try:
        last_drop = time.monotonic()

        def meanwhile() -> None:
            nonlocal last_drop
            compactors.step()
            if config.drop_cache and time.monotonic() - last_drop >= config.drop_cache:
                for folder in (Path(config.work), local_folder(config)):
                    drop_page_cache(folder)
                last_drop = time.monotonic()

        run.wait("measuring", timeout=SILENCE_SECONDS + config.left_out * 60, meanwhile=meanwhile)
        objects_before = objects.count()
        requests_before = requests.traffic() if requests is not None else None
        measured = run.wait("measured", timeout=SILENCE_SECONDS + config.seconds, meanwhile=meanwhile)
        if not config.s3:
            result.new_objects = objects.count() - objects_before
        if requests is not None and requests_before is not None:
            result.requests = requests.since(requests_before)
        _sizes(config, result)
        _summarise(config, result, run, measured)
        result.cpu = [(sample.time, sample.cpu) for sample in run.tree.samples]
        result.compactors_cpu = compactors.cpu
        if group is not None:
            result.memory_group_peak_bytes = group.peak()
        if config.restart and not config.engine.startswith("flink"):
            run.tree.kill()
            result.restart = _restart(config, result, group, _ready(run, measured))
        else:
            run.wait("stopped", timeout=120)
            compactors.close()
            run.tree.close(linger=20)
    finally:
        objects.close()
        compactors.close()
        run.tree.kill()


def _sizes(config: RunConfig, result: Result) -> None:
    if not config.s3:
        result.state_store_bytes = sum(tree_bytes(folder) for folder in state_folders(config))
    result.state_disk_bytes = tree_bytes(local_folder(config))


def _summarise(config: RunConfig, result: Result, run: EngineRun, measured: dict[str, Any]) -> None:
    result.version = str(run.events.get("started", {}).get("version", ""))
    if "samples" in measured:
        _summarise_flink(result, run, measured)
        return
    result.left_out = int(measured["left_out"])
    batches = [to_batch(raw, config) for raw in measured["batches"] if raw["batchId"] >= result.left_out]
    if not batches:
        raise EngineFailed(f"no batch was measured; {run.log}:\n{run.tail()}")
    start, end = batches[0].start, batches[-1].end
    result.batches = batches
    result.rows = sum(b.rows for b in batches)
    result.seconds = round(end - start, 3)
    result.rows_per_second = round(result.rows / (end - start))
    result.batch_ms = Spread.of([b.ms for b in batches])
    result.commit_ms = Spread.of([b.commit_ms for b in batches if b.commit_ms is not None])
    _use(result, run, start, end)


def _summarise_flink(result: Result, run: EngineRun, measured: dict[str, Any]) -> None:
    samples = measured["samples"]
    (start, before), (end, after) = samples[0], samples[-1]
    if after <= before:
        raise EngineFailed(f"no rows were counted; {run.log}:\n{run.tail()}")
    result.rows = after - before
    result.seconds = round(end - start, 3)
    result.rows_per_second = round(result.rows / (end - start))
    result.commit_ms = Spread.of([float(ms) for _, ms, _, _ in measured["checkpoints"]])
    result.extra["checkpoints"] = len(measured["checkpoints"])
    _use(result, run, start, end)


def _use(result: Result, run: EngineRun, start: float, end: float) -> None:
    """Record the CPU and memory that the processes used from `start` to `end`."""
    result.cpu_seconds_per_million_rows = round(run.tree.cpu_between(start, end) / result.rows * 1e6, 3)
    result.memory_peak_bytes = max((s.memory for s in run.tree.samples), default=0)
    result.memory_anonymous_peak_bytes = max((s.anonymous for s in run.tree.samples), default=0)
    result.memory_mean_bytes = run.tree.mean_memory(start, end)


def to_batch(progress: dict[str, Any], config: RunConfig) -> Batch:
    """Make a batch from Spark's progress report."""
    commit: float | None = None
    checkpoint: float | None = None
    if config.engine == "spark":
        operators = progress["stateOperators"]
        if operators:
            # Spark's times are sums over the partitions' tasks, which run side by side.
            commit = sum(o["commitTimeMs"] for o in operators) / max(1, min(config.partitions, config.cores))
            checkpoint = commit  # Spark's commits are durable at once
    else:
        figures = progress.get("observedMetrics", {}).get("millpond", {})
        commit, checkpoint = figures.get("commit_wait_ms"), figures.get("commit_ms")
    # Spark counts a row each time that the query scans the source: once for each kind of events, and for each use.
    if config.rate:
        source = progress["sources"][0]
        rows = (int(source["endOffset"]) - int(source["startOffset"] or 0)) * config.rate
    else:
        rows = min(int(progress["numInputRows"]), config.rows_per_batch)
    return Batch(batch_start(progress), float(progress["durationMs"]["triggerExecution"]), rows, commit, checkpoint)


def _ready(run: EngineRun, measured: dict[str, Any]) -> float:
    """Return the seconds from the session to the end of the first batch, including a repartitioning between them."""
    return round(batch_end(measured["batches"][0]) - float(run.events["session"]["time"]), 3)


def _restart(config: RunConfig, result: Result, group: MemoryGroup | None, empty_s: float) -> Restart:
    if config.lose_disk:
        shutil.rmtree(local_folder(config), ignore_errors=True)
    if config.restart_partitions and config.engine == "millpond":
        settings = config.settings | {"spark.millpond.partitions": str(config.restart_partitions)}
        config = msgspec.structs.replace(config, settings=settings)
    for folder in (Path(config.work), local_folder(config)):
        drop_page_cache(folder)
    run = EngineRun(config, restarted=True, group=group)
    try:
        measured = run.wait("measured")
        batches = [to_batch(b, config) for b in measured["batches"]]
        steady = result.batch_ms.p50 if result.batch_ms is not None else 0.0
        first = batches[0]
        return Restart(
            first_batch_ms=first.ms,
            second_batch_ms=batches[1].ms if len(batches) > 1 else None,
            extra_ms=round(first.ms - steady, 1),
            ready_s=_ready(run, measured),
            empty_s=empty_s,
            repartition_s=run.events.get("repartitioned", {}).get("seconds"),
        )
    finally:
        run.tree.kill()
