"""Protocol of external tables for lookup joins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import pyarrow as pa


class Found(NamedTuple):
    """The result of a lookup.

    Attributes:
        rows: the requested columns, one row per key that exists, in any order.
        at: for each row, the position of its key in the request.
        unreadable: by position, the error of each key that exists but cannot be read.
    """

    rows: pa.RecordBatch
    at: Sequence[int]
    unreadable: Mapping[int, str] = {}


class Connection(Protocol):
    """A connection to a table, used by one thread at a time."""

    def fetch(self, keys: pa.RecordBatch) -> Found:
        """Look up keys, if possible in one round trip.

        Args:
            keys: distinct keys without nulls; columns have the table's names.

        Raises:
            UsageError: a retry cannot help. Bugs in the code are not retried either (see `millpond.lookup.mistakes`).
            Exception: any other error closes the connection, and the keys are requested again on a new one.
        """

    def close(self) -> None:
        """Close the connection, which may be broken."""


@runtime_checkable
class LookupTable(Protocol):
    """The description of an external table. It is pickled, and connected to in each process that looks up keys."""

    @property
    def name(self) -> str:
        """Name in errors and plans; contains no secrets."""

    def connect(self, columns: pa.Schema, timeout: float) -> Connection:
        """Open a connection.

        Args:
            columns: the columns to return for each row.
            timeout: seconds after which the connect, and then each `fetch`, has to fail.

        Raises:
            UsageError: a retry cannot help.
        """
