"""Protocol of operator specs: the properties that every kind of operator defines."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Self

import msgspec

from millpond.spec.functions import KEY_COLUMNS, MAX_KEY_COLUMNS, key_width, unsupported_key
from millpond.spec.operators import AggregateCall, Field, Pattern
from millpond.spec.traits import Trait

NO_WATERMARK = 1 << 62
"""Lag of an operator that no watermark reaches: its own stays 0."""


class AccessPattern(NamedTuple):
    """Store that fits the operator's state accesses, and the reason."""

    store: str
    why: str


class KindFacts(NamedTuple):
    """Facts that hold for every operator of a kind.

    Attributes:
        emits_input_rows: whether input rows are emitted, perhaps with further columns, instead of results.
        supports_complete: whether it can show all its state after each batch, as output mode complete requires.
        beyond_spark: whether Spark has no such operator on streams.
        reads_updates_as_rows: whether it treats updates from operators below as further rows, as Spark does.
        functions_may_change: whether its functions may change between runs, and the state is migrated.
        variables_may_change: whether variables may be added, removed and renamed between runs, whatever is set.
        stateful: whether it has state.
    """

    emits_input_rows: bool
    supports_complete: bool
    beyond_spark: bool
    reads_updates_as_rows: bool
    functions_may_change: bool = False
    variables_may_change: bool = False
    stateful: bool = True


class ChangelogError(Exception):
    """An operator cannot consume or produce a changelog; the message names the part that cannot."""


class Spec(msgspec.Struct, frozen=True):
    """An operator as plain data: made by the planner, recorded in `query.json`, run in the slot.

    Members with a body are defaults; each kind has to define the abstract ones.

    Attributes:
        facts: the facts that hold for all operators of the kind.
    """

    facts: ClassVar[KindFacts]

    @property
    @abstractmethod
    def key_fields(self) -> tuple[Field, ...]:
        """The key columns, as they arrive and are stored (for sessions, without an ordinal)."""

    @property
    def output_keys(self) -> tuple[Field, ...]:
        """The key columns as the query shows them."""
        return self.key_fields

    @property
    @abstractmethod
    def input_fields(self) -> tuple[Field, ...]:
        """The input columns after `__hash`."""

    @property
    @abstractmethod
    def output_fields(self) -> tuple[Field, ...]:
        """The output columns."""

    @property
    @abstractmethod
    def state_fields(self) -> tuple[Field, ...]:
        """The columns of the main table's rows as a user reads them: the key, then the state."""

    @property
    @abstractmethod
    def traits(self) -> Mapping[str, Trait]:
        """The operator's behaviour in a user's terms, by aspect; functions are described by their own texts.

        Two specs that differ in `compatibility_spec` differ in a trait, or in their functions
        (`tests/query/test_differences.py`).
        """

    @property
    def compatibility_spec(self) -> Self:
        """The part of the spec that must not change between starts."""
        return self

    def with_idle_state(self, before: Spec) -> Self:
        """Return the spec with state that an earlier run has kept and this run does not use."""
        return self

    @property
    def parts(self) -> Mapping[str, str]:
        """Name → table of the parts of the state that a user can read by name; empty if it is read as a whole."""
        return {}

    def part_of(self, table: str) -> str | None:
        """Return the name of the part that a table belongs to; None if it belongs to no part."""
        return next((name for name, part_table in self.parts.items() if part_table == table), None)

    def table_columns(self, table: str) -> tuple[Field, ...]:
        """Return the columns of a table's rows as a user reads them."""
        return self.state_fields

    @property
    def lag(self) -> int | None:
        """Lag of the operator's watermark behind the query's, in ms; None if it uses no watermark."""
        return None

    def with_lag(self, lag_ms: int) -> Self:
        """Return the spec for a watermark that lags `lag_ms` behind the query's; itself if it uses no watermark."""
        return self

    @property
    def needs_no_data_batches(self) -> bool:
        """Whether the watermark closes state of the operator, so that no-data batches have work to do."""
        return self.lag is not None

    @property
    def due_by_processing_time(self) -> bool:
        """Whether processing time makes state due, so that there is always another batch."""
        return False

    @property
    def emits_updates(self) -> bool:
        """Whether emitted rows may change later."""
        return False

    @property
    def why_not_combined(self) -> str | None:
        """Why rows cannot be combined before the exchange, whatever the functions; None if they can."""
        return "only rows of groups without sessions are combined"

    def value_set(self, call: AggregateCall) -> tuple[int, ...]:
        """Return the call's inputs by whose values rows may be combined, without repeats; empty for other calls."""
        return ()

    @property
    def value_sets(self) -> tuple[tuple[int, ...], ...]:
        """The input sets by whose values rows may be combined, for calls that depend on the set of values alone."""
        return tuple(dict.fromkeys(filter(None, map(self.value_set, self.calls))))

    @property
    def retracts(self) -> bool:
        """Whether the input is a changelog, with `OP` as its last column."""
        return False

    @property
    def changes(self) -> bool:
        """Whether the output is a changelog, with deleted rows and `OP` as its last column."""
        return False

    def consume_changelog(self) -> Self:
        """Return the spec of the same operator over a changelog.

        Raises:
            ChangelogError: it cannot retract rows.
        """
        raise ChangelogError("what gives each row out once")

    def produce_changelog(self) -> Self:
        """Return the spec of the same operator with a changelog as output; itself if its rows never change.

        Raises:
            ChangelogError: its rows change, and it cannot emit the changes.
        """
        assert not self.emits_updates, "a kind whose rows change says how"
        return self

    @property
    @abstractmethod
    def access_pattern(self) -> AccessPattern:
        """The statically chosen store: how the operator will access its state."""

    def with_pattern(self, pattern: Pattern) -> Self:
        """Return the spec with the requested store pattern, where its functions leave a choice."""
        return self

    @property
    def keeps_rows(self) -> bool:
        """Whether rows are kept whole until their window or session closes, and results are computed then."""
        return False

    @property
    def located_by_hash(self) -> bool:
        """Whether the hash alone locates a row's state, so that prefetch hints need only the hash."""
        return True

    @property
    def adaptive(self) -> bool:
        """Whether the best layout of state depends on the data and is chosen while the operator runs."""
        return False

    @property
    def hint_columns(self) -> tuple[int, ...]:
        """Positions of the columns that a prefetch hint carries besides the hash.

        An operator that is not `located_by_hash` and has no such columns cannot be prefetched.
        """
        return ()

    def over_updates(self) -> Self | None:
        """Return the spec over rows that change, if each row is emitted by itself; None if rows are combined."""
        return None

    @property
    def extra_metrics(self) -> tuple[str, ...]:
        """Additional metrics that slots report for the operator (see `millpond.metrics`)."""
        return ()

    @property
    def calls(self) -> tuple[AggregateCall, ...]:
        """The aggregate functions that it computes."""
        return ()

    @property
    def arguments(self) -> tuple[Field, ...]:
        """The columns that the calls' inputs are positions in."""
        return ()

    @property
    def functions(self) -> tuple[str, ...]:
        """The computed functions, as `millpond.explain` shows them."""
        return ()

    @property
    def unsupported(self) -> str | None:
        """The reason code why the operator cannot run here; None if it can."""
        keys = self.key_fields
        for field in keys:
            if reason := unsupported_key(field.type):
                return reason
        return KEY_COLUMNS if key_width(keys) > MAX_KEY_COLUMNS else self.unsupported_values

    @property
    def unsupported_values(self) -> str | None:
        """The reason code why its values besides the keys cannot be stored; None if they can."""
        return None
