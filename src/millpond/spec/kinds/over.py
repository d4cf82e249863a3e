"""Aggregates over the last rows of each key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import msgspec

from millpond.spec.calls import described, result_fields
from millpond.spec.kinds.ordered_rows import OrderedRows
from millpond.spec.operators import OP, AggregateCall, Field
from millpond.spec.protocol import AccessPattern
from millpond.spec.traits import Trait
from millpond.words import counted


class OverSpec(OrderedRows, frozen=True, tag="over"):
    """Aggregates over the last rows of each key: of every row, its result over itself and the rows before it.

    Attributes:
        columns: of a row; the pipe's input, and its output but for the results.
        keys: positions of the columns that rows are partitioned by.
        order: what rows that come in one batch are ordered by; with `retracts`, all rows of a key.
        calls: the aggregates, their inputs being positions in `columns`.
        preceding: for each call, how many rows before the current one count.
        retracts, changes: as for `RankSpec`; `changes` only with `retracts`, since else no row ever changes.
    """

    calls: tuple[AggregateCall, ...]
    preceding: tuple[int, ...]
    retracts: bool = False
    changes: bool = False

    @property
    def traits(self) -> Mapping[str, Trait]:
        """Which rows it keeps, and what it computes over them."""
        rows = ", ".join(counted(number, "row") for number in self.preceding)
        return {**super().traits, "preceding": Trait(f"computes its functions over ({rows}) preceding the current one")}

    @property
    def output_fields(self) -> tuple[Field, ...]:
        """The columns of the output."""
        return (*self.columns, *result_fields(self.calls), *([OP] if self.changes else []))

    @property
    def updates(self) -> bool:
        """Whether rows that the operator gave out may change: if rows before them go or come."""
        return self.retracts

    def emitting(self) -> Self | str:
        """The same with its changes coming out, if there are any."""
        return msgspec.structs.replace(self, changes=True) if self.updates else self

    @property
    def access_pattern(self) -> AccessPattern:
        """The static choice of a store."""
        if self.retracts:
            why = "all rows of a key, since rows go again, in order, replaced whole"
            return AccessPattern("read-modify-write", why)
        last = counted(max(self.preceding), "row")
        return AccessPattern("read-modify-write", f"the last {last} of a key, replaced whole")

    @property
    def arguments(self) -> tuple[Field, ...]:
        """The columns that the inputs of its calls are positions in."""
        return self.columns

    @property
    def functions(self) -> tuple[str, ...]:
        """The calls, in the words of `millpond.explain`."""
        return described(self.calls, self.columns)
