"""The command line: `python -m benchmarks papers [--only PAPER] [--row NAME] [--quick] [--report]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import ROOT
from benchmarks.measuring.process import sigterm_exits
from benchmarks.papers.html import html
from benchmarks.papers.page import page
from benchmarks.papers.row import PAPERS
from benchmarks.papers.rows import ROWS
from benchmarks.papers.run import QUICK_SECONDS, run
from benchmarks.papers.saved import RECORD, Results, Saved

PAGE = ROOT / "docs" / "benchmarks" / "papers.md"
REPORT = ROOT / "build" / "papers.html"
QUICK = Path("build") / "papers-quick"
"""Folder of quick runs, so that they do not replace whole runs among the results of record."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(
        prog="python -m benchmarks papers",
        description="Measure each headline of the papers again, row after row, and write a page and an HTML report.",
    )
    add = p.add_argument
    add("--only", choices=PAPERS, action="append", help="the rows of this paper; may be given again")
    add("--row", choices=ROWS, action="append", metavar="NAME", help=f"this row: {', '.join(ROWS)}")
    add(
        "--quick",
        action="store_true",
        help=f"smaller state, fewer batches, at most {QUICK_SECONDS / 60:.0f} minutes; default of --out: {QUICK}",
    )
    add("--again", action="store_true", help="measure rows that are saved with this commit and these settings, too")
    add("--report", action="store_true", help="measure nothing: write page and report from saved results")
    add(
        "--out",
        type=Path,
        default=None,
        metavar="DIR",
        help="for results/, papers.md and papers.html; default: the results of record, docs/benchmarks/ and build/",
    )
    return p


def saved_rows(folder: Path) -> Mapping[str, Saved]:
    """Return the saved results in a folder by the row's name."""
    results = Results(folder)
    by_name = {name: results.get(row) for name, row in ROWS.items()}
    return {name: saved for name, saved in by_name.items() if saved is not None}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure rows, then write page and report. Return 1 if a row failed."""
    p = parser()
    options = p.parse_args(argv)
    for name in options.row or ():
        if options.only and (paper := ROWS[name].paper) not in options.only:
            p.error(f"--row {name} belongs to --only {paper}, not to --only {' --only '.join(options.only)}")
    folder, page_path, report_path = RECORD, PAGE, REPORT
    if (out := options.out or (QUICK if options.quick else None)) is not None:
        folder, page_path, report_path = (out / name for name in ("results", "papers.md", "papers.html"))
    rows = [
        row
        for row in ROWS.values()
        if (not options.only or row.paper in options.only) and (not options.row or row.name in options.row)
    ]
    failed = False
    try:
        if not options.report:
            with sigterm_exits():
                measured = run(rows, Results(folder), quick=options.quick, again=options.again, say=_say)
            failed = any(saved.error is not None for saved in measured)
    finally:
        all_rows, saved = list(ROWS.values()), saved_rows(folder)
        for path, text in ((page_path, page(all_rows, saved)), (report_path, html(all_rows, saved))):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            _say(f"wrote {path}")
    return 1 if failed else 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
