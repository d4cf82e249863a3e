"""Grouping by columns, which may include an event time or its windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

import msgspec

from millpond.metrics import ADAPTIVE_METRICS
from millpond.spec.calls import (
    EVENT_TIME_WINDOWS,
    describe_calls,
    explain_requested_pattern,
    needs_rows,
    result_fields,
    unsupported_state,
    with_requested_pattern,
)
from millpond.spec.functions import FUNCTIONS, is_by_value, is_distinct, key_width, unsupported_call
from millpond.spec.operators import OP, AggregateCall, EventTime, Field, Pattern
from millpond.spec.protocol import AccessPattern, ChangelogError, KindFacts, Spec
from millpond.spec.traits import Trait, changelog_traits, columns_trait

PANE_TYPE = "bigint"
"""Type of a window that the operator assigns, as input and in state: the start of its pane."""


class AggregateSpec(Spec, frozen=True, tag="aggregate"):
    """A grouped aggregation by `keys`.

    Input columns of the slot stage: `keys`, then `inputs`. Output columns: `keys`, then one per call.

    Append mode requires `time`. With `time`, late rows are dropped and the watermark closes groups. `retracts` and
    `changes` exclude `time`.
    """

    facts: ClassVar[KindFacts] = KindFacts(
        emits_input_rows=False,
        supports_complete=True,
        beyond_spark=False,
        reads_updates_as_rows=False,
        functions_may_change=True,
    )

    keys: tuple[Field, ...]
    inputs: tuple[Field, ...]
    calls: tuple[AggregateCall, ...]
    output_mode: str  # "append" | "update" | "complete"
    time: EventTime | None = None
    retracts: bool = False
    changes: bool = False
    pattern: Pattern = "auto"

    @property
    def traits(self) -> Mapping[str, Trait]:
        """The grouping columns, and the lifetime of groups."""
        time = self.time
        windows = None if time is None else time.windows
        shared = windows is not None and windows.shared
        closed = "for ever" if time is None else f"until the watermark passes {self.keys[time.column].name}"
        return {
            "keys": columns_trait("groups by", self.keys),
            "windows": Trait(f"has {windows.description}" if windows else "assigns no windows of event time"),
            "panes": Trait(f"keeps sliding windows {'by what they share' if shared else 'each by itself'}"),
            "time": Trait(f"keeps groups {closed}"),
            "mode": Trait(f"runs in output mode {self.output_mode}"),
            "pattern": Trait(f"keeps groups by spark.millpond.store.pattern={self.pattern}"),
            **changelog_traits(retracts=self.retracts, changes=self.changes),
        }

    @property
    def key_fields(self) -> tuple[Field, ...]:
        """The key columns, as they arrive and are stored."""
        if self.time is None or self.time.windows is None:
            return self.keys
        position = self.time.column
        return (*self.keys[:position], Field(self.keys[position].name, PANE_TYPE), *self.keys[position + 1 :])

    @property
    def output_keys(self) -> tuple[Field, ...]:
        """The key columns as the query shows them; windows arrive and are stored as numbers."""
        return self.keys

    @property
    def input_fields(self) -> tuple[Field, ...]:
        """The input columns after `__hash`."""
        return (*self.key_fields, *self.inputs, *([OP] if self.retracts else []))

    @property
    def output_fields(self) -> tuple[Field, ...]:
        """The output columns."""
        return (*self.keys, *result_fields(self.calls), *([OP] if self.changes else []))

    @property
    def state_fields(self) -> tuple[Field, ...]:
        """The key columns, then the columns of the state.

        Windows have a start and an end, and so have the panes that sliding windows share. If rows are kept until their
        window closes, each row shows its inputs. If the state may hold both groups and rows (`adaptive`), both are
        shown: groups without inputs, rows without results.
        """
        fields = self.keys + (self.inputs if self.keeps_rows else result_fields(self.calls))
        return fields + self.inputs if self.adaptive else fields

    @property
    def lag(self) -> int | None:
        """Lag of the operator's watermark behind the query's, in ms; None if it uses no watermark."""
        return None if self.time is None else self.time.lag_ms

    def with_lag(self, lag_ms: int) -> Self:
        """Return the spec for a watermark that lags `lag_ms` behind the query's."""
        if self.time is None:
            return self
        return msgspec.structs.replace(self, time=msgspec.structs.replace(self.time, lag_ms=lag_ms))

    @property
    def emits_updates(self) -> bool:
        """Whether emitted rows may change later."""
        return self.output_mode != "append"

    @property
    def located_by_hash(self) -> bool:
        """Whether the hash alone locates a row's groups; with event time, the slice does so, too."""
        return self.time is None

    @property
    def hint_columns(self) -> tuple[int, ...]:
        """The event time, for groups updated in place: it says which slice of the state holds a group."""
        if self.time is None or self.keeps_rows or self.adaptive:
            return ()
        return (self.time.column,)

    def consume_changelog(self) -> Self:
        """Return the spec over a changelog as input.

        Raises:
            ChangelogError: a function, or the grouping by event time, cannot retract rows.
        """
        if self.time is not None:
            raise ChangelogError("an aggregate by event time")
        for call in self.calls:
            # State such as a minimum does not know which value follows when its own is retracted.
            if not FUNCTIONS[call.function].retractable or is_distinct(call):
                raise ChangelogError(f"{call.function}{'(distinct)' if call.distinct else ''}")
        return msgspec.structs.replace(self, retracts=True)

    def produce_changelog(self) -> Self:
        """Return the spec with a changelog as output: update mode, since the operator above consumes changes.

        Raises:
            ChangelogError: the operator updates windows of event time.
        """
        if self.time is not None:
            # In append mode a group is emitted once, when it closes, so plain rows are its changelog.
            if self.emits_updates:
                raise ChangelogError(EVENT_TIME_WINDOWS)
            return self
        return msgspec.structs.replace(self, changes=True, output_mode="update")

    @property
    def keeps_rows(self) -> bool:
        """Whether rows are kept until their window closes, because a function needs all of them."""
        return self.time is not None and self.output_mode == "append" and needs_rows(self.calls, self.pattern)

    @property
    def adaptive(self) -> bool:
        """Whether the best layout of groups depends on the data and is chosen while the operator runs.

        This holds for distinct inputs. If they repeat within a window, groups and a table of inputs are small. If not,
        that table is as large as the rows: appending rows, and removing repeats when the window closes, is cheaper.

        Functions that depend on the arrival order exclude it. When a window changes from appended rows to groups, its
        appended rows are merged last, although they came first.
        """
        if self.time is None or self.output_mode != "append" or self.pattern != "auto":
            return False
        if self.keeps_rows or self._depends_on_order:
            return False
        overlap = 1 if self.time.windows is None else self.time.windows.overlap
        return overlap == 1 and any(map(is_distinct, self.calls))

    @property
    def why_not_combined(self) -> str | None:
        """Why rows cannot be combined before the exchange, whatever the functions; None if they can."""
        if self.keeps_rows or self.adaptive:
            return "the state keeps single rows"
        if self.retracts:
            return "its input is a changelog"
        collated = next((field.type for field in self.keys if "collate" in field.type), None)
        return None if collated is None else f"Spark does not hash keys of type {collated}"

    def value_set(self, call: AggregateCall) -> tuple[int, ...]:
        """Return the call's inputs by whose values rows may be combined, without repeats; empty for other calls."""
        by_value = is_by_value(call, [self.inputs[position].type for position in call.inputs])
        return tuple(dict.fromkeys(call.inputs)) if by_value else ()

    @property
    def in_order(self) -> bool:
        """Whether overlapping windows must receive rows in arrival order."""
        windows = None if self.time is None else self.time.windows
        return windows is not None and windows.overlap > 1 and self._depends_on_order

    @property
    def _depends_on_order(self) -> bool:
        return any(FUNCTIONS[call.function].ordered for call in self.calls)

    @property
    def extra_metrics(self) -> tuple[str, ...]:
        """Additional metrics that slots report for the operator."""
        return ADAPTIVE_METRICS if self.adaptive else ()

    @property
    def access_pattern(self) -> AccessPattern:
        """The statically chosen store."""
        return explain_requested_pattern(self._inferred(), self.pattern)

    def with_pattern(self, pattern: Pattern) -> Self:
        """Return the spec with the requested store pattern, where its functions leave a choice."""
        return with_requested_pattern(self, pattern)

    def _inferred(self) -> AccessPattern:
        if self.keeps_rows:
            why = "all rows of a group are needed at once: they are appended to their window, and read when it closes"
            return AccessPattern("aligned append", why)
        if self.adaptive:
            why = "it depends on how often DISTINCT inputs repeat: groups in memory first, with one row per key and "
            why += "value; if that outgrows it and values are mostly new, rows are appended to their window, and read "
            why += "when it closes"
            return AccessPattern("observed", why)
        if any(call.distinct for call in self.calls):
            why = "one row per key, updated in place; DISTINCT inputs are kept beside it, one row per key and value"
        elif any(FUNCTIONS[call.function].collects for call in self.calls):
            why = "one row per key, updated in place; collected values grow with it"
        else:
            why = "every function is associative and commutative: one row per key, updated in place"
        if self.lag is not None:
            why += "; kept by slices of event time, each dropped whole when the watermark passes it"
        return AccessPattern("read-modify-write", why)

    @property
    def arguments(self) -> tuple[Field, ...]:
        """The columns that the calls' inputs are positions in."""
        return self.inputs

    @property
    def functions(self) -> tuple[str, ...]:
        """The calls, as `millpond.explain` shows them."""
        return describe_calls(self.calls, self.inputs)

    @property
    def unsupported_values(self) -> str | None:
        """The reason code why a call is not supported; None if all are."""
        width = key_width(self.key_fields)
        for call in self.calls:
            inputs = [self.inputs[position] for position in call.inputs]
            reason = unsupported_call(call, [field.type for field in inputs])
            reason = reason or unsupported_state(call, inputs, width, whole=self.keeps_rows)
            if reason:
                return reason
        return None
