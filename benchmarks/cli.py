"""The command line: `python -m benchmarks WORKLOAD --engines … --json FILE`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

import msgspec

from benchmarks.engines.flink.jar import FLINK_PYTHON
from benchmarks.engines.s3 import s3_server
from benchmarks.measuring.arguments import count, engines, queries, setting, size
from benchmarks.measuring.harness import measure_and_report
from benchmarks.measuring.process import sigterm_exits
from benchmarks.measuring.report import plot, print_suite, print_table
from benchmarks.measuring.result import Result, write
from benchmarks.measuring.sustained import at_highest_rate
from benchmarks.nexmark.processors import PROCESSORS
from benchmarks.workloads.config import ENGINES, KEYS, PRELOADED, WORKLOADS, RunConfig
from benchmarks.workloads.dataframes import NEXMARK

_OTHERS = """other commands, each with --help:
  python -m benchmarks papers                 each headline of the papers measured again, into one page and one report
  python -m benchmarks.misa                   Linear Road and Cluster Monitoring at given rates
  python -m benchmarks.prefetch               latencies of rows with and without hints
  python -m benchmarks.studies.append_stores  append stores by read batch ratio, space amplification and write buffer
  python -m benchmarks.studies.disaggregated  state on an S3 server: checkpoints, recoveries, caches, CPU
  python -m benchmarks.studies.enrichment     lookup joins with Redis
  python -m benchmarks.studies.lost_host      batches around the loss of a host of a cluster
  python -m benchmarks.studies.starts         starts and stops of queries on busy cores
  python -m benchmarks.studies.timers         batch times by the number of timers that are due
  python -m benchmarks.studies.verify         the rows of NEXMark's queries compared with Spark's"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="The same rows through several engines, one after another, measured from outside.",
        epilog=_OTHERS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = p.add_argument
    add("workload", choices=WORKLOADS)
    add("--query", type=queries, metavar="A,B", help="which queries of nexmark, or all; several print one table")
    add("--engines", type=engines, default=["millpond", "spark"], metavar="A,B", help=", ".join(ENGINES))
    add("--rows-per-batch", type=count, default=1_000_000, metavar="N")
    add("--rate", type=count, default=0, metavar="N", help="rows per second that arrive, whatever an engine takes")
    add(
        "--highest-rate-of",
        choices=ENGINES,
        metavar="ENGINE",
        help="find the highest rate that this engine keeps up with, and run all of them at it",
    )
    add(
        "--keys",
        type=count,
        default=None,
        metavar="K",
        help="default: 5 m; read_write 10 m; processor_map 100 k; sliding, session, other processors 1 m",
    )
    add("--key-type", choices=("long", "string"), default="long", help="string: 20 bytes")
    add("--zipf", type=float, default=0.0, metavar="S", help="exponent; 0 = uniform keys")
    add("--seed", type=int, default=1)
    add("--seconds", type=float, default=60.0, help="to measure, after the batches left out")
    add("--warmup-batches", type=int, default=10, help="first batches to leave out")
    add("--warmup-seconds", type=float, default=0.0, metavar="S", help="leave out earlier batches as well")
    add("--max-batches", type=int, default=0, help="measure at most this number of batches")
    add("--preload", action="store_true", help="let the first rows bring every key once (left out as well)")
    add("--event-rate", type=count, default=10_000, help="events per second of event time")
    add("--cores", type=count, default=2)
    add("--hosts", type=int, default=0, metavar="N", help="Spark on a cluster of N hosts of this machine")
    add("--partitions", type=count, default=2)
    add("--driver-memory", default="4g", help="JVM heap of every engine")
    add("--slot-memory", default="1g", help="Millpond's memory per slot")
    add("--memory-limit", type=size, default=0, metavar="SIZE", help="for the whole process tree, page cache included")
    add("--drop-cache", type=float, default=0.0, metavar="S", help="drop the state files' page cache every S seconds")
    add("--store-latency", type=float, default=0.0, metavar="MS", help="of every request to Millpond's store")
    add("--store-bandwidth", type=size, default=0, metavar="SIZE", help="bytes per second of Millpond's store")
    add("--commit-mode", choices=("async", "sync"), default="async")
    add("--compaction", choices=("local", "remote"), default="local", help="of Millpond's state")
    add("--compactors", type=int, default=0, metavar="N", help="processes of `millpond compactor` beside the query")
    add("--s3", action="store_true", help="state on a real S3 server (SeaweedFS), Spark's whole checkpoint with it")
    add("--count-requests", action="store_true", help="requests to the S3 server for state, by a proxy before it")
    add("--restart", action="store_true", help="then kill, drop the page cache, and measure the first batch again")
    add("--restart-partitions", type=count, default=0, metavar="N", help="give the state N partitions then")
    add("--lose-disk", action="store_true", help="empty the local disk as well")
    add("--checkpoint-seconds", type=float, default=5.0, help="Flink's checkpoint interval")
    add(
        "--set", type=setting, action="append", default=[], metavar="KEY=VALUE", help="a further setting of the engines"
    )
    add("--json", type=Path, default=None, metavar="FILE", help="write the figures there")
    add("--plot", type=Path, default=None, metavar="FILE", help="draw the batches there (PNG or HTML)")
    add(
        "--work",
        type=Path,
        default=None,
        metavar="DIR",
        help="where checkpoints and logs go; default: a temporary folder",
    )
    add("--keep", action="store_true", help="leave checkpoints and logs")
    return p


