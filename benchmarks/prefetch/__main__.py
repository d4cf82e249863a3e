"""The command line: `python -m benchmarks.prefetch latencies|skews|caches|thresholds|changes|highest|costs`.

NEXMark's events, with as many auctions in flight as make state large, arrive in files by the clock; state lies on a
store that takes its time, and is many times what there is memory for. A row is as late as the batch that has it ends
after its file came. Millpond runs with all state in memory, with hints, and without hints by each rule of what leaves
memory first. Without hints, too, a batch reads what it misses many keys at a time and side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.measuring.arguments import count, names, setting
from benchmarks.nexmark.generator import NexmarkConfig
from benchmarks.prefetch.figures import FIGURES, draw, line
from benchmarks.prefetch.run import KEYS, VARIANTS, Config, Measured

_DEFAULT = ["memory", "prefetching", "timestamp", "lru", "clock"]
"""Variants that run by default. `auto` is left out: for each query it equals `prefetching` or `timestamp`."""
_ENDING = 60.0
"""Seconds for which the slots of a run are waited for."""


def parser() -> argparse.ArgumentParser:
    """The arguments, with their defaults."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.prefetch", description=(__doc__ or "").split("\n\n")[1])
    add = p.add_argument
    add("figure", choices=FIGURES)
    add("--query", type=names(KEYS, "query"), default=["q18", "q19", "q20"], metavar="A,B")
    add("--variants", type=names(VARIANTS, "variant"), default=_DEFAULT, metavar="A,B")
    add("--latency", type=lambda text: [float(one) for one in text.split(",")], default=[1.5], metavar="MS,MS")
    add("--rate", type=count, default=30_000, help="events a second")
    add("--interval", type=float, default=1.0, help="seconds between two batches")
    add("--stage", type=float, default=0.0, metavar="MS", help="of work that bids wait for, their keys known before")
    add("--loaded", type=count, default=4_000_000, help="events that bring state about")
    add("--in-flight", type=count, default=100_000, help="auctions that may be bid on at a time")
    add("--people", type=count, default=20_000, help="who may bid at a time")
    add("--seconds", type=float, default=30.0, help="to measure each run")
    add("--warmup", type=float, default=12.0, help="seconds of arriving events before that")
    add("--slot-memory", default="32m", help="of each of two slots")
    add("--set", type=setting, action="append", default=[], metavar="KEY=VALUE", help="of spark.millpond.")
    add("--events", type=Path, default=Path(tempfile.gettempdir()) / "millpond-events", help="where events are kept")
    add("--json", type=Path, default=None, metavar="FILE", help="write the figures there; drawn from it if it is there")
    add("--plot", type=Path, default=None, metavar="FILE", help="draw it there; default: FIGURE.png")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and draw one figure."""
    p = parser()
    options = p.parse_args(argv)
    options.stream = NexmarkConfig(
        in_flight_auctions=options.in_flight, active_people=options.people, hot_every=6_000, rate=100_000
    )
    path = options.plot or Path(f"{options.figure}.png")
    results: list[Measured] = []
    if options.json is not None and options.json.exists():
        results = msgspec.json.decode(options.json.read_bytes(), type=list[Measured])
    else:
        with tempfile.TemporaryDirectory(prefix="millpond-prefetch-") as folder:

            def measure(variant: str, **changes: Any) -> Measured:
                return _measured(Path(folder), variant, options, changes)

            for found in FIGURES[options.figure](options, measure):
                print(json.dumps(line(found)), file=sys.stderr, flush=True)
                results.append(found)
                if options.json is not None:
                    options.json.write_bytes(msgspec.json.encode(results))
    table = Table()
    for name in line(results[0]):
        table.add_column(name.strip(), justify="left" if name in ("query", "variant") else "right")
    for found in results:
        table.add_row(*line(found).values())
    Console(width=200).print(table)
    draw(options.figure, results, path)
    return 0


def _measured(folder: Path, variant: str, options: argparse.Namespace, changes: dict[str, Any]) -> Measured:
    """Run a variant in a process of its own."""
    work = folder / "run"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    base = Config(
        query=options.query[0],
        variant=variant,
        work=str(work / "work"),
        events=str(options.events),
        stream=options.stream,
        loaded=options.loaded,
        rate=options.rate,
        interval=options.interval,
        warmup=options.warmup,
        seconds=options.seconds,
        latency_ms=options.latency[0],
        slot_memory=options.slot_memory,
        stage_ms=options.stage,
        settings=dict(options.set),
    )
    (work / "config.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(base, **changes)))
    command = [sys.executable, "-m", "benchmarks.prefetch.run", str(work / "config.json"), str(work / "out.json")]
    with (work / "log").open("wb") as log:
        done = subprocess.run(command, stdout=log, stderr=log, check=False, env={**os.environ, "TMPDIR": str(work)})
    if done.returncode:
        raise SystemExit("\n".join((work / "log").read_text(errors="replace").splitlines()[-30:]))
    deadline = time.monotonic() + _ENDING
    while _ending(work) and time.monotonic() < deadline:
        time.sleep(0.1)
    return msgspec.json.decode((work / "out.json").read_bytes(), type=Measured)


def _ending(work: Path) -> bool:
    """Whether slots that were started with their directory in a folder still finish their commits."""
    try:
        return any(work.glob("millpond-*/*/slot-*.pid"))
    except FileNotFoundError:  # removed meanwhile
        return True


if __name__ == "__main__":
    sys.exit(main())
