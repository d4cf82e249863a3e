"""What every operator offers to the slot that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import pyarrow as pa

from millpond.layout import HashRange, TableSchema, Words

if TYPE_CHECKING:
    from millpond.stores.ordered.table import OrderedTable
    from millpond.stores.protocol import TableDelta
    from millpond.stores.rmw.table import RmwTable

MAIN = "main"
"""The name of an operator's first table."""

SLICE = "@"
"""What stands between a table's name and that of the slice of event time that it holds."""

PIECE = 65_536
"""Rows of an output batch, at most."""

ROWS = "rows"
"""The name of the table of rows that are kept until their session closes, or their window, beside groups."""

SAMPLE = "sample"
"""The name of the table of some of the distinct inputs of the rows that are kept beside groups."""

MOVED = "moved"
"""The name of the table that says up to which hash such rows have become groups."""

TableKind = Literal["rmw", "aligned", "unaligned", "scratch", "spool"]
"""Read-modify-write, aligned or unaligned append; for a moment and in no checkpoint: read-modify-write in memory, and
append."""


class MakeTable(Protocol):
    """Opens a table of the partition."""

    def __call__(self, name: str, schema: TableSchema, initial: Words, *, kind: TableKind = "rmw") -> Any:
        """Open a table: its name, its schema, the words of a fresh row, and the store that it is in."""


MakeOrdered = Callable[[str, TableSchema, bool], "OrderedTable"]
"""Opens an ordered table of the partition: its name, its schema, and whether matched rows are of no use."""


def base_name(table: str) -> str:
    """The name under which a table's schema is known: that of the table without its slice of event time."""
    return table.partition(SLICE)[0]


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


class Operator(Protocol):
    """One stateful operator on one partition.

    A batch is `begin`, any number of `process`, `finish`, then `output`, which may be asked for more than once.
    """

    @property
    def tables(self) -> Mapping[str, RmwTable | OrderedTable]:
        """The operator's tables by name; tables may come and go while it runs."""

    @property
    def late_rows(self) -> int:
        """Rows of the batch that were dropped because they were late."""

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
