"""What a query does, respect by respect, in words: a restart names the traits in which query and checkpoint differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from millpond.spec.operators import AggregateCall, Field
from millpond.words import length


class Trait(NamedTuple):
    """What a query does in one respect, in words that follow on "the query".

    Attributes:
        text: e.g. `groups by (user)`. exact: tells apart two whose texts are the same, e.g. by types.
    """

    text: str
    exact: str = ""


def columns_trait(does: str, columns: Sequence[Field]) -> Trait:
    """What a query does with columns: by their names, or where these are the same, with their types."""
    names, types = ([column.name for column in columns], [f"{column.name} {column.type}" for column in columns])
    return Trait(f"{does} ({', '.join(names)})", f"{does} ({', '.join(types)})")


def lag_trait(lag_ms: int | None) -> Trait:
    """How an operator's watermark follows from the query's."""
    if not lag_ms:
        return Trait("gets the watermark as it is")
    return Trait(f"gets the watermark {length(lag_ms * 1000)} late, as a join below it has a range of time")


def changelog_traits(*, retracts: bool, changes: bool) -> Mapping[str, Trait]:
    """Whether rows that come in, and rows that come out, may be taken back."""
    reads = "may be taken back" if retracts else "stay"
    gives = "also which rows are gone (spark.millpond.changes, or the operator above)" if changes else "new rows alone"
    return {"reads": Trait(f"reads rows that {reads}"), "gives": Trait(f"gives out {gives}")}


def option_traits(call: AggregateCall) -> Mapping[str, str]:
    """What the options of an aggregate function make of it, in words that follow on the function."""
    return {name: _OPTIONS[name](value) for name, value in call.options.items() if name in _OPTIONS}


def _direction(descending: bool, nulls_last: bool) -> str:
    """How values are ordered."""
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
    "order": lambda order: f"orders values {', '.join(_direction(*one) for one in order)}",
    "percentages": lambda shares: f"computes the shares {', '.join(map(str, shares))}",
    "accuracy": lambda accuracy: f"has an accuracy of {accuracy}",
    "array": lambda yes: f"gives {'an array' if yes else 'one value'}",
    "multipliers": lambda _: "has another seed or confidence",
    "width": lambda width: f"has an error that takes {width} counters",
}
