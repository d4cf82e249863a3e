"""Deduplication: the first row of each key, with and without `dropDuplicatesWithinWatermark`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

import msgspec

from millpond.spec.kinds.first_rows import FirstRows
from millpond.spec.operators import EventTime
from millpond.spec.protocol import AccessPattern, KindFacts
from millpond.spec.traits import Trait


class DeduplicateSpec(FirstRows, frozen=True, tag="deduplicate"):
    """Deduplication by the columns at positions `keys`; input and output columns are `columns`.

    Attributes:
        time: the event time. Late rows are dropped. If the time is a key column, the watermark expires keys.
        unread_time: whether the input has a watermark by which no row is late, as no operator above reads its column.
    """

    facts: ClassVar[KindFacts] = KindFacts(
        emits_input_rows=True, supports_complete=False, beyond_spark=False, reads_updates_as_rows=True
    )

    time: EventTime | None = None
    unread_time: bool = False

    @property
    def compatibility_spec(self) -> Self:
        """The key, and the key column that expires it; the column that defines lateness may change."""
        # An event time outside of the key drops late rows, but the state does not depend on it.
        time = None if self.time is None or self.located_by_hash else self.time
        if time is not None:
            time = msgspec.structs.replace(time, column=self.keys.index(time.column))
        return msgspec.structs.replace(super().compatibility_spec, time=time, unread_time=False)

    @property
    def traits(self) -> Mapping[str, Trait]:
        """The key columns, and how long keys are kept."""
        time = None if self.located_by_hash else self.time
        until = "for ever" if time is None else f"until the watermark passes their {self.columns[time.column].name}"
        return {
            **super().traits,
            "time": Trait(f"keeps keys {until}"),
        }

    @property
    def lag(self) -> int | None:
        """Lag of the operator's watermark behind the query's, in ms; None if it uses no watermark."""
        return None if self.time is None else self.time.lag_ms

    @property
    def needs_no_data_batches(self) -> bool:
        """Whether the input has a watermark: Spark then runs a no-data batch when it moves, even if nothing expires."""
        return self.time is not None or self.unread_time

    def with_lag(self, lag_ms: int) -> Self:
        """Return the spec for a watermark that lags `lag_ms` behind the query's."""
        if self.time is None:
            return self
        return msgspec.structs.replace(self, time=msgspec.structs.replace(self.time, lag_ms=lag_ms))

    @property
    def located_by_hash(self) -> bool:
        """Whether the hash alone locates a key; an event time in the key selects the slice."""
        return self.time is None or self.time.column not in self.keys

    @property
    def hint_columns(self) -> tuple[int, ...]:
        """The event time, if it is part of the key: it says which slice of the state holds the key."""
        return () if self.located_by_hash or self.time is None else (self.time.column,)

    @property
    def access_pattern(self) -> AccessPattern:
        """The statically chosen store."""
        return AccessPattern("read-modify-write", "each key is looked up once per row and kept once seen")


class WithinSpec(FirstRows, frozen=True, tag="within"):
    """Deduplication in which a key expires when the watermark reaches its first row's time plus `delay_ms`.

    Input and output columns are `columns`; the key columns are those at positions `keys`. Rows that are late by `time`
    are dropped.
    """

    facts: ClassVar[KindFacts] = KindFacts(
        emits_input_rows=True, supports_complete=False, beyond_spark=False, reads_updates_as_rows=False
    )

    time: EventTime
    delay_ms: int

    @property
    def compatibility_spec(self) -> Self:
        """The key: the state holds each key's expiry time, however it was computed."""
        return msgspec.structs.replace(super().compatibility_spec, time=EventTime(0), delay_ms=0)

    @property
    def lag(self) -> int | None:
        """Lag of the operator's watermark behind the query's, in ms."""
        return self.time.lag_ms

    def with_lag(self, lag_ms: int) -> Self:
        """Return the spec for a watermark that lags `lag_ms` behind the query's."""
        return msgspec.structs.replace(self, time=msgspec.structs.replace(self.time, lag_ms=lag_ms))

    @property
    def access_pattern(self) -> AccessPattern:
        """The statically chosen store."""
        why = "each key is looked up once per row and kept until the watermark has passed it"
        return AccessPattern("read-modify-write", why)
