"""Joins of two streams: each side is stored, and what comes on one side meets what is stored of the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.files.formats.blocks import Shape, shape_of
from millpond.kernels.ordered.order import Pairs
from millpond.kernels.runs.gather import addresses, gather_rows
from millpond.layout import HASH, NEVER, HashRange, Rows, Words
from millpond.operators.columns.encode import hashes_of, plain, portions
from millpond.operators.joins import condition
from millpond.operators.joins.rows import LEFT, RIGHT, SideRows, is_marked, side_table, times
from millpond.operators.protocol import NO_FIGURES, PIECE, MakeTable, Times
from millpond.spec.kinds.join import JoinSpec
from millpond.stores.ordered.ahead import Sought, Wanted, bring
from millpond.stores.ordered.parts import BEGINNING, Part
from millpond.stores.ordered.table import OrderedTable

if TYPE_CHECKING:
    from millpond.stores.protocol import TableDelta

_FAR = 1 << 61  # microseconds; times beyond are the same


class _Side:
    """One side of the join at work: its table, and how its rows are read."""

    def __init__(self, spec: JoinSpec, name: str, make_table: MakeTable) -> None:
        self.name = name
        self.rows = SideRows.of(spec, name)
        self.side = self.rows.side
        self.marked = is_marked(spec, name)
        table = side_table(spec, name)
        self.table = make_table(name, table.schema, table.initial, kind="ordered", drop_matched=table.drop_matched)
        self.shape: Shape = shape_of(self.rows.layout)
        self.alone: list[pa.RecordBatch] = []  # rows that come out at once, without a partner


class _Met(NamedTuple):
    """Pairs of rows of one side, a piece of a part, with rows of a part of the other."""

    probe: _Side
    probe_part: Part
    rows: Rows
    first: int
    other: _Side
    part: Part
    pairs: Pairs


class JoinOperator:
    """A `JoinSpec` on one partition.

    In a batch new left rows meet old right ones, then new right rows all left ones, so that every pair comes once.
    Inner joins are computed while their output is read, after the state is sealed; others before it too, since whether
    rows have found a partner is part of the state.

    Args:
        spec: what to join.
        make_table: opens the partition's tables.
    """

    figures = NO_FIGURES

    def __init__(self, spec: JoinSpec, make_table: MakeTable) -> None:
        self.spec = spec
        self._left = _Side(spec, LEFT, make_table)
        self._right = _Side(spec, RIGHT, make_table)
        self.tables: dict[str, OrderedTable] = {LEFT: self._left.table, RIGHT: self._right.table}
        self._names = [field.name for field in spec.output_fields]
        self._late = BEGINNING
        self.late_rows = 0
        self._adopted = False  # whether the batch is of rows that are known to have met
        self._once: list[tuple[Part, NDArray[np.int64]]] = []  # left rows of a semi join that found their first partner

    def begin(self, version: int, times: Times) -> None:
        """Start the batch that reads state `version`."""
        self._late = times.late * 1000
        self.late_rows = 0
        self._adopted = False
        self._once = []
        for side in (self._left, self._right):
            side.alone = []
            side.table.begin(version)
            if side.side.expiry_ms is not None:
                until = times.closed + side.side.expiry_ms
                cap = side.side.expiry_cap_ms
                side.table.expire((until if cap is None else min(until, cap)) * 1000)

    def announce(self, hashes: Words, needed: int) -> None:
        """Let what both sides have of some keys be read (see `Announced`); of which side rows come is not known."""
        for side in (self._left, self._right):
            side.table.announce(hashes)

    def announce_keys(self, keys: pa.RecordBatch, needed: int) -> None:
        """Let be read what rows of some keys will meet on the other side (see `KeysAnnounced`).

        Late rows will meet nothing. Where a time is not known, it may be any.
        """
        hashes = hashes_of(keys).view(np.uint64)
        right = np.asarray(plain(keys.column(1)).fill_null(False))
        at = times(keys.column(2)) if keys.num_columns > 2 else np.full(len(hashes), NEVER)
        for side, other, mine in ((self._left, self._right, ~right), (self._right, self._left, right)):
            if side.side.late == "time":
                mine = mine & (at > self._late)
            if not mine.any():
                continue
            lo, hi = self._intervals(side, at[mine])
            unknown = at[mine] == NEVER
            lo[unknown], hi[unknown] = BEGINNING, NEVER
            other.table.announce(hashes[mine], lo, hi)

    def passes(self, rows: int) -> int:
        """In how many passes over ranges of the hash to work through a batch: one, their order does not matter."""
        return 1

    def narrow(self, range_: HashRange) -> None:
        """Nothing to do: see `passes`."""

    def process(self, batch: pa.RecordBatch) -> None:
        """Take up rows of the batch: `__hash`, then the columns of the spec."""
        for portion in portions(batch, self._left.table.portion, batch.num_rows):
            right = np.asarray(portion.column("__right"))
            self._store(self._left, _select(portion, ~right))
            self._store(self._right, _select(portion, right))

    def _store(self, side: _Side, batch: pa.RecordBatch) -> None:
        if side.side.late != "none" and batch.num_rows:
            at = times(batch.column("__late" if side.side.late == "late" else "__time"))
            on_time = at > self._late
            self.late_rows += int(np.count_nonzero(~on_time))
            batch = _select(batch, on_time)
        if not batch.num_rows:
            return
        able = side.rows.able(batch)
        if not side.side.keeps:
            batch = _select(batch, able & ~side.rows.has_null_key(batch))
        elif not able.all():
            side.alone.append(self._extended(side, side.rows.of_input(_select(batch, ~able))))
            batch = _select(batch, able)
        if batch.num_rows:
            side.table.append(*side.rows.encode(batch))

    def adopt(self, batch: pa.RecordBatch) -> None:
        """Take up rows that Spark holds: columns as for `process`, at last `__matched`, null where it is not known."""
        for portion in portions(batch, self._left.table.portion, batch.num_rows):
            right = np.asarray(portion.column("__right"))
            for side, which in ((self._left, ~right), (self._right, right)):
                rows = _select(portion, which)
                if not rows.num_rows:
                    continue
                known = rows.column("__matched")
                self._adopted = self._adopted or not known.null_count
                matched = np.asarray(known.fill_null(False)) if side.marked else None
                side.table.append(*side.rows.encode(rows), matched)

    def finish(self) -> dict[str, TableDelta]:
        """End the batch: find who has a partner, if the state has to know it, and seal both tables."""
        for side in (self._left, self._right):
            side.table.settle()
        if self.spec.kind != "inner" and not self._adopted:
            for met in self._meet():
                self._mark(met)
        return {side.name: side.table.seal() for side in (self._left, self._right)}

    def _mark(self, met: _Met) -> None:
        keep = np.ones(len(met.pairs.probes), np.uint8)
        if met.other.marked:
            semi = self.spec.kind == "left_semi"
            new = met.other.table.mark(met.part, met.pairs.rows_at, met.pairs.positions, keep, once=semi)
            if semi and len(new):
                self._once.append((met.part, new))
        if met.probe.marked:
            rows_at, _ = addresses(met.rows.words, met.rows.heap)
            probes = met.pairs.probes
            new = met.probe.table.mark(met.probe_part, rows_at[probes], probes + met.first, keep, once=False)
            if self.spec.kind == "left_semi" and len(new):
                self._once.append((met.probe_part, new))

    # Who meets whom

    def _meet(self) -> Iterator[_Met]:
        """All pairs of the batch that fulfil the whole condition, in pieces; each is to be used before the next."""
        left, right = self._left.table, self._right.table
        # What the first rows will meet: at once for both sides and all parts, not one part after the other.
        bring([*self._far_blocks(self._left, self._right), *self._far_blocks(self._right, self._left)])
        if self.spec.right_first:
            yield from self._probe(self._right, self._left, [(part, left.floor(part)) for part in left.parts])
            floors = [(part, right.floor(part)) for part in right.parts]
            floors += [(part, right.until) for part in right.fresh]
            yield from self._probe(self._left, self._right, floors)
            return
        yield from self._probe(self._left, self._right, [(part, right.floor(part)) for part in right.parts])
        floors = [(part, left.floor(part)) for part in (*left.parts, *left.fresh)]
        yield from self._probe(self._right, self._left, floors)

    def _far_blocks(self, probe: _Side, other: _Side) -> Wanted:
        """Blocks with rows of one side that the first new ones of the other will meet, which take requests to read."""
        held = [fresh for fresh in probe.table.fresh if fresh.rows is not None]
        if not held or not other.table.far:
            return []
        first = [next(fresh.chunks())[0] for fresh in held]
        lo, hi = self._intervals(probe, np.concatenate([held[0].layout.times(rows) for rows in first]))
        return other.table.far_blocks(Sought(np.concatenate([rows.words[:, HASH] for rows in first]), lo, hi))

    def _probe(self, probe: _Side, other: _Side, floors: Sequence[tuple[Part, int]]) -> Iterator[_Met]:
        """New rows of a side with the rows of some parts of the other that are later than a time."""
        for fresh in probe.table.fresh:
            for rows, first in fresh.chunks() if floors else ():
                lo, hi = self._intervals(probe, fresh.layout.times(rows))
                lowest, highest = int(lo.min()), int(hi.max())
                for part, floor in floors:
                    if part.oldest > highest or (part.newest < max(lowest, floor) and not part.timeless):
                        continue
                    from_ = lo if floor == BEGINNING else np.maximum(lo, floor + 1)
                    for pairs in part.match(rows, probe.shape, from_, hi, PIECE):
                        met = _Met(probe, fresh, rows, first, other, part, pairs)
                        if self.spec.condition is not None:
                            met = self._fulfilling(met)
                        if len(met.pairs.probes):
                            yield met

    def _intervals(self, probe: _Side, at: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The times that rows of the other side may have to meet rows with these times."""
        earliest, latest = self.spec.earliest, self.spec.latest
        if earliest is None and latest is None:
            return np.full(len(at), BEGINNING), np.full(len(at), NEVER)
        if probe is self._left:
            earliest, latest = (None if latest is None else -latest), (None if earliest is None else -earliest)
        near = np.clip(at, -_FAR, _FAR)
        lo = np.full(len(at), BEGINNING) if earliest is None else near + earliest
        hi = np.full(len(at), NEVER - 1) if latest is None else near + latest
        never = at == NEVER
        lo[never], hi[never] = NEVER, BEGINNING
        return lo, hi

    def _fulfilling(self, met: _Met) -> _Met:
        """The pairs that fulfil the further condition."""
        assert self.spec.condition is not None
        probes, others = _gathered(met)
        own = met.probe.name

        def column(side: str, number: int) -> pa.Array:
            if side == own:
                return met.probe.rows.value(probes, number)
            return met.other.rows.value(others, number)

        true = np.asarray(condition.evaluate(self.spec.condition, column).fill_null(False))
        return met._replace(pairs=Pairs(*(array[true] for array in met.pairs)))

    # Output

    def output(self) -> Iterator[pa.RecordBatch]:
        """The rows of the join for the batch just finished."""
        if self.spec.kind == "left_semi":
            for part, positions in self._once:
                for rows in part.at(np.sort(positions)):
                    yield self._batch(self._left.rows.columns(rows))
            return
        for met in self._meet():
            probes, others = _gathered(met)
            columns = met.probe.rows.columns(probes), met.other.rows.columns(others)
            yield self._batch([*columns[0], *columns[1]] if met.probe is self._left else [*columns[1], *columns[0]])
        for side in (self._left, self._right):
            if side.side.keeps:
                for batch in side.alone:
                    for start in range(0, batch.num_rows, PIECE):
                        yield batch.slice(start, PIECE)
                for rows in side.table.leaving(unmatched=True):
                    yield self._extended(side, side.rows.columns(rows))

    def close(self) -> None:
        """Give all memory back."""
        for table in self.tables.values():
            table.close()

    def _extended(self, side: _Side, columns: list[pa.Array]) -> pa.RecordBatch:
        """Rows of one side with nulls for the other."""
        if side is self._left:
            return self._batch([*columns, *self._right.rows.nulls(len(columns[0]) if columns else 0)])
        return self._batch([*self._left.rows.nulls(len(columns[0]) if columns else 0), *columns])

    def _batch(self, columns: list[pa.Array]) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(columns, names=self._names)


def _gathered(met: _Met) -> tuple[Rows, Rows]:
    """The rows of pairs: those of the side that probes, and those of the other."""
    words = np.ascontiguousarray(met.rows.words)
    rows_at, heaps_at = addresses(words, met.rows.heap)
    probes, shape, pairs = met.pairs.probes, met.probe.shape, met.pairs
    left = gather_rows(rows_at[probes], heaps_at[probes], shape.width, shape.blobs)
    shape = met.other.shape
    return Rows(*left), Rows(*gather_rows(pairs.rows_at, pairs.heaps_at, shape.width, shape.blobs))


def _select(batch: pa.RecordBatch, chosen: NDArray[np.bool_]) -> pa.RecordBatch:
    return batch if chosen.all() else batch.filter(pa.array(chosen))
