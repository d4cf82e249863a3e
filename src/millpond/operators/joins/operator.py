"""Joins of two streams: stores both sides, and joins new rows of one side with stored rows of the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.files.formats.blocks import KernelLayout, kernel_layout
from millpond.kernels.ordered.order import Pairs
from millpond.kernels.runs.gather import addresses, gather_rows, heap_bytes
from millpond.layout import HASH, NEVER, HashRange, Rows, Words
from millpond.operators.columns.encode import hashes_of, plain, portions
from millpond.operators.joins import condition
from millpond.operators.joins.rows import LEFT, RIGHT, SideRows, has_matched_bit, side_table, times
from millpond.operators.protocol import MAX_OUTPUT_ROWS, NO_EXTRA_METRICS, MakeTable, Times
from millpond.spec.kinds.join import JoinSpec
from millpond.stores.memory.spool import Spool
from millpond.stores.ordered.block_prefetcher import KeyIntervals, PartBlockNumbers, preload_blocks
from millpond.stores.ordered.parts import BEGINNING, Part
from millpond.stores.ordered.table import OrderedTable

if TYPE_CHECKING:
    from millpond.stores.protocol import TableDelta


class _Side:
    """One side of the join: its table, and the encoding of its rows."""

    def __init__(self, spec: JoinSpec, name: str, make_table: MakeTable) -> None:
        self.name = name
        self.rows = SideRows.of(spec, name)
        self.side = self.rows.side
        self.marked = has_matched_bit(spec, name)
        table = side_table(spec, name)
        self.table = make_table(name, table.schema, table.initial, kind="ordered", drop_matched=table.drop_matched)
        self.shape: KernelLayout = kernel_layout(self.rows.layout)
        # Rows that are emitted at once, because they cannot find a partner.
        self.unmatchable = Spool(None, self.table.portion_bytes)


class _Matches(NamedTuple):
    """Pairs of a piece of one side's part (the probe) with rows of a part of the other side."""

    probe: _Side
    probe_part: Part
    rows: Rows
    first: int
    other: _Side
    part: Part
    pairs: Pairs


