"""What every operator offers to the slot that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, overload, runtime_checkable

import pyarrow as pa

from millpond.files.refs import Axis
from millpond.layout import HashRange, TableSchema, Words

if TYPE_CHECKING:
    from millpond.stores.aligned.table import AlignedTable
    from millpond.stores.ordered.table import OrderedTable
    from millpond.stores.protocol import Table, TableDelta
    from millpond.stores.rmw.cache_table import CacheTable
    from millpond.stores.rmw.table import RmwTable
    from millpond.stores.unaligned.table import UnalignedTable

MAIN = "main"
"""The name of an operator's first table."""

PIECE = 65_536
"""Rows of an output batch, at most."""

ROWS = "rows"
"""The name of the table of rows that are kept until their session closes, or their window, beside groups."""

TableKind = Literal["rmw", "ordered", "aligned", "unaligned", "scratch", "spool", "cache"]
"""Read-modify-write, ordered, aligned or unaligned append; for a moment and in no checkpoint: read-modify-write in
memory, and append; in no checkpoint either: rows that may be forgotten."""


class StateTable(NamedTuple):
    """One table of an operator's state, in all slices of event time.

    Attributes:
        schema: of its rows. initial: the words of a fresh row. kind: the store that it is in.
        axis: by what its rows belong to partitions; if it is not their hash, the table has rows of all hashes.
        shown: whether its rows are what a user reads who asks for the operator's state.
        counted: whether its rows are counted as those of the state.
        drop_matched: of an ordered table, whether matched rows are of no use.
        parts: the name of a table that may have more of what its rows have, each in the key group of its row.
    """

    schema: TableSchema
    initial: Words
    kind: TableKind = "rmw"
    axis: Axis = "hash"
    shown: bool = True
    counted: bool = True
    drop_matched: bool = False
    parts: str = ""


class MakeTable(Protocol):
    """Opens a table of the partition: its name, its schema, the words of a fresh row, and the store that it is in.

    The table `MAIN` (each slice of it) holds the partition's range of hashes; those of another axis the whole range.
    """

    @overload
    def __call__(
        self, name: str, schema: TableSchema, initial: Words, *, kind: Literal["rmw", "scratch"] = "rmw"
    ) -> RmwTable:
        """Open a table whose rows are read, changed and written."""

    @overload
    def __call__(
        self, name: str, schema: TableSchema, initial: Words, *, kind: Literal["ordered"], drop_matched: bool = False
    ) -> OrderedTable:
        """Open a table of rows in the order of their times; `drop_matched`: those that are matched are of no use."""

    @overload
    def __call__(
        self, name: str, schema: TableSchema, initial: Words, *, kind: Literal["aligned", "spool"]
    ) -> AlignedTable:
        """Open a table that is appended to, and read as a whole."""

    @overload
    def __call__(self, name: str, schema: TableSchema, initial: Words, *, kind: Literal["unaligned"]) -> UnalignedTable:
        """Open a table that is appended to, and of which lists are read."""

    @overload
    def __call__(self, name: str, schema: TableSchema, initial: Words, *, kind: Literal["cache"]) -> CacheTable:
        """Open a table of rows that may be forgotten."""


MakeRows = Callable[[str, TableSchema, "Words"], "RmwTable"]
"""Opens a table whose rows are read, changed and written."""


def scratch(make_table: MakeTable) -> MakeRows:
    """Opens tables that live for a moment."""
    return lambda name, schema, initial: make_table(name, schema, initial, kind="scratch")


NO_FIGURES: Mapping[str, float] = MappingProxyType({})
"""The figures of an operator that has nothing to report."""


class Times(NamedTuple):
    """The times of a batch, in milliseconds since the epoch, as they reach an operator.

    Attributes:
        late: rows whose event time is at or before it are late: the watermark of the batch before.
        closed: state of event times at or before it is closed: the watermark of this batch.
        processing: when Spark planned the batch.
    """

    late: int = 0
    closed: int = 0
    processing: int = 0


@runtime_checkable
class Adopting(Protocol):
    """An operator that can take up state that Spark held, in place of a batch's rows, when it has none of its own."""

    def adopt(self, batch: pa.RecordBatch) -> None:
        """Take up a part of it: the column `__hash`, then what `plan.spark_state.rows` makes of Spark's state."""


@runtime_checkable
class Combining(Protocol):
    """An operator that merges rows which were combined before the exchange."""

    def process_combined(self, batch: pa.RecordBatch) -> int:
        """Fold in combined rows of the batch; returns how many rows they stand for.

        Args:
            batch: the columns `__hash`, those of the spec's input, the state columns of all calls but those of its
                `value_sets`, `__set` if there are such, and `__rows`.
        """


@runtime_checkable
class Announced(Protocol):
    """An operator that can be told which keys a batch will ask for."""

    def announce(self, hashes: Words, needed: int) -> None:
        """Let the state of keys be read that the batch which reads version `needed` will ask for.

        Between two batches, or two `process` of one. `hashes`: of keys, as in the column `__hash`, unsigned.
        """


@runtime_checkable
class KeysAnnounced(Protocol):
    """An operator that can be told which keys a batch will ask for, if they come with their hashes."""

    def announce_keys(self, keys: pa.RecordBatch, needed: int) -> None:
        """As `Announced.announce`; `keys`: the column `__hash`, then the columns that `Spec.announced` names."""


class Operator(Protocol):
    """One stateful operator on one partition.

    A batch is `begin`, any number of `process`, `finish`, then `output`, which may be asked for more than once.
    """

    @property
    def tables(self) -> Mapping[str, Table]:
        """The operator's tables by name; tables may come and go while it runs."""

    @property
    def late_rows(self) -> int:
        """Rows of the batch that were dropped because they were late."""

    @property
    def figures(self) -> Mapping[str, float]:
        """What there is to report of the batch beside what is reported of every operator (see `Spec.figures`)."""

    def begin(self, version: int, times: Times) -> None:
        """Start the batch that reads state `version`."""

    def passes(self, rows: int) -> int:
        """In how many passes over ranges of the hash (see `narrow`) to work through a batch of so many rows."""

    def narrow(self, range_: HashRange) -> None:
        """Until the next call, or the next batch, all rows will have hashes of this range."""

    def process(self, batch: pa.RecordBatch) -> None:
        """Fold in rows of the batch: the column `__hash`, then the operator's columns (no marker rows)."""

    def finish(self) -> dict[str, TableDelta]:
        """End the batch: seal the tables that it changed. Tables that are not in `tables` any more are forgotten."""

    def output(self) -> Iterator[pa.RecordBatch]:
        """The operator's output for the batch just finished, in bounded pieces."""

    def close(self) -> None:
        """Give all memory back."""
