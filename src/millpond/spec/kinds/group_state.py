"""A user function over the rows and the state of each key (`applyInPandasWithState`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import msgspec

from millpond.spec.kinds.processor import ProcessorSpec
from millpond.spec.operators import Field
from millpond.spec.protocol import Spec
from millpond.spec.traits import Trait, columns_trait

STATE = "groupState"
"""Name of the only state variable, as in Spark."""
TIMEOUT = "timeoutTimestamp"
"""Column of a key's time-out in milliseconds, as in Spark."""


_MAIN = "main"
"""Name of the table that is read by default."""


class GroupStateSpec(ProcessorSpec, frozen=True, tag="group_state"):
    """A user function, called with the rows and the state of each key, and for keys that time out.

    It is a processor with one variable, `STATE`, and at most one time-out per key, stored in the same row.

    Attributes:
        time_mode: the clock of time-outs.
    """

    @property
    def traits(self) -> Mapping[str, Trait]:
        """The key columns, the state's type, and the clock of time-outs."""
        return {
            "keys": columns_trait("groups by", self.key_fields),
            "state": Trait(f"has a state of {self.state}", f"has the state {self.variables[0].description}"),
            "timeouts": Trait(f"has timeouts of {self.time_mode} time" if self.expires else "has no timeouts"),
        }

    def with_idle_state(self, before: Spec) -> Self:
        """Return the same spec: no variables of earlier runs are kept."""
        return self

    @property
    def compatibility_spec(self) -> Self:
        """The key, the state's type and the clock of time-outs; not the output mode, as in Spark."""
        return msgspec.structs.replace(super().compatibility_spec, output_mode="")

    @property
    def timed(self) -> bool:
        """True: the function receives the current time and watermark even without time-outs."""
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
        """The only table; a key's time-out may outlive its removed state."""
        stored = f"struct<{STATE}:{self.state},{TIMEOUT}:bigint>" if self.expires else self.state
        return {_MAIN: (stored, self.expires)}

    @property
    def state_fields(self) -> tuple[Field, ...]:
        """The key columns, the state and the time-out."""
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
        """Empty: the state is read as a whole."""
        return {}

    def table_columns(self, table: str) -> tuple[Field, ...]:
        """Return the columns of the table's rows as a user reads them."""
        return self.state_fields

    @property
    def needs_no_data_batches(self) -> bool:
        """Whether no-data batches follow a moved watermark: for event-time time-outs, as in Spark."""
        return self.time_mode == "event"

    @property
    def functions(self) -> tuple[str, ...]:
        """The state, and the clock of time-outs."""
        timeout = f", timeouts of {self.time_mode} time" if self.expires else ""
        return (f"state: {self.state}{timeout}",)
