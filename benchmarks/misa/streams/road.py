"""SegSpeedStr: position reports of Linear Road, of vehicles that enter an expressway, drive and leave."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from benchmarks.misa.streams.records import TIME, Calendar, Rows, timestamps

REPORT_SECONDS = 30
"""Seconds between two reports of a vehicle."""
SEGMENTS, MILE = 100, 5280
"""Segments of an expressway, each a mile long, and feet in a mile."""
TRIP_MILES = 10.0
"""Mean length of a trip."""
ENTRY, EXIT = 0, 4
"""Lanes of a vehicle's first and last report; between them it is on one of the lanes 1 to 3."""
EXPRESSWAY_RATE = 1500
"""Reports a second from one expressway; the number of expressways grows with the rate."""
_FEET = REPORT_SECONDS * MILE / 3600
"""Feet between two reports for each mile an hour."""

SCHEMA = pa.schema(
    [
        ("timestamp", TIME),
        ("vehicle", pa.int64()),
        ("speed", pa.float64()),
        ("highway", pa.int64()),
        ("lane", pa.int64()),
        ("direction", pa.int64()),
        ("segment", pa.int64()),
        ("position", pa.int64()),
    ]
)
_VEHICLE = np.dtype([(name, "f8" if name == "speed" else "i8") for name in [*SCHEMA.names[1:], "left"]])
"""A vehicle's last report, with the feet that are left of its trip."""


class SegSpeedStr:
    """Position reports, as many a second as asked for.

    Vehicles that are due report first. New vehicles enter for the rest. If more are due than may report, some report a
    second late.

    Args:
        rate: mean of the reports in a second.
    """

    def __init__(self, rate: float, seed: int) -> None:
        self._rng = np.random.default_rng([seed, 1])
        self._highways = max(1, round(rate / EXPRESSWAY_RATE))
        self._calendar = Calendar(_VEHICLE, REPORT_SECONDS + 1)
        self._vehicles = 0

    def second(self, number: int, count: int) -> pa.Table:
        """Make the reports of a second."""
        due = self._drive(self._calendar.take(number, count))
        rows = self._rng.permutation(np.concatenate([due, self._enter(count - len(due))]))
        staying = rows[rows["lane"] != EXIT]
        self._calendar.put(staying, np.full(len(staying), number + REPORT_SECONDS))
        columns = [timestamps(number, count), *(pa.array(rows[name]) for name in SCHEMA.names[1:])]
        return pa.Table.from_arrays(columns, schema=SCHEMA)

    def _enter(self, count: int) -> Rows:
        rows, rng = np.zeros(count, _VEHICLE), self._rng
        rows["vehicle"] = self._vehicles + np.arange(count)
        rows["speed"] = np.rint(rng.uniform(40, 70, count))
        rows["highway"] = rng.integers(0, self._highways, count)
        rows["lane"] = ENTRY
        rows["direction"] = rng.integers(0, 2, count)
        rows["position"] = rng.integers(0, SEGMENTS * MILE, count)
        rows["segment"] = rows["position"] // MILE
        end = np.where(rows["direction"] == 0, SEGMENTS * MILE - 1 - rows["position"], rows["position"])
        rows["left"] = np.minimum(end, rng.exponential(TRIP_MILES * MILE, count))
        self._vehicles += count
        return rows

    def _drive(self, rows: Rows) -> Rows:
        count = len(rows)
        rows["speed"] = np.clip(np.rint(rows["speed"] + self._rng.normal(0, 5, count)), 10, 100)
        driven = np.minimum(rows["left"], rows["speed"] * _FEET).astype(np.int64)
        rows["left"] -= driven
        rows["position"] += np.where(rows["direction"] == 0, driven, -driven)
        rows["segment"] = rows["position"] // MILE
        rows["lane"] = np.where(rows["left"] == 0, EXIT, self._rng.integers(1, 4, count))
        return rows
