"""The groups of an aggregate: their tables, and folding rows in block by block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millpond.kernels.aggregate import distinct_entries, numeric
from millpond.layout import HashRange, Rows, Words
from millpond.operators.aggregate.tables import Distinct, accumulators_before, changelog_of, distincts, main_table
from millpond.operators.columns.encode import (
    ALL,
    Leaf,
    Mask,
    and_masks,
    flatten,
    flatten_all,
    hashes_of,
    is_true,
    key_rows,
    normalised,
    operand,
    portions,
)
from millpond.operators.functions.accumulators import BLOCK, Accumulator
from millpond.operators.functions.retractable import Retractable, RetractableCount
from millpond.operators.functions.whole_groups import GatheredRows
from millpond.operators.protocol import MAIN, MakeRmwTable
from millpond.operators.tables.keyed import Keyed
from millpond.operators.tables.partial_rows import partial_rows
from millpond.operators.tables.removed import RemovedKeys
from millpond.spec.functions import count_only_inputs
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.operators import GLOBAL_HASH, AggregateCall
from millpond.spec.types import parse_type

if TYPE_CHECKING:
    from millpond.stores.protocol import TableDelta
    from millpond.stores.rmw.table import RmwTable


class Groups:
    """Groups by key: one row each in the main table, and side tables of their distinct inputs.

    Args:
        spec: keys, inputs and calls.
        make_table: opens the partition's tables.
        suffix: the suffix of the tables' names.
        whole: whether all rows of each group come in one batch.

    Attributes:
        main: the main table's layout.
        calls: the accumulators, bound to it.
        table: the main table.
        tables: all tables by name.
        changelog: the changelog columns of the main table; None if no row is retracted and no changelog is asked for.
        before: accumulators of the groups' state before the batch, where the spec asks for changes.
        sides: the side tables of distinct inputs, each with its layout.
    """

    def __init__(self, spec: AggregateSpec, make_table: MakeRmwTable, suffix: str = "", *, whole: bool = False) -> None:
        self._spec = spec
        self.main, self.calls = main_table(spec, whole=whole)
        self.table = make_table(MAIN + suffix, self.main.layout.schema, self.main.initial)
        self.tables: dict[str, RmwTable] = {MAIN + suffix: self.table}
        self.sides: list[tuple[Keyed, RmwTable]] = []
        mask_of: dict[int, _Side] = {}
        for distinct, keyed, calls in distincts(spec):
            table = make_table(distinct.table + suffix, keyed.layout.schema, keyed.initial)
            side = _Side(spec, distinct, keyed, table, len(self.main.keys))
            self.tables[distinct.table + suffix] = table
            self.sides.append((keyed, table))
            mask_of |= dict.fromkeys(calls, side)
        self.changelog = changelog_of(spec, self.main)
        self.before = accumulators_before(spec, self.changelog) if self.changelog is not None and spec.changes else []
        self._removed = RemovedKeys(self.main.layout, self.table)
        self._counts = [call.places[0].offset for call in self.calls if isinstance(call, RetractableCount)]
        self._input_types = [parse_type(field.type) for field in spec.inputs]
        folds = [
            _Fold(call, accumulator, mask_of.get(number))
            for number, (call, accumulator) in enumerate(zip(spec.calls, self.calls, strict=True))
        ]
        self._rows = _Folds(folds)
        self._partial = [fold.accumulator for fold in folds if not spec.value_set(fold.call)]
        self._by_value = [
            _Folds([fold for fold in folds if spec.value_set(fold.call) == inputs]) for inputs in spec.value_sets
        ]
        # Partial states that are merged only for output are not final at the end of a batch.
        windows = None if spec.time is None else spec.time.windows
        self._is_final_per_batch = not (windows is not None and windows.shared) and not spec.adaptive
        self._version = 0

    def begin(self, version: int) -> None:
        """Start the batch that reads state `version`."""
        self._version = version
        self._removed.clear()
        for table in self.tables.values():
            table.begin(version)
        if self._is_final_per_batch:
            for call in self.calls:
                call.begin(version)

    def prefetch(self, hashes: Words, needed: int) -> None:
        """Prefetch groups that a later batch will read (see `operators.protocol.Prefetchable`)."""
        self.table.prefetch(hashes, needed, needed)

    def restrict(self, range_: HashRange) -> None:
        """Restrict the rows that follow to a hash range, until the next call or the next batch."""
        self.table.restrict(range_)

    def ensure_global(self) -> None:
        """Ensure that the one group of an aggregate without keys exists, and mark it as changed in this batch."""
        header = np.array([GLOBAL_HASH], dtype=np.int64)
        (row,), (created,) = self.table.upsert(key_rows(header, [], [], self.main.layout.key_stop), self._version)
        if self.changelog is not None:
            self.changelog.begin_global(self.table, row, self._version, created=created)

    def fold(self, batch: pa.RecordBatch) -> None:
        """Fold in rows: the column `__hash`, then keys and inputs in the order of the spec."""
        for portion in portions(batch, self.table.portion_bytes, self.table.portion_keys):
            self._fold(portion, self._rows)

    def merge(self, batch: pa.RecordBatch) -> None:
        """Fold in rows that were combined before the exchange (see `operators.protocol.Combining`)."""
        skipped = len(self._spec.inputs)
        if not self._by_value:
            self._merge(batch, self.calls, skipped)
            return
        numbers = batch.column(batch.num_columns - 2)
        for number, folds in enumerate(self._by_value):
            rows = batch.filter(pc.equal(numbers, number))
            # Only rows of the first value set carry partial results: in the others they would count again.
            if number == 0 and self._partial:
                self._merge(rows, self._partial, skipped)
            for portion in portions(rows, self.table.portion_bytes, self.table.portion_keys):
                self._fold(portion, folds)

    def adopt(self, batch: pa.RecordBatch) -> None:
        """Adopt partial results: the column `__hash`, then keys and the state columns of all calls."""
        self._merge(batch, self.calls)

    def _merge(self, batch: pa.RecordBatch, calls: Sequence[Accumulator], skipped: int = 0) -> None:
        """Fold in partial results of `calls`, whose state columns follow the keys and `skipped` further columns."""
        for portion in portions(batch, self.table.portion_bytes, self.table.portion_keys):
            rows = partial_rows(portion, self.main, self.main.types, self.main.keys, calls, skipped)
            keys = rows.leading(self.main.layout.key_stop)
            self.table.preload(keys, self._version)
            signs = np.ones(rows.count if self.changelog is not None else 0, dtype=np.int8)
            for start in range(0, rows.count, BLOCK):
                block = slice(start, start + BLOCK)
                ids = self.table.upsert(keys.take(block), self._version).rows
                # A combined row counts as one row: only whether a group has rows matters, not how many.
                if self.changelog is not None:
                    self.changelog.update(self.table, ids, start, self._version, signs)
                for call in calls:
                    call.combine(self.table, ids, rows.take(block))

    def _fold(self, batch: pa.RecordBatch, folds: _Folds) -> None:
        hashes = hashes_of(batch)
        first = 1 + len(self.main.types)  # columns are taken by position: names may repeat
        leaves = flatten_all(batch.columns[1:first], self.main.types)
        operands = {
            p: operand(batch.column(first + p), self._input_types[p], nulls_only=p in folds.counted)
            for p in folds.used | folds.filters
        }
        filters = {p: is_true(operands[p]) for p in folds.filters}
        keys = key_rows(hashes, leaves, self.main.keys, self.main.layout.key_stop)
        for side in folds.sides:
            columns = {p: batch.column(first + p) for p in side.distinct.inputs}
            side.add_inputs(hashes, leaves, columns, filters, self._version)
        signs = self._signs(batch)
        for fold in folds.folds:
            call, accumulator = fold.call, fold.accumulator
            counts = ALL if call.filter is None else filters[call.filter]
            if isinstance(accumulator, GatheredRows):
                accumulator.gather([batch.column(first + position) for position in call.inputs], counts)
                continue
            inputs = [operands[position] for position in call.inputs]
            if fold.side is not None:  # the side table has applied the filter and left out nulls
                counts = fold.side.masks[call.filter]
                inputs = [normalised(column, dtype) for column, dtype in zip(inputs, accumulator.inputs, strict=True)]
            if isinstance(accumulator, Retractable):
                accumulator.signs = signs
            accumulator.load(inputs, counts)
        self.table.preload(keys, self._version)
        for start in range(0, batch.num_rows, BLOCK):
            rows = self.table.upsert(keys.take(slice(start, start + BLOCK)), self._version).rows
            if self.changelog is not None:
                # Before the accumulators change the rows: the image from before the batch is copied here.
                self.changelog.update(self.table, rows, start, self._version, signs)
            for fold in folds.folds:
                fold.accumulator.update(self.table, rows, start)

    def _signs(self, batch: pa.RecordBatch) -> NDArray[np.int8]:
        """Return 1 for each row that is inserted and −1 for each that is retracted."""
        if self._spec.retracts:
            kinds: NDArray[np.int8] = batch.column(batch.num_columns - 1).to_numpy()
            # An update comes as its old image and its new one, so only the sign of a kind counts.
            return np.sign(kinds)
        return np.ones(batch.num_rows if self.changelog is not None else 0, dtype=np.int8)

    def seal(self) -> dict[str, TableDelta]:
        """End the batch: remove the groups that have lost all their rows, and seal all tables.

        Raises:
            StateDamagedError: a row was retracted that was never inserted.
        """
        # Checked before the seal, so that a batch which retracts unknown rows leaves no delta.
        if self._spec.retracts:
            self._removed.remove(self._checked_empty, self._version, keep=self._spec.changes)
        return {name: table.seal() for name, table in self.tables.items()}

    def _checked_empty(self, rows: Rows) -> NDArray[np.bool_]:
        """Check groups that the batch has changed (see `seal`), and return a mask of those without rows."""
        assert self.changelog is not None
        self.changelog.check(rows, self._counts)
        return self.changelog.is_empty(rows)

    def touched(self) -> Iterator[Rows]:
        """Yield the rows of the groups that the batch changed, without those that it has removed."""
        return self.table.touched()

    def removed(self) -> Iterator[Rows]:
        """Yield the rows of the groups that the batch has removed, if the spec asks for changes."""
        return self._removed.rows()

    def scan(self, size: int | None = None) -> Iterator[Rows]:
        """Yield the rows of all groups, in pieces of about `size` rows, or by default as the memory allows."""
        return self.table.scan(size)

    def close(self) -> None:
        """Release all memory."""
        for table in self.tables.values():
            table.close()


def combined_rows(batch: pa.RecordBatch) -> int:
    """Return the number of source rows that combined rows stand for, by their last column."""
    return int(np.asarray(batch.column(batch.num_columns - 1)).sum())


class _Fold(NamedTuple):
    """An aggregate call with its accumulator.

    Attributes:
        call: the call in the spec.
        accumulator: the accumulator of the call.
        side: for distinct inputs, the side table that determines which rows count.
    """

    call: AggregateCall
    accumulator: Accumulator
    side: _Side | None


class _Folds:
    """The folds of several calls, with the inputs that they load.

    Attributes:
        folds: the fold of each call.
        sides: the side tables.
        used: positions of inputs that are loaded.
        counted: positions of inputs of which only nulls matter.
        filters: positions of inputs that are filters.
    """

    def __init__(self, folds: Sequence[_Fold]) -> None:
        self.folds = folds
        self.sides = list(dict.fromkeys(fold.side for fold in folds if fold.side is not None))
        loaded = [fold.call for fold in folds if not isinstance(fold.accumulator, GatheredRows)]
        self.used = {position for call in loaded for position in call.inputs}
        self.counted = count_only_inputs(loaded)
        self.filters = {fold.call.filter for fold in folds if fold.call.filter is not None}


class _Side:
    """A side table of distinct inputs: determines for each row whether its inputs are new to its group.

    Args:
        spec: the aggregate.
        distinct: the distinct inputs and the filters of their calls.
        keyed: the layout of the table.
        table: the table.
        groups: the number of flattened columns of the groups' own keys, which precede those of the inputs.

    Attributes:
        masks: for each filter, the rows of the batch whose inputs are the first in their group to pass it; set by
            `add_inputs`.
    """

    def __init__(self, spec: AggregateSpec, distinct: Distinct, keyed: Keyed, table: RmwTable, groups: int) -> None:
        self.distinct = distinct
        self.masks: dict[int | None, Mask] = {}
        self._keyed = keyed
        self._table = table
        self._types = {p: parse_type(spec.inputs[p].type) for p in distinct.inputs}
        layout = keyed.layout
        self._start, self._stop = layout.offsets[groups], layout.key_stop
        self._references = np.zeros(layout.width, dtype=np.uint8)
        self._references[[offset + 1 for offset in layout.bytes_columns[: layout.key_bytes]]] = 1

    def add_inputs(
        self,
        hashes: NDArray[np.int64],
        groups: list[Leaf],
        columns: dict[int, pa.Array],
        filters: Mapping[int, Mask],
        version: int,
    ) -> None:
        """Add the distinct inputs of a batch to the side table, and set `masks` for the rows of the batch.

        The masks are complete before any accumulator loads them: an accumulator may keep a copy.

        Args:
            hashes: the hashes of the rows' groups.
            groups: the flattened columns of the groups' keys.
            columns: the columns of the distinct inputs, by position.
            filters: the masks of the filters, by position.
            version: the state version that the batch reads.
        """
        leaves, valid, count = list(groups), ALL, len(hashes)
        for position in self.distinct.inputs:
            flat = flatten(columns[position], self._types[position])
            valid = and_masks(valid, flat[0].valid)
            leaves += flat
        masks = [and_masks(valid, ALL if column is None else filters[column]) for column in self.distinct.filters]
        passed = _pack_masks(masks, count) if len(masks) > 1 else np.empty(0, dtype=np.uint64)
        counts = (passed != 0).view(np.uint8) if len(masks) > 1 else masks[0]
        words, heap = key_rows(hashes, leaves, self._keyed.keys, self._stop + 1)
        words[:, self._stop] = hashes.view(np.uint64)  # the hash of the group, which assigns rows to partitions
        selected = np.flatnonzero(counts) if counts.size else None
        if selected is not None:
            words, hashes = words[selected], hashes[selected]
            passed = passed[selected] if len(masks) > 1 else passed
        # The hash of the group alone would put all inputs of a large group in one place of the index.
        distinct_entries.hash_entries(words, heap, self._start, self._stop, self._references)
        entries = Rows(words, heap)
        self._table.preload(entries, version)
        self.masks = {column: np.zeros(count, dtype=np.uint8) for column in self.distinct.filters}
        for start in range(0, entries.count, BLOCK):
            block = slice(start, start + BLOCK)
            rows = block if selected is None else selected[block]
            self._add_block(entries.take(block), hashes[block], passed[block], rows, version)

    def _add_block(
        self,
        entries: Rows,
        groups: NDArray[np.int64],
        passed: NDArray[np.uint64],
        batch_rows: slice | NDArray[np.int64],
        version: int,
    ) -> None:
        """Add a block of entries, and set the masks of its rows.

        Args:
            entries: the entries.
            groups: the hashes of their groups.
            passed: the filters that each entry passes, as bits, if there are several filters.
            batch_rows: the rows of the batch that the entries come from.
            version: the state version that the batch reads.
        """
        # Entries that exist do not count as changed, so the delta holds only new ones.
        rows, created = self._table.upsert(entries, version, touch="created")
        new = created.view(np.uint8)
        numeric.assign_words(self._table.words, rows, 0, *self._keyed.values[0], new, groups, ALL)
        if len(self.masks) == 1:
            self.masks[self.distinct.filters[0]][batch_rows] = new
            return
        distinct_entries.add_passed_filters(self._table.words, rows, self._keyed.values[1].offset, passed)
        # An entry changes whenever its input is the first to pass another filter.
        self._table.touch(rows[passed != 0])
        for bit, column in enumerate(self.distinct.filters):
            self.masks[column][batch_rows] = (passed >> np.uint64(bit)) & np.uint64(1)


def _pack_masks(masks: Sequence[Mask], count: int) -> NDArray[np.uint64]:
    """Pack masks into one word per row: bit i is mask i. An empty mask counts every row."""
    bits = np.zeros(count, dtype=np.uint64)
    for bit, mask in enumerate(masks):
        bits |= np.uint64(1 << bit) if not mask.size else mask.astype(np.uint64) << np.uint64(bit)
    return bits
