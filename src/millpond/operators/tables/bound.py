"""Accumulators of calls, and the columns of a table that hold their state."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.layout import Column
from millpond.operators.columns.encode import Place
from millpond.operators.functions.accumulators import Accumulator
from millpond.operators.functions.registry import accumulator
from millpond.spec.operators import AggregateCall, Field
from millpond.spec.types import parse_type


def accumulators(
    calls: Sequence[AggregateCall], inputs: Sequence[Field], *, whole: bool = False, retracts: bool = False
) -> list[Accumulator]:
    """Make the accumulators of calls, without binding them.

    Args:
        calls: the calls.
        inputs: the columns that the calls' inputs refer to by position.
        whole: whether all rows of each group are there.
        retracts: whether rows may be retracted.
    """
    types = [parse_type(field.type) for field in inputs]
    return [
        accumulator(call, [types[position] for position in call.inputs], whole=whole, retracts=retracts)
        for call in calls
    ]


def state_columns(calls: Sequence[Accumulator]) -> list[tuple[Column, bool]]:
    """Return the columns of their state, named by the calls' fields, each with whether a fresh row has null there."""
    return [
        (
            Column(f"{number if call_state.call.field is None else call_state.call.field}.{part}", column.kind),
            column.null,
        )
        for number, call_state in enumerate(calls)
        for part, column in enumerate(call_state.columns)
    ]


def bind(calls: Sequence[Accumulator], places: Sequence[Place]) -> None:
    """Bind accumulators to the first places, in the order of `state_columns`."""
    remaining = iter(places)
    for call_state in calls:
        call_state.bind([next(remaining) for _ in call_state.columns])
