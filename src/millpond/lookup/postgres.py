"""PostgreSQL: a row for each primary key."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from millpond.errors import UsageError
from millpond.lookup.conninfo import parts_of, secrets_of
from millpond.lookup.convert import column, objects
from millpond.lookup.secrets import hide
from millpond.lookup.table import Found
from millpond.spec.types import spark_name

_LASTING = ("authentication failed", "does not exist", "pg_hba.conf", "permission denied")
"""What a server says that will not let anybody in at another try either."""

_INTEGERS = ("smallint", "integer", "bigint")
_FLOATS = ("real", "double precision")
_TIMES = {
    "date": "date",
    "timestamp without time zone": "timestamp_ntz",
    "timestamp with time zone": "timestamp",
}
"""Types of days and times, and what Spark calls them: a server would turn one into another by a zone of its own."""


@dataclass(frozen=True)
class PostgresTable:
    """A table, or a view, of a PostgreSQL server, by a key of one column or several that no two rows share.

    Attributes:
        conninfo: how to connect, as libpq reads it: `postgresql://user:password@host/database`, or `host=… dbname=…`.
        table: its name, with its schema if that is not on the search path.
    """

    conninfo: str = field(repr=False)
    table: str

    def __post_init__(self) -> None:
        """See that it can be read how to connect.

        Raises:
            UsageError: it cannot.
        """
        parts_of(self.conninfo, self.table)

    @property
    def name(self) -> str:
        """Which table it is, and where, without passwords."""
        parts = parts_of(self.conninfo, self.table)
        if parts is None:  # psycopg is not installed where this is asked
            return f"PostgreSQL {self.table}"
        place = parts.get("host") or parts.get("hostaddr") or "localhost"
        return f"PostgreSQL {place}:{parts.get('port') or 5432}, table {self.table}"

    def connect(self, columns: pa.Schema, timeout: float) -> _PostgresConnection:
        """Connect to the server (see `LookupTable`).

        Raises:
            UsageError: psycopg is not there; it cannot be read how to connect; the server refuses the user; there is no
                such table.
        """
        try:
            import psycopg
        except ImportError as error:
            raise UsageError(
                f"'{self.name}' needs the package psycopg, which is not installed where keys are looked up.",
                action="Install millpond[postgres] there.",
            ) from error

        parts = parts_of(self.conninfo, self.table) or {}

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
                options=f"{_options(parts)} -c statement_timeout={max(1, round(timeout * 1000))}",
            )
        except psycopg.OperationalError as error:
            hide(error, secrets_of(self.conninfo))
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
        hide(error, secrets_of(self.conninfo))
        return UsageError(
            f"'{self.name}' refuses the request: {str(error).strip().splitlines()[0]}.",
            action="Mend the connection's parameters, the table's name, the columns, or the user's rights.",
        )


def _options(parts: Mapping[str, str]) -> str:
    """The server's options that the user gives, a search path say: ours come behind them, not in their place."""
    return parts.get("options") or os.environ.get("PGOPTIONS", "")


def _time_of(dtype: pa.DataType) -> str | None:
    """What Spark calls a type of days or times; None for others."""
    if pa.types.is_date(dtype):
        return "date"
    if not pa.types.is_timestamp(dtype):
        return None
    return "timestamp_ntz" if dtype.tz is None else "timestamp"


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


def _values(column: pa.Array, unreadable: dict[int, str]) -> list[Any]:
    """Parts of keys as the client takes them; null for those that no table can have, or that cannot be asked for.

    Args:
        column: of one part. unreadable: gets the latter, by position, and why.
    """
    if pa.types.is_string(column.type):
        return [_text(raw) for raw in column.cast(pa.binary()).to_pylist()]
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError):
        pass
    values = []
    for position, one in enumerate(column):
        try:
            values.append(one.as_py())
        except (ValueError, OverflowError) as error:  # a time beyond those of Python's
            unreadable[position] = f"the key cannot be asked for: {error}"
            values.append(None)
    return values


