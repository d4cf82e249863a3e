"""The accumulators of calls, and the columns of a table that they keep their state in."""

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
    """The accumulators of calls, not bound yet.

    Args:
        calls: the calls. inputs: what their inputs are positions in.
        whole: whether the rows of each group are all there. retracts: whether rows may be taken back.
    """
    types = [parse_type(field.type) for field in inputs]
    return [
        accumulator(call, [types[position] for position in call.inputs], whole=whole, retracts=retracts)
        for call in calls
    ]


def state_columns(made: Sequence[Accumulator]) -> list[tuple[Column, bool]]:
    """The columns of their state, each with whether a fresh row has null there; named by the calls' fields."""
    return [
        (Column(f"{number if each.call.field is None else each.call.field}.{part}", column.kind), column.null)
        for number, each in enumerate(made)
        for part, column in enumerate(each.columns)
    ]


def bind(made: Sequence[Accumulator], places: Sequence[Place]) -> None:
    """Bind accumulators to the first of some places, in the order of `state_columns`."""
    remaining = iter(places)
    for each in made:
        each.bind([next(remaining) for _ in each.columns])
