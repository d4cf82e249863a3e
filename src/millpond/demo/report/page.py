"""The demo's report: a self-contained HTML file."""

from __future__ import annotations

import time
from html import escape
from pathlib import Path
from string import Template

import msgspec

from millpond.demo.engines.figures import rounded, shown, times
from millpond.demo.report.chart import Chart, svg
from millpond.demo.report.curves import batch_times, rates, timeline
from millpond.demo.report.report import Report

_STYLE = """
:root { --paper:#fff; --card:#fff; --ink:#18212f; --quiet:#5b6675; --line:#e3e7ed; --millpond:#1668dc; --spark:#d9580d;
  --good:#1a7f4b; --bad:#c92a2a }
body { font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif }
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink) }
main { max-width: 1136px; margin: 0 auto; padding: 40px 24px 56px }
h1 { font-size: 17px; font-weight: 600; margin: 0 0 4px } h1 b { color: var(--millpond) }
h2 { font-size: 17px; margin: 40px 0 12px }
p { margin: 0 0 8px } .quiet { color: var(--quiet); font-size: 14px }
.hero { display: flex; flex-wrap: wrap; align-items: center; gap: 8px 28px; margin: 28px 0 24px }
.ratio { font-size: 92px; line-height: 1; font-weight: 750; color: var(--millpond); letter-spacing: -3px }
.claim { font-size: 24px; line-height: 1.3; font-weight: 600; max-width: 24em }
.verdict { font-weight: 600; font-size: 16px; margin-top: 6px }
.good { color: var(--good) } .bad { color: var(--bad); overflow-wrap: anywhere }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(220px, 1fr)); gap: 14px }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 12px }
.tile { padding: 16px 18px } .tile .what { color: var(--quiet); font-size: 14px; margin-bottom: 6px }
.pair { display: grid; grid-template-columns: 1fr auto; gap: 2px 12px; align-items: baseline }
.pair b { font-size: 21px; text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.pair span { font-size: 14px } .pair .spark { color: var(--spark) } .pair .millpond { color: var(--millpond) }
.card { padding: 20px 22px; margin-top: 16px; overflow-x: auto }
.card svg { display: block; margin: 0 auto; max-width: 100%; height: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: 7px 12px 7px 0; text-align: left; border-bottom: 1px solid var(--line); font-size: 15px }
tr:last-child td { border-bottom: 0 } th { font-size: 14px; color: var(--quiet); font-weight: 600 }
.number { text-align: right; white-space: nowrap; padding-right: 0; padding-left: 16px }
pre { margin: 0; font: 13.5px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere }
dl { display: grid; grid-template-columns: minmax(110px, auto) 1fr; gap: 6px 20px; margin: 0; font-size: 15px }
dt { color: var(--quiet) } dd { margin: 0; overflow-wrap: anywhere }
details summary { cursor: pointer; color: var(--quiet); font-size: 14px; margin-top: 14px }
footer { margin-top: 32px; color: var(--quiet); font-size: 14px }
@media (max-width: 720px) {
  main { padding: 24px 14px 40px } .ratio { font-size: 72px } .claim { font-size: 20px }
  .card { padding: 16px 12px }
  th, td { font-size: 14px } dl { grid-template-columns: 1fr; gap: 0 } dd { margin-bottom: 8px }
}
@media print { .card, .tile { break-inside: avoid } }
"""

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Millpond demo: $ratio× Spark's RocksDB</title>
<style>$style</style></head><body><main>
<h1><b>Millpond</b> demo · $title</h1>
<p class="quiet">$about</p>
<div class="hero"><div class="ratio">$ratio×</div><div>
<div class="claim">the rows per second of Spark's RocksDB state store: same query, same rows, same $cores cores</div>
<div class="verdict $good">$verdict</div></div></div>
<div class="tiles">$tiles</div>
$charts
<h2>Figures</h2>
<div class="card"><table><thead><tr><th></th><th class="number">Spark (RocksDB)</th>
<th class="number">Millpond</th></tr></thead><tbody>$rows</tbody></table></div>
<p class="quiet" style="margin-top:10px">$counted One engine after the other, each in processes
of its own. Both were killed with SIGKILL in mid-stream, all of their processes at once, and started again on what was
durable.</p>
<h2>The query</h2>
<div class="card"><pre>$source</pre></div>
<h2>What ran where</h2>
<div class="card"><pre>$explained</pre></div>
<h2>Machine and versions</h2>
<div class="card"><dl>$machine</dl><details><summary>Settings, the same for both engines</summary>
<pre style="margin-top:10px">$settings</pre></details></div>
<footer>$finished · <code>millpond demo --query $query</code> makes this page; it holds its figures as JSON,
too.</footer>
<script type="application/json" id="figures">$json</script>
</main></body></html>
""")


def render(report: Report) -> str:
    """Return the page as HTML."""
    spark, millpond = report.runs
    tiles = (
        ("Rows per second", rounded(spark.rate()), rounded(millpond.rate())),
        ("Batch time, median", shown(spark.median_ms(), " ms"), shown(millpond.median_ms(), " ms")),
        (
            "Restart to end of first batch",
            shown(spark.back_seconds(), " s", 1),
            shown(millpond.back_seconds(), " s", 1),
        ),
        ("All batches, with both starts", shown(spark.seconds(), " s"), shown(millpond.seconds(), " s")),
    )
    machine = (
        ("Machine", report.machine.hardware()),
        ("Versions", f"{report.versions} · Python {report.machine.python}"),
        ("Disk", f"{report.machine.free_bytes / 1e9:.0f} GB free at the start"),
    )
    return _PAGE.substitute(
        style=_STYLE,
        ratio=times(report.ratio),
        title=escape(report.title),
        about=escape(report.about),
        cores=str(report.cores),
        good="good" if report.equal else "bad",
        verdict=escape(("✓ " if report.equal else "✗ ") + report.verdict()),
        tiles="".join(_tile(*tile) for tile in tiles),
        charts="".join(_card(chart) for chart in (rates(report), batch_times(report), timeline(report))),
        rows="".join(_row(*line) for line in report.table()),
        counted=escape(report.counted()),
        source=escape(report.source.strip()),
        explained=escape(report.explained),
        machine="".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in machine),
        settings=escape("\n".join(f"{key}={value}" for key, value in report.settings.items())),
        finished=escape(report.finished),
        query=escape(report.query),
        json=_json(report),
    )


def write(folder: Path, text: str) -> Path:
    """Write the page under a unique name, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    name = time.strftime("demo-%Y%m%d-%H%M%S")
    number = 1
    while True:
        path = folder / (f"{name}.html" if number == 1 else f"{name}-{number}.html")
        try:
            with path.open("x", encoding="utf-8") as out:
                out.write(text)
            return path
        except FileExistsError:
            number += 1


def _json(report: Report) -> str:
    """Return the report and its computed figures as JSON that is safe within HTML."""
    computed = {
        "ratio": report.ratio,
        **{f"{run.engine}_rows_per_second": run.rate() for run in report.runs},
        **{f"{run.engine}_batch_ms": run.median_ms() for run in report.runs},
        **{f"{run.engine}_restart_seconds": run.back_seconds() for run in report.runs},
    }
    data = {"computed": computed, "report": msgspec.to_builtins(report)}
    return msgspec.json.encode(data).decode().replace("<", "\\u003c")


def _tile(what: str, theirs: str, ours: str) -> str:
    pair = f'<span>Millpond</span><b class="millpond">{ours}</b><span>Spark</span><b class="spark">{theirs}</b>'
    return f'<div class="tile"><div class="what">{what}</div><div class="pair">{pair}</div></div>'


def _card(chart: Chart) -> str:
    return f'<div class="card">{svg(chart, 11, 3.6)}</div>'


def _row(what: str, theirs: str, ours: str) -> str:
    return f'<tr><td>{what}</td><td class="number">{theirs}</td><td class="number">{ours}</td></tr>'
