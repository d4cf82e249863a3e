"""The outcome of a headline: the peers' figure here, Millpond's, the ratio, and whether the claim is reached."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from benchmarks.papers.rows.figures import METRICS, Figures
from benchmarks.papers.rows.row import Headline, Row
from benchmarks.papers.saved import Saved
from benchmarks.report import geometric_mean

NAMES = {
    "spark": "Spark",
    "millpond": "Millpond",
    "flink-rocksdb": "Flink, RocksDB",
    "flink-forst": "Flink, ForSt",
    "prefetching": "hints",
    "memory": "all in memory",
    "lru": "LRU",
    "clock": "Clock",
    "timestamp": "timestamps",
    "spark-shipped": "Spark as shipped",
    "spark-best": "Spark at its best",
    "spark-async": "asynchronous progress",
    "spark-deadline": "deadline",
    "millpond-sync": "Millpond, synchronous",
}
"""Engines and variants, as people call them; the others are called as they are."""
NOT_MEASURED = "not measured yet"
_MOST_PLACES = 4
"""The most places whose figures a cell lists; of more, it shows the first and the last."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One headline as the page shows it.

    Attributes:
        passed: whether the claim is reached; None if it was not measured.
    """

    peers: str
    ours: str
    ratio: str
    verdict: str
    passed: bool | None


def outcomes(row: Row, saved: Saved | None) -> list[Outcome]:
    """The outcomes of a row's headlines."""
    return [outcome(headline, saved) for headline in row.headlines]


def outcome(headline: Headline, saved: Saved | None) -> Outcome:
    """Read a headline from a saved result."""
    if saved is None:
        return Outcome(peers="–", ours="–", ratio="–", verdict=NOT_MEASURED, passed=None)
    runs = {(figures.engine, figures.place): figures for figures in saved.figures}
    ours = _values(runs, headline.ours, headline.metric, headline.place)
    peers = {
        peer: _values(runs, peer, headline.metric, headline.peer_place or headline.place) for peer in headline.peers
    }
    beside = {name: _values(runs, name, headline.metric, headline.place) for name in headline.beside}
    ratio = _ratio(headline, ours, peers)
    cells = [_cell(name, values, headline, saved) for name, values in (*peers.items(), *beside.items())]
    passed, verdict = _verdict(headline, ours, ratio, saved)
    return Outcome(
        peers="; ".join(cells) or "–",
        ours=_shown(ours, headline.metric) if ours else _missing(headline.ours, saved),
        ratio="–" if ratio is None else f"{ratio:.2f}",
        verdict=verdict,
        passed=passed,
    )


def _values(runs: dict[tuple[str, str], Figures], engine: str, metric: str, place: str) -> dict[str, float]:
    """An engine's values of a metric by place: of one place, or of all if it is empty."""
    return {
        at: figures.values[metric]
        for (name, at), figures in runs.items()
        if name == engine and place in ("", at) and metric in figures.values
    }


def _ratio(headline: Headline, ours: dict[str, float], peers: dict[str, dict[str, float]]) -> float | None:
    """By how many times Millpond is better than the best peer, as a geometric mean over the places that both have."""
    found = []
    for place, value in ours.items():
        theirs = [values[at] for values in peers.values() for at in values if headline.peer_place or at == place]
        if not theirs or min(value, *theirs) <= 0:
            continue
        more = METRICS[headline.metric].more
        found.append(value / max(theirs) if more else min(theirs) / value)
    return geometric_mean(found)


def _cell(name: str, values: dict[str, float], headline: Headline, saved: Saved) -> str:
    shown = _shown(values, headline.metric) if values else _missing(name, saved)
    return f"{NAMES.get(name, name)} {shown}"


def _shown(values: dict[str, float], metric: str) -> str:
    """The values in the order of their places, with the unit."""
    found = METRICS[metric]
    texts = [f"{value:,.{found.digits}f}" for value in values.values()]
    if len(texts) > _MOST_PLACES:
        texts = [texts[0], "…", texts[-1]]
    return f"{', '.join(texts)} {found.unit}".strip()


def _missing(name: str, saved: Saved) -> str:
    """Why an engine has no figure."""
    if name in saved.absent:
        return "not installed"
    mine = [figures for figures in saved.figures if figures.engine == name]
    if any(figures.refused for figures in mine):
        return "refused"
    if any(figures.error for figures in mine):
        return "failed"
    return "not in a quick run" if saved.quick else "no figure"


def _verdict(headline: Headline, ours: dict[str, float], ratio: float | None, saved: Saved) -> tuple[bool | None, str]:
    if not ours:
        reason = (saved.error or _missing(headline.ours, saved)).splitlines()[0]
        return None, f"failed: {reason}" if saved.error else f"{NOT_MEASURED}: {reason}"
    if headline.ratio is not None and ratio is None:
        reason = "no peer has a figure"
        return None, f"failed: {reason}" if saved.error else f"{NOT_MEASURED}: {reason}"
    compared = list(_comparisons(headline, ours, ratio))
    passed = all(holds for holds, _ in compared)
    text = " and ".join(text for holds, text in compared if passed or not holds)
    return passed, f"pass: {text}" if passed else f"miss: {text}. {headline.missed}"


def _comparisons(headline: Headline, ours: dict[str, float], ratio: float | None) -> Iterator[tuple[bool, str]]:
    metric = METRICS[headline.metric]
    if headline.ratio is not None and ratio is not None:
        sign = "≥" if ratio >= headline.ratio else "<"
        yield ratio >= headline.ratio, f"{ratio:.2f} {sign} {headline.ratio:g}"
    if headline.most is not None:
        worst = max(ours.values())
        holds = worst <= headline.most
        yield holds, f"{worst:,.{metric.digits}f} {'≤' if holds else '>'} {headline.most:,g} {metric.unit}".strip()
    if headline.least is not None:
        worst = min(ours.values())
        holds = worst >= headline.least
        yield holds, f"{worst:,.{metric.digits}f} {'≥' if holds else '<'} {headline.least:,g} {metric.unit}".strip()
