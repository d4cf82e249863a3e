"""The report as one HTML file, pictures and figures in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from string import Template

import msgspec

from benchmarks.papers.page import COLUMNS, NOTES, cells_of, command_of, origin, summary
from benchmarks.papers.pictures import picture
from benchmarks.papers.row import PAPERS, Row
from benchmarks.papers.saved import Saved

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Millpond: the papers, measured again</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #18212f; max-width: 1300px; margin: 0 auto; padding: 32px 24px }
.pass { color: #1a7f4b } .miss, .failed { color: #c92a2a } .not, .no { color: #5b6675 }
svg { max-width: 100%; height: auto; display: block; margin: 24px 0 }
table { border-collapse: collapse; font-size: 13px }
td, th { padding: 6px 14px 6px 0; border-bottom: 1px solid #e3e7ed; text-align: left; vertical-align: top }
pre { white-space: pre-wrap; overflow-wrap: anywhere } summary { color: #5b6675 }
</style></head><body>
<h1>The papers, measured again</h1>
<p>$summary</p>
$papers
<script type="application/json" id="results">$json</script>
</body></html>
""")


def html(rows: Sequence[Row], saved: Mapping[str, Saved]) -> str:
    """Return the report.

    Args:
        rows: all rows.
        saved: results by the row's name.
    """
    measured = [saved[row.name] for row in rows if row.name in saved]
    parts = [part for paper in PAPERS for part in _paper(paper, [row for row in rows if row.paper == paper], saved)]
    return _PAGE.substitute(
        summary=escape(summary(rows, saved).replace("**", "")),
        papers="\n".join(parts),
        json=msgspec.json.encode(measured).decode().replace("<", "\\u003c"),
    )


def _paper(paper: str, rows: Sequence[Row], saved: Mapping[str, Saved]) -> Iterator[str]:
    if not rows:
        return
    yield f"<h2>{escape(PAPERS[paper])}</h2><p>{escape(NOTES[paper].replace('`', ''))}</p>"
    yield f"<table><tr>{''.join(f'<th>{escape(name)}</th>' for name in COLUMNS)}</tr>"
    for row in rows:
        for cells in cells_of(row, saved.get(row.name)):
            verdict = cells[-2]
            kind = verdict.partition(":")[0].partition(" ")[0]
            texts = [f"<td>{escape(text)}</td>" for text in cells]
            texts[-2] = f'<td class="{escape(kind)}">{escape(verdict)}</td>'
            yield f"<tr>{''.join(texts)}</tr>"
    yield "</table>"
    for row in rows:
        if row.name in saved:
            yield _measured(row, saved[row.name])


def _measured(row: Row, saved: Saved) -> str:
    """Return a row's picture, and the commands that measure it again."""
    lines = [command_of(row, quick=saved.quick), *saved.settings, "", " · ".join(origin(saved)[1:])]
    if saved.error is not None:
        lines += ["", saved.error]
    text = escape("\n".join(lines))
    title = escape(f"{row.title}{' (quick run)' if saved.quick else ''}")
    return f"<h3>{title}</h3>{picture(row, saved)}<details><summary>{row.name}</summary><pre>{text}</pre></details>"
