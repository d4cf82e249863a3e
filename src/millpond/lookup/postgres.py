"""PostgreSQL: a row for each primary key."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from millpond.errors import UsageError
from millpond.lookup.convert import column, objects
from millpond.lookup.table import Found

_LASTING = ("authentication failed", "does not exist", "pg_hba.conf", "permission denied")
"""What a server says that will not let anybody in at another try either."""


@dataclass(frozen=True)
class PostgresTable:
    """A table, or a view, of a PostgreSQL server, by a key of one column or several that no two rows share.

    Attributes:
        conninfo: how to connect, as libpq reads it: `postgresql://user:password@host/database`, or `host=… dbname=…`.
        table: its name, with its schema if that is not on the search path.
    """

    conninfo: str = field(repr=False)
    table: str

    @property
    def name(self) -> str:
        """Which table it is, and where, without passwords."""
        try:
            from psycopg.conninfo import conninfo_to_dict

            parts = conninfo_to_dict(self.conninfo)
        except Exception:  # not installed where this is asked, or malformed: connecting tells
            return f"PostgreSQL {self.table}"
        place = parts.get("host") or parts.get("hostaddr") or "localhost"
        return f"PostgreSQL {place}:{parts.get('port') or 5432}, table {self.table}"

    def connect(self, columns: pa.Schema, timeout: float) -> _PostgresConnection:
        """Connect to the server (see `LookupTable`).

        Raises:
            UsageError: psycopg is not there; the server refuses the user; there is no such table.
        """
        try:
            import psycopg
        except ImportError as error:
            raise UsageError(
                f"'{self.name}' needs the package psycopg, which is not installed where keys are looked up.",
                action="Install millpond[postgres] there.",
            ) from error

        class Limited(psycopg.Connection[Any]):
            """A connection that waits for no answer longer than it is told to."""

            until = time.monotonic() + timeout

            def wait(self, gen: Any, *_: Any, **__: Any) -> Any:
                return super().wait(_limited(gen, self.until), interval=0.05)

        try:
            client = Limited.connect(
                self.conninfo,
                autocommit=True,
                connect_timeout=max(2, round(timeout)),
                options=f"-c statement_timeout={max(1, round(timeout * 1000))}",
            )
        except psycopg.OperationalError as error:
            if "FATAL" in str(error) and any(said in str(error) for said in _LASTING):
                raise self._refused(error) from error
            raise
        except psycopg.ProgrammingError as error:
            raise self._refused(error) from error
        connection = _PostgresConnection(self, client, columns, timeout)
        try:
            connection.learn()
        except BaseException:
            connection.close()
            raise
        return connection

    def _refused(self, error: Exception) -> UsageError:
        return UsageError(
            f"'{self.name}' refuses the request: {str(error).strip().splitlines()[0]}.",
            action="Mend the connection's parameters, the table's name, the columns, or the user's rights.",
        )


def _limited(gen: Generator[Any, Any, Any], until: float) -> Generator[Any, Any, Any]:
    """The same conversation with the server, up to a time by the monotonic clock."""
    try:
        asked = next(gen)
        while True:
            ready = yield asked
            if time.monotonic() > until:
                raise TimeoutError("no answer")
            asked = gen.send(ready)
    except StopIteration as end:
        return end.value


class _PostgresConnection:
    def __init__(self, table: PostgresTable, client: Any, columns: pa.Schema, timeout: float) -> None:
        self._table = table
        self._client = client
        self._columns = columns
        self._timeout = timeout
        self._types: dict[str, str] = {}
        self._statement: Any = None

    def learn(self) -> None:
        """Find out of what types the table's columns are, so that keys are compared as those."""
        rows = self._ask(
            "SELECT attname, format_type(atttypid, NULL) FROM pg_attribute "
            "WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped",
            (".".join('"' + part.replace('"', '""') + '"' for part in self._table.table.split(".")),),
        )
        self._types = dict(rows)

    def _ask(self, statement: Any, parameters: Any) -> list[Any]:
        import psycopg

        self._client.until = time.monotonic() + self._timeout
        try:
            return list(self._client.execute(statement, parameters).fetchall())
        except psycopg.errors.QueryCanceled as error:
            raise TimeoutError("no answer") from error
        except (psycopg.ProgrammingError, psycopg.DataError, psycopg.NotSupportedError) as error:
            raise self._table._refused(error) from error

    def fetch(self, keys: pa.RecordBatch) -> Found:
        """Read the rows of all keys with one statement."""
        if self._statement is None:
            self._statement = self._select(keys.schema.names)
        lists = [one.to_pylist() for one in keys.columns]
        rows = self._ask(self._statement, [*lists, *lists])
        names, *values = zip(*rows, strict=True) if rows else ((), *(() for _ in self._columns))
        at = [int(position) - 1 for position in names]
        arrays: list[pa.Array] = []
        unreadable: dict[int, str] = {}
        for one, some in zip(self._columns, values, strict=True):
            array, wrong = column(some, one, objects)
            arrays.append(array)
            unreadable |= {at[position]: why for position, why in wrong.items()}
        return Found(pa.RecordBatch.from_arrays(arrays, schema=self._columns), at, unreadable)

    def _select(self, keys: list[str]) -> Any:
        """The statement: keys come as arrays, and each row tells which of them it is of."""
        from psycopg import sql

        missing = [name for name in [*keys, *self._columns.names] if name not in self._types]
        if missing:
            raise UsageError(
                f"'{self._table.name}' has no column {', '.join(missing)}.",
                action=f"It has {', '.join(self._types)}: name those in `on` and `columns`.",
            )
        arrays = [sql.SQL("%s::") + sql.SQL(self._types[name] + "[]") for name in keys]
        numbered = sql.SQL(", ").join(sql.Identifier(f"k{number}") for number in range(len(keys)))
        equal = [
            sql.SQL("t.{} = asked.{}").format(sql.Identifier(name), sql.Identifier(f"k{number}"))
            for number, name in enumerate(keys)
        ]
        # The planner takes an index for these, whatever it makes of the join.
        among = [
            sql.SQL("t.{} = ANY({})").format(sql.Identifier(name), array)
            for name, array in zip(keys, arrays, strict=True)
        ]
        return sql.SQL(
            "SELECT asked.i, {columns} FROM {table} AS t "
            "JOIN unnest({arrays}) WITH ORDINALITY AS asked({numbered}, i) ON {equal} WHERE {among}"
        ).format(
            columns=sql.SQL(", ").join(self._column(one) for one in self._columns),
            table=sql.Identifier(*self._table.table.split(".")),
            arrays=sql.SQL(", ").join(arrays),
            numbered=numbered,
            equal=sql.SQL(" AND ").join(equal),
            among=sql.SQL(" AND ").join(among),
        )

    def _column(self, wanted: pa.Field) -> Any:
        from psycopg import sql

        name = sql.SQL("t.") + sql.Identifier(wanted.name)
        if pa.types.is_string(wanted.type):
            return name + sql.SQL("::text")
        return name + sql.SQL("::double precision") if pa.types.is_floating(wanted.type) else name

    def close(self) -> None:
        """End the connection."""
        self._client.close()
