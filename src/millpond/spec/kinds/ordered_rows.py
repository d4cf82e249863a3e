"""What is common to operators over the rows of each key in an order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import msgspec

from millpond.spec.operators import OP, Field, Order
from millpond.spec.protocol import Spec
from millpond.spec.traits import Trait, changelog_traits, columns_trait


class OrderedRows(Spec, frozen=True):
    """What is computed over the rows of each key in an order.

    Attributes:
        columns: of a row. keys: positions of the columns that rows are partitioned by.
        order: what they are ordered by within a key.
    """

    columns: tuple[Field, ...]
    keys: tuple[int, ...]
    order: tuple[Order, ...]

    @property
    def traits(self) -> Mapping[str, Trait]:
        """Which rows it keeps, and in which order."""
        order = ", ".join(_by(self.columns[one.column].name, one) for one in self.order)
        return {
            "keys": columns_trait("partitions by", self.key_fields),
            "order": Trait(f"orders by ({order})"),
            "columns": columns_trait("keeps the columns", self.columns),
            **changelog_traits(retracts=self.retracts, changes=self.changes),
        }

    @property
    def key_fields(self) -> tuple[Field, ...]:
        """The columns that make up the key."""
        return tuple(self.columns[k] for k in self.keys)

    @property
    def input_fields(self) -> tuple[Field, ...]:
        """The columns of the input, after `__hash`."""
        return (*self.columns, *([OP] if self.retracts else []))

    @property
    def state_fields(self) -> tuple[Field, ...]:
        """The key."""
        return self.key_fields

    @property
    def keeps_columns(self) -> bool:
        """Yes: results come beside the columns of a row."""
        return True

    @property
    def lag(self) -> int | None:
        """None: no watermark closes what is kept."""
        return None

    def with_lag(self, lag_ms: int) -> Self:
        """The same."""
        return self

    @property
    def shows_all(self) -> bool:
        """No: all that is kept would have to be ranked again."""
        return False

    @property
    def beyond_spark(self) -> bool:
        """Yes: Spark has window functions on batches alone."""
        return True

    @property
    def takes_updates(self) -> bool:
        """No: the row before would stand beside them."""
        return False

    def consuming(self) -> Self | str:
        """The same over an input that is a changelog: all rows of a key are kept."""
        return msgspec.structs.replace(self, retracts=True)

    def emitting(self) -> Self | str:
        """The same with its changes coming out."""
        return msgspec.structs.replace(self, changes=True)

    @property
    def unsupported_values(self) -> str | None:
        """Rows are kept as they are, whatever they hold."""
        return None


def _by(name: str, order: Order) -> str:
    nulls = "" if order.descending == order.nulls_last else f" nulls {'last' if order.nulls_last else 'first'}"
    return f"{name}{' desc' if order.descending else ''}{nulls}"
