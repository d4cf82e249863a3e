"""Grouped aggregation of distinct inputs over windows, with a store chosen by how often the inputs repeat.

A slice of event time begins with groups in memory: a read-modify-write table, and side tables of distinct inputs. If
the observer decides so, the following rows are appended instead. If it decides for groups later, following rows go to
groups again, and each batch turns some of the appended rows into groups. A window that closes during this, or whose
slice has left groups, is read from both.

The choice is part of the state: the names of a slice's tables record it (see `AdaptiveSlice`). A new slice appends if
any live slice does.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from millpond.operators.aggregate.adaptive_slice import AdaptiveSlice
from millpond.operators.aggregate.cardinality_observer import Observation, Observer
from millpond.operators.aggregate.windowed import WindowedAggregate
from millpond.operators.event_time_slices import SlicedState
from millpond.operators.protocol import MakeTable, Times, scratch
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.time_slices import SLICE

if TYPE_CHECKING:
    from millpond.stores.protocol import TableDelta

_log = logging.getLogger(__name__)


class AdaptiveAggregate(WindowedAggregate):
    """An `AggregateSpec` with `time`, distinct inputs and tumbling windows, if any, in append mode, on one partition.

    Args:
        spec: keys, inputs and calls.
        make_table: opens the partition's tables, and temporary ones.
        existing: the names of the tables that exist.
        memory: bytes that the state may take in memory, roughly.
    """

    _parts: SlicedState[AdaptiveSlice]  # type: ignore[assignment]

    def __init__(self, spec: AggregateSpec, make_table: MakeTable, existing: Iterable[str], *, memory: int) -> None:
        self._observer = Observer(memory)
        self._make_table = make_table
        self._appending = False
        self._version = self._bytes = self._rows = self._backfilled = 0
        super().__init__(spec, make_table, tuple(existing))
        self._appending = self._appends

    def _sliced(self, make_table: MakeTable, existing: Iterable[str]) -> SlicedState[AdaptiveSlice]:  # type: ignore[override]
        assert self.spec.time is not None
        base_names: dict[str, set[str]] = {}
        for name in existing:
            base, _, slice_ = name.partition(SLICE)
            base_names.setdefault(SLICE + slice_, set()).add(base)

        def make(suffix: str) -> AdaptiveSlice:
            return AdaptiveSlice(self.spec, make_table, suffix, base_names.pop(suffix, ()), append=self._appending)

        return SlicedState(self.spec.time, make, existing)

    @property
    def _appends(self) -> bool:
        return any(part.appends for part in self._parts.live.values())

    @property
    def extra_metrics(self) -> Mapping[str, float]:
        """The observer's choice and its progress.

        `appending` is 1 if new rows are appended. `moved_rows` counts the rows that the batch turned into groups, and
        `left_rows` the appended rows that are still to become groups.
        """
        backlog = sum(part.backlog for part in self._parts.live.values())
        return {"appending": float(self._appends), "moved_rows": float(self._backfilled), "left_rows": float(backlog)}

    def begin(self, version: int, times: Times) -> None:
        """Start the batch that reads state `version`."""
        super().begin(version, times)
        self._version = version
        self._bytes = self._rows = self._backfilled = 0
        self._appending = self._appends

    def process(self, batch: pa.RecordBatch) -> None:
        """Process rows of the batch: the column `__hash`, then keys and inputs in the order of the spec."""
        self._bytes += batch.nbytes
        self._rows += batch.num_rows
        super().process(batch)

    def finish(self) -> dict[str, TableDelta]:
        """End the batch: observe it, backfill some rows, drop what is closed, and seal the other changes."""
        staying = {slice_: part for slice_, part in self._parts.live.items() if not self._parts.closes(slice_)}
        # The names of the tables record the choice, so it is made before the seal: a repeated batch finds the same.
        self._choose_store(staying.values())
        moving = [slice_ for slice_, part in staying.items() if part.backlog]
        # Each batch backfills one piece of one slice, the latest, which bounds what it costs.
        if moving:
            self._backfilled = self._parts.open(max(moving)).backfill()
        sealed = super().finish()
        for part in self._parts.closing.values():
            part.measure()
        return sealed

    def _choose_store(self, parts: Collection[AdaptiveSlice]) -> None:
        """Change the store of slices if the observer decides so."""
        row_bytes = self._bytes // max(1, self._rows)
        observation = Observation.total(part.observe(row_bytes) for part in parts)
        if self._appending:
            largest_hash_bytes = max((part.largest_hash_bytes for part in parts), default=0)
            if self._observer.should_group(observation, largest_hash_bytes):
                self._log("keeps groups again", observation)
                for part in parts:
                    part.switch_to_groups()
        elif self._observer.should_append(observation):
            self._log("appends rows", observation)
            for part in parts:
                part.switch_to_rows()

    def _log(self, what: str, observation: Observation) -> None:
        _log.info(
            "From version %d on, an aggregate of distinct inputs %s: of %d inputs %d were new; all take %d MB.",
            self._version + 1,
            what,
            observation.accesses,
            observation.created,
            observation.bytes >> 20,
        )

    def output(self) -> Iterator[pa.RecordBatch]:
        """Yield the groups that the batch's watermark closed."""
        for slice_, part in self._parts.closing.items():
            whole = self._parts.closes_whole(slice_)
            for groups, rows in part.emit(scratch(self._make_table)):
                yield from self._decoded(groups, rows if whole else self._closing_now(groups, rows))
