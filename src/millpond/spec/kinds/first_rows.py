"""What is common to operators that give out the first row of each key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import msgspec

from millpond.spec.calls import ONCE
from millpond.spec.operators import Field
from millpond.spec.protocol import Spec
from millpond.spec.traits import Trait, columns_trait


class FirstRows(Spec, frozen=True):
    """What gives out the first row of each key, once.

    Attributes:
        columns: of the input and the output. keys: positions of those that make up the key.
    """

    columns: tuple[Field, ...]
    keys: tuple[int, ...]

    @property
    def traits(self) -> Mapping[str, Trait]:
        """What it deduplicates by."""
        return {"keys": columns_trait("deduplicates by", self.key_fields)}

    @property
    def key_fields(self) -> tuple[Field, ...]:
        """The columns that make up the key."""
        return tuple(self.columns[k] for k in self.keys)

    @property
    def lasting(self) -> Self:
        """Its key: the other columns are not in the state, so they may come and go, as in Spark."""
        return msgspec.structs.replace(self, columns=self.key_fields, keys=tuple(range(len(self.keys))))

    @property
    def input_fields(self) -> tuple[Field, ...]:
        """The columns of the input, after `__hash`."""
        return self.columns

    @property
    def output_fields(self) -> tuple[Field, ...]:
        """The columns of the output."""
        return self.columns

    @property
    def state_fields(self) -> tuple[Field, ...]:
        """The key."""
        return self.key_fields

    @property
    def keeps_columns(self) -> bool:
        """Yes: rows come out as they are."""
        return True

    @property
    def updates(self) -> bool:
        """No: rows come out once."""
        return False

    @property
    def shows_all(self) -> bool:
        """No: only keys are kept."""
        return False

    @property
    def beyond_spark(self) -> bool:
        """No: Spark deduplicates streams too."""
        return False

    def consuming(self) -> Self | str:
        """A row that has come out cannot be taken back."""
        return ONCE

    def emitting(self) -> Self | str:
        """The same: nothing changes."""
        return self

    @property
    def functions(self) -> tuple[str, ...]:
        """Nothing is computed."""
        return ()

    @property
    def unsupported_values(self) -> str | None:
        """Nothing is kept beside the key."""
        return None
