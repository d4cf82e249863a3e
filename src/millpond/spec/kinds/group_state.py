"""A user's function over the rows of each key and a state of it (`applyInPandasWithState`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import msgspec

from millpond.spec.kinds.processor import ProcessorSpec
from millpond.spec.operators import Field
from millpond.spec.protocol import Spec
from millpond.spec.traits import Trait, columns_trait

STATE = "groupState"
"""The name of the one state variable, as Spark calls it."""
TIMEOUT = "timeoutTimestamp"
"""What a key's row has beside it, as Spark calls it: when the key times out, in milliseconds."""


_MAIN = "main"
"""The name of the table that is read where none is named."""


class GroupStateSpec(ProcessorSpec, frozen=True, tag="group_state"):
    """A user's function, called beside the pipe with the rows and the state of each key, and for keys that time out.

    It is a processor with one variable, `STATE`, and at most one time for each key, which is kept beside it.

    Attributes:
        time_mode: what timeouts go by.
    """

    @property
    def traits(self) -> Mapping[str, Trait]:
        """What it groups by, its state, and what timeouts go by."""
        return {
            "keys": columns_trait("groups by", self.key_fields),
            "state": Trait(f"has a state of {self.state}", f"has the state {self.variables[0].description}"),
            "timeouts": Trait(f"has timeouts of {self.time_mode} time" if self.expires else "has no timeouts"),
        }

    def keeping(self, before: Spec) -> Self:
        """The same: there is nothing that is kept for later runs."""
        return self

    @property
    def lasting(self) -> Self:
        """Its key, the type of its state, and what timeouts go by; as in Spark, not the output mode."""
        return msgspec.structs.replace(super().lasting, output_mode="")

    @property
    def timed(self) -> bool:
        """Yes: it is told the times also where there are no timeouts."""
        return True

    @property
    def expires(self) -> bool:
        """Whether keys may time out."""
        return self.time_mode != "none"

    @property
    def state(self) -> str:
        """The type of the state, as DDL."""
        return self.variables[0].value

    @property
    def tables(self) -> Mapping[str, tuple[str, bool]]:
        """The one table: of a state that was removed, the timeout may be left."""
        stored = f"struct<{STATE}:{self.state},{TIMEOUT}:bigint>" if self.expires else self.state
        return {_MAIN: (stored, self.expires)}

    @property
    def state_fields(self) -> tuple[Field, ...]:
        """The key, its state, and when it times out."""
        taken = {field.name for field in self.key_fields}
        shown = {STATE: self.state} | ({TIMEOUT: "bigint"} if self.expires else {})
        fields = list(self.key_fields)
        for name, type_ in shown.items():
            while name in taken:
                name += "_state"
            taken.add(name)
            fields.append(Field(name, type_))
        return tuple(fields)

    @property
    def parts(self) -> Mapping[str, str]:
        """None: the state is read as one."""
        return {}

    def shown(self, table: str) -> tuple[Field, ...]:
        """The columns of the table's rows as a user reads them."""
        return self.state_fields

    @property
    def closes(self) -> bool:
        """Whether batches without rows follow a watermark that has moved: as in Spark, for timeouts of event time."""
        return self.time_mode == "event"

    @property
    def functions(self) -> tuple[str, ...]:
        """The state, and what timeouts go by."""
        timeout = f", timeouts of {self.time_mode} time" if self.expires else ""
        return (f"state: {self.state}{timeout}",)
