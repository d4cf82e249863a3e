"""What is common to operators over the rows of each key in an order."""

from __future__ import annotations

from typing import Self

import msgspec

from millpond.spec.operators import OP, Field, Order
from millpond.spec.protocol import Spec


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
