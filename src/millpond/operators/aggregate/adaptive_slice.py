"""One slice of event time, kept as groups, as rows, or as both."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from millpond.layout import HASH, LAST_HASH, HashRange, Rows
from millpond.operators.aggregate.cardinality_observer import Observation, Sample
from millpond.operators.aggregate.groups import Groups
from millpond.operators.aggregate.tables import BACKFILLED, backfill_table, distincts
from millpond.operators.columns.encode import portions
from millpond.operators.hash_ranges import bounds, by_range, key_groups
from millpond.operators.protocol import MAIN, ROWS, MakeRmwTable, MakeTable
from millpond.operators.tables.input_rows import StoredRows
from millpond.operators.tables.keyed import Keyed
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.stores.aligned.hash_intervals import largest_hash_bytes, read_gradually
from millpond.stores.aligned.table import AlignedTable
from millpond.stores.rmw.table import RmwTable

if TYPE_CHECKING:
    from millpond.stores.protocol import TableDelta

_INDEX_BYTES = 24  # approximate overhead of an entry beside its words, in bytes


class AdaptiveSlice:
    """The state of one slice, whose set of tables records how it is kept.

    `MAIN` and side tables hold groups. `ROWS` and `SAMPLE` exist while the slice holds appended rows. `BACKFILLED`,
    which has no rows, marks a slice that appends no more: its rows become groups, up to a hash that `ROWS` records.
    `BACKFILLED` stays when all rows have become groups and `ROWS` is gone. So a slice appends at most once, and no
    pattern makes it oscillate.

    Args:
        spec: keys, inputs and calls.
        make_table: opens the partition's tables.
        suffix: the suffix of their names.
        existing: the base names of the tables that exist.
        append: whether a slice without tables begins by appending rows.
    """

    def __init__(
        self, spec: AggregateSpec, make_table: MakeTable, suffix: str, existing: Collection[str], *, append: bool
    ) -> None:
        self._spec = spec
        self._make_table = make_table
        self._suffix = suffix
        self._stored = StoredRows(spec.key_fields, spec.inputs)
        layouts = [table.layout for _, table, _ in distincts(spec)]
        self._entry_bytes = 8 * max(layout.width for layout in layouts) + _INDEX_BYTES
        self._has_long_values = any(layout.bytes_columns for layout in layouts)
        self._version: int | None = None  # the running batch, if the slice takes part in it
        self._groups: Groups | None = None
        self._rows: tuple[AlignedTable, Sample] | None = None
        self._backfilled: RmwTable | None = None
        self._appended = False  # whether the running batch appended rows
        self._entries_before = 0  # entries at the start of the batch
        self._size = 0  # bytes
        self._retired: list[AlignedTable | RmwTable] = []
        if MAIN in existing or not (existing or append):
            self._groups = Groups(spec, make_table, suffix)
        if ROWS in existing or (append and not existing):
            self.switch_to_rows()
        if BACKFILLED in existing:
            self._open_backfill()

    @property
    def appends(self) -> bool:
        """Whether new rows are appended."""
        return self._rows is not None and self._backfilled is None

    @property
    def backlog(self) -> int:
        """Approximate number of rows that are still to become groups."""
        if self._rows is None or self._backfilled is None:
            return 0
        return max(1, int(self._rows[0].rows * (1 - self._rows[0].lowest / (LAST_HASH + 1))))

    @property
    def table(self) -> AlignedTable | RmwTable:
        """The table that new rows go to."""
        if self.appends:
            assert self._rows is not None
            return self._rows[0]
        return self._open_groups().table

    @property
    def tables(self) -> dict[str, AlignedTable | RmwTable]:
        """The slice's tables by name."""
        tables: dict[str, AlignedTable | RmwTable] = {} if self._groups is None else {**self._groups.tables}
        if self._rows is not None:
            tables |= {ROWS + self._suffix: self._rows[0], self._rows[1].name: self._rows[1].table}
        if self._backfilled is not None:
            tables[BACKFILLED + self._suffix] = self._backfilled
        return tables

    def begin(self, version: int) -> None:
        """Start the batch that reads state `version`."""
        self._close_retired()
        self._version = version
        self._appended = False
        if self._groups is not None:
            self._groups.begin(version)
        if self._rows is not None:
            for part in self._rows:
                part.begin(version)
        if self._backfilled is not None:
            self._backfilled.begin(version)
        self._entries_before = self._entries

    def fold(self, batch: pa.RecordBatch) -> None:
        """Append rows or fold them into groups: the column `__hash`, then keys and inputs."""
        if not self.appends:
            self._open_groups().fold(batch)
            return
        assert self._rows is not None
        rows, sample = self._rows
        self._appended = True
        for portion in portions(batch, rows.portion_bytes, rows.portion_keys):
            rows.append(self._stored.encode(portion))
            sample.add(portion)

    @property
    def _entries(self) -> int:
        return 0 if self._groups is None else sum(side.stats()["keys"] for _, side in self._groups.sides)

    def observe(self, row_bytes: int) -> Observation:
        """Return the running batch's accesses to the slice's distinct inputs, and their size.

        Args:
            row_bytes: bytes of an input row, which estimate values that do not fit into a state row.
        """
        accesses = created = groups = entries = 0
        if self._rows is not None:
            sample = self._rows[1]
            entries = sample.entries
            if self.appends and self._version is not None:
                accesses, created = sample.accesses, sample.created
        if self._groups is not None:
            groups = self._groups.table.stats()["keys"]
            entries += self._entries
            if not self.appends and self._version is not None:
                stats = [side.stats() for _, side in self._groups.sides]
                accesses = sum(stat["cache_hits"] + stat["cache_misses"] for stat in stats)
                created = self._entries - self._entries_before
        return Observation(
            accesses, created, entries * (self._entry_bytes + (row_bytes if self._has_long_values else 0)), groups
        )

    @property
    def largest_hash_bytes(self) -> int:
        """Upper bound of the bytes of one group's appended rows."""
        return 0 if self._rows is None else largest_hash_bytes(self._rows[0].all_segments())

    def switch_to_rows(self) -> None:
        """Append rows from now on, unless the slice has ever appended."""
        # A slice appends at most once, so that no pattern of inputs makes it change back and forth.
        if self._rows is not None or self._backfilled is not None:
            return
        layout = self._stored.layout
        rows = self._make_table(ROWS + self._suffix, layout.schema, self._stored.initial, kind="aligned")
        self._rows = rows, Sample(self._spec, self._make_table, self._suffix)
        if self._version is not None:
            for part in self._rows:
                part.begin(self._version)

    def switch_to_groups(self) -> None:
        """Keep groups from now on, and turn appended rows into groups."""
        if self.appends:
            self._open_backfill()

    def _open_backfill(self) -> None:
        table = backfill_table()
        self._backfilled = self._make_table(BACKFILLED + self._suffix, table.layout.schema, table.initial)
        if self._version is not None:
            self._backfilled.begin(self._version)

    def _open_groups(self) -> Groups:
        if self._groups is None:
            self._groups = Groups(self._spec, self._make_table, self._suffix)
            if self._version is not None:
                self._groups.begin(self._version)
        return self._groups

    # From rows to groups

    def backfill(self) -> int:
        """Turn some of the appended rows into groups; the slice must take part in the running batch.

        Returns:
            The number of rows.
        """
        assert self._rows is not None
        assert self._backfilled is not None
        assert self._version is not None
        pieces = self._backlog_rows()
        piece = next(pieces, None)
        pieces.close()
        last = LAST_HASH if piece is None else int(piece.words[-1, HASH])
        if piece is not None:
            groups = self._open_groups()
            # The piece may lie outside of the range of the batch's last pass.
            groups.table.unrestrict()
            groups.table.set_idle(False)
            groups.fold(self._stored.decode(piece))
        # Tables that leave `tables` are dropped from the manifest with this batch.
        if last == LAST_HASH:
            rows, sample = self._rows
            self._retired += [rows, sample.table]
            self._rows = None
            return 0 if piece is None else piece.count
        assert piece is not None
        self._rows[0].lowest = last + 1
        return piece.count

    def _backlog_rows(self) -> Generator[Rows]:
        """Yield the rows that are not groups yet, in hash order; a piece has all rows of its hashes."""
        assert self._rows is not None
        rows = self._rows[0]
        yield from read_gradually(
            [rows.all_segments()], self._stored.layout, max(1, rows.portion_bytes // 2), HashRange(rows.lowest)
        )

    # Closing

    def measure(self) -> None:
        """Measure the slice's size for `emit`, which yields the same pieces until the next call."""
        self._size = sum(_size(table) for table in self.tables.values())

    def emit(self, make_scratch: MakeRmwTable) -> Iterator[tuple[Groups, Rows]]:
        """Yield all groups in hash order, with the rows that are not groups yet folded in."""
        if self._rows is None:
            groups = self._open_groups()
            for rows in groups.scan():
                yield groups, rows
            return
        with ExitStack() as open_tables:
            for content in self._ranges(open_tables):
                # Temporary tables leave those of the slice as they are, since output may be read again.
                groups = Groups(self._spec, make_scratch)
                try:
                    groups.begin(0)
                    self._merge_rows(groups, *content)
                    for result in groups.scan():
                        yield groups, result
                finally:
                    groups.close()

    def _merge_rows(
        self, groups: Groups, stored: Sequence[Rows], entries: Sequence[Sequence[Rows]], rows: Sequence[Rows]
    ) -> None:
        """Fold rows into the groups of the same hash range, in new tables."""
        ranges = [key_groups(piece) for piece in (*stored, *rows)]
        if not ranges:
            return
        groups.restrict(HashRange(min(range_.lo for range_ in ranges), max(range_.hi for range_ in ranges)))
        groups.table.size_index(sum(len(piece.words) for piece in (*stored, *rows)))
        for piece in stored:
            groups.table.load(piece)
        for (table, side), pieces in zip(groups.sides, entries, strict=False):
            for piece in pieces:
                side.load(_with_hash_swapped(piece, table))
        for piece in rows:
            groups.fold(self._stored.decode(piece))

    def _ranges(
        self, open_tables: ExitStack
    ) -> Iterator[tuple[Sequence[Rows], Sequence[Sequence[Rows]], Sequence[Rows]]]:
        """Yield groups, the distinct inputs of each side table, and rows, for one hash range after the other."""
        groups = self._groups
        if groups is None:
            for piece in self._backlog_rows():
                yield (), (), (piece,)
            return
        assert self._rows is not None
        portion = self._rows[0].portion_bytes
        ends = bounds(groups.table.range, -(-self._size // max(1, portion // 2)))
        # A side table is in the order of its entries' own hashes, which says nothing about their groups' ranges.
        sides = [self._by_group(table, side, open_tables) for table, side in groups.sides]
        entries = [read_gradually([side.all_segments()], side.layout, portion // 4) for side in sides]
        sources = [groups.scan(), self._backlog_rows(), *entries]
        for stored, backlog, *inputs in zip(*(by_range(source, ends) for source in sources), strict=True):
            yield stored, inputs, backlog

    def _by_group(self, table: Keyed, side: RmwTable, open_tables: ExitStack) -> AlignedTable:
        """Copy a side table's entries to a temporary table in the order of their groups' hashes."""
        name = f"{MAIN}{self._suffix} by group"
        spool = self._make_table(name, table.layout.schema, table.initial, kind="spool")
        open_tables.callback(spool.close)
        for rows in side.scan():
            spool.append(_with_hash_swapped(rows, table))
        return spool

    def seal(self) -> dict[str, TableDelta]:
        """End the batch: seal the tables that it may have changed."""
        sealed = {} if self._groups is None else self._groups.seal()
        if self._rows is not None:
            rows, sample = self._rows
            sealed[sample.name] = sample.table.seal()
            if self._appended:
                sealed[ROWS + self._suffix] = rows.seal()
        if self._backfilled is not None:
            sealed[BACKFILLED + self._suffix] = self._backfilled.seal()
        self._version = None
        return sealed

    def _close_retired(self) -> None:
        for table in self._retired:
            if isinstance(table, AlignedTable):
                table.drop_copies()
            table.close()
        self._retired = []

    def close(self) -> None:
        """Release all memory."""
        self._close_retired()
        for table in self.tables.values():
            table.close()


def _size(table: AlignedTable | RmwTable) -> int:
    stats = table.stats()
    return max(8 * table.layout.width * stats["keys"], stats["bytes"])


def _with_hash_swapped(rows: Rows, table: Keyed) -> Rows:
    """Swap the hash of a side table's entries with the hash of their group; twice is the identity."""
    words = np.array(rows.words)
    group = table.values[0].offset
    words[:, [HASH, group]] = words[:, [group, HASH]]
    return Rows(words, rows.heap)
