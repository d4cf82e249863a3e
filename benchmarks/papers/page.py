"""The page `docs/benchmarks/papers.md`, made from saved results alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.papers.outcome import NOT_JUDGED, Outcome, outcomes
from benchmarks.papers.row import PAPERS, Row
from benchmarks.papers.saved import Saved

COLUMNS = (
    "where",
    "what they measured",
    "their figure",
    "peer here",
    "Millpond here",
    "ratio",
    "pass or miss",
    "command",
)
NOTES = {
    "flink": "The paper's baseline is Flink 1.20 with RocksDB on a cluster. Here it is Spark with RocksDB, and Flink"
    " where it is installed (`make engines`). All processes share one machine, the S3 server with them.",
    "prefetch": "Without hints a batch reads the keys that it misses side by side. So LRU and Clock here are the"
    " paper's asynchronous I/O over these caches; no run reads one key at a time. The lookups of Q13 and YSB have"
    " `pipelines` beside them, a client written by hand that asks for 500 keys at once.",
    "flowkv": "The paper's baseline is Flink with RocksDB. Here it is Spark with RocksDB at its best settings, and"
    " Flink where it is installed. `events alone` makes the same events without any engine: on the same two cores no"
    " store, however fast, takes more rows than that, so that this figure over the peer's bounds each ratio.",
    "apsys": "The paper's baseline is Flink with RocksDB. Here it is Spark with RocksDB, and Flink where it is"
    " installed.",
    "misa": "The paper's baseline is Spark 3.2 as shipped with RocksDB, on two workers, with checkpoints on a"
    " distributed file system. Here it is Spark 4.3 as shipped with RocksDB, on one machine: each batch writes a"
    " snapshot, and all other settings are Spark's defaults. The checkpoints of all engines, their logs included, are"
    " on an S3 server on the same machine. Beside the baseline stand Spark at its best settings and Spark with batches"
    " cut to a deadline (zStream). The paper's Async.Ckp has no peer: Spark's asynchronous progress tracking refuses"
    " queries with state. Where the paper gives a range or its best, the best is asked for, against whatever engine it"
    " was measured. LR2 is one join by ranges of time: Spark has no window that slides by a second over a join, from"
    " which much of LR2's load comes in the paper.",
}
"""Differences between each paper's baseline and the peers here."""


def command_of(row: Row, *, quick: bool) -> str:
    """Return the command that measures a row alone."""
    return f"python -m benchmarks papers --row {row.name}{' --quick' if quick else ''}"


def page(rows: Sequence[Row], saved: Mapping[str, Saved]) -> str:
    """Return the whole page.

    Args:
        rows: all rows.
        saved: results by the row's name.
    """
    return "\n".join(_lines(rows, saved)) + "\n"


def _lines(rows: Sequence[Row], saved: Mapping[str, Saved]) -> Iterator[str]:
    yield "# The papers, measured again"
    yield ""
    yield "Each headline of the papers that Millpond builds on ([references](../references.md)): the paper's figure,"
    yield "the peer's figure here, Millpond's figure here, and whether Millpond reaches the claim."
    yield "`python -m benchmarks papers` measures the headlines, saves the results, and makes this page from them."
    if not saved:
        yield "No results are saved yet."
    yield ""
    yield "A ratio above 1 says by how many times Millpond is better than the best peer, as a geometric mean where a"
    yield "headline has several queries or sizes. The command in the last column measures that row alone; with"
    yield "`--quick` it takes less state and fewer batches. Compare ratios, not rates, because the machines differ."
    yield ""
    yield summary(rows, saved)
    for paper, name in PAPERS.items():
        yield from _paper(name, paper, [row for row in rows if row.paper == paper], saved)
    yield from _origins([saved[row.name] for row in rows if row.name in saved])


def summary(rows: Sequence[Row], saved: Mapping[str, Saved]) -> str:
    """Return the number of headlines that are reached, as a sentence, and a second one if there were quick runs."""
    all_outcomes = [outcome for row in rows for outcome in outcomes(row, saved.get(row.name))]
    reached, missed = (sum(outcome.passed is verdict for outcome in all_outcomes) for verdict in (True, False))
    quick = sum(outcome.verdict == NOT_JUDGED for outcome in all_outcomes)
    text = f"Of {len(all_outcomes)} headlines, {reached} are reached, {missed} are missed, and"
    text += f" {len(all_outcomes) - reached - missed - quick} have no figures."
    only = f" {quick} have figures of a quick run alone, with less state and fewer batches, and are not judged."
    return text + only if quick else text


def _paper(name: str, paper: str, rows: Sequence[Row], saved: Mapping[str, Saved]) -> Iterator[str]:
    if not rows:
        return
    yield ""
    yield f"## {name}"
    yield ""
    yield NOTES[paper]
    yield ""
    yield _row(COLUMNS)
    yield "|" + "---|" * len(COLUMNS)
    for row in rows:
        for cells in cells_of(row, saved.get(row.name)):
            yield _row([*cells[:-1], f"`{cells[-1]}`"])


def cells_of(row: Row, saved: Saved | None) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each headline of a row, in the order of `COLUMNS`."""
    for headline, outcome in zip(row.headlines, outcomes(row, saved), strict=True):
        yield (
            headline.where,
            headline.measured,
            headline.theirs,
            outcome.peers,
            outcome.ours,
            outcome.ratio,
            _marked(outcome, saved),
            command_of(row, quick=saved is not None and saved.quick),
        )


def _marked(outcome: Outcome, saved: Saved | None) -> str:
    if saved is None or outcome.passed is None:
        return outcome.verdict
    ended = not saved.unfinished and saved.error is None
    return outcome.verdict if ended else f"{outcome.verdict} (not all runs ended)"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _origins(saved_rows: Sequence[Saved]) -> Iterator[str]:
    """Yield the lines of the table that shows how each row was measured."""
    if not saved_rows:
        return
    yield ""
    yield "## Measured with"
    yield ""
    yield _row(("row", "commit", "day", "run", "seed", "seconds", "machine", "versions"))
    yield "|" + "---|" * 8
    for saved in saved_rows:
        yield _row(origin(saved))
    yield ""
    yield "The settings of a row are in its file in `benchmarks/papers/results/`, and in the HTML report."


def origin(saved: Saved) -> tuple[str, ...]:
    """Return the cells that show how a row was measured."""
    machine, versions = saved.machine, dict(saved.versions)
    engines = dict.fromkeys(f"{figures.engine} {figures.version}" for figures in saved.figures if figures.version)
    return (
        f"`{saved.row}`",
        saved.commit,
        saved.day,
        "quick" if saved.quick else "whole",
        ", ".join(str(seed) for seed in dict.fromkeys(figures.seed for figures in saved.figures)),
        f"{saved.seconds:,.0f}",
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_bytes / 1e9:.0f} GB",
        ", ".join([f"Python {machine.python}", *(f"{name} {text}" for name, text in versions.items()), *engines]),
    )
