"""State on an object store: `python -m benchmarks.studies.disaggregated checkpoints|recoveries|cpu|caches`.

Measure figures 9, 10, 11 and 13 of Flink 2.0 (docs/references.md) again, with Millpond's state and Spark's on an S3
server (SeaweedFS):

- `checkpoints`: how long checkpoints take, by the size of the state.
- `recoveries`: how long a query takes to be ready after SIGKILL and the loss of its local disk. It has as many
  partitions as before, more, or fewer.
- `cpu`: cores in use while compaction runs in slots, or in a compactor.
- `caches`: rows per second where the state is larger than memory, by the share of it that may be copied to local disk.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.engines.s3 import s3_server
from benchmarks.measuring.arguments import count, engines, queries, setting
from benchmarks.measuring.harness import measure_and_report
from benchmarks.measuring.report import bar_groups, geometric_mean, measured
from benchmarks.measuring.result import Result, read, write
from benchmarks.workloads.config import RunConfig
from millpond.demo.charts import COLOURS, new_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LARGER_THAN_MEMORY = ("q4", "q7", "q9", "q18", "q19", "q20", "q23")
"""NEXMark's queries whose state grows with the number of events."""

Measure = Callable[..., Result]
"""Runs an engine with changed fields of its configuration; `variant` names the run in the figure."""


def checkpoints(options: argparse.Namespace, measure: Measure) -> Iterator[Result]:
    """Measure checkpoints of a count per key by size of the state: the time from sealed to durable state."""
    for keys in options.keys:
        for engine in options.engines:
            yield measure(engine, f"{keys:,} keys", "rmw", keys=keys, preload=True, warmup_batches=3)


def draw_checkpoints(axis: Axes, results: Sequence[Result]) -> None:
    """Draw the distribution of the durations, a line for each size and engine."""
    styles = dict(zip(_variants(results), ("-", "--", ":", "-."), strict=False))
    for r in results:
        seconds = np.sort([batch.checkpoint_ms for batch in r.batches if batch.checkpoint_ms is not None]) / 1000
        share = np.arange(1, len(seconds) + 1) / max(1, len(seconds))
        line, label = styles.get(r.extra["variant"], "-"), f"{r.engine}, {r.extra['variant']}"
        axis.step(seconds, share, line, where="post", color=COLOURS[r.engine], label=label)
    axis.set_xscale("log")
    axis.set_xlabel("checkpoint, s")
    axis.set_ylabel("share of checkpoints")


def recoveries(options: argparse.Namespace, measure: Measure) -> Iterator[Result]:
    """Measure a restart after SIGKILL and the loss of the local disk, by partitions before and after it."""
    for before, after in options.partitions:
        for engine in options.engines:
            yield measure(
                engine,
                f"{before} → {after}",
                "rmw",
                keys=options.keys[0],
                partitions=before,
                restart_partitions=after if after != before else 0,
                preload=True,
                warmup_batches=3,
                restart=True,
                lose_disk=True,
            )


def draw_recoveries(axis: Axes, results: Sequence[Result]) -> None:
    """Draw the seconds from the session to the end of the first batch, minus those of a start with no state."""
    _bars(axis, results, lambda r: r.restart.ready_s - r.restart.empty_s if r.restart is not None else 0.0)
    axis.set_ylabel("s more than with no state")
    axis.set_xlabel("partitions before → after")


def cpu(options: argparse.Namespace, measure: Measure) -> Iterator[Result]:
    """Measure a count per key with more state than memory: compaction in the slots, then by a compactor."""
    more = {"keys": options.keys[0], "slot_memory": options.slot_memory, "warmup_batches": 5}
    yield measure("millpond", "compaction in slots", "rmw", **more)
    yield measure("millpond", "by a compactor", "rmw", compaction="remote", compactors=1, **more)


def draw_cpu(axis: Axes, results: Sequence[Result]) -> None:
    """Draw the cores in use over time, with the compactor and without, and the p99 of batch times as a label."""
    for r in results:
        start = r.batches[0].start
        p99 = f"batch p99 {r.batch_ms.p99:,.0f} ms" if r.batch_ms is not None else ""
        if r.compactors_cpu:
            times, used = cores_in_use(r, compactors=True)
            axis.plot(times - start, used, ":", label=f"{r.extra['variant']}, with it")
        times, used = cores_in_use(r)
        axis.plot(times - start, used, label=f"{r.extra['variant']}: {p99}")
    axis.set_xlabel("s")
    axis.set_ylabel("cores in use")
    axis.set_ylim(bottom=0)


def cores_in_use(result: Result, *, compactors: bool = False) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return times from the first measured batch on, in seconds since the epoch, and the cores in use at each.

    Args:
        result: one engine's figures.
        compactors: whether compactors count.
    """
    samples = np.array([sample for sample in result.cpu if sample[0] >= result.batches[0].start])
    if result.compactors_cpu and not compactors:
        compactors_cpu = np.array(result.compactors_cpu)
        samples[:, 1] -= np.interp(samples[:, 0], compactors_cpu[:, 0], compactors_cpu[:, 1], left=0.0)
    return _rate(samples)


def _rate(samples: NDArray[np.float64], every: float = 2.0) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return CPU seconds per second, over steps of `every` seconds."""
    times = np.arange(samples[0, 0], samples[-1, 0], every)
    used = np.diff(np.interp(times, samples[:, 0], samples[:, 1])) / every
    return times[1:], used


