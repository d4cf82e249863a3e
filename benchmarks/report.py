"""Figures for people: a table in the terminal, a plot in a file."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.result import Result, Spread

_COLOURS = {"millpond": "#1f6feb", "spark": "#e25a1c", "flink-rocksdb": "#8957e5", "flink-forst": "#bf3989"}
_COLUMNS = (
    *("rows/s", "× spark", "batch ms p50/p99/max", "commit ms p50/p99/max", "CPU s/M rows"),
    *("memory MB", "disk MB", "store MB", "puts"),
)


def _number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _spread(spread: Spread | None) -> str:
    return "–" if spread is None else f"{spread.p50:,.0f} / {spread.p99:,.0f} / {spread.max:,.0f}"


def _mega(value: int) -> str:
    return f"{value / 1e6:,.0f}" if value else "–"


def table(results: list[Result]) -> Table:
    """One row per engine."""
    first = results[0]
    what = f"{first.workload} {first.query}".strip()
    title = f"{what}, {first.rows_per_batch:,} rows a batch" + (
        "" if first.workload == "nexmark" else f", {first.keys:,} keys"
    )
    found = Table(title=title, title_justify="left")
    found.add_column("engine")
    for name in _COLUMNS:
        found.add_column(name, justify="right", no_wrap=True)
    base = next((r.rows_per_second for r in results if r.engine == "spark"), 0.0)
    for r in results:
        if r.error is not None:
            found.add_row(r.engine, "failed")
            continue
        found.add_row(
            r.engine,
            _number(r.rows_per_second),
            _number(r.rows_per_second / base, 1) if base else "–",
            _spread(r.batch_ms),
            _spread(r.commit_ms),
            _number(r.cpu_seconds_per_million_rows, 2),
            _mega(r.memory_group_peak_bytes or r.memory_peak_bytes),
            _mega(r.state_disk_bytes),
            _mega(r.state_store_bytes),
            str(r.puts),
        )
    return found


def print_table(results: list[Result]) -> None:
    """Print the table, and a line per restart."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(table(results))
    for r in results:
        if r.restart is not None:
            console.print(
                f"{r.engine}: first batch after a restart {r.restart.first_batch_ms:,.0f} ms,"
                f" {r.restart.extra_ms:,.0f} ms more than a steady one; ready after {r.restart.ready_s:.1f} s"
            )


def plot(results: list[Result], path: Path) -> None:
    """Draw rows/s and batch times over the run; `.html` gives a page with the picture in it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (bars, lines) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained", width_ratios=(1, 2))
    good = [r for r in results if r.error is None]
    colours = [_COLOURS.get(r.engine, "#57606a") for r in good]
    drawn = bars.bar([r.engine for r in good], [r.rows_per_second for r in good], color=colours)
    bars.bar_label(drawn, [f"{r.rows_per_second / 1000:,.0f} k" for r in good])
    bars.set_ylabel("rows/s")
    bars.tick_params(axis="x", rotation=20)
    for r, colour in zip(good, colours, strict=True):
        if r.batches and r.batch_ms is not None:
            start = r.batches[0].start
            lines.plot(
                [b.start - start for b in r.batches],
                [b.ms for b in r.batches],
                label=r.engine,
                color=colour,
                marker=".",
            )
    lines.set_xlabel("seconds")
    lines.set_ylabel("batch ms")
    lines.set_ylim(bottom=0)
    lines.legend()
    if results:
        figure.suptitle(f"{results[0].workload} {results[0].query}".strip())
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".html":
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=120)
        data = base64.b64encode(picture.getvalue()).decode()
        path.write_text(f'<!doctype html><title>Benchmark</title><img src="data:image/png;base64,{data}" alt="plot">\n')
    else:
        figure.savefig(path, dpi=120)
    pyplot.close(figure)
