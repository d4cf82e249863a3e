"""The first rows of each key in an order."""

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
        columns: of a row; the pipe's input, and its output but for the rank.
        keys: positions of the columns that rows are partitioned by.
        order: what they are ordered by within a key.
        function: `row_number`, `rank` or `dense_rank`.
        limit: the last rank that is wanted.
        retracts: whether the input is a changelog, with `OP` as its last column.
        changes: whether the output is one, with images that are gone and `OP` as its last column.
    """

    function: str
    limit: int
    retracts: bool = False
    changes: bool = False

    @property
    def traits(self) -> Mapping[str, Trait]:
        """Which rows it keeps."""
        return {**super().traits, "rank": Trait(f"keeps rows with {self.function}() up to {self.limit}")}

    @property
    def output_fields(self) -> tuple[Field, ...]:
        """The columns of the output."""
        return (*self.columns, RANK, *([OP] if self.changes else []))

    @property
    def single(self) -> bool:
        """Whether one row a key suffices."""
        return self.function == "row_number" and self.limit == 1 and not self.retracts and not self.changes

    @property
    def updates(self) -> bool:
        """Yes: rows are outranked."""
        return True

    @property
    def access_pattern(self) -> AccessPattern:
        """The static choice of a store."""
        held = "all rows of a key, since rows go again" if self.retracts else f"the first {self.limit} of a key's rows"
        return AccessPattern("read-modify-write", f"{held}, in order, replaced whole")

    @property
    def functions(self) -> tuple[str, ...]:
        """The rank and its bound, in the words of `millpond.explain`."""
        return (f"{self.function}() <= {self.limit}",)
