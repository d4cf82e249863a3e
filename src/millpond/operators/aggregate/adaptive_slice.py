"""One slice of event time that is kept as groups, as rows, or as both."""

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
from millpond.operators.protocol import MAIN, ROWS, MakeRows, MakeTable
from millpond.operators.tables.input_rows import StoredRows
from millpond.operators.tables.keyed import Keyed
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.stores.aligned.hash_intervals import gradually, heaviest
from millpond.stores.aligned.table import AlignedTable
from millpond.stores.rmw.table import RmwTable

if TYPE_CHECKING:
    from millpond.stores.protocol import TableDelta

_INDEX = 24  # bytes that an entry takes beside its words, roughly


class AdaptiveSlice:
    """The state of one slice. Its tables say how it is kept.

    `MAIN` and side tables: it has groups. `ROWS` and `SAMPLE`: it has rows that were appended. `BACKFILLED`, which has
    no rows: it appends no more, and rows up to a hash, `ROWS` says which, have become groups. That table stays when all
    have, and `ROWS` is gone: a slice appends once at most, so that no pattern makes it go to and fro.

    Args:
        spec: keys, inputs and calls. make_table: opens the partition's tables. suffix: of their names.
        known: the base names of the tables that there are. append: how it begins if there are none.
    """

    def __init__(
        self, spec: AggregateSpec, make_table: MakeTable, suffix: str, known: Collection[str], *, append: bool
    ) -> None:
        self._spec = spec
        self._make_table = make_table
        self._suffix = suffix
        self._stored = StoredRows(spec.key_fields, spec.inputs)
        layouts = [table.layout for _, table, _ in distincts(spec)]
        self._entry = 8 * max(layout.width for layout in layouts) + _INDEX
        self._long = any(layout.bytes_columns for layout in layouts)
        self._version: int | None = None  # of the running batch, if it has to do with the slice
        self._groups: Groups | None = None
        self._rows: tuple[AlignedTable, Sample] | None = None
        self._backfilled: RmwTable | None = None
        self._appended = False  # in this batch
        self._before = 0  # entries
        self._size = 0  # bytes
        self._retired: list[AlignedTable | RmwTable] = []
        if MAIN in known or not (known or append):
            self._groups = Groups(spec, make_table, suffix)
        if ROWS in known or (append and not known):
            self.switch_to_rows()
        if BACKFILLED in known:
            self._open_backfill()

    @property
    def appends(self) -> bool:
        """Whether rows that come are appended."""
        return self._rows is not None and self._backfilled is None

    @property
    def backlog(self) -> int:
        """How many rows are still to become groups, roughly."""
        if self._rows is None or self._backfilled is None:
            return 0
        return max(1, int(self._rows[0].rows * (1 - self._rows[0].lowest / (LAST_HASH + 1))))

    @property
    def table(self) -> AlignedTable | RmwTable:
        """Where rows that come go."""
        if self.appends:
            assert self._rows is not None
            return self._rows[0]
        return self._open_groups().table

    @property
    def tables(self) -> dict[str, AlignedTable | RmwTable]:
        """Its tables by name."""
        found: dict[str, AlignedTable | RmwTable] = {} if self._groups is None else {**self._groups.tables}
        if self._rows is not None:
            found |= {ROWS + self._suffix: self._rows[0], self._rows[1].name: self._rows[1].table}
        if self._backfilled is not None:
            found[BACKFILLED + self._suffix] = self._backfilled
        return found

    def begin(self, version: int) -> None:
        """Start the batch that reads state `version`."""
        self._close_retired()
        self._version = version
        self._appended = False
        if self._groups is not None:
            self._groups.begin(version)
        if self._rows is not None:
            for each in self._rows:
                each.begin(version)
        if self._backfilled is not None:
            self._backfilled.begin(version)
        self._before = self._entries

    def fold(self, batch: pa.RecordBatch) -> None:
        """Take rows: the column `__hash`, then keys and inputs."""
        if not self.appends:
            self._open_groups().fold(batch)
            return
        assert self._rows is not None
        rows, sample = self._rows
        self._appended = True
        for portion in portions(batch, rows.portion, rows.ahead):
            rows.append(self._stored.encode(portion))
            sample.add(portion)

    @property
    def _entries(self) -> int:
        return 0 if self._groups is None else sum(side.stats()["keys"] for _, side in self._groups.sides)

    def observe(self, wide: int) -> Observation:
        """What the running batch did to the slice's distinct inputs, and what they take.

        Args:
            wide: bytes of a row of the input, for what is longer than a row of state.
        """
        asked = made = groups = entries = 0
        if self._rows is not None:
            sample = self._rows[1]
            entries = sample.entries
            if self.appends and self._version is not None:
                asked, made = sample.asked, sample.made
        if self._groups is not None:
            groups = self._groups.table.stats()["keys"]
            entries += self._entries
            if not self.appends and self._version is not None:
                stats = [side.stats() for _, side in self._groups.sides]
                asked = sum(each["cache_hits"] + each["cache_misses"] for each in stats)
                made = self._entries - self._before
        return Observation(asked, made, entries * (self._entry + (wide if self._long else 0)), groups)

    @property
    def heaviest(self) -> int:
        """Bytes of the appended rows of one group, at most."""
        return 0 if self._rows is None else heaviest(self._rows[0].readable())

    def switch_to_rows(self) -> None:
        """Append rows from now on, if the slice never did."""
        if self._rows is not None or self._backfilled is not None:
            return
        layout = self._stored.layout
        rows = self._make_table(ROWS + self._suffix, layout.schema, self._stored.initial, kind="aligned")
        self._rows = rows, Sample(self._spec, self._make_table, self._suffix)
        if self._version is not None:
            for each in self._rows:
                each.begin(self._version)

    def switch_to_groups(self) -> None:
        """Keep groups from now on, also of what was appended."""
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
        """Make groups of some of the appended rows; how many. The running batch has to have to do with the slice."""
        assert self._rows is not None
        assert self._backfilled is not None
        assert self._version is not None
        pieces = self._backlog_rows()
        some = next(pieces, None)
        pieces.close()
        last = LAST_HASH if some is None else int(some.words[-1, HASH])
        if some is not None:
            groups = self._open_groups()
            groups.table.widen()
            groups.table.rest(False)
            groups.fold(self._stored.decode(some))
        if last == LAST_HASH:
            rows, sample = self._rows
            self._retired += [rows, sample.table]
            self._rows = None
            return 0 if some is None else some.count
        assert some is not None
        self._rows[0].lowest = last + 1
        return some.count

    def _backlog_rows(self) -> Generator[Rows]:
        """The rows that have not become groups, in hash order, in pieces that have all rows of their hashes."""
        assert self._rows is not None
        rows = self._rows[0]
        yield from gradually([rows.readable()], self._stored.layout, max(1, rows.portion // 2), HashRange(rows.lowest))

    # Closing

    def measure(self) -> None:
        """Learn how large the slice is, before `emit`, which gives the same pieces until this is called again."""
        self._size = sum(_size(table) for table in self.tables.values())

    def emit(self, make_scratch: MakeRows) -> Iterator[tuple[Groups, Rows]]:
        """All groups, with the rows that are no groups yet, in pieces of hash order."""
        if self._rows is None:
            groups = self._open_groups()
            for rows in groups.scan():
                yield groups, rows
            return
        with ExitStack() as open_:
            for found in self._ranges(open_):
                groups = Groups(self._spec, make_scratch)
                try:
                    groups.begin(0)
                    self._merge_rows(groups, *found)
                    for some in groups.scan():
                        yield groups, some
                finally:
                    groups.close()

    def _merge_rows(
        self, groups: Groups, held: Sequence[Rows], entries: Sequence[Sequence[Rows]], rows: Sequence[Rows]
    ) -> None:
        """Fold rows into what is held of groups of the same range, in fresh tables."""
        ranges = [key_groups(some) for some in (*held, *rows)]
        if not ranges:
            return
        groups.narrow(HashRange(min(each.lo for each in ranges), max(each.hi for each in ranges)))
        groups.table.expect(sum(len(some.words) for some in (*held, *rows)))
        for some in held:
            groups.table.load(some)
        for (table, side), found in zip(groups.sides, entries, strict=False):
            for some in found:
                side.load(_with_hash_swapped(some, table))
        for some in rows:
            groups.fold(self._stored.decode(some))

    def _ranges(self, open_: ExitStack) -> Iterator[tuple[Sequence[Rows], Sequence[Sequence[Rows]], Sequence[Rows]]]:
        """Range after range of the hash: groups, their distinct inputs in each side table, rows."""
        groups = self._groups
        if groups is None:
            for piece in self._backlog_rows():
                yield (), (), (piece,)
            return
        assert self._rows is not None
        portion = self._rows[0].portion
        ends = bounds(groups.table.range, -(-self._size // max(1, portion // 2)))
        sides = [self._by_group(table, side, open_) for table, side in groups.sides]
        entries = [gradually([side.readable()], side.layout, portion // 4) for side in sides]
        sources = [groups.scan(), self._backlog_rows(), *entries]
        for held, left, *found in zip(*(by_range(each, ends) for each in sources), strict=True):
            yield held, found, left

    def _by_group(self, table: Keyed, side: RmwTable, open_: ExitStack) -> AlignedTable:
        """A side table's entries in the order of their groups' hashes, for a moment."""
        name = f"{MAIN}{self._suffix} by group"
        spool = self._make_table(name, table.layout.schema, table.initial, kind="spool")
        open_.callback(spool.close)
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
            table.close()
        self._retired = []

    def close(self) -> None:
        """Give all memory back."""
        self._close_retired()
        for table in self.tables.values():
            table.close()


def _size(table: AlignedTable | RmwTable) -> int:
    stats = table.stats()
    return max(8 * table.layout.width * stats["keys"], stats["bytes"])


def _with_hash_swapped(rows: Rows, table: Keyed) -> Rows:
    """Entries of a side table with the hash of their group in place of their own, which takes its place; and back."""
    words = np.array(rows.words)
    group = table.values[0].offset
    words[:, [HASH, group]] = words[:, [group, HASH]]
    return Rows(words, rows.heap)
