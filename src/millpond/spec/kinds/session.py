"""Grouping by columns and sessions of event time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

import msgspec

from millpond.metrics import LIST_METRICS
from millpond.spec.calls import (
    EVENT_TIME_WINDOWS,
    describe_calls,
    explain_requested_pattern,
    needs_rows,
    result_fields,
    unsupported_state,
    with_requested_pattern,
)
from millpond.spec.functions import (
    FUNCTIONS,
    KEY_COLUMNS,
    MAX_KEY_COLUMNS,
    SESSION_DISTINCT,
    is_distinct,
    key_width,
    unsupported_call,
)
from millpond.spec.operators import AggregateCall, Field, Pattern
from millpond.spec.protocol import AccessPattern, ChangelogError, KindFacts, Spec
from millpond.spec.traits import Trait, columns_trait

KEPT = Field("rows", "bigint")
"""Column with the number of rows kept for a session."""


class SessionSpec(Spec, frozen=True, tag="session"):
    """Session windows by `keys`: rows of a key whose own windows overlap or touch share a session.

    Input columns of the slot stage: `keys`, the start of the row's own window, without `gap` its end (both timestamps),
    `inputs`. Output columns: `keys`, `window`, then one per call.

    Attributes:
        window: the session column, a struct of two timestamps.
        lag_ms: lag of the operator's watermark behind the query's; None if it has no watermark.
        gap: the length of every row's own window in microseconds, if it is constant.
    """

    facts: ClassVar[KindFacts] = KindFacts(
        emits_input_rows=False,
        supports_complete=True,
        beyond_spark=False,
        reads_updates_as_rows=False,
        functions_may_change=True,
    )

    keys: tuple[Field, ...]
    window: Field
    inputs: tuple[Field, ...]
    calls: tuple[AggregateCall, ...]
    output_mode: str  # "append" | "complete"
    lag_ms: int | None = None
    pattern: Pattern = "auto"
    gap: int | None = None

    @property
    def traits(self) -> Mapping[str, Trait]:
        """The grouping columns, and the lifetime of sessions."""
        closed = "for ever" if self.lag_ms is None else "until the watermark passes them"
        return {
            "keys": columns_trait("groups by sessions and", self.keys),
            "window": columns_trait("shows sessions as", (self.window,)),
            "time": Trait(f"keeps sessions {closed}"),
            "mode": Trait(f"runs in output mode {self.output_mode}"),
            "pattern": Trait(f"keeps groups by spark.millpond.store.pattern={self.pattern}"),
        }

    @property
    def key_fields(self) -> tuple[Field, ...]:
        """The key columns, without a session ordinal."""
        return self.keys

    @property
    def window_bounds(self) -> tuple[Field, ...]:
        """The bounds of a row's own window: its start and, unless `gap` is constant, its end."""
        kind = "timestamp_ntz" if "timestamp_ntz" in self.window.type else "timestamp"
        start, end = Field("__start", kind), Field("__end", kind)
        return (start, end) if self.gap is None else (start,)

    @property
    def input_fields(self) -> tuple[Field, ...]:
        """The input columns after `__hash`."""
        return self.keys + self.window_bounds + self.inputs

    @property
    def output_fields(self) -> tuple[Field, ...]:
        """The output columns."""
        return (*self.keys, self.window, *result_fields(self.calls))

    @property
    def state_fields(self) -> tuple[Field, ...]:
        """The output columns; if rows are kept in a table beside the sessions, their number instead of results."""
        return (*self.keys, self.window, KEPT) if self.keeps_rows else self.output_fields

    @property
    def lag(self) -> int | None:
        """Lag of the operator's watermark behind the query's, in ms; None if it uses no watermark."""
        return self.lag_ms

    def with_lag(self, lag_ms: int) -> Self:
        """Return the spec for a watermark that lags `lag_ms` behind the query's."""
        return self if self.lag_ms is None else msgspec.structs.replace(self, lag_ms=lag_ms)

    @property
    def needs_no_data_batches(self) -> bool:
        """Whether the watermark closes sessions; complete mode shows all sessions in every batch."""
        return self.lag is not None and self.output_mode != "complete"

    @property
    def emits_updates(self) -> bool:
        """Whether emitted rows may change later."""
        return self.output_mode != "append"

    def produce_changelog(self) -> Self:
        """Return the same spec, or refuse if its rows change: sessions cannot emit a changelog.

        Raises:
            ChangelogError: emitted rows may change.
        """
        if self.emits_updates:
            raise ChangelogError(EVENT_TIME_WINDOWS)
        return self

    @property
    def keeps_rows(self) -> bool:
        """Whether rows are kept until their session closes, for functions that are costly to merge."""
        if self.lag_ms is None or self.output_mode != "append":
            return False
        # When sessions merge, distinct inputs of both must be compared: that needs the rows.
        return needs_rows(self.calls, self.pattern) or any(map(is_distinct, self.calls))

    @property
    def depends_on_row_order(self) -> bool:
        """Whether rows have to be folded in the order of their times; rows that are kept are not ordered."""
        return not self.keeps_rows and any(
            FUNCTIONS[call.function].ordered and not self._sorts_values(call) for call in self.calls
        )

    def _sorts_values(self, call: AggregateCall) -> bool:
        """Whether the function sorts its values by themselves; by other columns, the order of rows decides ties."""
        # ORDER BY other columns comes as a struct of the value and these columns.
        return "order" in call.options and not self.inputs[call.inputs[0]].type.startswith("struct")

    @property
    def extra_metrics(self) -> tuple[str, ...]:
        """Additional metrics that slots report for the operator."""
        return LIST_METRICS if self.keeps_rows else ()

    @property
    def access_pattern(self) -> AccessPattern:
        """The statically chosen store."""
        if self.keeps_rows:
            why = "all rows of a session are needed at once: they are appended to it, and read when it closes"
            return explain_requested_pattern(AccessPattern("unaligned append", why), self.pattern)
        why = "one row per open session, updated in place; those that meet are merged, closed ones found by their end"
        return explain_requested_pattern(AccessPattern("read-modify-write", why), self.pattern)

    def with_pattern(self, pattern: Pattern) -> Self:
        """Return the spec with the requested store pattern, where its functions leave a choice."""
        return with_requested_pattern(self, pattern)

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
        width = key_width(self.keys) + 1  # one more column: the session's number within its key
        if width > MAX_KEY_COLUMNS:
            return KEY_COLUMNS
        for call in self.calls:
            inputs = [self.inputs[position] for position in call.inputs]
            if reason := unsupported_call(call, [field.type for field in inputs]):
                return reason
            if is_distinct(call) and not self.keeps_rows:
                return SESSION_DISTINCT
            if reason := unsupported_state(call, inputs, width, whole=self.keeps_rows):
                return reason
        return None
