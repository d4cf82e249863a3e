"""Base of the specs over the ordered rows of each key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

import msgspec

from millpond.spec.operators import OP, Field, Order
from millpond.spec.protocol import KindFacts, Spec
from millpond.spec.traits import Trait, changelog_traits, columns_trait


class OrderedRows(Spec, frozen=True):
    """A computation over the ordered rows of each key.

    Attributes:
        columns: the columns of a row.
        keys: positions of the partitioning columns.
        order: the order of rows within a key.
    """

    facts: ClassVar[KindFacts] = KindFacts(
        emits_input_rows=True, supports_complete=False, beyond_spark=True, reads_updates_as_rows=False
    )

    columns: tuple[Field, ...]
    keys: tuple[int, ...]
    order: tuple[Order, ...]

    @property
    def traits(self) -> Mapping[str, Trait]:
        """The kept columns, the partitioning and the order."""
        order = ", ".join(_by(self.columns[column.column].name, column) for column in self.order)
        return {
            "keys": columns_trait("partitions by", self.key_fields),
            "order": Trait(f"orders by ({order})"),
            "columns": columns_trait("keeps the columns", self.columns),
            **changelog_traits(retracts=self.retracts, changes=self.changes),
        }

    @property
    def key_fields(self) -> tuple[Field, ...]:
        """The key columns."""
        return tuple(self.columns[k] for k in self.keys)

    @property
    def input_fields(self) -> tuple[Field, ...]:
        """The input columns after `__hash`."""
        return (*self.columns, *([OP] if self.retracts else []))

    @property
    def state_fields(self) -> tuple[Field, ...]:
        """The key columns."""
        return self.key_fields

    def consume_changelog(self) -> Self:
        """Return the spec over a changelog as input: all rows of a key are kept."""
        return msgspec.structs.replace(self, retracts=True)

    def produce_changelog(self) -> Self:
        """Return the spec with a changelog as output."""
        return msgspec.structs.replace(self, changes=True)


def _by(name: str, order: Order) -> str:
    nulls = "" if order.descending == order.nulls_last else f" nulls {'last' if order.nulls_last else 'first'}"
    return f"{name}{' desc' if order.descending else ''}{nulls}"
