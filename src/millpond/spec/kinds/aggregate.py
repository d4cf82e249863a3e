"""Grouping by columns, among them perhaps an event time or its windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import msgspec

from millpond.metrics import OBSERVED
from millpond.spec.calls import WINDOWS, asked_for, described, needs_rows, patterned, result_fields, unkept
from millpond.spec.functions import FUNCTIONS, is_by_value, is_distinct, key_width, supported
from millpond.spec.operators import OP, AggregateCall, EventTime, Field, Pattern
from millpond.spec.protocol import AccessPattern, Spec
from millpond.spec.traits import Trait, changelog_traits, columns_trait, lag_trait

PANE_TYPE = "bigint"
"""The type in which a window that the operator assigns arrives and is stored: the beginning of its pane."""


class AggregateSpec(Spec, frozen=True, tag="aggregate"):
    """Grouping by `keys`; the pipe's input columns are `keys` then `inputs`, its output `keys` then one per call.

    With `time`, which in append mode there has to be, late rows are dropped and groups are closed by the watermark.
    `retracts` and `changes` are not with `time`.
    """

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
        """What it groups by, and what becomes of groups."""
        time = self.time
        windows = None if time is None else time.windows
        shared = windows is not None and windows.shared
        closed = "for ever" if time is None else f"until the watermark passes {self.keys[time.column].name}"
        return {
            "keys": columns_trait("groups by", self.keys),
            "windows": Trait(f"has {windows.description}" if windows else "assigns no windows of event time"),
            "panes": Trait(f"keeps sliding windows {'by what they share' if shared else 'each by itself'}"),
            "time": Trait(f"keeps groups {closed}"),
            "lag": lag_trait(None if time is None else time.lag_ms),
            "mode": Trait(f"runs in output mode {self.output_mode}"),
            "pattern": Trait(f"keeps groups by spark.millpond.store.pattern={self.pattern}"),
            **changelog_traits(retracts=self.retracts, changes=self.changes),
        }

    @property
    def key_fields(self) -> tuple[Field, ...]:
        """The columns that make up the key, as they arrive and are stored."""
        if self.time is None or self.time.windows is None:
            return self.keys
        at = self.time.column
        return (*self.keys[:at], Field(self.keys[at].name, PANE_TYPE), *self.keys[at + 1 :])

    @property
    def shown_keys(self) -> tuple[Field, ...]:
        """The key's columns as the query shows them: windows arrive and are stored as numbers."""
        return self.keys

    @property
    def input_fields(self) -> tuple[Field, ...]:
        """The columns of the input, after `__hash`."""
        return (*self.key_fields, *self.inputs, *([OP] if self.retracts else []))

    @property
    def output_fields(self) -> tuple[Field, ...]:
        """The columns of the output."""
        return (*self.keys, *result_fields(self.calls), *([OP] if self.changes else []))

    @property
    def state_fields(self) -> tuple[Field, ...]:
        """The key, and what the state says of it.

        Windows have a start and an end; so have the panes that sliding windows share. Where rows are kept until their
        window closes, the inputs of each are shown. Where groups may have rows beside them, both are shown: groups
        without inputs, rows without results.
        """
        fields = self.keys + (self.inputs if self.keeps_rows else result_fields(self.calls))
        return fields + self.inputs if self.observed else fields

    @property
    def keeps_columns(self) -> bool:
        """No: results come out."""
        return False

    @property
    def lag(self) -> int | None:
        """How far the operator's watermark lags behind the query's, in milliseconds; None if it asks for none."""
        return None if self.time is None else self.time.lag_ms

    def with_lag(self, lag_ms: int) -> Self:
        """The same, reached by a watermark that lags behind the query's."""
        if self.time is None:
            return self
        return msgspec.structs.replace(self, time=msgspec.structs.replace(self.time, lag_ms=lag_ms))

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
        """No: Spark aggregates streams too."""
        return False

    @property
    def keyed(self) -> bool:
        """Not if event time says where the groups of a row are."""
        return self.time is None

    @property
    def announced(self) -> tuple[int, ...]:
        """The event time, if groups by it are updated in place: it says in which slice of the state a group is."""
        if self.time is None or self.keeps_rows or self.observed:
            return ()
        return (self.time.column,)

    @property
    def takes_updates(self) -> bool:
        """No: they would be counted twice."""
        return False

    def consuming(self) -> Self | str:
        """The same over an input that is a changelog, or what of it cannot take rows back."""
        if self.time is not None:
            return "an aggregate by event time"
        for call in self.calls:
            if not FUNCTIONS[call.function].retractable or is_distinct(call):
                return f"{call.function}{'(distinct)' if call.distinct else ''}"
        return msgspec.structs.replace(self, retracts=True)

    def emitting(self) -> Self | str:
        """The same with its changes coming out: whatever the query shows, the operator above wants what has changed."""
        if self.time is not None:
            return WINDOWS if self.updates else self
        return msgspec.structs.replace(self, changes=True, output_mode="update")

    @property
    def follows(self) -> bool:
        """Yes: they keep a row for each group, if not said otherwise."""
        return True

    @property
    def keeps_rows(self) -> bool:
        """Whether rows are kept until their window closes: so that functions are computed that need all of them."""
        return self.time is not None and self.output_mode == "append" and needs_rows(self.calls, self.pattern)

    @property
    def observed(self) -> bool:
        """Whether it depends on the data how groups are best kept, and that is found out while the operator runs.

        So it is with distinct inputs: where they repeat within a window, groups and a table of inputs are small; where
        not, that table is as large as the rows, which are better appended, and sorted out when the window closes.
        """
        if self.time is None or self.output_mode != "append" or self.pattern != "auto" or self.keeps_rows:
            return False
        overlap = 1 if self.time.windows is None else self.time.windows.overlap
        return overlap == 1 and any(map(is_distinct, self.calls))

    @property
    def uncombined(self) -> str | None:
        """Why its rows cannot be combined before the exchange, whatever its functions; None if they can."""
        if self.keeps_rows or self.observed:
            return "the state keeps single rows"
        if self.retracts:
            return "its input is a changelog"
        collated = next((field.type for field in self.keys if "collate" in field.type), None)
        return None if collated is None else f"Spark does not hash keys of type {collated}"

    def value_set(self, call: AggregateCall) -> tuple[int, ...]:
        """The inputs of a call by whose values rows may be combined, each once; none for other calls."""
        by_value = is_by_value(call, [self.inputs[position].type for position in call.inputs])
        return tuple(dict.fromkeys(call.inputs)) if by_value else ()

    @property
    def in_order(self) -> bool:
        """Whether rows have to reach overlapping windows in the order in which they come."""
        windows = None if self.time is None else self.time.windows
        return (
            windows is not None and windows.overlap > 1 and any(FUNCTIONS[call.function].ordered for call in self.calls)
        )

    @property
    def figures(self) -> tuple[str, ...]:
        """What slots report of it beside what they report of every operator."""
        return OBSERVED if self.observed else ()

    @property
    def access_pattern(self) -> AccessPattern:
        """The static choice of a store."""
        return asked_for(self._inferred(), self.pattern)

    def with_pattern(self, pattern: Pattern) -> Self:
        """The same with the pattern that is asked for, where its functions leave a choice."""
        return patterned(self, pattern)

    def _inferred(self) -> AccessPattern:
        if self.keeps_rows:
            why = "all rows of a group are needed at once: they are appended to their window, and read when it closes"
            return AccessPattern("aligned append", why)
        if self.observed:
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
        """The columns that the inputs of its calls are positions in."""
        return self.inputs

    @property
    def functions(self) -> tuple[str, ...]:
        """The calls, in the words of `millpond.explain`."""
        return described(self.calls, self.inputs)

    @property
    def unsupported_values(self) -> str | None:
        """Why one of the calls cannot run here, as a reason code; None if all can."""
        width = key_width(self.key_fields)
        for call in self.calls:
            inputs = [self.inputs[position] for position in call.inputs]
            reason = supported(call, [field.type for field in inputs])
            reason = reason or unkept(call, inputs, width, whole=self.keeps_rows)
            if reason:
                return reason
        return None
