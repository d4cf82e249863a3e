"""The demo's report: a self-contained HTML file."""

from __future__ import annotations

from datetime import datetime
from html import escape
from pathlib import Path
from string import Template

import msgspec

from millpond.demo.charts import charts
from millpond.demo.engine import SETTINGS
from millpond.demo.figures import Report, times

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Millpond demo: $ratio× Spark's RocksDB</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #18212f; max-width: 1136px; margin: 0 auto; padding: 32px 24px }
.ratio { font-size: 80px; line-height: 1.2; font-weight: 750; color: #1668dc }
.good { color: #1a7f4b } .bad { color: #c92a2a; overflow-wrap: anywhere }
svg { max-width: 100%; height: auto }
table { border-collapse: collapse } td, th { padding: 6px 24px 6px 0; border-bottom: 1px solid #e3e7ed }
td:not(:first-child), th { text-align: right }
pre { white-space: pre-wrap; overflow-wrap: anywhere } footer, summary { color: #5b6675 }
</style></head><body>
<h1>Millpond demo: $title</h1>
<p>$about</p>
<div class="ratio">$ratio×</div>
<p>the rows per second of Spark's RocksDB state store: same query, same rows, same cores</p>
<p class="$good"><b>$verdict</b></p>
$charts
<h2>Figures</h2>
<table><tr><th></th><th>Spark (RocksDB)</th><th>Millpond</th></tr>$rows</table>
<p>$counted One engine after the other, each in processes of its own. Both were killed with SIGKILL in mid-stream, all
of their processes at once, and started again on what was durable.</p>
<h2>The query</h2>
<pre>$source</pre>
<h2>Where it ran</h2>
<pre>$explained</pre>
<p>$machine · $versions</p>
<details><summary>Settings, the same for both engines</summary><pre>$settings</pre></details>
<footer>$finished · <code>millpond demo --query $query</code> makes this page; it holds its figures as JSON,
too.</footer>
<script type="application/json" id="figures">$json</script>
</body></html>
""")


def render(report: Report) -> str:
    """Return the page as HTML."""
    texts = {
        "ratio": times(report.ratio()),
        "title": report.job.title,
        "about": report.job.about,
        "verdict": ("✓ " if report.equal else "✗ ") + report.verdict,
        "counted": report.counted,
        "source": report.job.source.strip(),
        "explained": report.explained,
        "machine": report.machine,
        "versions": report.versions,
        "settings": "\n".join(f"{key}={value}" for key, value in SETTINGS.items()),
        "finished": f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        "query": report.job.name,
    }
    return _PAGE.substitute(
        {name: escape(text) for name, text in texts.items()},
        good="good" if report.equal else "bad",
        charts="".join(charts(report)),
        rows="".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in report.table()),
        json=_json(report),
    )


def write(folder: Path, text: str) -> Path:
    """Write the page under a unique name, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"demo-{datetime.now():%Y%m%d-%H%M%S-%f}.html"
    path.write_text(text, encoding="utf-8")
    return path


def _json(report: Report) -> str:
    """Return the report and its computed figures as JSON that is safe within HTML."""
    figures = {f"{run.engine}_{name}": value for run in report.runs for name, value in run.figures().items()}
    data = {name: getattr(report, name) for name in report.__struct_fields__ if name != "job"}
    return (
        msgspec.json.encode({"computed": {"ratio": report.ratio(), **figures}, "report": data})
        .decode()
        .replace("<", "\\u003c")
    )