def _text(raw: bytes) -> str | None:
    """A text; null if PostgreSQL has no such: one with a zero in it, or that is not in UTF-8."""
    try:
        return None if b"\0" in raw else raw.decode()
    except UnicodeDecodeError:
        return None


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
        self._client.until = time.monotonic() + self._timeout
        rows = self._ask(
            # Without lengths, by which casts would cut keys short: `character` alone has one, and domains may.
            "SELECT attname, format_type(CASE typtype WHEN 'd' THEN typbasetype ELSE atttypid END, -1) "
            "FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid "
            "WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped",
            (".".join('"' + part.replace('"', '""') + '"' for part in self._table.table.split(".")),),
        )
        self._types = dict(rows)

    def _ask(self, statement: Any, parameters: Any) -> list[Any]:
        import psycopg

        try:
            return list(self._client.execute(statement, parameters).fetchall())
        except psycopg.errors.QueryCanceled as error:
            raise TimeoutError("no answer") from error
        except (psycopg.ProgrammingError, psycopg.NotSupportedError) as error:
            raise self._table._refused(error) from error

    def fetch(self, keys: pa.RecordBatch) -> Found:
        """Read the rows of all keys with one statement; with several, where one key or row is of no use."""
        self._client.until = time.monotonic() + self._timeout
        if self._statement is None:
            self._statement = self._select(keys.schema)
        unreadable: dict[int, str] = {}
        lists = [_values(one, unreadable) for one in keys.columns]
        rows = self._rows(lists, 0, unreadable)
        names, *values = zip(*rows, strict=True) if rows else ((), *(() for _ in self._columns))
        at = [int(position) - 1 for position in names]
        arrays: list[pa.Array] = []
        for one, some in zip(self._columns, values, strict=True):
            array, wrong = column(some, one, objects)
            arrays.append(array)
            unreadable |= {at[position]: why for position, why in wrong.items()}
        return Found(pa.RecordBatch.from_arrays(arrays, schema=self._columns), at, unreadable)

    def _rows(self, lists: list[list[Any]], start: int, unreadable: dict[int, str]) -> list[Any]:
        """The rows of some keys, the first of which is number `start`; halves are asked for where that fails.

        A key that is none of its column's type, and a row with a time that Python does not have, fail a statement.
        """
        import psycopg

        try:
            rows = self._ask(self._statement, [*lists, *lists])
        except psycopg.DataError as error:
            count = len(lists[0])
            if count == 1:
                unreadable[start] = str(error).strip().splitlines()[0]
                return []
            left = self._rows([one[: count // 2] for one in lists], start, unreadable)
            return left + self._rows([one[count // 2 :] for one in lists], start + count // 2, unreadable)
        return [(start + position, *values) for position, *values in rows] if start else rows

    def _select(self, schema: pa.Schema) -> Any:
        """The statement: keys come as arrays, and each row tells which of them it is of."""
        from psycopg import sql

        keys = schema.names
        missing = [name for name in [*keys, *self._columns.names] if name not in self._types]
        if missing:
            raise UsageError(
                f"'{self._table.name}' has no column {', '.join(missing)}.",
                action=f"It has {', '.join(self._types)}: name those in `on` and `columns`.",
            )
        for one in schema:
            self._check_key(one)
        for one in self._columns:
            self._check_column(one)
        arrays = [sql.SQL("%s::") + sql.SQL(self._compared(one) + "[]") for one in schema]
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

    def _compared(self, key: pa.Field) -> str:
        """The type as which a key is compared with its column: one to which no two different keys are cast alike.

        Raises:
            UsageError: there is none.
        """
        kind = self._types[key.name]
        if kind in _INTEGERS and pa.types.is_integer(key.type):
            return "bigint"  # no column is too narrow for a key that it does not have
        if kind in _INTEGERS and pa.types.is_decimal(key.type):
            return "numeric"
        if kind in ("name", '"char"'):
            return "text"
        if kind in _FLOATS or (kind == "boolean" and not pa.types.is_boolean(key.type)):
            raise self._unlike(key, "Look up by another column, or by a view that has it as the query does.")
        return kind

    def _check_key(self, key: pa.Field) -> None:
        """See that keys and their column are both days, times, times of a zone, bytes, or none of these.

        As text, a server would write and read them as its settings say.
        """
        kind = self._types[key.name]
        if _time_of(key.type) != _TIMES.get(kind) or pa.types.is_binary(key.type) != (kind == "bytea"):
            spark = _TIMES.get(kind) or ("binary" if kind == "bytea" else "string")
            raise self._unlike(key, f"Make a {spark} of it in the query, or take a view that has the query's type.")

    def _check_column(self, wanted: pa.Field) -> None:
        """See that no number is taken for a time, no time for one of a zone, and no bytes for text."""
        kind, dtype = self._types[wanted.name], wanted.type
        while pa.types.is_list(dtype):
            kind, dtype = kind.removesuffix("[]"), dtype.value_type
        here, there = _time_of(dtype), _TIMES.get(kind)
        if here is not None and here != there:
            action = f"Ask for {there}" if there else "Ask for the type that it has"
            raise self._unlike(wanted, f"{action}, or take a view that has a {here}.")
        if kind == "bytea" and pa.types.is_string(dtype):
            raise self._unlike(wanted, "Ask for binary.")

    def _unlike(self, one: pa.Field, action: str) -> UsageError:
        kind, type_ = self._types[one.name], spark_name(one.type)
        said = f"'{self._table.name}' has {one.name} as {kind}, which does not go with {type_}."
        return UsageError(said, action=action)

    def _column(self, wanted: pa.Field) -> Any:
        from psycopg import sql

        name = sql.SQL("t.") + sql.Identifier(wanted.name)
        if pa.types.is_string(wanted.type):
            return name + sql.SQL("::text")
        return name + sql.SQL("::double precision") if pa.types.is_floating(wanted.type) else name

    def close(self) -> None:
        """End the connection."""
        self._client.close()
