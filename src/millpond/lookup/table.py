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

    Examples:
        >>> import pyarrow as pa
        >>> from millpond.lookup import Found
        >>> rows = pa.RecordBatch.from_pylist([{"name": "Ann"}])
        >>> found = Found(rows, at=[1])  # Ann has the second key of the request; the first key does not exist
        >>> found.rows.to_pylist()
        [{'name': 'Ann'}]
    """

    rows: pa.RecordBatch
    at: Sequence[int]
    unreadable: Mapping[int, str] = {}


class Connection(Protocol):
    """A connection to a table, used by one thread at a time.

    Examples:
        >>> import pyarrow as pa
        >>> from millpond.lookup import Found
        >>> class Names:
        ...     known = {2: "Ann"}
        ...
        ...     def fetch(self, keys):
        ...         ids = keys.column("id").to_pylist()
        ...         positions = [position for position, number in enumerate(ids) if number in self.known]
        ...         rows = [{"name": self.known[ids[position]]} for position in positions]
        ...         return Found(pa.RecordBatch.from_pylist(rows, pa.schema({"name": pa.string()})), positions)
        ...
        ...     def close(self):
        ...         pass
        >>> Names().fetch(pa.RecordBatch.from_pylist([{"id": 1}, {"id": 2}])).at
        [1]
    """

    def fetch(self, keys: pa.RecordBatch) -> Found:
        """Look up keys, if possible in one round trip.

        Args:
            keys: distinct keys without nulls; columns have the table's names.

        Raises:
            UsageError: a retry cannot help. Bugs in the code are not retried either (see `lookup.user_errors`).
            Exception: any other error closes the connection, and the keys are requested again on a new one.
        """

    def close(self) -> None:
        """Close the connection, which may be broken."""


@runtime_checkable
class LookupTable(Protocol):
    """The description of an external table. It is pickled, and connected to in each process that looks up keys.

    Examples:
        >>> import pyarrow as pa
        >>> from millpond.lookup import Found
        >>> class Squares:
        ...     name = "squares"
        ...
        ...     def connect(self, columns, timeout):
        ...         return self
        ...
        ...     def fetch(self, keys):
        ...         numbers = keys.column("n").to_pylist()
        ...         return Found(pa.RecordBatch.from_pydict({"square": [n * n for n in numbers]}), range(len(numbers)))
        ...
        ...     def close(self):
        ...         pass
        >>> numbers = spark.createDataFrame([(3,)], "n bigint")
        >>> millpond.enrich(numbers, Squares(), on="n", columns="square bigint").collect()
        [Row(n=3, square=9)]
    """

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
