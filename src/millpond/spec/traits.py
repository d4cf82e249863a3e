"""Traits of a query in words: a restart names those in which query and checkpoint differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from millpond.spec.operators import AggregateCall, Field


class Trait(NamedTuple):
    """One aspect of a query's behaviour, in words that follow on "the query".

    Attributes:
        text: e.g. `groups by (user)`.
        exact: a more exact text, e.g. with types, for two traits with equal texts.
    """

    text: str
    exact: str = ""


def columns_trait(does: str, columns: Sequence[Field]) -> Trait:
    """Describe the use of columns by their names; the exact text has their types, too."""
    names, types = ([column.name for column in columns], [f"{column.name} {column.type}" for column in columns])
    return Trait(f"{does} ({', '.join(names)})", f"{does} ({', '.join(types)})")


def changelog_traits(*, retracts: bool, changes: bool) -> Mapping[str, Trait]:
    """Describe whether input rows, and output rows, may be retracted."""
    reads = "may be taken back" if retracts else "stay"
    gives = "also which rows are gone (spark.millpond.changes, or the operator above)" if changes else "new rows alone"
    return {"reads": Trait(f"reads rows that {reads}"), "gives": Trait(f"gives out {gives}")}


def option_traits(call: AggregateCall) -> Mapping[str, str]:
    """Describe the options of an aggregate function, in words that follow on the function."""
    return {name: _OPTIONS[name](value) for name, value in call.options.items() if name in _OPTIONS}


def _direction(descending: bool, nulls_last: bool) -> str:
    """Describe a sort direction."""
    nulls = "" if descending == nulls_last else f" nulls {'last' if nulls_last else 'first'}"
    return f"{'descending' if descending else 'ascending'}{nulls}"


_OPTIONS: dict[str, Callable[[Any], str]] = {
    "ignore_nulls": lambda yes: "ignores nulls" if yes else "takes nulls",
    "eval_mode": lambda mode: {
        "ansi": "fails on overflow",
        "legacy": "goes on at an overflow (spark.sql.ansi.enabled=false)",
        "try": "gives null on overflow (try_)",
    }.get(mode, mode),
    "null_on_divide_by_zero": lambda yes: f"gives {'null' if yes else 'NaN'} where it would divide by zero",
    "relative_sd": lambda deviation: f"has a relative standard deviation of {deviation}",
    "delimiter": lambda digits: f"puts {bytes.fromhex(digits).decode(errors='replace')!r} between values",
    "order": lambda order: f"orders values {', '.join(_direction(*column) for column in order)}",
    "percentages": lambda shares: f"computes the shares {', '.join(map(str, shares))}",
    "accuracy": lambda accuracy: f"has an accuracy of {accuracy}",
    "array": lambda yes: f"gives {'an array' if yes else 'one value'}",
    "multipliers": lambda _: "has another seed or confidence",
    "width": lambda width: f"has an error that takes {width} counters",
}