def caches(options: argparse.Namespace, measure: Measure) -> Iterator[Result]:
    """Measure NEXMark with its state on local disk, on the store with a quarter of it copied, and with nothing copied.

    A last run copies nothing, and each batch waits for its commit. It stands for Flink's synchronous execution.
    """
    small = {"slot_memory": options.slot_memory, "warmup_batches": 3}
    for query in options.query:
        run = partial(measure, "millpond", query=query, **small)
        yield (local := run("local", "nexmark", s3=""))
        quarter = str(max(1 << 20, (local.state_store_bytes or 0) // 4 // local.partitions))
        yield run("store, ¼ copied", "nexmark", settings={"spark.millpond.cache.disk": quarter})
        yield run("store, no copies", "nexmark", settings={"spark.millpond.cache.disk": "0"})
        nothing = {"spark.millpond.cache.disk": "0"}
        yield run("store, no copies, commits waited for", "nexmark", settings=nothing, commit_mode="sync")


def draw_caches(axis: Axes, results: Sequence[Result]) -> None:
    """Draw rows per second by query, and the geometric mean of the ratios to those on local disk."""
    names = list(dict.fromkeys(r.query for r in results))
    variants = _variants(results)
    rates = {(r.query, r.extra["variant"]): r.rows_per_second for r in results}
    for variant, positions, width in bar_groups(variants, len(names)):
        ratios = [
            rates[name, variant] / rates[name, variants[0]]
            for name in names
            if rates.get((name, variant)) and rates.get((name, variants[0]))
        ]
        mean = geometric_mean(ratios)
        heights = [rates.get((name, variant), 0.0) / 1000 for name in names]
        axis.bar(positions, heights, width, label=variant if mean is None else f"{variant} ({mean:.2f})")
    axis.set_xticks(range(len(names)), names)
    axis.set_ylabel("thousand rows/s")


def _variants(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(r.extra["variant"] for r in results))


def _bars(axis: Axes, results: Sequence[Result], height: Callable[[Result], float]) -> None:
    variants, engines = _variants(results), list(dict.fromkeys(r.engine for r in results))
    for engine, positions, width in bar_groups(engines, len(variants)):
        heights = {r.extra["variant"]: height(r) for r in results if r.engine == engine}
        drawn = axis.bar(
            positions, [heights.get(variant, 0.0) for variant in variants], width, label=engine, color=COLOURS[engine]
        )
        axis.bar_label(drawn, fmt="%.1f")
    axis.set_xticks(range(len(variants)), variants)


FIGURES: dict[str, tuple[Callable[..., Iterator[Result]], Callable[..., None]]] = {
    "checkpoints": (checkpoints, draw_checkpoints),
    "recoveries": (recoveries, draw_recoveries),
    "cpu": (cpu, draw_cpu),
    "caches": (caches, draw_caches),
}


def plot(name: str, results: Sequence[Result], path: Path) -> None:
    """Draw a figure of measured results."""
    with style():
        figure = new_figure(8, 4.5)
        axis = figure.subplots()
        FIGURES[name][1](axis, [r for r in results if measured(r)])
        axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def pairs(text: str) -> list[tuple[int, int]]:
    """Parse numbers of partitions before and after a restart: `2:2,2:4`."""
    try:
        return [(int(before), int(after)) for before, after in (part.split(":") for part in text.split(","))]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not of the form 2:2,2:4, partitions before and after") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and draw one figure. Return 1 if an engine failed."""
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.disaggregated", description=(__doc__ or "").split("\n")[0]
    )
    add = p.add_argument
    add("figure", choices=FIGURES)
    add("--engines", type=engines, default=["millpond", "spark"], metavar="A,B")
    add("--keys", type=lambda text: [count(part) for part in text.split(",")], default=[10_000_000], metavar="K,K")
    add("--partitions", type=pairs, default="2:2,2:4,4:2", metavar="A:B,A:B", help="before and after a recovery")
    add("--query", type=queries, default=list(LARGER_THAN_MEMORY), metavar="A,B", help="of NEXMark, for caches")
    add("--rows-per-batch", type=count, default=200_000, metavar="N")
    add("--seconds", type=float, default=60.0, help="to measure each run")
    add("--slot-memory", default="32m", help="for cpu and caches: memory per slot, which the state has to exceed")
    add("--set", type=setting, action="append", default=[], metavar="KEY=VALUE", help="a setting of the engines")
    add("--json", type=Path, default=None, metavar="FILE", help="write the figures there; drawn from it if it is there")
    add("--work", type=Path, default=None, metavar="DIR", help="for checkpoints and logs; default: a temporary folder")
    add("--plot", type=Path, default=None, metavar="FILE", help="draw it there; default: FIGURE.png")
    options = p.parse_args(argv)
    path = options.plot or Path(f"{options.figure}.png")
    if options.json is not None and options.json.exists():
        plot(options.figure, read(options.json), path)
        return 0
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="millpond-disaggregated-") as folder, s3_server() as endpoint:
        work = (options.work or Path(folder)).resolve()

        def measure(engine: str, variant: str, workload: str, **changes: Any) -> Result:
            print(f"{variant}:", end=" ", file=sys.stderr)
            settings = dict(options.set) | changes.pop("settings", {})
            base = RunConfig(
                engine=engine,
                workload=workload,
                work=str(work / f"{len(results)}-{engine}"),
                rows_per_batch=options.rows_per_batch,
                seconds=options.seconds,
                s3=endpoint,
                settings=settings,
            )
            result = measure_and_report(msgspec.structs.replace(base, **changes), keep=False)
            result.extra["variant"] = variant
            return result

        for result in FIGURES[options.figure][0](options, measure):
            results.append(result)
            if options.json is not None:
                write(options.json, results)
    plot(options.figure, results, path)
    return 1 if any(r.error is not None for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
