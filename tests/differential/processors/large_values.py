"""A processor whose state is larger than memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle


class LargeValues(StatefulProcessor):
    """Counts and adds up the values of each key, and keeps its last string."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """See `StatefulProcessor`."""
        self.totals = handle.getValueState("totals", "count bigint, sum bigint")
        self.last = handle.getValueState("last", "last string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        """See `StatefulProcessor`."""
        count, total = self.totals.get() if self.totals.exists() else (0, 0)
        before = self.last.get()[0][:20] if self.last.exists() else None
        last = ""
        for row in sorted(rows, key=lambda row: row.id):
            count, total, last = count + 1, total + row.v, f"{row.id:09d}" + row.k * 5
        self.totals.update((count, total))
        self.last.update((last,))
        yield Row(n=key[0], count=count, sum=total, last=before)

    def close(self) -> None:
        """See `StatefulProcessor`."""
