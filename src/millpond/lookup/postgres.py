"""PostgreSQL tables: one row per key."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from millpond.errors import UsageError
from millpond.lookup.conninfo import parse_conninfo, secret_values
from millpond.lookup.convert import convert_column, from_objects
from millpond.lookup.secrets import redact_error
from millpond.lookup.table import Found
from millpond.spec.types import spark_name

_PERMANENT_ERRORS = ("authentication failed", "does not exist", "pg_hba.conf", "permission denied")
"""Fragments of server messages after which a retry cannot succeed."""

_INTEGERS = ("smallint", "integer", "bigint")
_FLOATS = ("real", "double precision")
_TIMES = {
    "date": "date",
    "timestamp without time zone": "timestamp_ntz",
    "timestamp with time zone": "timestamp",
}
"""Date and time types and Spark's names for them: comparing two of them would depend on the server's time zone."""


@dataclass(frozen=True)
class PostgresTable:
    """A PostgreSQL table or view, looked up by one or more columns that identify a row.

    Attributes:
        conninfo: libpq connection string: `postgresql://user:password@host/database`, or `host=… dbname=…`.
        table: the table's name, with its schema if that is not on the search path.

    Examples:
        >>> from millpond.lookup import PostgresTable
        >>> PostgresTable("postgresql://user:secret@db.example.org/shop", "public.ads").name
        'PostgreSQL db.example.org:5432, table public.ads'
    """

    conninfo: str = field(repr=False)
    table: str

    def __post_init__(self) -> None:
        """Check the connection string.

        Raises:
            UsageError: the string is malformed or ambiguous.
        """
        parse_conninfo(self.conninfo, self.table)

    @property
    def name(self) -> str:
        """Server and table, without secrets."""
        parts = parse_conninfo(self.conninfo, self.table)
        if parts is None:  # psycopg is not installed in this process
            return f"PostgreSQL {self.table}"
        place = parts.get("host") or parts.get("hostaddr") or "localhost"
        return f"PostgreSQL {place}:{parts.get('port') or 5432}, table {self.table}"

    def connect(self, columns: pa.Schema, timeout: float) -> _PostgresConnection:
        """Connect to the server and read the table's column types (see `LookupTable`).

        Raises:
            UsageError: psycopg is not installed, the connection string is malformed, the server refuses the user, or
                the table does not exist.
        """
        try:
            import psycopg
        except ImportError as error:
            raise UsageError(
                f"'{self.name}' needs the package psycopg, which is not installed where keys are looked up.",
                action="Install millpond[postgres] there.",
            ) from error

        try:
            client = self._connect(timeout)
        except psycopg.OperationalError as error:
            redact_error(error, secret_values(self.conninfo))
            if _is_permanent(error):
                raise self._refusal(error) from error
            raise
        except psycopg.ProgrammingError as error:
            raise self._refusal(error) from error
        connection = _PostgresConnection(self, client, columns, timeout)
        try:
            connection.read_column_types()
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self, timeout: float) -> Any:
        """Connect to the first address that answers. The addresses share the time-out, with at least 2 s for each.

        Raises:
            OperationalError: no address answers. The error is permanent only if all hosts refuse permanently.
        """
        import psycopg
        from psycopg.conninfo import conninfo_attempts, conninfo_to_dict, make_conninfo

        class DeadlineConnection(psycopg.Connection[Any]):
            """A connection that fails when the server has not answered a statement by `deadline`."""

            deadline: float  # set before each statement

            def wait(self, gen: Any, *_: Any, **__: Any) -> Any:
                return super().wait(_with_deadline(gen, self.deadline), interval=0.05)

        deadline = time.monotonic() + timeout
        parts = parse_conninfo(self.conninfo, self.table) or {}
        # psycopg itself would give each address the whole time.
        attempts = conninfo_attempts(conninfo_to_dict(self.conninfo))
        errors: dict[tuple[Any, ...], psycopg.OperationalError] = {}  # by host
        for number, attempt in enumerate(attempts):
            seconds_left = (deadline - time.monotonic()) / (len(attempts) - number)
            try:
                return DeadlineConnection.connect(
                    make_conninfo("", **attempt),
                    autocommit=True,
                    # Prepared statements fail once a column's type changes ("cached plan must not change result type").
                    prepare_threshold=None,
                    connect_timeout=max(2, round(seconds_left)),  # libpq's minimum
                    # The server ends the statement as well, instead of working on for a client that has given up.
                    options=f"{_options(parts)} -c statement_timeout={max(1, round(timeout * 1000))}",
                )
            except psycopg.OperationalError as error:
                host = attempt.get("host") or attempt.get("hostaddr"), attempt.get("port")
                # A host may have several addresses (`localhost`): it refuses if one of them does.
                if host not in errors or not _is_permanent(errors[host]):
                    errors[host] = error
        # A refusal does not go away, but another host that is merely down may answer a retry: its error comes first.
        raise min(errors.values(), key=_is_permanent)

    def _refusal(self, error: Exception) -> UsageError:
        redact_error(error, secret_values(self.conninfo))
        return UsageError(
            f"'{self.name}' refuses the request: {str(error).strip().splitlines()[0]}.",
            action="Mend the connection's parameters, the table's name, the columns, or the user's rights.",
        )


def _is_permanent(error: Exception) -> bool:
    return "FATAL" in str(error) and any(fragment in str(error) for fragment in _PERMANENT_ERRORS)


def _options(parts: Mapping[str, str]) -> str:
    """Return the user's server options; Millpond's are appended, because they must not replace a search path."""
    return parts.get("options") or os.environ.get("PGOPTIONS", "")


def _time_of(dtype: pa.DataType) -> str | None:
    """Return Spark's name of a date or time type; None for other types."""
    if pa.types.is_date(dtype):
        return "date"
    if not pa.types.is_timestamp(dtype):
        return None
    return "timestamp_ntz" if dtype.tz is None else "timestamp"


