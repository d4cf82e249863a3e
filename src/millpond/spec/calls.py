"""What specs with aggregate functions have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from millpond.spec.functions import FUNCTIONS, KEY_COLUMNS, MAX_KEY_COLUMNS, ROWS, WHOLE_WINDOWS, is_distinct, key_width
from millpond.spec.operators import AggregateCall, Field, Pattern
from millpond.spec.protocol import AccessPattern, Spec

S = TypeVar("S", bound=Spec)

ONCE = "what gives each row out once"
"""What takes no changes, and has none."""

WINDOWS = "windows of event time"
"""What keeps its changes to itself."""


def result_fields(calls: Sequence[AggregateCall]) -> tuple[Field, ...]:
    """The columns of the calls' results."""
    return tuple(Field(f"{call.function}_{number}", call.type) for number, call in enumerate(calls))


def described(calls: Iterable[AggregateCall], columns: Sequence[Field]) -> tuple[str, ...]:
    """The calls as `millpond.explain` tells them, but for functions of the user.

    Args:
        calls: the calls. columns: what their inputs are positions in.
    """
    return tuple(_described(call, columns) for call in calls if call.function != ROWS)


def _described(call: AggregateCall, columns: Sequence[Field]) -> str:
    inputs = ", ".join(columns[position].type for position in call.inputs) or "*"
    condition = " filter" if call.filter is not None else ""
    return f"{call.function}({'distinct ' if call.distinct else ''}{inputs}){condition}: {call.type}"


def needs_rows(calls: Iterable[AggregateCall], pattern: Pattern) -> bool:
    """Whether functions need all rows of a group at once, or had better: a list is as long as its rows."""
    functions = [FUNCTIONS[call.function] for call in calls]
    if any(function.whole for function in functions) or pattern == "append":
        return True
    return pattern == "auto" and any(function.collects and not function.sets for function in functions)


def unkept(call: AggregateCall, inputs: Sequence[Field], width: int, *, whole: bool) -> str | None:
    """Why the state of a call cannot be kept, as a reason code; None if it can.

    Args:
        call: the call. inputs: its inputs.
        width: how many columns the operator's key takes.
        whole: whether rows are kept whole.
    """
    if is_distinct(call) and width + key_width(inputs) > MAX_KEY_COLUMNS:
        return KEY_COLUMNS
    return WHOLE_WINDOWS if FUNCTIONS[call.function].whole and not whole else None


def patterned(spec: S, pattern: Pattern) -> S:
    """The same with the pattern that is asked for, where that makes a difference and is possible."""
    if pattern == "auto":
        return spec
    asked = msgspec.structs.replace(spec, pattern=pattern)
    chosen = (asked.observed, asked.keeps_rows) != (spec.observed, spec.keeps_rows)
    return asked if chosen and asked.unsupported is None else spec


def asked_for(inferred: AccessPattern, pattern: Pattern) -> AccessPattern:
    """An access pattern that is told whether the user asked for one."""
    if pattern == "auto":
        return inferred
    return inferred._replace(why=f"{inferred.why} (asked for by spark.millpond.store.pattern={pattern})")
