"""The command line: `python -m benchmarks.misa --query LR2,LR4,CM1,CM2 --engines … --rates 1500,2500`.

Measure MiSA's workloads on Spark and Millpond, at each rate and trigger: LR2 and LR4 of Linear Road, CM1 and CM2 of
Cluster Monitoring. Records come in files by the clock.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from benchmarks.engines.s3 import s3_server
from benchmarks.measuring.arguments import count, names, setting
from benchmarks.measuring.process import sigterm_exits
from benchmarks.measuring.report import table_of_lines
from benchmarks.measuring.result import write
from benchmarks.misa.measure import measure
from benchmarks.misa.queries import QUERIES
from benchmarks.misa.result import Batch, Result
from benchmarks.misa.settings import ENGINES, EVENTS, Settings

_PAPER = ["LR2", "LR4", "CM1", "CM2"]
"""The queries of the paper, which run by default."""
_ENGINES = ["spark-shipped", "spark-best", "millpond"]
"""The engines that run by default."""


def rates(text: str) -> list[int]:
    """Parse records a second, separated by commas; 0 = as many as an engine takes."""
    return [0 if rate.strip() == "0" else count(rate) for rate in text.split(",")]


def seconds(text: str) -> list[float]:
    """Parse positive numbers of seconds, separated by commas."""
    triggers = [float(trigger) for trigger in text.split(",")]
    if min(triggers) <= 0:
        raise argparse.ArgumentTypeError(f"'{text}': a trigger must be longer than 0 s")
    return triggers


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.misa", description=(__doc__ or "").split("\n\n")[1])
    add = p.add_argument
    add("--query", type=names(QUERIES, "query"), default=_PAPER, metavar="A,B", help=", ".join(QUERIES))
    add("--engines", type=names(ENGINES, "engine"), default=_ENGINES, metavar="A,B", help=", ".join(ENGINES))
    add("--rates", type=rates, default=[1500], metavar="N,N", help="records a second; 0: as many as an engine takes")
    add("--trigger", type=seconds, default=[3.0], metavar="S,S", help="seconds between batches, or the deadline")
    add("--batches", type=count, default=100, help="to measure")
    add("--warmup", type=int, default=5, metavar="N", help="first batches to leave out")
    add("--rows-per-batch", type=count, default=450_000, metavar="N", help="where an engine gets as many as it takes")
    add("--seed", type=int, default=1)
    add("--cores", type=count, default=2)
    s3 = "the whole checkpoint on a real S3 server (SeaweedFS), or on the local disk"
    add("--s3", action=argparse.BooleanOptionalAction, default=False, help=s3)
    add("--driver-memory", default="4g")
    add("--slot-memory", default="1g", help="of each of Millpond's slots")
    add("--set", type=setting, action="append", default=[], metavar="KEY=VALUE", help="of Spark or Millpond")
    add("--events", type=Path, default=EVENTS, help="where streams of records are kept")
    add("--json", type=Path, default=None, metavar="FILE", help="write all figures there, run by run")
    return p


def runs(options: argparse.Namespace, endpoint: str = "") -> Iterator[Settings]:
    """Yield the settings of each run; at each rate, one engine follows another.

    Args:
        endpoint: of the S3 server; empty = local disk.
    """
    for query, rate, trigger, engine in itertools.product(
        options.query, options.rates, options.trigger, options.engines
    ):
        yield Settings(
            query=query,
            engine=engine,
            rate=rate,
            trigger=trigger,
            batches=options.batches,
            warmup=options.warmup,
            seed=options.seed,
            rows_per_batch=options.rows_per_batch,
            cores=options.cores,
            s3=endpoint,
            driver_memory=options.driver_memory,
            slot_memory=options.slot_memory,
            settings=dict(options.set),
            events=str(options.events),
        )


def line(result: Result) -> dict[str, str]:
    """Return a run's figures by column; times are in ms, and medians where the column names no other statistic."""
    settings = result.settings
    shown = {
        "query": settings.query,
        "engine": settings.engine,
        "rate": f"{settings.rate:,}" if settings.rate else "all",
        "trigger": f"{settings.trigger:g} s" if settings.rate or settings.engine == "spark-deadline" else "–",
    }
    if result.batch_ms is None and result.kept_up is False:
        return {**shown, "batches": "behind: no batch ended after those that are left out"}
    if result.batch_ms is None:
        reason = result.refused or (result.error or "").splitlines()[0]
        return {**shown, "batches": f"{'refused' if result.refused else 'failed'}: {reason}"}
    spread, rows = result.batch_ms, result.row_max_ms
    return {
        **shown,
        "batches": str(len(result.batches)),
        "p50": f"{spread.p50:,.0f}",
        "p99": f"{spread.p99:,.0f}",
        "max": f"{spread.max:,.0f}",
        "slope": f"{result.slope_ms:+.2f}",
        "row p99": f"{rows.p99:,.0f}" if rows else "–",
        "rows/s": f"{result.rows_per_second:,.0f}" + (" (behind)" if result.kept_up is False else ""),
        "KB/s": f"{result.kilobytes_per_second:,.0f}",
        "logs": _median(result.batches, lambda batch: batch.log_ms),
        "commit": _median(result.batches, lambda batch: batch.commit_ms),
        "durable": _median(result.batches, lambda batch: batch.durable_ms),
        "reads": _median(result.batches, lambda batch: batch.read_ms),
        "cores": f"{result.cores:.2f}",
        "memory": f"{result.memory_peak_bytes / 2**20:,.0f} MB",
    }


def _median(batches: Sequence[Batch], value_of: Callable[[Batch], float | None]) -> str:
    values = [value for value in map(value_of, batches) if value is not None]
    return f"{statistics.median(values):,.0f}" if values else "–"


def main(arguments: Sequence[str] | None = None, run: Callable[[Settings], Result] = measure) -> int:
    """Measure run by run, and print the table. Return 1 if a run failed."""
    options = parser().parse_args(arguments)
    results: list[Result] = []
    with sigterm_exits(), s3_server() if options.s3 else nullcontext("") as endpoint:
        for settings in runs(options, endpoint):
            results.append(run(settings))
            cells = line(results[-1]).items()
            print(", ".join(f"{name} {value}" for name, value in cells), file=sys.stderr, flush=True)
            if options.json is not None:
                write(options.json, results)
    Console(width=220).print(table_of_lines([line(result) for result in results], left=("query", "engine")))
    for result in results:
        if result.error is not None:
            print(result.error, file=sys.stderr)
    return int(any(result.error is not None for result in results))


if __name__ == "__main__":
    sys.exit(main())
