"""Cost of timers by how many are due: `python -m benchmarks.studies.timers --engines millpond,spark`.

The workload `processor_timers` runs with a thousandth, a hundredth and a tenth of all timers due in each batch. A batch
has only a hundred rows: the more timers are due, the further events are apart in event time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.measuring.arguments import count, engines
from benchmarks.measuring.harness import measure_and_report
from benchmarks.measuring.process import sigterm_exits
from benchmarks.measuring.result import Result
from benchmarks.workloads.config import RunConfig

SHARES = (1000, 100, 10)
"""One timer in each of these numbers is due in each batch."""


def config(engine: str, share: int, options: argparse.Namespace, work: Path) -> RunConfig:
    """Return a run in which one in `share` timers is due in each batch.

    One timer is due in each millisecond of event time, so a batch spans as many milliseconds as it has due timers.
    """
    return RunConfig(
        engine=engine,
        workload="processor_timers",
        work=str(work / f"{engine}-{share}"),
        keys=options.keys,
        rows_per_batch=options.rows_per_batch,
        event_rate=max(1, options.rows_per_batch * 1000 * share // options.keys),
        preload=True,
        # The watermark is four seconds behind, and the first timers are due by the time of the last row that sets one.
        warmup_batches=-(-options.keys // options.rows_per_batch) + 5 + 4000 * share // options.keys,
        seconds=options.seconds,
    )


def shown(results: Sequence[tuple[int, Result]], keys: int) -> Table:
    """Return a table with the timers due in a batch, the batch time, and the time for 1,000 due timers, by run."""
    grid = Table(title=f"{keys:,} timers", title_justify="left")
    for name in ("engine", "due a batch", "batch ms p50", "ms for 1,000 due"):
        grid.add_column(name, justify="left" if name == "engine" else "right")
    for share, result in results:
        due = keys // share
        if result.batch_ms is None:
            grid.add_row(result.engine, f"{due:,}", "–", "–")
        else:
            p50 = result.batch_ms.p50
            grid.add_row(result.engine, f"{due:,}", f"{p50:,.0f}", f"{p50 * 1000 / due:,.1f}")
    return grid


def main(
    arguments: Sequence[str] | None = None,
    measure: Callable[..., Result] = measure_and_report,
    console: Console | None = None,
) -> int:
    """Run engine by engine and share by share, and print the table. Return 1 if a run failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.timers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--engines", type=engines, default=["millpond", "spark"], metavar="A,B")
    parser.add_argument("--keys", type=count, default=1_000_000, metavar="K", help="timers, one for each key")
    parser.add_argument("--rows-per-batch", type=count, default=100_000, metavar="N", help="of those that set timers")
    parser.add_argument("--seconds", type=float, default=30.0, help="to measure each")
    parser.add_argument(
        "--shares", type=count, nargs="+", default=SHARES, metavar="N", help="one in N timers is due in a batch"
    )
    options = parser.parse_args(arguments)
    results: list[tuple[int, Result]] = []
    with sigterm_exits(), tempfile.TemporaryDirectory(prefix="millpond-timers-") as folder:
        for engine in options.engines:
            runs = ((share, config(engine, share, options, Path(folder))) for share in options.shares)
            results.extend((share, measure(run, keep=False)) for share, run in runs)
    (console or Console()).print(shown(results, options.keys))
    return 1 if any(result.error is not None for _, result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
