"""Names of tables that hold a slice of event time: `main@0:9999999` has the rows of `main` of these microseconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

SLICE = "@"
"""What stands between a table's name and that of the slice of event time that it holds."""


class TimeSlice(NamedTuple):
    """Event times from `low` to `last`, both included, in microseconds."""

    low: int
    last: int

    @property
    def name(self) -> str:
        """What tells the slice's tables from those of others."""
        return f"{self.low}:{self.last}"

    @staticmethod
    def parse(name: str) -> TimeSlice:
        """The slice of a `name`."""
        low, last = name.split(":")
        return TimeSlice(int(low), int(last))


def base_name(table: str) -> str:
    """The name under which a table's schema is known: that of the table without its slice of event time."""
    return table.partition(SLICE)[0]


def disjoint(tables: Iterable[str]) -> dict[str, str]:
    """For each of some tables the one that it belongs to if no two slices may overlap.

    Slices that overlap become one: from the first of their times to the last.
    """
    names = list(tables)
    slices = {name: TimeSlice.parse(name.partition(SLICE)[2]) for name in names if SLICE in name}
    covers: list[TimeSlice] = []
    for low, last in sorted(set(slices.values())):
        if covers and low <= covers[-1].last:
            covers[-1] = TimeSlice(covers[-1].low, max(covers[-1].last, last))
        else:
            covers.append(TimeSlice(low, last))
    found = {name: name for name in names}
    for name, one in slices.items():
        cover = next(cover for cover in covers if cover.low <= one.low <= cover.last)
        found[name] = f"{base_name(name)}{SLICE}{cover.name}"
    return found
