"""A row of the report as data: the commands that measure it, and the headlines that their figures decide."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import msgspec

from benchmarks.engines.flink.jar import FLINK_PYTHON

PAPERS = {
    "flink": "Flink 2.0",
    "prefetch": "Keyed Prefetching",
    "flowkv": "FlowKV",
    "apsys": "APSys '18",
    "misa": "MiSA",
}
"""The papers by their names on the command line, with their headings in `docs/references.md`."""
NOT_KNOWN = "The reason is not known yet."
"""The reason for a miss while none is known."""


def absent(engine: str) -> bool:
    """Return whether an engine is not installed here."""
    return engine.startswith("flink-") and not FLINK_PYTHON.exists()


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One call of an existing benchmark.

    Attributes:
        module: run as `python -m MODULE`.
        arguments: of a whole run, as a shell takes them.
        quick: appended to them in a quick run, where the last of an option counts; None leaves the command out.
        engines: passed as `--engines`, without those that are not installed; empty = the benchmark's own.
        engine: name of the figures' engine; empty = the engine's own name.
        place: place of the figures; empty = the query or size of each.
    """

    module: str
    arguments: str
    quick: str | None = None
    engines: tuple[str, ...] = ()
    engine: str = ""
    place: str = ""

    def line(self, *, quick: bool = False, more: Sequence[str] = ()) -> list[str] | None:
        """Return the arguments after `python -m`; None if this run has no such command.

        Args:
            quick: of a quick run.
            more: appended last.
        """
        engines = [engine for engine in self.engines if not absent(engine)]
        if (self.engines and not engines) or (quick and self.quick is None):
            return None
        words = [self.module, *shlex.split(self.arguments)]
        if engines:
            words += ["--engines", ",".join(engines)]
        return [*words, *shlex.split(self.quick or "" if quick else ""), *more]


class Headline(msgspec.Struct, frozen=True, kw_only=True):
    """One claim of a paper, and how it is read from the figures of its row.

    Attributes:
        where: section and figure, after the paper's heading in `docs/references.md`.
        measured: the paper's experiment.
        theirs: the paper's figure.
        metric: of `benchmarks.papers.figures.METRICS`.
        ours: the engine, or the variant of Millpond, that stands for the paper's system.
        peers: engines that stand for the paper's baseline. The best peer counts.
        beside: engines that are shown beside the peers, without being compared.
        place: the query or size that is read; empty = all: geometric means of ratios, and the worst value for bounds.
        each: whether the ratio has to be reached at each place, and not on average.
        peer_place: the place at which peers are read; empty = `place`.
        ratio: how many times Millpond has to be better than the best peer.
        most, least: bounds on Millpond's own figure, in the metric's unit.
        missed: the reason for a miss, in one sentence.
    """

    where: str
    measured: str
    theirs: str
    metric: str
    ours: str = "millpond"
    peers: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    place: str = ""
    each: bool = False
    peer_place: str = ""
    ratio: float | None = None
    most: float | None = None
    least: float | None = None
    missed: str = NOT_KNOWN


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A unit that is measured, saved and repeated as a whole.

    Attributes:
        name: as `--row` takes it.
        paper: a key of `PAPERS`.
        title: of its picture.
        commands: run in this order.
        headlines: read from the figures of all commands.
        lines: whether its places are steps of a sweep, which are drawn as a line.
    """

    name: str
    paper: str
    title: str
    commands: tuple[Command, ...]
    headlines: tuple[Headline, ...]
    lines: bool = False

    def settings(self, *, quick: bool) -> list[str]:
        """Return each command as a shell takes it, with everything that the figures depend on."""
        lines = [command.line(quick=quick) for command in self.commands]
        return [f"python -m {shlex.join(line)}" for line in lines if line is not None]

    def absent(self) -> list[str]:
        """Return the engines of its commands that are not installed here."""
        return list(dict.fromkeys(e for command in self.commands for e in command.engines if absent(e)))