def configs(arguments: argparse.Namespace, endpoint: str = "") -> list[RunConfig]:
    """Return a run per query and engine.

    Args:
        endpoint: of the S3 server for the state; empty = local disk.
    """
    names: list[str] = arguments.query or [""]
    work = arguments.work.resolve()
    keys = arguments.keys or KEYS.get(arguments.workload, 5_000_000)
    return [
        RunConfig(
            engine=engine,
            workload=arguments.workload,
            query=query,
            work=str(work / query / engine if len(names) > 1 else work / engine),
            rows_per_batch=arguments.rows_per_batch,
            rate=arguments.rate,
            keys=keys,
            seconds=arguments.seconds,
            warmup_batches=arguments.warmup_batches,
            warmup_seconds=arguments.warmup_seconds,
            max_batches=arguments.max_batches,
            preload=arguments.preload or arguments.workload in PRELOADED,
            key_type=arguments.key_type,
            zipf=arguments.zipf,
            seed=arguments.seed,
            event_rate=arguments.event_rate,
            partitions=arguments.partitions,
            cores=arguments.cores,
            hosts=arguments.hosts,
            driver_memory=arguments.driver_memory,
            slot_memory=arguments.slot_memory,
            memory_limit=arguments.memory_limit,
            drop_cache=arguments.drop_cache,
            store_latency_ms=arguments.store_latency,
            store_bandwidth=arguments.store_bandwidth,
            commit_mode=arguments.commit_mode,
            compaction=arguments.compaction,
            compactors=arguments.compactors,
            s3=endpoint,
            count_requests=arguments.count_requests,
            restart=arguments.restart,
            restart_partitions=arguments.restart_partitions,
            lose_disk=arguments.lose_disk,
            checkpoint_seconds=arguments.checkpoint_seconds,
            settings=dict(arguments.set),
        )
        for query in names
        for engine in arguments.engines
    ]


