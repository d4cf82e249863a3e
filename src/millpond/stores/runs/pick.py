"""Choice of the runs to merge.

Every run that may hold a key costs each lookup a filter, so few runs should hold a key. Every merge costs writing its
output. Size-tiered picking weighs the two: it merges the neighbouring runs with the lowest cost for each run saved.
Once the newer runs together are half as large as the oldest, all are merged, which bounds the space of outdated rows.
(Simulated with flushes of random keys: a byte flushed is written 4.5 times, and outdated rows take a quarter more, when
40 flushes make up the state; 7.7 times when keys are only ever added.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAX_LAYERS = 4
"""Number of runs that may hold one key before some are merged."""

_OUTDATED_RATIO = 0.5
"""Size of the newer runs, relative to the oldest, from which all are merged."""


class Extent(NamedTuple):
    """The extent of a run: lowest and highest hash, both included, and bytes."""

    first: int
    last: int
    bytes: int


class Pick(NamedTuple):
    """Neighbouring runs to merge: positions `begin` to `end` (excluded), newest first; `whole`: down to the oldest."""

    begin: int
    end: int
    whole: bool


def pick(runs: Sequence[Extent], max_layers: int = MAX_LAYERS) -> Pick | None:
    """Choose neighbouring runs to merge, or None if at most `max_layers` runs hold any key.

    Args:
        runs: newest first.
    """
    layers = group_layers(runs)
    if len(layers) <= max_layers:
        return None
    sizes = [sum(run.bytes for run in runs[begin:end]) for begin, end in layers]
    if sum(sizes[:-1]) >= _OUTDATED_RATIO * sizes[-1]:
        return Pick(0, len(runs), True)
    best, cost = (0, len(layers)), float("inf")
    for begin in range(len(layers) - 1):
        total = sizes[begin]
        for end in range(begin + 2, len(layers) + 1):
            total += sizes[end - 1]
            saved_cost = total / (end - begin - 1)
            if saved_cost <= cost:
                best, cost = (begin, end), saved_cost
    return Pick(layers[best[0]][0], layers[best[1] - 1][1], best[1] == len(layers))


def group_layers(runs: Sequence[Extent]) -> list[tuple[int, int]]:
    """Group neighbouring runs (from, to) that do not overlap: a group is searched like one run."""
    layers: list[tuple[int, int]] = []
    begin = 0
    for end in range(1, len(runs) + 1):
        if end == len(runs) or any(_overlap(runs[end], other) for other in runs[begin:end]):
            layers.append((begin, end))
            begin = end
    return layers


def _overlap(first: Extent, second: Extent) -> bool:
    return first.first <= second.last and second.first <= first.last
