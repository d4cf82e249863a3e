"""Aggregates over the last rows of each key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import msgspec

from millpond.humanize import counted
from millpond.spec.calls import describe_calls, result_fields
from millpond.spec.kinds.ordered_rows import OrderedRows
from millpond.spec.operators import OP, AggregateCall, Field
from millpond.spec.protocol import AccessPattern
from millpond.spec.traits import Trait


class OverSpec(OrderedRows, frozen=True, tag="over"):
    """Aggregates over the last rows of each key: each row's result covers itself and the rows before it.

    Attributes:
        columns: the columns of a row: the slot stage's input, and its output before the results.
        keys: positions of the partitioning columns.
        order: the order of rows that arrive in one batch; with `retracts`, of all rows of a key.
        calls: the aggregates; their inputs are positions in `columns`.
        preceding: for each call, the number of rows before the current one that count.
        retracts, changes: as for `RankSpec`. `changes` requires `retracts`: otherwise no row ever changes.
    """

    calls: tuple[AggregateCall, ...]
    preceding: tuple[int, ...]
    retracts: bool = False
    changes: bool = False

    @property
    def traits(self) -> Mapping[str, Trait]:
        """The kept rows, and the frames of the functions."""
        rows = ", ".join(counted(number, "row") for number in self.preceding)
        return {**super().traits, "preceding": Trait(f"computes its functions over ({rows}) preceding the current one")}

    @property
    def output_fields(self) -> tuple[Field, ...]:
        """The output columns."""
        return (*self.columns, *result_fields(self.calls), *([OP] if self.changes else []))

    @property
    def emits_updates(self) -> bool:
        """Whether emitted rows may change, because rows before them may be added or retracted."""
        return self.retracts

    def produce_changelog(self) -> Self:
        """Return the spec with a changelog as output, if its rows change."""
        return msgspec.structs.replace(self, changes=True) if self.emits_updates else self

    @property
    def access_pattern(self) -> AccessPattern:
        """The statically chosen store."""
        if self.retracts:
            why = "all rows of a key, since rows go again, in order, replaced whole"
            return AccessPattern("read-modify-write", why)
        last = counted(max(self.preceding), "row")
        return AccessPattern("read-modify-write", f"the last {last} of a key, replaced whole")

    @property
    def arguments(self) -> tuple[Field, ...]:
        """The columns that the calls' inputs are positions in."""
        return self.columns

    @property
    def functions(self) -> tuple[str, ...]:
        """The calls, as `millpond.explain` shows them."""
        return describe_calls(self.calls, self.columns)
