"""Names of tables for one slice of event time: `main@0:9999999` holds the rows of `main` of these microseconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

SLICE = "@"
"""Separator between the name of a table and the name of its slice."""


class TimeSlice(NamedTuple):
    """Event times from `low` to `last`, both included, in microseconds."""

    low: int
    last: int

    @property
    def name(self) -> str:
        """The suffix of the names of the slice's tables."""
        return f"{self.low}:{self.last}"

    @staticmethod
    def parse(name: str) -> TimeSlice:
        """Parse the `name` of a slice."""
        low, last = name.split(":")
        return TimeSlice(int(low), int(last))


def base_name(table: str) -> str:
    """Return the name of a table without its slice, under which its schema is known."""
    return table.partition(SLICE)[0]


def disjoint(tables: Iterable[str]) -> dict[str, str]:
    """Map tables to tables of slices that do not overlap.

    Overlapping slices become one slice, from the first of their times to the last.

    Args:
        tables: names, with or without slices.

    Returns:
        For each name, the table that its rows belong to.
    """
    names = list(tables)
    slices = {name: TimeSlice.parse(name.partition(SLICE)[2]) for name in names if SLICE in name}
    covers: list[TimeSlice] = []
    for low, last in sorted(set(slices.values())):
        if covers and low <= covers[-1].last:
            covers[-1] = TimeSlice(covers[-1].low, max(covers[-1].last, last))
        else:
            covers.append(TimeSlice(low, last))
    targets = {name: name for name in names}
    for name, time_slice in slices.items():
        cover = next(cover for cover in covers if cover.low <= time_slice.low <= cover.last)
        targets[name] = f"{base_name(name)}{SLICE}{cover.name}"
    return targets
