"""The first row of each key within some time."""

from __future__ import annotations

from typing import Self

import msgspec

from millpond.spec.kinds.first_rows import FirstRows
from millpond.spec.operators import EventTime
from millpond.spec.protocol import AccessPattern


class WithinSpec(FirstRows, frozen=True, tag="within"):
    """The first row of each key; a key is forgotten when the watermark reaches that row's time and `delay_ms`.

    Input and output columns are `columns`, the key those at positions `keys`. Rows that are late by `time` are dropped.
    """

    time: EventTime
    delay_ms: int

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
