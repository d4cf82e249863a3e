"""The first row of each key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import msgspec

from millpond.spec.kinds.first_rows import FirstRows
from millpond.spec.operators import EventTime
from millpond.spec.protocol import AccessPattern
from millpond.spec.traits import Trait, lag_trait


class DeduplicateSpec(FirstRows, frozen=True, tag="deduplicate"):
    """The first row of each key; input and output columns are `columns`, the key those at positions `keys`.

    With `time`, late rows are dropped; keys are forgotten when the watermark passes it, if it is one of them.
    `passed` is whether a watermark comes by that nothing is late by, as nobody reads its column.
    """

    time: EventTime | None = None
    passed: bool = False

    @property
    def lasting(self) -> Self:
        """Its key, and which of its columns closes it; by what other column rows are late may change."""
        time = None if self.time is None or self.keyed else self.time
        if time is not None:
            time = msgspec.structs.replace(time, column=self.keys.index(time.column))
        return msgspec.structs.replace(super().lasting, time=time, passed=False)

    @property
    def traits(self) -> Mapping[str, Trait]:
        """What it deduplicates by, and how long keys are kept."""
        time = None if self.keyed else self.time
        until = "for ever" if time is None else f"until the watermark passes their {self.columns[time.column].name}"
        return {
            **super().traits,
            "time": Trait(f"keeps keys {until}"),
            "lag": lag_trait(None if time is None else time.lag_ms),
        }

    @property
    def lag(self) -> int | None:
        """How far the operator's watermark lags behind the query's, in milliseconds; None if it asks for none."""
        return None if self.time is None else self.time.lag_ms

    @property
    def closes(self) -> bool:
        """Whether a watermark comes by: Spark runs a batch without rows when it has moved, also if nothing closes."""
        return self.time is not None or self.passed

    def with_lag(self, lag_ms: int) -> Self:
        """The same, reached by a watermark that lags behind the query's."""
        if self.time is None:
            return self
        return msgspec.structs.replace(self, time=msgspec.structs.replace(self.time, lag_ms=lag_ms))

    @property
    def keyed(self) -> bool:
        """Not if event time says where the keys of a row are."""
        return self.time is None or self.time.column not in self.keys

    @property
    def announced(self) -> tuple[int, ...]:
        """The event time, if it is part of the key: it says in which slice of the state the key is."""
        return () if self.keyed or self.time is None else (self.time.column,)

    @property
    def takes_updates(self) -> bool:
        """Yes: they are deduplicated as the rows that they are."""
        return True

    @property
    def access_pattern(self) -> AccessPattern:
        """The static choice of a store."""
        return AccessPattern("read-modify-write", "each key is looked up once per row and kept once seen")


class WithinSpec(FirstRows, frozen=True, tag="within"):
    """The first row of each key; a key is forgotten when the watermark reaches that row's time and `delay_ms`.

    Input and output columns are `columns`, the key those at positions `keys`. Rows that are late by `time` are dropped.
    """

    time: EventTime
    delay_ms: int

    @property
    def lasting(self) -> Self:
        """Its key: the state has the time at which each key is forgotten, however that was computed."""
        return msgspec.structs.replace(super().lasting, time=EventTime(0), delay_ms=0)

    @property
    def lag(self) -> int | None:
        """How far the operator's watermark lags behind the query's, in milliseconds."""
        return self.time.lag_ms

    def with_lag(self, lag_ms: int) -> Self:
        """The same, reached by a watermark that lags behind the query's."""
        return msgspec.structs.replace(self, time=msgspec.structs.replace(self.time, lag_ms=lag_ms))

    @property
    def takes_updates(self) -> bool:
        """No: what is updated has no event time of its own."""
        return False

    @property
    def access_pattern(self) -> AccessPattern:
        """The static choice of a store."""
        why = "each key is looked up once per row and kept until the watermark has passed it"
        return AccessPattern("read-modify-write", why)
