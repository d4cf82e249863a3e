"""The interface of every operator to the slot that runs it."""

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
"""The name of an operator's main table."""

MAX_OUTPUT_ROWS = 65_536
"""Maximum rows of an output batch."""

ROWS = "rows"
"""The name of the table of rows that are kept, beside groups, until their session or window closes."""

TableKind = Literal["rmw", "ordered", "aligned", "unaligned", "scratch", "spool", "cache"]
"""The store of a table.

`rmw` is read-modify-write, `ordered` a multimap by key and time; `aligned` and `unaligned` are append stores. The
others are in no checkpoint: `scratch` is temporary read-modify-write in memory, `spool` a temporary append store, and
`cache` may drop rows at any time.
"""


class StateTable(NamedTuple):
    """One table of an operator's state, in all slices of event time.

    Attributes:
        schema: the schema of its rows.
        initial: the words of a fresh row.
        kind: the store that it is in.
        axis: what assigns its rows to partitions; if it is not their own hash, the table has rows of all hashes.
        shown: whether a user who reads the operator's state sees its rows.
        counted: whether its rows count as rows of the state.
        drop_matched: for an ordered table, whether matched rows can be dropped.
        parts: the name of a table that may hold further parts of its rows, each in the key group of its row.
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
    """Opens a table of the partition, given its name, its schema, the words of a fresh row, and its store.

    The table `MAIN` (each slice of it) holds the partition's hash range; tables of another axis hold the whole range.
    """

    @overload
    def __call__(
        self, name: str, schema: TableSchema, initial: Words, *, kind: Literal["rmw", "scratch"] = "rmw"
    ) -> RmwTable:
        """Open a read-modify-write table."""

    @overload
    def __call__(
        self, name: str, schema: TableSchema, initial: Words, *, kind: Literal["ordered"], drop_matched: bool = False
    ) -> OrderedTable:
        """Open a table of rows in time order; with `drop_matched`, matched rows can be dropped."""

    @overload
    def __call__(
        self, name: str, schema: TableSchema, initial: Words, *, kind: Literal["aligned", "spool"]
    ) -> AlignedTable:
        """Open a table that is appended to and read as a whole."""

    @overload
    def __call__(self, name: str, schema: TableSchema, initial: Words, *, kind: Literal["unaligned"]) -> UnalignedTable:
        """Open a table that is appended to and read list by list."""

    @overload
    def __call__(self, name: str, schema: TableSchema, initial: Words, *, kind: Literal["cache"]) -> CacheTable:
        """Open a table whose rows may be dropped at any time."""


MakeRmwTable = Callable[[str, TableSchema, "Words"], "RmwTable"]
"""Opens a read-modify-write table."""


def scratch(make_table: MakeTable) -> MakeRmwTable:
    """Return a function that opens temporary tables."""
    return lambda name, schema, initial: make_table(name, schema, initial, kind="scratch")


NO_EXTRA_METRICS: Mapping[str, float] = MappingProxyType({})
"""The metrics of an operator without metrics of its own."""


class Times(NamedTuple):
    """The times of a batch, in milliseconds since the epoch.

    Attributes:
        late: the watermark of the batch before; rows at or before it are late.
        closed: the watermark of this batch; state at or before it is closed.
        processing: when Spark planned the batch.
    """

    late: int = 0
    closed: int = 0
    processing: int = 0


@runtime_checkable
class AdoptsSparkState(Protocol):
    """An operator that can adopt Spark's state in place of a batch's rows, while it has no state of its own."""

    def adopt(self, batch: pa.RecordBatch) -> None:
        """Adopt a part of Spark's state: the column `__hash`, then the columns of `plan.spark_state.rows`."""


@runtime_checkable
class Combining(Protocol):
    """An operator that merges rows which were combined before the exchange."""

    def process_combined(self, batch: pa.RecordBatch) -> int:
        """Fold in combined rows of the batch.

        Args:
            batch: the columns `__hash`, those of the spec's input, the state columns of all calls but those of its
                `value_sets`, `__set` if there are such, and `__rows`.

        Returns:
            The number of source rows that they stand for.
        """


@runtime_checkable
class Prefetchable(Protocol):
    """An operator that takes prefetch hints: the keys that a batch will read."""

    def prefetch(self, hashes: Words, needed: int) -> None:
        """Prefetch the state of keys that the batch of state version `needed` will read.

        Called between two batches, or between two `process` calls of one.

        Args:
            hashes: the keys' hashes, as in the column `__hash`, but unsigned.
            needed: the state version that this batch reads.
        """


@runtime_checkable
class KeyPrefetchable(Protocol):
    """An operator that takes prefetch hints with the key columns beside the hashes."""

    def prefetch_keys(self, keys: pa.RecordBatch, needed: int) -> None:
        """As `Prefetchable.prefetch`; `keys`: the column `__hash`, then the columns that `Spec.hint_columns` names."""


class Operator(Protocol):
    """One stateful operator on one partition.

    The calls of a batch are `begin`, any number of `process`, `finish`, then `output`, which may be called repeatedly.
    """

    @property
    def tables(self) -> Mapping[str, Table]:
        """The operator's tables by name; the set may change while it runs."""

    @property
    def late_rows(self) -> int:
        """The number of the batch's rows that were dropped as late."""

    @property
    def extra_metrics(self) -> Mapping[str, float]:
        """The batch's metrics that only this operator reports (see `Spec.extra_metrics`)."""

    def begin(self, version: int, times: Times) -> None:
        """Start the batch that reads state `version`."""

    def passes(self, rows: int) -> int:
        """Return the number of passes over hash ranges (see `restrict`) that a batch of `rows` rows takes."""

    def restrict(self, range_: HashRange) -> None:
        """Restrict the rows that follow to a hash range, until the next call or the next batch."""

    def process(self, batch: pa.RecordBatch) -> None:
        """Fold in rows of the batch: the column `__hash`, then the operator's columns (no marker rows)."""

    def finish(self) -> dict[str, TableDelta]:
        """End the batch: seal the tables that it changed. The slot drops tables that are no longer in `tables`."""

    def output(self) -> Iterator[pa.RecordBatch]:
        """Yield the output of the batch just finished, in bounded pieces."""

    def close(self) -> None:
        """Release all memory."""
