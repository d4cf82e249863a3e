"""The figures: which runs each consists of, and how it is drawn."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benchmarks.measuring.report import bar_groups
from benchmarks.prefetch.run import VARIANTS, Measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Measure = Callable[..., Measured]
"""Runs a variant with changed fields of its configuration."""

_HIGHEST = (1.0, 0.85, 0.7, 0.55, 0.4, 0.3, 0.2)
"""Rates to try, the highest first, as shares of the rate with all state in memory."""


def latencies(options: argparse.Namespace, measure: Measure) -> Iterator[Measured]:
    """Measure latencies of rows by query and latency of the store, with all variants (Fig. 6)."""
    for query in options.query:
        for latency in options.latency:
            for variant in options.variants:
                yield measure(variant, query=query, latency_ms=latency)


def skews(options: argparse.Namespace, measure: Measure) -> Iterator[Measured]:
    """Vary the share of bids that are for the hot auction (Fig. 7)."""
    for share in (0, 50, 95):
        stream = msgspec.structs.replace(options.stream, hot_bids=share)
        for variant in _without_memory(options):
            yield measure(variant, query=options.query[0], stream=stream)


def caches(options: argparse.Namespace, measure: Measure) -> Iterator[Measured]:
    """Vary the memory of a slot (Fig. 8)."""
    for memory in ("24m", "32m", "128m"):
        for variant in _without_memory(options):
            yield measure(variant, query=options.query[0], slot_memory=memory)


def thresholds(options: argparse.Namespace, measure: Measure) -> Iterator[Measured]:
    """Vary the count of a key from which on it gets no hints (Fig. 9)."""
    for hot in (1, 2, 4, 8, 16, 64):
        yield measure("prefetching", query=options.query[0], hot=hot)


def changes(options: argparse.Namespace, measure: Measure) -> Iterator[Measured]:
    """Spread bids over many more auctions from mid-run on, to which hints adapt (Fig. 10)."""
    for variant in _without_memory(options):
        yield measure(variant, query=options.query[0], changed=True)


def highest(options: argparse.Namespace, measure: Measure) -> Iterator[Measured]:
    """Find the highest rate that each variant keeps up with, in steps below the rate with all state in memory."""
    for query in options.query:
        yield (top := measure("memory", query=query, rate=0))
        for variant in _without_memory(options):
            for share in _HIGHEST:
                measured = measure(variant, query=query, rate=round(top.events_per_second * share))
                yield measured
                if measured.kept_up:
                    break


def costs(options: argparse.Namespace, measure: Measure) -> Iterator[Measured]:
    """Measure the cost of hints where all state is in memory: the rate without a clock, with hints and without."""
    for query in options.query:
        for prefetch in ("on", "off") * 2:
            yield measure("memory", query=query, rate=0, settings={"prefetch": prefetch})


def _without_memory(options: argparse.Namespace) -> list[str]:
    return [variant for variant in options.variants if variant != "memory"]


FIGURES: dict[str, Callable[[argparse.Namespace, Measure], Iterator[Measured]]] = {
    runs.__name__: runs for runs in (latencies, skews, caches, thresholds, changes, highest, costs)
}


def place_of(name: str, measured: Measured) -> str:
    """Return the step of a figure that a run belongs to."""
    config = measured.config
    return {
        "latencies": f"{config.query}, {config.latency_ms:g} ms",
        "skews": f"{config.stream.hot_bids} %",
        "caches": config.slot_memory,
        "thresholds": f"{config.hot}",
        "highest": config.query,
        "costs": f"{config.query}, prefetch={config.settings.get('prefetch', 'on')}",
    }.get(name, config.query)


def draw(name: str, results: Sequence[Measured], path: Path) -> None:
    """Draw a figure of measured runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    if name == "changes":
        _over_time(axis, results)
    else:
        _bars(axis, name, results)
    axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _over_time(axis: Axes, results: Sequence[Measured]) -> None:
    for measured in results:
        start = measured.trace[0][0]
        ends, durations = [end - start for end, _, _ in measured.trace], [ms for _, ms, _ in measured.trace]
        axis.plot(ends, durations, label=measured.config.variant)
    axis.set_xlabel("s")
    axis.set_ylabel("batch, ms")


def _bars(axis: Axes, name: str, results: Sequence[Measured]) -> None:
    places = list(dict.fromkeys(place_of(name, measured) for measured in results))
    variants = [variant for variant in VARIANTS if any(measured.config.variant == variant for measured in results)]
    rates = name in ("highest", "costs")
    for variant, positions, width in bar_groups(variants, len(places)):
        runs = {place_of(name, measured): measured for measured in results if measured.config.variant == variant}

        def heights(value: Callable[[Measured], float], runs: dict[str, Measured] = runs) -> list[float]:
            return [value(runs[place]) if place in runs else 0.0 for place in places]

        if rates:
            thousands = heights(lambda measured: measured.events_per_second / 1000)
            axis.bar(positions, thousands, width, label=variant)
        else:
            drawn = axis.bar(positions, heights(lambda measured: measured.rows.p999), width, label=variant)
            axis.bar(positions, heights(lambda measured: measured.rows.p50), width, color="black", alpha=0.3)
            axis.bar_label(drawn, fmt="%.0f", fontsize=7)
    axis.set_xticks(range(len(places)), places)
    axis.set_ylabel("thousand events/s" if rates else "row latency, ms: p999 (p50 in grey)")


def line(measured: Measured) -> dict[str, str]:
    """Return the figures of a run by column."""
    figures = measured.figures
    return {
        "query": measured.config.query,
        "variant": measured.config.variant,
        "store ms": f"{measured.config.latency_ms:g}",
        "rate": f"{measured.config.rate:,}",
        "events/s": f"{measured.events_per_second:,.0f}",
        "row p50": f"{measured.rows.p50:,.0f}",
        "p99": f"{measured.rows.p99:,.0f}",
        "p999": f"{measured.rows.p999:,.0f}",
        "batch p50": f"{measured.batches.p50:,.0f}",
        "p999 ": f"{measured.batches.p999:,.0f}",
        "cores": f"{measured.cpu:.2f}",
        "missing": f"{figures.get('cache_misses', 0.0):,.0f}",
        "read ahead": f"{figures.get('prefetched_keys', 0.0):,.0f}",
        "used": f"{figures.get('prefetched_used', 0.0):,.0f}",
        "hints": f"{100 * measured.hint_share:.1f} %",
        "kept up": "yes" if measured.kept_up else "no",
    }
