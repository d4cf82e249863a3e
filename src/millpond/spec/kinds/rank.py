"""The first rows of each key in an order (top-n)."""

from __future__ import annotations

from collections.abc import Mapping

from millpond.spec.kinds.ordered_rows import OrderedRows
from millpond.spec.operators import OP, Field
from millpond.spec.protocol import AccessPattern
from millpond.spec.traits import Trait

RANK = Field("__rank", "int")


class RankSpec(OrderedRows, frozen=True, tag="rank"):
    """The rows of each key whose rank in an order is at most `limit`.

    Attributes:
        columns: the columns of a row: the slot stage's input, and its output without the rank.
        keys: positions of the partitioning columns.
        order: the order of rows within a key.
        function: `row_number`, `rank` or `dense_rank`.
        limit: the last rank to keep.
        retracts: whether the input is a changelog, with `OP` as its last column.
        changes: whether the output is a changelog: with deleted rows, and `OP` as its last column.
    """

    function: str
    limit: int
    retracts: bool = False
    changes: bool = False

    @property
    def traits(self) -> Mapping[str, Trait]:
        """The rank condition, besides the traits of ordered rows."""
        return {**super().traits, "rank": Trait(f"keeps rows with {self.function}() up to {self.limit}")}

    @property
    def output_fields(self) -> tuple[Field, ...]:
        """The output columns."""
        return (*self.columns, RANK, *([OP] if self.changes else []))

    @property
    def single(self) -> bool:
        """Whether one row per key suffices."""
        return self.function == "row_number" and self.limit == 1 and not self.retracts and not self.changes

    @property
    def emits_updates(self) -> bool:
        """True: a better row outranks an emitted one."""
        return True

    @property
    def access_pattern(self) -> AccessPattern:
        """The statically chosen store."""
        stored = (
            "all rows of a key, since rows go again" if self.retracts else f"the first {self.limit} of a key's rows"
        )
        return AccessPattern("read-modify-write", f"{stored}, in order, replaced whole")

    @property
    def functions(self) -> tuple[str, ...]:
        """The rank and its bound, as `millpond.explain` shows them."""
        return (f"{self.function}() <= {self.limit}",)
