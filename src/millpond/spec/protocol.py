"""What every kind of operator says of itself, by its spec alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import NamedTuple, Self

import msgspec

from millpond.spec.functions import KEY_COLUMNS, MAX_KEY_COLUMNS, key_supported, key_width
from millpond.spec.operators import AggregateCall, Field, Pattern
from millpond.spec.traits import Trait


class AccessPattern(NamedTuple):
    """How state is accessed, and why that was concluded."""

    store: str
    why: str


class Spec(msgspec.Struct, frozen=True):
    """What an operator computes, as plain data: made by the planner, pinned in `query.json`, run in the slot.

    What has a body here holds of a kind that does not say otherwise; the rest each kind has to say.
    """

    @property
    @abstractmethod
    def key_fields(self) -> tuple[Field, ...]:
        """The columns that make up the key, as they arrive and are stored (of sessions, without an ordinal)."""

    @property
    def shown_keys(self) -> tuple[Field, ...]:
        """The key's columns as the query shows them."""
        return self.key_fields

    @property
    @abstractmethod
    def input_fields(self) -> tuple[Field, ...]:
        """The columns of the input, after `__hash`."""

    @property
    @abstractmethod
    def output_fields(self) -> tuple[Field, ...]:
        """The columns of the output."""

    @property
    @abstractmethod
    def state_fields(self) -> tuple[Field, ...]:
        """The columns of the main table's rows as a user reads them: the key, and what the state says of it."""

    @property
    @abstractmethod
    def traits(self) -> Mapping[str, Trait]:
        """What it does, as a user knows it, by a name for each respect; functions have their texts instead.

        Two specs that differ in what lasts differ in a trait, or in their functions (`tests/spec/test_traits.py`).
        """

    @property
    def lasting(self) -> Self:
        """What of it must not change between starts."""
        return self

    def keeping(self, before: Spec) -> Self:
        """The same, with what an earlier run has kept and it does not ask for."""
        return self

    @property
    def parts(self) -> Mapping[str, str]:
        """What of the state a user asks for by name, and its tables; empty where the state is read as one."""
        return {}

    def part_of(self, table: str) -> str | None:
        """What a user asks for by name that a table belongs to, if it does to any."""
        return next((name for name, one in self.parts.items() if one == table), None)

    def shown(self, table: str) -> tuple[Field, ...]:
        """The columns of a table's rows as a user reads them."""
        return self.state_fields

    @property
    @abstractmethod
    def keeps_columns(self) -> bool:
        """Whether rows of the input come out, with further columns perhaps, not results in their place."""

    @property
    @abstractmethod
    def lag(self) -> int | None:
        """How far the operator's watermark lags behind the query's, in milliseconds; None if it asks for none."""

    @abstractmethod
    def with_lag(self, lag_ms: int) -> Self:
        """The same, reached by a watermark that lags behind the query's."""

    @property
    def closes(self) -> bool:
        """Whether the watermark closes state of the operator, so that batches without rows have something to do."""
        return self.lag is not None

    @property
    def ticks(self) -> bool:
        """Whether the clock makes state of the operator due, so that there is always another batch."""
        return False

    @property
    @abstractmethod
    def updates(self) -> bool:
        """Whether rows that the operator gave out may change later."""

    @property
    @abstractmethod
    def shows_all(self) -> bool:
        """Whether it can show all that it has after each batch, which output mode complete asks for."""

    @property
    @abstractmethod
    def beyond_spark(self) -> bool:
        """Whether Spark has no such operator on streams."""

    @property
    @abstractmethod
    def takes_updates(self) -> bool:
        """Whether it takes updates of Spark's operators below as further rows, as Spark does."""

    @property
    def uncombined(self) -> str | None:
        """Why its rows cannot be combined before the exchange, whatever its functions; None if they can."""
        return "only rows of groups without sessions are combined"

    def value_set(self, call: AggregateCall) -> tuple[int, ...]:
        """The inputs of a call by whose values rows may be combined, each once; none for other calls."""
        return ()

    @property
    def value_sets(self) -> tuple[tuple[int, ...], ...]:
        """The inputs of calls whose results follow from which values there are: rows may be combined by those."""
        return tuple(dict.fromkeys(filter(None, map(self.value_set, self.calls))))

    @property
    def retracts(self) -> bool:
        """Whether the input is a changelog, with `OP` as its last column."""
        return False

    @property
    def changes(self) -> bool:
        """Whether the output is a changelog, with images that are gone and `OP` as its last column."""
        return False

    @abstractmethod
    def consuming(self) -> Self | str:
        """The same over an input that is a changelog, or what of it cannot take rows back."""

    @abstractmethod
    def emitting(self) -> Self | str:
        """The same with its changes coming out, or what keeps them in; of what never changes, the same."""

    @property
    @abstractmethod
    def access_pattern(self) -> AccessPattern:
        """The static choice of a store: how the operator will access its state."""

    def with_pattern(self, pattern: Pattern) -> Self:
        """The same with the pattern that is asked for, where its functions leave a choice."""
        return self

    @property
    def follows(self) -> bool:
        """Whether its functions may change from one run to the next, and the state follow."""
        return False

    @property
    def varies(self) -> bool:
        """Whether what it keeps may come, go, and have other names from one run to the next, whatever is set."""
        return False

    @property
    def keeps_rows(self) -> bool:
        """Whether rows are kept whole until their window or session closes, and results computed then."""
        return False

    @property
    def keyed(self) -> bool:
        """Whether the hash of a row's key tells where its state is, so that keys can be announced before their rows."""
        return True

    @property
    def observed(self) -> bool:
        """Whether it depends on the data how state is best kept, and that is found out while the operator runs."""
        return False

    @property
    def announced(self) -> tuple[int, ...]:
        """Positions of the columns that come with the hash where keys are announced ahead of their rows.

        What is keyed neither by its hash nor has any cannot be announced.
        """
        return ()

    @property
    def stateful(self) -> bool:
        """Whether it has state."""
        return True

    def passing(self) -> Self | None:
        """The same over rows that change, of which each comes out by itself; None of what holds them together."""
        return None

    @property
    def figures(self) -> tuple[str, ...]:
        """What slots report of it beside what they report of every operator (see `millpond.metrics`)."""
        return ()

    @property
    def calls(self) -> tuple[AggregateCall, ...]:
        """The aggregate functions that it computes."""
        return ()

    @property
    def arguments(self) -> tuple[Field, ...]:
        """The columns that the inputs of its calls are positions in."""
        return ()

    @property
    @abstractmethod
    def functions(self) -> tuple[str, ...]:
        """What it computes, in the words of `millpond.explain`."""

    @property
    def unsupported(self) -> str | None:
        """Why the operator cannot run here, as a reason code; None if it can."""
        keys = self.key_fields
        for field in keys:
            if reason := key_supported(field.type):
                return reason
        return KEY_COLUMNS if key_width(keys) > MAX_KEY_COLUMNS else self.unsupported_values

    @property
    @abstractmethod
    def unsupported_values(self) -> str | None:
        """Why what it keeps beside its keys cannot be kept here, as a reason code; None if it can."""
