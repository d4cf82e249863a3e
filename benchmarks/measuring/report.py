"""Figures for people: tables in the terminal, plots in files."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.measuring.result import Requests, Result, Spread
from millpond.demo.charts import COLOURS, QUIET, as_svg, new_figure, style
from millpond.metrics import request_cost

_COLUMNS = (
    *("rows/s", "× spark", "batch ms p50/p95/p99", "commit ms p50/p95/p99", "CPU s/M rows"),
    *("memory MB", "disk MB", "store MB", "new objects"),
)


def _number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _spread(spread: Spread | None) -> str:
    return "–" if spread is None else f"{spread.p50:,.0f} / {spread.p95:,.0f} / {spread.p99:,.0f}"


def _mega(value: int | None) -> str:
    return f"{value / 1e6:,.0f}" if value else "–"


def measured(result: Result) -> bool:
    """Return whether a run has figures."""
    return result.error is None and result.refused is None


def outcome(result: Result) -> str:
    """Return the text that stands in place of the figures of a run without figures."""
    return "refused" if result.refused is not None else "failed"


def summary(result: Result) -> str:
    """Return the result of a run in one line; if it failed, with the full reason."""
    reason = result.error or result.refused
    if reason is not None:
        return f"{outcome(result)}: {reason}"
    return f"{_number(result.rows_per_second)} rows/s; batch ms p50/p95/p99 {_spread(result.batch_ms)}"


def table(results: list[Result]) -> Table:
    """Return a table with one row per engine."""
    first = results[0]
    workload = f"{first.workload} {first.query}".strip()
    arriving = f"{first.rate:,} rows a second" if first.rate else f"{first.rows_per_batch:,} rows a batch"
    title = f"{workload}, {arriving}" + ("" if first.workload == "nexmark" else f", {first.keys:,} keys")
    grid = Table(title=title, title_justify="left")
    grid.add_column("engine")
    for name in _COLUMNS:
        grid.add_column(name, justify="right", no_wrap=True)
    base = next((r.rows_per_second for r in results if r.engine == "spark"), 0.0)
    for r in results:
        if not measured(r):
            grid.add_row(r.engine, outcome(r))
            continue
        grid.add_row(
            r.engine,
            _number(r.rows_per_second),
            _number(r.rows_per_second / base, 1) if base else "–",
            _spread(r.batch_ms),
            _spread(r.commit_ms),
            _number(r.cpu_seconds_per_million_rows, 2),
            _mega(r.memory_group_peak_bytes or r.memory_peak_bytes),
            _mega(r.state_disk_bytes),
            _mega(r.state_store_bytes),
            "–" if r.new_objects is None else str(r.new_objects),
        )
    return grid


def geometric_mean(ratios: list[float]) -> float | None:
    """Return the mean that treats twice and half as fast alike; None if there are no ratios."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


def suite(results: list[Result]) -> Table:
    """Return a table with one row per query.

    Each engine has columns for rows/s and for the 99th percentile of batch times. Further columns divide the first
    engine's rows/s by those of each other engine. The last row has geometric means over the queries that both engines
    ran.
    """
    engines = list(dict.fromkeys(r.engine for r in results))
    queries = list(dict.fromkeys(r.query for r in results))
    arriving = "by the clock" if results[0].rate else f"{results[0].rows_per_batch:,} rows a batch"
    grid = Table(title=f"{results[0].workload}, {arriving}", title_justify="left")
    grid.add_column("query", no_wrap=True)
    for engine in engines:
        grid.add_column(f"{engine}\nrows/s", justify="right", no_wrap=True)
        grid.add_column("batch ms\np99", justify="right", no_wrap=True)
    for other in engines[1:]:
        grid.add_column(f"{engines[0]}\n÷ {other}", justify="right", no_wrap=True)
    by_run = {(r.query, r.engine): r for r in results}
    ratios: dict[str, list[float]] = {other: [] for other in engines[1:]}
    for query in queries:
        runs = {engine: by_run[query, engine] for engine in engines if (query, engine) in by_run}
        cells = [cell for engine in engines for cell in _figures(runs.get(engine))]
        for other in ratios:
            ratio = _ratio(runs.get(engines[0]), runs.get(other))
            ratios[other] += [] if ratio is None else [ratio]
            cells.append(_number(ratio, 2))
        grid.add_row(query, *cells)
    if ratios:
        means = [_number(geometric_mean(by_query), 2) for by_query in ratios.values()]
        grid.add_section()
        grid.add_row("geometric mean", *[""] * (2 * len(engines)), *means)
    return grid


