"""What every operator offers to the slot that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

import pyarrow as pa

from millpond.layout import TableSchema, Words

if TYPE_CHECKING:
    from millpond.stores.ordered import OrderedTable
    from millpond.stores.protocol import TableDelta
    from millpond.stores.rmw import RmwTable

MAIN = "main"
"""The name of an operator's first table."""

PIECE = 65_536
"""Rows of an output batch, at most."""

MakeTable = Callable[[str, TableSchema, Words], "RmwTable"]
"""Opens a table of the partition: its name, its schema, and the words of a fresh row."""

MakeOrdered = Callable[[str, TableSchema, bool], "OrderedTable"]
"""Opens an ordered table of the partition: its name, its schema, and whether matched rows are of no use."""


class Times(NamedTuple):
    """What time it is for a batch, in milliseconds.

    Attributes:
        late: input rows whose event time is at or before it are late: the previous batch's watermark.
        closed: this batch's watermark: state at or before it is closed.
        processing: the batch's timestamp.
    """

    late: int
    closed: int
    processing: int


class Operator(Protocol):
    """One stateful operator on one partition.

    A batch is `begin`, any number of `process`, `finish`, then `output`, which may be asked for more than once.
    """

    @property
    def tables(self) -> Mapping[str, RmwTable]:
        """The operator's tables by name."""

    def begin(self, version: int) -> None:
        """Start the batch that reads state `version`."""

    def process(self, batch: pa.RecordBatch) -> None:
        """Fold in rows of the batch: the column `__hash`, then the operator's columns (no marker rows)."""

    def finish(self) -> dict[str, TableDelta]:
        """End the batch: seal all tables."""

    def output(self) -> Iterator[pa.RecordBatch]:
        """The operator's output for the batch just finished, in bounded pieces."""