def check(p: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse arguments that contradict each other, and engines that are not installed."""
    if arguments.workload == "nexmark" and arguments.query is None:
        p.error(f"nexmark needs --query: {', '.join(NEXMARK)}")
    if arguments.workload != "nexmark" and arguments.query is not None:
        p.error("--query belongs to nexmark")
    if arguments.key_type == "string" and arguments.workload != "rmw":
        p.error("--key-type string belongs to rmw")
    if len(arguments.query or ()) > 1 and arguments.plot is not None:
        p.error("--plot draws one query")
    clocked = arguments.rate or arguments.highest_rate_of is not None
    if arguments.rate and arguments.highest_rate_of is not None:
        p.error("--highest-rate-of finds the rate; leave --rate out")
    if arguments.highest_rate_of not in (None, *arguments.engines):
        p.error(f"--highest-rate-of {arguments.highest_rate_of} is not among --engines")
    if clocked and any(e.startswith("flink") for e in arguments.engines):
        p.error("--rate and --highest-rate-of are for the engines on Spark")
    processors = arguments.workload.startswith("processor") or PROCESSORS.keys() & set(arguments.query or ())
    if processors and any(e.startswith("flink") for e in arguments.engines):
        p.error("processors are for the engines on Spark")
    if clocked and arguments.workload in PRELOADED:
        p.error(f"{arguments.workload} has batches of a fixed size")
    if arguments.s3 and (clocked or any(e not in ("millpond", "spark") for e in arguments.engines)):
        p.error("--s3 is for millpond and spark, without a rate")
    if arguments.count_requests and not arguments.s3:
        p.error("--count-requests needs --s3")
    if arguments.compactors and arguments.compaction != "remote":
        p.error("--compactors work with --compaction remote")
    if (arguments.restart_partitions or arguments.lose_disk) and not arguments.restart:
        p.error("--restart-partitions and --lose-disk need --restart")
    if arguments.seconds <= 0:
        p.error("--seconds must be positive")
    for name in (
        "zipf",
        "warmup_batches",
        "warmup_seconds",
        "max_batches",
        "drop_cache",
        "store_latency",
        "compactors",
    ):
        if getattr(arguments, name) < 0:
            p.error(f"--{name.replace('_', '-')} must not be negative")
    if any(e.startswith("flink") for e in arguments.engines) and not FLINK_PYTHON.exists():
        p.error("Flink is not installed here; `make engines` installs it")


def measured(runs: Sequence[RunConfig], highest_rate_of: str | None, *, keep: bool) -> Iterator[Result]:
    """Yield the result of each run.

    Args:
        highest_rate_of: an engine that runs first for each query. The others then run at the highest rate that it keeps
            up with. None = all run as configured.
    """
    measure = partial(measure_and_report, keep=keep)
    if highest_rate_of is None:
        yield from map(measure, runs)
        return
    for peer in (config for config in runs if config.engine == highest_rate_of):
        highest = at_highest_rate(peer, measure)
        yield highest
        if highest.error is None and highest.refused is None:
            for config in runs:
                if config.query == peer.query and config is not peer:
                    yield measure(msgspec.structs.replace(config, rate=highest.rate))


def main(argv: Sequence[str] | None = None) -> int:
    """Run query by query and engine by engine; print the table, write JSON and plot. Return 1 if an engine failed."""
    p = parser()
    arguments = p.parse_args(argv)
    check(p, arguments)
    results: list[Result] = []
    temporary = None if arguments.work else Path(tempfile.mkdtemp(prefix="millpond-benchmark-"))
    arguments.work = arguments.work or temporary
    try:
        with sigterm_exits(), s3_server() if arguments.s3 else nullcontext("") as endpoint:
            runs = configs(arguments, endpoint)
            for result in measured(runs, arguments.highest_rate_of, keep=arguments.keep):
                results.append(result)
                if arguments.json is not None:
                    write(arguments.json, results)
    except KeyboardInterrupt:
        if not results:
            raise
        print("Interrupted; results so far:", file=sys.stderr)
    finally:
        if temporary is not None:
            with suppress(OSError):  # it holds the logs of failed runs, or folders to keep
                temporary.rmdir()
    results.sort(key=lambda result: arguments.engines.index(result.engine))
    if len({result.query for result in results}) > 1:
        print_suite(results)
    else:
        print_table(results)
    if arguments.plot is not None:
        plot(results, arguments.plot)
    return 1 if any(r.error is not None for r in results) else 0
