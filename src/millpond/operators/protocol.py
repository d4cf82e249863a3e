"""What every operator offers to the slot that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

import pyarrow as pa

from millpond.layout import TableSchema, Words

if TYPE_CHECKING:
    from millpond.stores.protocol import TableDelta
    from millpond.stores.rmw import RmwTable

MAIN = "main"
"""The name of an operator's first table."""

PIECE = 65_536
"""Rows of an output batch, at most."""

MakeTable = Callable[[str, TableSchema, Words], "RmwTable"]
"""Opens a table of the partition: its name, its schema, and the words of a fresh row."""


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