class _Scattered(NamedTuple):
    """Rows by their addresses and those of their heaps, valid as long as the memory that they point into."""

    rows_at: Words
    heaps_at: Words
    shape: KernelLayout

    def long_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of the long values of the rows from `start` to `stop`."""
        if not len(self.shape.blobs):
            return 0
        size: int = heap_bytes(self.rows_at[start:stop], stop - start, self.shape.blobs)
        return size

    def gather(self, start: int, stop: int) -> Rows:
        """Copy the rows from `start` to `stop`."""
        shape = self.shape
        return Rows(*gather_rows(self.rows_at[start:stop], self.heaps_at[start:stop], shape.width, shape.blobs))


class JoinOperator:
    """A `JoinSpec` on one partition.

    In a batch, new left rows meet old right ones, then new right rows meet all left ones, so that every pair comes
    once. Inner joins are computed while their output is read, after the state is sealed. Other joins are computed
    before the seal too, because the matched bits of rows are part of the state.

    Args:
        spec: the join.
        make_table: opens the partition's tables.
    """

    extra_metrics = NO_EXTRA_METRICS

    def __init__(self, spec: JoinSpec, make_table: MakeTable) -> None:
        self.spec = spec
        self._left = _Side(spec, LEFT, make_table)
        self._right = _Side(spec, RIGHT, make_table)
        self.tables: dict[str, OrderedTable] = {LEFT: self._left.table, RIGHT: self._right.table}
        self._names = [field.name for field in spec.output_fields]
        self._max_bytes = self._left.table.portion_bytes
        self._late_micros = BEGINNING
        self.late_rows = 0
        self._adopted = False  # whether the batch consists of adopted rows that have met already
        # Left rows of a semi join that found their first partner in this batch; each is emitted once.
        self._semi_matches: list[tuple[Part, NDArray[np.int64]]] = []

    def begin(self, version: int, times: Times) -> None:
        """Start the batch that reads state `version`."""
        self._late_micros = times.late * 1000
        self.late_rows = 0
        self._adopted = False
        self._semi_matches = []
        for side in (self._left, self._right):
            side.unmatchable.clear()
            side.table.begin(version)
            if side.side.expiry_ms is not None:
                until = times.closed + side.side.expiry_ms
                cap = side.side.expiry_cap_ms
                side.table.expire((until if cap is None else min(until, cap)) * 1000)

    def prefetch(self, hashes: Words, needed: int) -> None:
        """Prefetch the state of keys on both sides (see `Prefetchable`), because hashes alone do not give the side."""
        for side in (self._left, self._right):
            side.table.prefetch(hashes)

    def prefetch_keys(self, keys: pa.RecordBatch, needed: int) -> None:
        """Prefetch the rows of the other side that rows of keys will meet (see `KeyPrefetchable`).

        Late rows meet nothing. A row without a known time may meet rows of any time.
        """
        hashes = hashes_of(keys).view(np.uint64)
        right = np.asarray(plain(keys.column(1)).fill_null(False))
        row_times = times(keys.column(2)) if keys.num_columns > 2 else np.full(len(hashes), NEVER)
        for side, other, own in ((self._left, self._right, ~right), (self._right, self._left, right)):
            if side.side.late == "time":
                own = own & (row_times > self._late_micros)
            if not own.any():
                continue
            lo, hi = self._intervals(side, row_times[own])
            unknown = row_times[own] == NEVER
            lo[unknown], hi[unknown] = BEGINNING, NEVER
            other.table.prefetch(hashes[own], lo, hi)

    def passes(self, rows: int) -> int:
        """Return 1: the order of the rows does not matter."""
        return 1

    def restrict(self, range_: HashRange) -> None:
        """Do nothing (see `passes`)."""

    def process(self, batch: pa.RecordBatch) -> None:
        """Store rows of the batch: `__hash`, then the columns of the spec."""
        for portion in portions(batch, self._left.table.portion_bytes, batch.num_rows):
            right = np.asarray(portion.column("__right"))
            self._store(self._left, _select(portion, ~right))
            self._store(self._right, _select(portion, right))

    def _store(self, side: _Side, batch: pa.RecordBatch) -> None:
        if side.side.late != "none" and batch.num_rows:
            row_times = times(batch.column("__late" if side.side.late == "late" else "__time"))
            on_time = row_times > self._late_micros
            self.late_rows += int(np.count_nonzero(~on_time))
            batch = _select(batch, on_time)
        if not batch.num_rows:
            return
        # Stored keys compare null as equal to null. Outside of full outer joins one side drops its null keys here.
        # In full outer joins null keys meet, as in Spark.
        able = side.rows.can_match(batch)
        # Rows that fail the side's filter are not stored: a side that keeps unmatched rows emits them at once.
        if not side.side.keeps:
            batch = _select(batch, able & ~side.rows.has_null_key(batch))
        elif not able.all():
            side.unmatchable.add(self._with_nulls(side, side.rows.columns_of_input(_select(batch, ~able))))
            batch = _select(batch, able)
        if batch.num_rows:
            side.table.append(*side.rows.encode(batch))

    def adopt(self, batch: pa.RecordBatch) -> None:
        """Adopt rows from Spark's state: columns as for `process`, then `__matched`, null where it is not known."""
        for portion in portions(batch, self._left.table.portion_bytes, batch.num_rows):
            right = np.asarray(portion.column("__right"))
            for side, which in ((self._left, ~right), (self._right, right)):
                rows = _select(portion, which)
                # Null keys have no match on this side (see `_store`), but Spark's state of outer joins may have them.
                if not side.side.keeps:
                    rows = _select(rows, ~side.rows.has_null_key(rows))
                if not rows.num_rows:
                    continue
                # Where Spark's state has no such flag, adopted rows meet here once more, to set their matched bits.
                known = rows.column("__matched")
                self._adopted = self._adopted or not known.null_count
                matched = np.asarray(known.fill_null(False)) if side.marked else None
                side.table.append(*side.rows.encode(rows), matched)

    def finish(self) -> dict[str, TableDelta]:
        """End the batch: set the matched bits, if the join needs them, and seal both tables."""
        for side in (self._left, self._right):
            side.table.build_parts()
        # Adopted rows have met in Spark already, so their matched bits come with them.
        if self.spec.kind != "inner" and not self._adopted:
            for matches in self._match():
                self._set_matched(matches)
        return {side.name: side.table.seal() for side in (self._left, self._right)}

    def _set_matched(self, matches: _Matches) -> None:
        keep = np.ones(len(matches.pairs.probes), np.uint8)
        if matches.other.marked:
            # A left row of a semi join is emitted with its first partner, so rows that were marked before do not count.
            semi = self.spec.kind == "left_semi"
            new = matches.other.table.mark(
                matches.part, matches.pairs.rows_at, matches.pairs.positions, keep, once=semi
            )
            if semi and len(new):
                self._semi_matches.append((matches.part, new))
        if matches.probe.marked:
            rows_at, _ = addresses(matches.rows.words, matches.rows.heap)
            probes = matches.pairs.probes
            new = matches.probe.table.mark(
                matches.probe_part, rows_at[probes], probes + matches.first, keep, once=False
            )
            if self.spec.kind == "left_semi" and len(new):
                self._semi_matches.append((matches.probe_part, new))

    # Matching

    def _match(self) -> Iterator[_Matches]:
        """Yield all pairs of the batch that fulfil the whole condition, in pieces; use each before the next."""
        left, right = self._left.table, self._right.table
        # Read the remote blocks of the first rows at once for both sides and all parts, not one part after the other.
        preload_blocks([*self._remote_blocks(self._left, self._right), *self._remote_blocks(self._right, self._left)])
        if self.spec.right_first:
            # As in Spark since 4.2, right rows come first, and stored right rows expire before left rows look for them.
            yield from self._probe(self._right, self._left, [(part, left.floor(part)) for part in left.parts])
            floors = [(part, right.floor(part)) for part in right.parts]
            floors += [(part, right.until) for part in right.fresh]
            yield from self._probe(self._left, self._right, floors)
            return
        yield from self._probe(self._left, self._right, [(part, right.floor(part)) for part in right.parts])
        floors = [(part, left.floor(part)) for part in (*left.parts, *left.fresh)]
        yield from self._probe(self._right, self._left, floors)

    def _remote_blocks(self, probe: _Side, other: _Side) -> PartBlockNumbers:
        """Return the remote blocks of one side's table that the first new rows of the other side will meet."""
        in_memory = [fresh for fresh in probe.table.fresh if fresh.rows is not None]
        if not in_memory or not other.table.remote_parts:
            return []
        first = [next(fresh.chunks())[0] for fresh in in_memory]
        lo, hi = self._intervals(probe, np.concatenate([in_memory[0].layout.times(rows) for rows in first]))
        return other.table.remote_blocks(KeyIntervals(np.concatenate([rows.words[:, HASH] for rows in first]), lo, hi))

    def _probe(self, probe: _Side, other: _Side, floors: Sequence[tuple[Part, int]]) -> Iterator[_Matches]:
        """Yield pairs of a side's new rows with rows of the other's parts.

        Args:
            probe: the side with the new rows.
            other: the other side.
            floors: its parts, each with a time that its rows must be later than.
        """
        for fresh in probe.table.fresh:
            for rows, first in fresh.chunks() if floors else ():
                lo, hi = self._intervals(probe, fresh.layout.times(rows))
                lowest, highest = int(lo.min()), int(hi.max())
                for part, floor in floors:
                    if part.oldest > highest or (part.newest < max(lowest, floor) and not part.timeless):
                        continue
                    from_ = lo if floor == BEGINNING else np.maximum(lo, floor + 1)
                    for pairs in part.match(rows, probe.shape, from_, hi, MAX_OUTPUT_ROWS):
                        matches = _Matches(probe, fresh, rows, first, other, part, pairs)
                        if self.spec.condition is not None:
                            matches = self._filter_by_condition(matches)
                        if len(matches.pairs.probes):
                            yield matches

    def _intervals(self, probe: _Side, row_times: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the interval of times, per row, in which rows of the other side meet it."""
        earliest, latest = self.spec.earliest, self.spec.latest
        if earliest is None and latest is None:
            return np.full(len(row_times), BEGINNING), np.full(len(row_times), NEVER)
        if probe is self._left:
            earliest, latest = (None if latest is None else -latest), (None if earliest is None else -earliest)
        lo = np.full(len(row_times), BEGINNING) if earliest is None else _shifted(row_times, earliest)
        hi = np.full(len(row_times), NEVER - 1) if latest is None else _shifted(row_times, latest)
        never = row_times == NEVER
        # A row without a time is in no interval: its bounds are crossed.
        lo[never], hi[never] = NEVER, BEGINNING
        return lo, hi

    def _filter_by_condition(self, matches: _Matches) -> _Matches:
        """Select the pairs that fulfil the further condition."""
        pieces = _gather_pairs(matches, self._max_bytes)
        true = np.concatenate([self._fulfil_condition(matches, probes, others) for probes, others in pieces])
        return matches._replace(pairs=Pairs(*(array[true] for array in matches.pairs)))

    def _fulfil_condition(self, matches: _Matches, probes: Rows, others: Rows) -> NDArray[np.bool_]:
        """Return a mask of the pairs that fulfil the further condition."""
        assert self.spec.condition is not None

        def column(side: str, number: int) -> pa.Array:
            if side == matches.probe.name:
                return matches.probe.rows.value(probes, number)
            return matches.other.rows.value(others, number)

        # As in SQL, a pair whose condition is null does not match.
        true: NDArray[np.bool_] = np.asarray(condition.evaluate(self.spec.condition, column).fill_null(False))
        return true

    # Output

    def output(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the join for the batch just finished."""
        if self.spec.kind == "left_semi":
            for part, positions in self._semi_matches:
                # Positions in order, so that each block of the part is read once.
                for rows in part.rows_at_positions(np.sort(positions)):
                    for piece in self._left.rows.pieces(rows, self._max_bytes):
                        yield self._batch(self._left.rows.columns(piece))
            return
        for matches in self._match():
            for probes, others in _gather_pairs(matches, self._max_bytes):
                own, other = matches.probe.rows.columns(probes), matches.other.rows.columns(others)
                yield self._batch([*own, *other] if matches.probe is self._left else [*other, *own])
        for side in (self._left, self._right):
            if side.side.keeps:
                for batch in side.unmatchable.read():
                    for start in range(0, batch.num_rows, MAX_OUTPUT_ROWS):
                        yield batch.slice(start, MAX_OUTPUT_ROWS)
                for rows in side.table.expired_unmatched_rows():
                    for piece in side.rows.pieces(rows, self._max_bytes):
                        yield self._with_nulls(side, side.rows.columns(piece))

    def close(self) -> None:
        """Release all memory."""
        for side in (self._left, self._right):
            side.unmatchable.clear()
        for table in self.tables.values():
            table.close()

    def _with_nulls(self, side: _Side, columns: list[pa.Array]) -> pa.RecordBatch:
        """Return rows of one side with nulls for the other."""
        if side is self._left:
            return self._batch([*columns, *self._right.rows.nulls(len(columns[0]) if columns else 0)])
        return self._batch([*self._left.rows.nulls(len(columns[0]) if columns else 0), *columns])

    def _batch(self, columns: list[pa.Array]) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(columns, names=self._names)


def _shifted(times: NDArray[np.int64], micros: int) -> NDArray[np.int64]:
    """Return times moved by an interval; beyond the ends of time, the ends."""
    # Clipped before the addition, which would wrap around.
    return np.clip(times, BEGINNING - min(micros, 0), NEVER - 1 - max(micros, 0)) + micros


def _gather_pairs(matches: _Matches, max_bytes: int) -> Iterator[tuple[Rows, Rows]]:
    """Gather the rows of pairs, in pieces with at most `max_bytes` of long values each, or of a single pair.

    Every pair has copies of its rows' values, so a hot key turns a few megabytes of long values into gigabytes.

    Yields:
        The rows of the probing side, and those of the other, pair by pair.
    """
    source = matches.rows.packed()
    rows_at, heaps_at = addresses(*source)
    pairs = matches.pairs
    probe = _Scattered(rows_at[pairs.probes], heaps_at[pairs.probes], matches.probe.shape)
    other = _Scattered(pairs.rows_at, pairs.heaps_at, matches.other.shape)
    remaining = [(0, len(pairs.probes))]
    while remaining:
        start, stop = remaining.pop()
        middle = (start + stop) // 2
        if middle > start and probe.long_bytes(start, stop) + other.long_bytes(start, stop) > max_bytes:
            remaining += [(middle, stop), (start, middle)]
        else:
            yield probe.gather(start, stop), other.gather(start, stop)


def _select(batch: pa.RecordBatch, chosen: NDArray[np.bool_]) -> pa.RecordBatch:
    return batch if chosen.all() else batch.filter(pa.array(chosen))
