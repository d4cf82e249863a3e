"""Helpers shared by the specs that have aggregate functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from millpond.spec.functions import FUNCTIONS, KEY_COLUMNS, MAX_KEY_COLUMNS, ROWS, WHOLE_WINDOWS, is_distinct, key_width
from millpond.spec.operators import AggregateCall, Field, Pattern
from millpond.spec.protocol import AccessPattern, Spec

S = TypeVar("S", bound=Spec)

EVENT_TIME_WINDOWS = "windows of event time"
"""Message of a `ChangelogError`: the operator cannot emit its changes as a changelog."""


def result_fields(calls: Sequence[AggregateCall]) -> tuple[Field, ...]:
    """Return the columns that hold the calls' results."""
    return tuple(Field(f"{call.function}_{number}", call.type) for number, call in enumerate(calls))


def describe_calls(calls: Iterable[AggregateCall], columns: Sequence[Field]) -> tuple[str, ...]:
    """Describe the calls as `millpond.explain` shows them; user functions are left out.

    Args:
        calls: the calls.
        columns: the columns that the calls' inputs are positions in.
    """
    return tuple(_describe_call(call, columns) for call in calls if call.function != ROWS)


def _describe_call(call: AggregateCall, columns: Sequence[Field]) -> str:
    inputs = ", ".join(columns[position].type for position in call.inputs) or "*"
    condition = " filter" if call.filter is not None else ""
    return f"{call.function}({'distinct ' if call.distinct else ''}{inputs}){condition}: {call.type}"


def needs_rows(calls: Iterable[AggregateCall], pattern: Pattern) -> bool:
    """Decide whether all rows of a group are kept until it closes.

    Functions of whole groups (`percentile`, `mode`) need all rows. Collecting functions (`collect_list`) keep rows too:
    their result is as long as the input.
    """
    functions = [FUNCTIONS[call.function] for call in calls]
    if any(function.whole for function in functions) or pattern == "append":
        return True
    return pattern == "auto" and any(function.collects and not function.distinct_only for function in functions)


def unsupported_state(call: AggregateCall, inputs: Sequence[Field], width: int, *, whole: bool) -> str | None:
    """Return the reason code why a call's state cannot be kept; None if it can.

    Args:
        call: the call.
        inputs: the call's inputs.
        width: the number of stored columns of the operator's key.
        whole: whether the operator keeps whole rows.
    """
    if is_distinct(call) and width + key_width(inputs) > MAX_KEY_COLUMNS:
        return KEY_COLUMNS
    return WHOLE_WINDOWS if FUNCTIONS[call.function].whole and not whole else None


def with_requested_pattern(spec: S, pattern: Pattern) -> S:
    """Return the spec with the requested store pattern, if that changes the state and is supported."""
    if pattern == "auto":
        return spec
    requested = msgspec.structs.replace(spec, pattern=pattern)
    # A pattern that changes nothing is left out, so that it does not make a restart incompatible.
    differs = (requested.adaptive, requested.keeps_rows) != (spec.adaptive, spec.keeps_rows)
    return requested if differs and requested.unsupported is None else spec


def explain_requested_pattern(inferred: AccessPattern, pattern: Pattern) -> AccessPattern:
    """Add to the explanation that the user requested the pattern, unless it is `auto`."""
    if pattern == "auto":
        return inferred
    return inferred._replace(why=f"{inferred.why} (asked for by spark.millpond.store.pattern={pattern})")