def _with_deadline(gen: Generator[Any, Any, Any], deadline: float) -> Generator[Any, Any, Any]:
    """Run psycopg's protocol generator until a deadline by the monotonic clock."""
    try:
        request = next(gen)
        while True:
            ready = yield request
            if time.monotonic() > deadline:
                raise TimeoutError("no answer")
            request = gen.send(ready)
    except StopIteration as end:
        return end.value


def _values(column: pa.Array, unreadable: dict[int, str]) -> list[Any]:
    """Convert a key column to client values; null for values that no row can have or that cannot be sent.

    Args:
        column: one column of the keys.
        unreadable: receives the errors of values that cannot be sent, by position.
    """
    if pa.types.is_string(column.type):
        return [_text(raw) for raw in column.cast(pa.binary()).to_pylist()]
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError):
        pass
    values = []
    for position, value in enumerate(column):
        try:
            values.append(value.as_py())
        except (ValueError, OverflowError) as error:  # a time that Python cannot represent
            unreadable[position] = f"the key cannot be asked for: {error}"
            values.append(None)
    return values


def _text(raw: bytes) -> str | None:
    """Decode a string; null if PostgreSQL cannot store it (it contains NUL or is not UTF-8)."""
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

    def read_column_types(self) -> None:
        """Read the types of the table's columns, to which keys are cast for the comparison."""
        self._client.deadline = time.monotonic() + self._timeout
        rows = self._query(
            # Without lengths, because a cast to them truncates keys. Only `character` keeps one, and domains may.
            "SELECT attname, format_type(CASE typtype WHEN 'd' THEN typbasetype ELSE atttypid END, -1) "
            "FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid "
            "WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped",
            (".".join('"' + part.replace('"', '""') + '"' for part in self._table.table.split(".")),),
        )
        self._types = dict(rows)

    def _query(self, statement: Any, parameters: Any) -> list[Any]:
        import psycopg

        try:
            return list(self._client.execute(statement, parameters).fetchall())
        except psycopg.errors.QueryCanceled as error:
            raise TimeoutError("no answer") from error
        except (psycopg.ProgrammingError, psycopg.NotSupportedError) as error:
            raise self._table._refusal(error) from error

    def fetch(self, keys: pa.RecordBatch) -> Found:
        """Read the rows of all keys with one statement; bisect if a single key or row makes it fail."""
        self._client.deadline = time.monotonic() + self._timeout
        if self._statement is None:
            self._statement = self._compose_statement(keys.schema)
        unreadable: dict[int, str] = {}
        lists = [_values(part, unreadable) for part in keys.columns]
        # A single bad key or row must not fail the others of its request.
        rows = self._rows(lists, 0, unreadable)
        names, *values = zip(*rows, strict=True) if rows else ((), *(() for _ in self._columns))
        positions = [int(position) - 1 for position in names]
        arrays: list[pa.Array] = []
        for column_field, raw in zip(self._columns, values, strict=True):
            array, wrong = convert_column(raw, column_field, from_objects)
            arrays.append(array)
            unreadable |= {positions[position]: why for position, why in wrong.items()}
        return Found(pa.RecordBatch.from_arrays(arrays, schema=self._columns), positions, unreadable)

    def _rows(self, lists: list[list[Any]], start: int, unreadable: dict[int, str]) -> list[Any]:
        """Read the rows of keys; if the statement fails, read each half by itself.

        A key that does not fit its column's type makes a statement fail. So does a row with a time that Python cannot
        represent.

        Args:
            lists: the keys, by column.
            start: position of the first key in the request.
            unreadable: receives the errors of single keys, by position.
        """
        import psycopg

        try:
            rows = self._query(self._statement, [*lists, *lists])
        except psycopg.DataError as error:
            count = len(lists[0])
            if count == 1:
                unreadable[start] = str(error).strip().splitlines()[0]
                return []
            left = self._rows([values[: count // 2] for values in lists], start, unreadable)
            return left + self._rows([values[count // 2 :] for values in lists], start + count // 2, unreadable)
        return [(start + position, *values) for position, *values in rows] if start else rows

    def _compose_statement(self, schema: pa.Schema) -> Any:
        """Compose the statement: keys are passed as arrays, and each row contains its key's position, from 1."""
        from psycopg import sql

        keys = schema.names
        missing = [name for name in [*keys, *self._columns.names] if name not in self._types]
        if missing:
            raise UsageError(
                f"'{self._table.name}' has no column {', '.join(missing)}.",
                action=f"It has {', '.join(self._types)}: name those in `on` and `columns`.",
            )
        for column_field in schema:
            self._check_key(column_field)
        for column_field in self._columns:
            self._check_column(column_field)
        arrays = [sql.SQL("%s::") + sql.SQL(self._comparison_type(column_field) + "[]") for column_field in schema]
        numbered = sql.SQL(", ").join(sql.Identifier(f"k{number}") for number in range(len(keys)))
        equal = [
            sql.SQL("t.{} = asked.{}").format(sql.Identifier(name), sql.Identifier(f"k{number}"))
            for number, name in enumerate(keys)
        ]
        # `= ANY` makes the planner use an index, whatever plan it chooses for the join.
        among = [
            sql.SQL("t.{} = ANY({})").format(sql.Identifier(name), array)
            for name, array in zip(keys, arrays, strict=True)
        ]
        return sql.SQL(
            "SELECT asked.i, {columns} FROM {table} AS t "
            "JOIN unnest({arrays}) WITH ORDINALITY AS asked({numbered}, i) ON {equal} WHERE {among}"
        ).format(
            columns=sql.SQL(", ").join(self._column(column_field) for column_field in self._columns),
            table=sql.Identifier(*self._table.table.split(".")),
            arrays=sql.SQL(", ").join(arrays),
            numbered=numbered,
            equal=sql.SQL(" AND ").join(equal),
            among=sql.SQL(" AND ").join(among),
        )

    def _comparison_type(self, key: pa.Field) -> str:
        """Choose the type to which keys are cast for the comparison; casts must keep different keys different.

        Raises:
            UsageError: no such type exists.
        """
        kind = self._types[key.name]
        if kind in _INTEGERS and pa.types.is_integer(key.type):
            return "bigint"  # a key outside the column's range then compares as unequal instead of failing
        if kind in _INTEGERS and pa.types.is_decimal(key.type):
            return "numeric"
        if kind in ("name", '"char"'):
            return "text"
        if kind in _FLOATS or (kind == "boolean" and not pa.types.is_boolean(key.type)):
            raise self._type_mismatch(key, "Look up by another column, or by a view that has it as the query does.")
        return kind

    def _check_key(self, key: pa.Field) -> None:
        """Check that a key and its column are of one kind: date, timestamp, zoned timestamp, bytes or other.

        Between kinds the server would convert through text, by its own settings.

        Raises:
            UsageError: they are of different kinds.
        """
        kind = self._types[key.name]
        if _time_of(key.type) != _TIMES.get(kind) or pa.types.is_binary(key.type) != (kind == "bytea"):
            spark = _TIMES.get(kind) or ("binary" if kind == "bytea" else "string")
            raise self._type_mismatch(
                key, f"Make a {spark} of it in the query, or take a view that has the query's type."
            )

    def _check_column(self, column_field: pa.Field) -> None:
        """Check that a column's requested type does not need the server to convert times, zones or bytes."""
        kind, dtype = self._types[column_field.name], column_field.type
        while pa.types.is_list(dtype):
            kind, dtype = kind.removesuffix("[]"), dtype.value_type
        expected, actual = _time_of(dtype), _TIMES.get(kind)
        if expected is not None and expected != actual:
            action = f"Ask for {actual}" if actual else "Ask for the type that it has"
            raise self._type_mismatch(column_field, f"{action}, or take a view that has a {expected}.")
        if kind == "bytea" and pa.types.is_string(dtype):
            raise self._type_mismatch(column_field, "Ask for binary.")

    def _type_mismatch(self, column_field: pa.Field, action: str) -> UsageError:
        kind, type_ = self._types[column_field.name], spark_name(column_field.type)
        message = f"'{self._table.name}' has {column_field.name} as {kind}, which does not go with {type_}."
        return UsageError(message, action=action)

    def _column(self, column_field: pa.Field) -> Any:
        from psycopg import sql

        name = sql.SQL("t.") + sql.Identifier(column_field.name)
        if pa.types.is_string(column_field.type):
            return name + sql.SQL("::text")
        return name + sql.SQL("::double precision") if pa.types.is_floating(column_field.type) else name

    def close(self) -> None:
        """Close the connection."""
        self._client.close()
