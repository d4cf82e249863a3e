"""The outcome of a headline: the peers' figure here, Millpond's, the ratio, and whether the claim is reached."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from benchmarks.measuring.report import geometric_mean
from benchmarks.papers.figures import METRICS, Figures
from benchmarks.papers.row import Headline, Row
from benchmarks.papers.saved import Saved

NAMES = {
    "spark": "Spark",
    "millpond": "Millpond",
    "events": "events alone",
    "flink-rocksdb": "Flink, RocksDB",
    "flink-forst": "Flink, ForSt",
    "prefetching": "hints",
    "auto": "prefetch=auto",
    "memory": "all in memory",
    "lru": "LRU",
    "clock": "Clock",
    "timestamp": "prefetch=off",
    "spark-shipped": "Spark as shipped",
    "spark-best": "Spark at its best",
    "spark-async": "asynchronous progress",
    "spark-deadline": "deadline",
    "millpond-sync": "Millpond, synchronous",
}
"""Names of engines and variants for people. Those that are not listed keep their own names."""
NOT_MEASURED = "not measured yet"
"""The verdict of a headline whose row has no saved result."""
NOT_JUDGED = "not judged: a quick run"
"""The verdict of a headline that a quick run measured, with less state and fewer batches than it is about."""
_UNRUN = "no figure"
"""Reason for a missing figure where the result gives none."""
_MOST_PLACES = 4
"""A cell lists the figures of at most this number of places. Of more places, it shows the first and the last."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One headline as the page shows it.

    Attributes:
        passed: whether the claim is reached; None if it was not measured, or in a quick run only.
    """

    peers: str
    ours: str
    ratio: str
    verdict: str
    passed: bool | None


def outcomes(row: Row, saved: Saved | None) -> list[Outcome]:
    """Return the outcomes of a row's headlines."""
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
    # A result may be older than the entry of an engine in `beside`.
    beside = {name: values for name, values in beside.items() if values or _why(name, headline.place, saved) != _UNRUN}
    ratio = _ratio(headline, ours, peers)
    cells = [_cell(name, values, headline, saved) for name, values in (*peers.items(), *beside.items())]
    passed, verdict = _verdict(headline, ours, ratio, saved)
    return Outcome(
        peers="; ".join(cells) or "–",
        ours=_shown(headline.ours, ours, headline.metric, headline.place, saved),
        ratio="–" if ratio is None else f"{ratio:.2f}",
        verdict=verdict,
        passed=passed,
    )


def _values(runs: dict[tuple[str, str], Figures], engine: str, metric: str, place: str) -> dict[str, float]:
    """Return an engine's values of a metric by place: at one place, or at all if `place` is empty."""
    return {
        measured_at: figures.values[metric]
        for (name, measured_at), figures in runs.items()
        if name == engine and place in ("", measured_at) and metric in figures.values
    }


def _ratio(headline: Headline, ours: dict[str, float], peers: dict[str, dict[str, float]]) -> float | None:
    """Return how many times Millpond is better than the best peer where both have figures: on average, or at worst."""
    ratios = []
    for place, value in ours.items():
        theirs = [
            peer_value
            for values in peers.values()
            for peer_place, peer_value in values.items()
            if headline.peer_place or peer_place == place
        ]
        if not theirs or min(value, *theirs) <= 0:
            continue
        more = METRICS[headline.metric].more
        ratios.append(value / max(theirs) if more else min(theirs) / value)
    return min(ratios, default=None) if headline.each else geometric_mean(ratios)


def _cell(name: str, values: dict[str, float], headline: Headline, saved: Saved) -> str:
    place = (headline.peer_place if name in headline.peers else "") or headline.place
    return f"{NAMES.get(name, name)} {_shown(name, values, headline.metric, place, saved)}"


def _shown(name: str, values: dict[str, float], metric: str, place: str, saved: Saved) -> str:
    """Return an engine's values with their unit, in the order of their places; several values name their places."""
    if not values:
        return _why(name, place, saved).partition(":")[0]
    unit, digits = METRICS[metric].unit, METRICS[metric].digits
    texts = {place: f"{value:,.{digits}f} {unit}".strip() for place, value in values.items()}
    texts |= dict.fromkeys(_missing(name, place, saved), "no figure")
    if len(texts) == 1:
        return "".join(texts.values())
    cells = [f"{text} ({place})" for place, text in texts.items()]
    return ", ".join(cells if len(cells) <= _MOST_PLACES else [cells[0], "…", cells[-1]])


def _missing(name: str, place: str, saved: Saved) -> dict[str, str]:
    """Return by place why an engine that ran has no figures."""
    last = {figures.place: figures for figures in saved.figures if figures.engine == name}
    return {
        measured_at: figures.missing
        for measured_at, figures in last.items()
        if figures.missing and place in ("", measured_at)
    }


def _why(name: str, place: str, saved: Saved) -> str:
    """Return why an engine has no figure."""
    if name in saved.absent:
        return "not installed"
    runs = [figures for figures in saved.figures if figures.engine == name]
    if any(figures.refused for figures in runs):
        return "refused"
    if any(figures.error for figures in runs):
        return "failed"
    if missing := _missing(name, place, saved):
        return f"no figure: {', '.join(dict.fromkeys(missing.values()))}"
    if saved.unfinished:
        return "not measured: no time left"
    return "not measured: not in a quick run" if saved.quick else _UNRUN


def _verdict(headline: Headline, ours: dict[str, float], ratio: float | None, saved: Saved) -> tuple[bool | None, str]:
    if not ours or _missing(headline.ours, headline.place, saved):
        reason = _why(headline.ours, headline.place, saved)
        if saved.error and not reason.startswith("no figure:"):
            return None, f"failed: {saved.error.splitlines()[0]}"
        return None, reason if reason.startswith(("no figure", "not measured")) else f"no figure: {reason}"
    if headline.ratio is not None and ratio is None:
        if saved.error:
            return None, "failed: no peer has a figure"
        reasons = [_why(peer, headline.peer_place or headline.place, saved) for peer in headline.peers]
        explained = [reason for reason in reasons if ":" in reason]
        return None, explained[0] if explained else "no figure: no peer has one"
    if saved.quick:
        return None, NOT_JUDGED
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
