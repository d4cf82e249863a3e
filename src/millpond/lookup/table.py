"""What a table outside of Spark has to offer so that streams can be enriched from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import pyarrow as pa


class Found(NamedTuple):
    """What a table has of some keys.

    Attributes:
        rows: the columns that were asked for; a row for each key that is there, in any order.
        at: for each row the position of its key among those asked for.
        unreadable: keys that are there and cannot be read, by position, and why.
    """

    rows: pa.RecordBatch
    at: Sequence[int]
    unreadable: Mapping[int, str] = {}


class Connection(Protocol):
    """A connection to a table, used by one thread at a time."""

    def fetch(self, keys: pa.RecordBatch) -> Found:
        """Look keys up, all in one round trip if that can be had.

        Args:
            keys: different ones, without nulls; the columns are called as in the table.

        Raises:
            UsageError: no other try can help. Nor does one if the code has a bug (see `millpond.lookup.mistakes`).
            Exception: any other ends the connection, and the keys are asked for again on a new one.
        """

    def close(self) -> None:
        """End it; it may be broken."""


@runtime_checkable
class LookupTable(Protocol):
    """A table outside of Spark, by description: it is pickled, and connected to wherever keys are looked up."""

    @property
    def name(self) -> str:
        """What errors and plans call it: no secrets."""

    def connect(self, columns: pa.Schema, timeout: float) -> Connection:
        """Connect to it.

        Args:
            columns: those that are wanted of each row.
            timeout: seconds that a connect, and then each `fetch`, may take before it has to fail.

        Raises:
            UsageError: no other try can help.
        """