def _figures(result: Result | None) -> tuple[str, str]:
    if result is None:
        return "–", "–"
    if not measured(result):
        return outcome(result), "–"
    return _number(result.rows_per_second), _number(result.batch_ms.p99 if result.batch_ms is not None else None)


def _ratio(ours: Result | None, theirs: Result | None) -> float | None:
    if ours is None or theirs is None or not ours.rows_per_second or not theirs.rows_per_second:
        return None
    return ours.rows_per_second / theirs.rows_per_second


def table_of_lines(lines: Sequence[Mapping[str, str]], left: Collection[str]) -> Table:
    """Return a table of lines, each with its cells by column.

    Args:
        left: columns that are aligned to the left.
    """
    columns = list(dict.fromkeys(name for cells in lines for name in cells))
    grid = Table()
    for name in columns:
        grid.add_column(name.strip(), justify="left" if name in left else "right")
    for cells in lines:
        grid.add_row(*(cells.get(name, "") for name in columns))
    return grid


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=160)


def print_suite(results: list[Result]) -> None:
    """Print the table of several queries."""
    _console().print(suite(results))


def print_table(results: list[Result]) -> None:
    """Print the table of one query, and a line for each run with counted requests or a restart."""
    console = _console()
    console.print(table(results))
    for r in results:
        if r.requests is not None and r.batches:
            console.print(f"{r.engine}: {_requests_of_a_batch(r.requests, len(r.batches))}")
        if r.restart is not None:
            console.print(
                f"{r.engine}: first batch after a restart {r.restart.first_batch_ms:,.0f} ms,"
                f" {r.restart.extra_ms:,.0f} ms more than a steady one; ready after {r.restart.ready_s:.1f} s,"
                f" with no state after {r.restart.empty_s:.1f} s"
                + ("" if r.restart.repartition_s is None else f" (repartitioned in {r.restart.repartition_s:.1f} s)")
            )


def _requests_of_a_batch(requests: Requests, batches: int) -> str:
    per_batch = {kind: getattr(requests, kind) / batches for kind in ("puts", "gets", "lists", "heads", "deletes")}
    counts = ", ".join(f"{number:.1f} {kind}" for kind, number in per_batch.items())
    return (
        f"asked of the store for state in a batch: {counts}, {requests.bytes / batches / 1e6:.2f} MB;"
        f" {request_cost(per_batch):,.2f} dollars for a million batches"
    )


def bar_groups(names: Collection[str], places: int) -> Iterator[tuple[str, list[float], float]]:
    """Yield each name with the positions of its bars, and the width of a bar: at each place, all names side by side."""
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        yield name, [place + (number - (len(names) - 1) / 2) * width for place in range(places)], width


def plot(results: list[Result], path: Path) -> None:
    """Draw rows/s and batch times over the run; `.html` gives a page with the picture in it."""
    with style():
        figure = new_figure(12, 4.5)
        bars, lines = figure.subplots(1, 2, width_ratios=(1, 2))
        drawn = [r for r in results if measured(r)]
        colours = [COLOURS.get(r.engine, QUIET) for r in drawn]
        rates = bars.bar([r.engine for r in drawn], [r.rows_per_second for r in drawn], color=colours)
        bars.bar_label(rates, [f"{r.rows_per_second / 1000:,.0f} k" for r in drawn])
        bars.set_ylabel("rows/s")
        bars.tick_params(axis="x", rotation=20)
        for r, colour in zip(drawn, colours, strict=True):
            if r.batches and r.batch_ms is not None:
                start = r.batches[0].start
                x, y = [b.start - start for b in r.batches], [b.ms for b in r.batches]
                lines.plot(x, y, label=r.engine, color=colour, marker=".")
        lines.set_xlabel("seconds")
        lines.set_ylabel("batch ms")
        lines.set_ylim(bottom=0)
        lines.legend()
        if results:
            figure.suptitle(f"{results[0].workload} {results[0].query}".strip())
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".html":
        path.write_text(f"<!doctype html><title>Benchmark</title>{as_svg(figure, 'benchmark')}\n")
    else:
        figure.savefig(path, dpi=120)
