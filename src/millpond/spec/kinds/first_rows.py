"""Base of the specs that emit the first row of each key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import msgspec

from millpond.spec.operators import Field
from millpond.spec.protocol import Spec
from millpond.spec.traits import Trait, columns_trait


class FirstRows(Spec, frozen=True):
    """An operator that emits the first row of each key, once.

    Attributes:
        columns: the columns of input and output.
        keys: positions of the key columns.
    """

    columns: tuple[Field, ...]
    keys: tuple[int, ...]

    @property
    def traits(self) -> Mapping[str, Trait]:
        """The key columns."""
        return {"keys": columns_trait("deduplicates by", self.key_fields)}

    @property
    def key_fields(self) -> tuple[Field, ...]:
        """The key columns."""
        return tuple(self.columns[k] for k in self.keys)

    @property
    def compatibility_spec(self) -> Self:
        """The key: other columns are not in the state, so they may be added and removed, as in Spark."""
        return msgspec.structs.replace(self, columns=self.key_fields, keys=tuple(range(len(self.keys))))

    @property
    def input_fields(self) -> tuple[Field, ...]:
        """The input columns after `__hash`."""
        return self.columns

    @property
    def output_fields(self) -> tuple[Field, ...]:
        """The output columns."""
        return self.columns

    @property
    def state_fields(self) -> tuple[Field, ...]:
        """The key columns."""
        return self.key_fields
