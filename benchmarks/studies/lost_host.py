"""Cost of a lost host: `python -m benchmarks.studies.lost_host --hosts 3 --keys 10m --latency 23 --kills 6`.

A count per key runs on several hosts of this machine, with all keys in the state. One host after another is killed in
the middle of the query, with its executor, its slots and its disk. A new host takes its place. For each loss the study
prints the time from the kill to the end of the next batch and of the third, beside the median batch. It prints whether
the query was started again, because the lost host's last commit was not durable. It also prints the longest batch until
twelve batches after the new host came.

With `--hold` the store takes nothing from the end of the batch before until the kill, so that no commit of the host is
durable. With `--how stop` the host's processes are stopped, not killed. With `--how decommission` its executor hands
over and ends, and another executor starts there. With `--check` each batch gives all rows (complete mode,
`foreachBatch`). The last rows are compared with Spark's over the same events in batch: an error in any batch shows in
all later ones.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import millpond
from benchmarks.engines.spark import cluster_of, session, store_url
from benchmarks.measuring.arguments import count, setting
from benchmarks.nexmark.spark import numbers_between
from benchmarks.studies.verify import digest
from benchmarks.workloads.config import RunConfig
from benchmarks.workloads.dataframes import build, rmw, rmw_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery
    from tests.support.cluster import Hosts

_BETWEEN = 12
"""Batches between a loss and the next one."""


class Loss(msgspec.Struct, frozen=True):
    """One lost host: seconds from the kill to the end of the first and third batch, and whether the query restarted."""

    first: float
    third: float
    restarted: bool


class Batches:
    """Records the ends of a query's batches, over all runs behind its handle.

    Attributes:
        ended: when this process first saw the progress of a batch, by the monotonic clock that kills are timed by.
            Spark's own end of a batch (`measuring.timing`) is earlier, and by another clock.
        seconds: execution time of each batch.
    """

    def __init__(self, query: StreamingQuery) -> None:
        self._query = query
        self.ended: dict[int, float] = {}
        self.seconds: dict[int, float] = {}

    def wait_for(self, batch: int, timeout: float = 600.0) -> float:
        """Wait until a batch, or a later one, has ended; return the time of the last batch's end."""
        deadline = time.monotonic() + timeout
        while not self.ended or self.last < batch:
            if not self._query.isActive:
                raise RuntimeError(f"the query has ended: {self._query.exception()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"batch {batch} did not end in {timeout:.0f} s")
            progress = self._query.lastProgress
            if progress is not None and progress["batchId"] not in self.ended:
                self.ended[progress["batchId"]] = time.monotonic()
                self.seconds[progress["batchId"]] = progress["durationMs"]["triggerExecution"] / 1000
            time.sleep(0.02)
        return self.ended[self.last]

    @property
    def last(self) -> int:
        """Number of the last batch that has ended."""
        return max(self.ended)


def lose(
    hosts: Hosts, number: int, query: StreamingQuery, batches: Batches, delay: float, held: Path | None, how: str
) -> Loss:
    """Kill, stop or decommission a host after a batch; the store takes nothing while the file `held` exists."""
    run = query.runId
    if held is not None:
        batches.wait_for(batches.last + 1)
        held.touch()
    batches.wait_for(batches.last + 1)
    before = batches.last
    time.sleep(delay)
    killed = time.monotonic()
    if how == "stop":
        hosts.signal(number, signal.SIGSTOP)
    elif how == "kill":
        hosts.kill(number)
    else:
        hosts.decommission(number)
    if held is not None:
        held.unlink()
    # The batch that was planned when the host was lost, whatever its number: later ones end after it.
    first = batches.wait_for(before + 1)
    third = batches.wait_for(before + 3)
    if how == "stop":
        hosts.kill(number)
    return Loss(first - killed, third - killed, query.runId != run)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the query and lose its hosts."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--hosts", type=count, default=3)
    add("--cores", type=count, default=3, help="cores of all hosts")
    add("--keys", type=count, default=10_000_000)
    add("--rows-per-batch", type=count, default=500_000)
    add("--partitions", type=count, default=6)
    add("--latency", type=float, default=23.0, metavar="MS", help="of each request to the store")
    add("--slot-memory", default="512m")
    add("--kills", type=count, default=6)
    add("--delay", type=float, metavar="S", help="from the end of a batch to the kill; random by default")
    add("--hold", action="store_true", help="the store takes nothing from the batch before until the kill")
    add("--how", choices=("kill", "stop", "decommission"), default="kill", help="how a host is lost")
    add("--timeout", type=float, default=30.0, metavar="S", help="without an answer, after which a host is given up")
    add("--check", action="store_true", help="compare the last rows with Spark's in batch")
    add("--set", type=setting, action="append", default=[], metavar="KEY=VALUE", help="a further setting")
    add("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(prefix="millpond-lost-host-"))
    os.environ["TMPDIR"] = str(work)
    held = work / "held" if options.hold else None
    config = RunConfig(
        engine="millpond",
        workload="rmw",
        work=str(work),
        keys=options.keys,
        rows_per_batch=options.rows_per_batch,
        preload=True,
        partitions=options.partitions,
        cores=options.cores,
        hosts=options.hosts,
        driver_memory="1g",
        slot_memory=options.slot_memory,
        store_latency_ms=options.latency,
        store_hold=str(held or ""),
        settings={
            "spark.millpond.executor.timeout": f"{options.timeout:g}",
            "spark.millpond.restarts": "100",
            # Without it, the signal that decommissions an executor kills it.
            "spark.decommission.enabled": "true",
            **dict(options.set),
        },
    )
    try:
        with cluster_of(config) as hosts:
            measure(config, hosts, options, random.Random(options.seed))
    finally:
        shutil.rmtree(work, ignore_errors=True)


def measure(config: RunConfig, hosts: Hosts, options: argparse.Namespace, choice: random.Random) -> None:
    """Start the query, lose hosts, and print the cost of each loss."""
    spark = session(config, hosts.url)
    print(f"state at {store_url(config)}", flush=True)
    rows: dict[int, tuple[Any, ...]] = {}

    def keep(batch: DataFrame, number: int) -> None:
        rows[number] = digest(batch)

    writer = millpond.writeStream(build(spark, config))
    writer = (
        writer.outputMode("complete").foreachBatch(keep)
        if options.check
        else writer.outputMode("update").format("noop")
    )
    query = writer.option("checkpointLocation", f"{config.work}/checkpoint").start()
    batches = Batches(query)
    batches.wait_for(config.left_out + _BETWEEN)
    median = statistics.median(list(batches.seconds.values())[-_BETWEEN:])
    print(f"{config.keys:,} keys on {config.hosts} hosts: median batch {median:.2f} s", flush=True)
    held = Path(config.store_hold) if config.store_hold else None
    for kill in range(options.kills):
        number = kill % config.hosts
        pause = choice.uniform(0.0, median) if options.delay is None else options.delay
        before = batches.last
        loss = lose(hosts, number, query, batches, pause, held, options.how)
        print(
            f"host lost: next batch after {loss.first:.1f} s, third after {loss.third:.1f} s"
            f"{', started again' if loss.restarted else ''}",
            flush=True,
        )
        if options.how != "decommission":
            hosts.add(number)
        batches.wait_for(batches.last + _BETWEEN)
        longest = max(seconds for batch, seconds in batches.seconds.items() if batch > before)
        print(f"longest of these and {_BETWEEN} more batches: {longest / median:.1f} x the median", flush=True)
    query.stop()
    if options.check:
        last = max(rows)
        check(spark, config, last, rows[last])
    spark.stop()


def check(spark: SparkSession, config: RunConfig, number: int, actual: tuple[Any, ...]) -> None:
    """Compare the rows of a batch with Spark's in batch, over all events until the end of that batch."""
    events = numbers_between(spark, 0, (number + 1) * config.rows_per_batch, config.partitions)
    expected = digest(rmw(events.selectExpr(*rmw_columns(config))))
    if actual != expected:
        raise RuntimeError(f"batch {number} has other rows: {actual}, not {expected}")
    print(f"the {actual[0]:,} rows of batch {number} are Spark's", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    main()
