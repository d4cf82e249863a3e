"""The command line: `python -m benchmarks.prefetch latencies|skews|caches|thresholds|changes|highest|costs`.

Measure row latencies of NEXMark queries with hints and without. State is many times larger than memory, and lies on a
store with latency. Events arrive in files by the clock. The latency of a row is the time from the arrival of its file
to the end of its batch. Millpond runs with all state in memory, with hints, and without hints under each eviction
policy. Without hints, too, a batch reads the keys that it misses in groups and side by side.
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

from benchmarks.measuring.arguments import count, names, setting
from benchmarks.measuring.report import table_of_lines
from benchmarks.nexmark.generator import NexmarkConfig
from benchmarks.prefetch.figures import FIGURES, draw, line
from benchmarks.prefetch.run import KEYS, VARIANTS, Config, Measured

_DEFAULT = ["memory", "prefetching", "timestamp", "lru", "clock"]
"""Variants that run by default. `auto` is left out: for each query it equals `prefetching` or `timestamp`."""
_ENDING = 60.0
"""Seconds for which the slots of a run may finish their commits."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.prefetch", description=(__doc__ or "").split("\n\n")[1])
    add = p.add_argument
    add("figure", choices=FIGURES)
    add("--query", type=names(KEYS, "query"), default=["q18", "q19", "q20"], metavar="A,B")
    add("--variants", type=names(VARIANTS, "variant"), default=_DEFAULT, metavar="A,B")
    add("--latency", type=lambda text: [float(part) for part in text.split(",")], default=[1.5], metavar="MS,MS")
    add("--rate", type=count, default=30_000, help="events a second")
    add("--interval", type=float, default=1.0, help="seconds between two batches")
    add("--stage", type=float, default=0.0, metavar="MS", help="that bids wait, once their keys are known")
    add("--loaded", type=count, default=4_000_000, help="events that build up the state")
    add("--in-flight", type=count, default=100_000, help="auctions that may be bid on at a time")
    add("--people", type=count, default=20_000, help="people who may bid at a time")
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

            for measured in FIGURES[options.figure](options, measure):
                print(json.dumps(line(measured)), file=sys.stderr, flush=True)
                results.append(measured)
                if options.json is not None:
                    options.json.write_bytes(msgspec.json.encode(results))
    Console(width=200).print(table_of_lines([line(measured) for measured in results], left=("query", "variant")))
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
        process = subprocess.run(command, stdout=log, stderr=log, check=False, env={**os.environ, "TMPDIR": str(work)})
    if process.returncode:
        raise SystemExit("\n".join((work / "log").read_text(errors="replace").splitlines()[-30:]))
    deadline = time.monotonic() + _ENDING
    while _ending(work) and time.monotonic() < deadline:
        time.sleep(0.1)
    return msgspec.json.decode((work / "out.json").read_bytes(), type=Measured)


def _ending(work: Path) -> bool:
    """Return whether slots whose directory is below a folder are still finishing their commits."""
    try:
        return any(work.glob("millpond-*/*/slot-*.pid"))
    except FileNotFoundError:  # removed meanwhile
        return True


if __name__ == "__main__":
    sys.exit(main())
