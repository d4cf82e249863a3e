"""The figures: which runs each is made of, and how it is drawn."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.prefetch.run import VARIANTS, Measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Measure = Callable[..., Measured]
"""Runs a variant with some fields of its configuration."""

_SMALLER = ("prefetching", "timestamp", "lru", "clock")
_HIGHEST = (1.0, 0.85, 0.7, 0.55, 0.4, 0.3, 0.2)
"""Rates that are tried, from above, as shares of what is taken with all state in memory."""


def latencies(options: argparse.Namespace, measure: Measure) -> Iterator[Measured]:
    """Latencies of rows, by query, with all in memory, with hints, and without by what leaves memory (Fig. 6)."""
    for query in options.query:
        for latency in options.latency:
            for variant in options.variants:
                yield measure(variant, query=query, latency_ms=latency)


def skews(options: argparse.Namespace, measure: Measure) -> Iterator[Measured]:
    """By how many bids are for the hot auction (Fig. 7)."""
    for share in (0, 25, 50, 75, 95):
        stream = msgspec.structs.replace(options.stream, hot_bids=share)
        for variant in options.variants:
            yield measure(variant, query=options.query[0], stream=stream)


def caches(options: argparse.Namespace, measure: Measure) -> Iterator[Measured]:
    """By the memory of a slot (Fig. 8)."""
    for memory in ("24m", "32m", "64m", "128m"):
        for variant in [one for one in options.variants if one != "memory"]:
            yield measure(variant, query=options.query[0], slot_memory=memory)


def thresholds(options: argparse.Namespace, measure: Measure) -> Iterator[Measured]:
    """By how often a key comes until hints leave it out (Fig. 9)."""
    for hot in (1, 2, 4, 8, 16, 64):
        yield measure("prefetching", query=options.query[0], hot=hot)


def changes(options: argparse.Namespace, measure: Measure) -> Iterator[Measured]:
    """Batch by batch, where in mid-run many more auctions are bid on: who announces keys adapts (Fig. 10)."""
    for variant in [one for one in options.variants if one != "memory"]:
        yield measure(variant, query=options.query[0], changed=True)


def highest(options: argparse.Namespace, measure: Measure) -> Iterator[Measured]:
    """The highest rate that is kept up with, in steps of what is taken with all state in memory."""
    for query in options.query:
        yield (top := measure("memory", query=query, rate=0))
        for variant in [one for one in options.variants if one != "memory"]:
            for share in _HIGHEST:
                found = measure(variant, query=query, rate=round(top.events_per_second * share))
                yield found
                if found.kept_up:
                    break


def costs(options: argparse.Namespace, measure: Measure) -> Iterator[Measured]:
    """Cost of hints where all state is in memory: as many events as are taken, with and without."""
    for query in options.query:
        for prefetch in ("on", "off") * 2:
            yield measure("memory", query=query, rate=0, settings={"prefetch": prefetch})


FIGURES: dict[str, Callable[[argparse.Namespace, Measure], Iterator[Measured]]] = {
    one.__name__: one for one in (latencies, skews, caches, thresholds, changes, highest, costs)
}


def place_of(name: str, found: Measured) -> str:
    """Return the step of a figure that a run belongs to."""
    config = found.config
    return {
        "latencies": f"{config.query}, {config.latency_ms:g} ms",
        "skews": f"{config.stream.hot_bids} %",
        "caches": config.slot_memory,
        "thresholds": f"{config.hot}",
        "highest": config.query,
        "costs": f"{config.query}, prefetch={config.settings.get('prefetch', 'on')}",
    }.get(name, config.query)


def draw(name: str, results: Sequence[Measured], path: Path) -> None:
    """Draw a figure of what was measured."""
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
    for found in results:
        start = found.trace[0][0]
        ends, took = [end - start for end, _, _ in found.trace], [ms for _, ms, _ in found.trace]
        axis.plot(ends, took, label=found.config.variant)
    axis.set_xlabel("s")
    axis.set_ylabel("batch, ms")


def _bars(axis: Axes, name: str, results: Sequence[Measured]) -> None:
    places = list(dict.fromkeys(place_of(name, one) for one in results))
    variants = [one for one in VARIANTS if any(found.config.variant == one for found in results)]
    width = 0.8 / len(variants)
    for number, variant in enumerate(variants):
        mine = {place_of(name, one): one for one in results if one.config.variant == variant}
        at = [place + (number - (len(variants) - 1) / 2) * width for place in range(len(places))]

        def height(place: str, of: Callable[[Measured], float], mine: dict[str, Measured] = mine) -> float:
            return of(mine[place]) if place in mine else 0.0

        if name in ("highest", "costs"):
            heights = [height(place, lambda one: one.events_per_second / 1000) for place in places]
            axis.bar(at, heights, width, label=variant)
        else:
            drawn = axis.bar(at, [height(place, lambda one: one.rows.p999) for place in places], width, label=variant)
            axis.bar(at, [height(place, lambda one: one.rows.p50) for place in places], width, color="black", alpha=0.3)
            axis.bar_label(drawn, fmt="%.0f", fontsize=7)
    axis.set_xticks(range(len(places)), places)
    axis.set_ylabel("thousand events/s" if name in ("highest", "costs") else "row latency, ms: p999 (p50 in grey)")


def line(found: Measured) -> dict[str, Any]:
    """Figures of a run."""
    figures = found.figures
    read, used = figures.get("prefetched_keys", 0.0), figures.get("prefetched_used", 0.0)
    asked = figures.get("cache_misses", 0.0)
    return {
        "query": found.config.query,
        "variant": found.config.variant,
        "store ms": f"{found.config.latency_ms:g}",
        "rate": f"{found.config.rate:,}",
        "events/s": f"{found.events_per_second:,.0f}",
        "row p50": f"{found.rows.p50:,.0f}",
        "p99": f"{found.rows.p99:,.0f}",
        "p999": f"{found.rows.p999:,.0f}",
        "batch p50": f"{found.batches.p50:,.0f}",
        "p999 ": f"{found.batches.p999:,.0f}",
        "cores": f"{found.cpu:.2f}",
        "missing": f"{asked:,.0f}",
        "read ahead": f"{read:,.0f}",
        "used": f"{used:,.0f}",
        "hints": f"{100 * found.hint_share:.1f} %",
        "kept up": "yes" if found.kept_up else "no",
    }
