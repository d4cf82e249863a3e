"""Grouping by columns and sessions of event time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import msgspec

from millpond.metrics import READ_AHEAD
from millpond.spec.calls import ONCE, WINDOWS, asked_for, described, needs_rows, patterned, result_fields, unkept
from millpond.spec.functions import SESSION_DISTINCT, is_distinct, key_width, supported
from millpond.spec.operators import AggregateCall, Field, Pattern
from millpond.spec.protocol import AccessPattern, Spec
from millpond.spec.traits import Trait, columns_trait, lag_trait

KEPT = Field("rows", "bigint")
"""How many rows of a session are kept."""


class SessionSpec(Spec, frozen=True, tag="session"):
    """Grouping by `keys` and sessions: windows that rows of a key are in together whose own windows meet.

    The pipe's input columns are `keys`, then the start of the row's own window and, without `gap`, its end, both
    timestamps, then `inputs`; its output `keys`, `window`, then one per call.

    Attributes:
        window: the column of sessions, a struct of two timestamps.
        lag_ms: how far the watermark that reaches the operator lags behind the query's; None if it has none.
        gap: the length of every row's own window in microseconds, if it is always the same.
    """

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
        """What it groups by, and what becomes of sessions."""
        closed = "for ever" if self.lag_ms is None else "until the watermark passes them"
        return {
            "keys": columns_trait("groups by sessions and", self.keys),
            "window": columns_trait("shows sessions as", (self.window,)),
            "time": Trait(f"keeps sessions {closed}"),
            "lag": lag_trait(self.lag_ms),
            "mode": Trait(f"runs in output mode {self.output_mode}"),
            "pattern": Trait(f"keeps groups by spark.millpond.store.pattern={self.pattern}"),
        }

    @property
    def key_fields(self) -> tuple[Field, ...]:
        """The columns that make up the key, without an ordinal."""
        return self.keys

    @property
    def window_bounds(self) -> tuple[Field, ...]:
        """The columns of a row's own window: its start and, unless the spec tells how long it is, its end."""
        kind = "timestamp_ntz" if "timestamp_ntz" in self.window.type else "timestamp"
        start, end = Field("__start", kind), Field("__end", kind)
        return (start, end) if self.gap is None else (start,)

    @property
    def input_fields(self) -> tuple[Field, ...]:
        """The columns of the input, after `__hash`."""
        return self.keys + self.window_bounds + self.inputs

    @property
    def output_fields(self) -> tuple[Field, ...]:
        """The columns of the output."""
        return (*self.keys, self.window, *result_fields(self.calls))

    @property
    def state_fields(self) -> tuple[Field, ...]:
        """Those of the output; where rows are kept, which is in a table beside the sessions, the number of these."""
        return (*self.keys, self.window, KEPT) if self.keeps_rows else self.output_fields

    @property
    def keeps_columns(self) -> bool:
        """No: results come out."""
        return False

    @property
    def lag(self) -> int | None:
        """How far the operator's watermark lags behind the query's, in milliseconds; None if it asks for none."""
        return self.lag_ms

    def with_lag(self, lag_ms: int) -> Self:
        """The same, reached by a watermark that lags behind the query's."""
        return self if self.lag_ms is None else msgspec.structs.replace(self, lag_ms=lag_ms)

    @property
    def closes(self) -> bool:
        """Whether the watermark closes sessions: in complete mode, all are shown again and again."""
        return self.lag is not None and self.output_mode != "complete"

    @property
    def updates(self) -> bool:
        """Whether rows that the operator gave out may change later."""
        return self.output_mode != "append"

    @property
    def shows_all(self) -> bool:
        """Yes: output mode complete is its own."""
        return True

    @property
    def beyond_spark(self) -> bool:
        """No: Spark has sessions on streams too."""
        return False

    @property
    def takes_updates(self) -> bool:
        """No: they would be counted twice."""
        return False

    def consuming(self) -> Self | str:
        """Nothing of it can take rows back."""
        return ONCE

    def emitting(self) -> Self | str:
        """Its changes stay in, if there are any."""
        return WINDOWS if self.updates else self

    @property
    def follows(self) -> bool:
        """Yes: they keep a row for each group, if not said otherwise."""
        return True

    @property
    def keeps_rows(self) -> bool:
        """Whether rows are kept until the watermark closes their session: for what cannot be merged cheaply."""
        if self.lag_ms is None or self.output_mode != "append":
            return False
        return needs_rows(self.calls, self.pattern) or any(map(is_distinct, self.calls))

    @property
    def figures(self) -> tuple[str, ...]:
        """What slots report of it beside what they report of every operator."""
        return READ_AHEAD if self.keeps_rows else ()

    @property
    def access_pattern(self) -> AccessPattern:
        """The static choice of a store."""
        if self.keeps_rows:
            why = "all rows of a session are needed at once: they are appended to it, and read when it closes"
            return asked_for(AccessPattern("unaligned append", why), self.pattern)
        why = "one row per open session, updated in place; those that meet are merged, closed ones found by their end"
        return asked_for(AccessPattern("read-modify-write", why), self.pattern)

    def with_pattern(self, pattern: Pattern) -> Self:
        """The same with the pattern that is asked for, where its functions leave a choice."""
        return patterned(self, pattern)

    @property
    def arguments(self) -> tuple[Field, ...]:
        """The columns that the inputs of its calls are positions in."""
        return self.inputs

    @property
    def functions(self) -> tuple[str, ...]:
        """The calls, in the words of `millpond.explain`."""
        return described(self.calls, self.inputs)

    @property
    def unsupported_values(self) -> str | None:
        """Why one of the calls cannot run here, as a reason code; None if all can."""
        width = key_width(self.keys)
        for call in self.calls:
            inputs = [self.inputs[position] for position in call.inputs]
            if reason := supported(call, [field.type for field in inputs]):
                return reason
            if is_distinct(call) and not self.keeps_rows:
                return SESSION_DISTINCT
            if reason := unkept(call, inputs, width, whole=self.keeps_rows):
                return reason
        return None
