"""Redis: one hash per key."""

from __future__ import annotations

import re
import string
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc

from millpond.errors import UsageError
from millpond.lookup.convert import convert_column, from_text
from millpond.lookup.secrets import redact, redact_error
from millpond.lookup.table import Found
from millpond.spec.types import spark_name

_MAX_PLAIN_SCALE = 6
"""Largest scale at which Arrow writes every decimal without an exponent."""


@dataclass(frozen=True)
class RedisTable:
    """Hashes of a Redis-compatible server: each hash is a row, and its fields are columns written as text.

    A key is absent if it has no hash, or if the hash lacks all requested fields.

    Attributes:
        url: `redis://[[user]:password@]host[:port]/[number]` with the database's number, `rediss://…` or `unix://…`,
            in redis-py's syntax.
        key: pattern of the hashes' keys, with key columns in braces: `ad:{ad_id}`.
        fields: names of hash fields by column, where they differ.

    Examples:
        >>> from millpond.lookup import RedisTable
        >>> RedisTable("redis://user:secret@redis.example.org:6379/0", key="ad:{ad_id}", fields={"price": "p"}).name
        'Redis redis.example.org:6379, hashes ad:{ad_id}'
    """

    url: str = field(repr=False)
    key: str
    fields: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the URL and the key pattern; the URL's options only where redis-py is installed.

        Raises:
            UsageError: they are malformed.
        """
        try:
            parts = urlsplit(self.url)
            database = parts.scheme == "unix" or re.fullmatch(r"/?|/[0-9]+/?", parts.path)
            known = parts.scheme in ("redis", "rediss", "unix") and not parts.fragment and (parts.port or 1) > 0
            # A raw @ after the host is the rest of an unescaped password, which errors would print.
            good = known and database and "@" not in parts.path + parts.query
        except (ValueError, TypeError, AttributeError):  # the error's text may contain a part of the password
            good = False
        if not good:
            raise UsageError(
                f"The URL of the RedisTable with hashes {self.key} cannot be read.",
                action="Write it like redis://user:password@host:6379/0 (or rediss://, unix://), with the database's "
                "number; in a password, write what is no letter or number with a per cent sign: %23 for #, %2F for /, "
                "%40 for @.",
            )
        parse_key_pattern(self.key)
        with suppress(ImportError):  # `connect` reports a missing redis-py
            self._check_options()

    def _check_options(self) -> None:
        """Check that redis-py accepts the URL's options.

        Raises:
            ImportError: redis-py is not installed.
            UsageError: an option is unknown or malformed.
        """
        import redis

        try:
            redis.ConnectionPool.from_url(self.url).make_connection()
        except (redis.RedisError, TypeError, ValueError):  # the error's text may contain a part of the password
            good = False
        else:
            good = True
        if not good:
            raise UsageError(
                f"The URL of '{self.name}' has an option that redis-py does not take.",
                action="Mend what comes after the question mark: names and values are those of redis.Connection.",
            )

    @property
    def name(self) -> str:
        """Server and key pattern, without secrets."""
        parts = urlsplit(self.url)
        place = parts.path if parts.scheme == "unix" else f"{parts.hostname or 'localhost'}:{parts.port or 6379}"
        return f"Redis {place}, hashes {self.key}"

    def connect(self, columns: pa.Schema, timeout: float) -> _RedisConnection:
        """Make a client with one connection (see `LookupTable`).

        Raises:
            UsageError: redis-py is not installed, the URL or key pattern is malformed, or a column is nested.
        """
        try:
            self._check_options()
            import redis
            from redis.backoff import NoBackoff
            from redis.exceptions import AuthorizationError
            from redis.retry import Retry
        except ImportError as error:
            raise UsageError(
                f"'{self.name}' needs the package redis, which is not installed where keys are looked up.",
                action="Install millpond[redis] there.",
            ) from error
        for column_field in columns:
            if pa.types.is_nested(column_field.type):
                raise UsageError(
                    f"'{self.name}' has strings, which cannot be converted to {spark_name(column_field.type)} "
                    f"(column {column_field.name}).",
                    action="Ask for a string, and take it apart in the query (from_json).",
                )
        parts = parse_key_pattern(self.key)
        try:
            client = redis.Redis.from_url(
                self.url,
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                # Retries are the fetcher's: hidden ones would exceed the time-out.
                retry=Retry(NoBackoff(), 0),
                single_connection_client=True,
            )
        except redis.RedisError as error:
            redact_error(error, self._secrets())
            if isinstance(error, redis.AuthenticationError | AuthorizationError) or "DB index" in str(error):
                raise self._refusal(error) from error
            raise
        return _RedisConnection(self, client, columns, parts, timeout)

    def _secrets(self) -> list[str]:
        parts = urlsplit(self.url)
        passwords = [parts.password or "", *parse_qs(parts.query).get("password", [])]
        return [*passwords, unquote(passwords[0])]

    def _refusal(self, reason: object) -> UsageError:
        return UsageError(
            f"'{self.name}' refuses the request: {redact(str(reason), self._secrets()).rstrip('.')}.",
            action="Mend the URL's user, password and database, or the user's rights.",
        )


def parse_key_pattern(key: str) -> list[tuple[str, str | None]]:
    """Split a key pattern into pairs of a text and the column that follows it; None after the last text.

    Raises:
        UsageError: the pattern is malformed.
    """
    try:
        parsed = [(text, name, spec, conversion) for text, name, spec, conversion in string.Formatter().parse(key)]
    except ValueError as error:
        raise UsageError(f"{key!r} is no pattern of keys: {error}.", action="Write it like ad:{ad_id}.") from error
    if any(spec or conversion or name == "" for _, name, spec, conversion in parsed):
        raise UsageError(f"{key!r} is no pattern of keys: columns stand by name alone.", action="Write ad:{ad_id}.")
    return [(text, name) for text, name, _, _ in parsed]


class _RedisConnection:
    def __init__(
        self,
        table: RedisTable,
        client: Any,
        columns: pa.Schema,
        parts: Sequence[tuple[str, str | None]],
        timeout: float,
    ) -> None:
        self._table = table
        self._client = client
        self._columns = columns
        self._parts = parts
        self._timeout = timeout
        self._fields = [table.fields.get(name, name) for name in columns.names]

    def fetch(self, keys: pa.RecordBatch) -> Found:
        """Read the fields of all hashes in one pipeline.

        Requests are serialised as Arrow columns and sent unchanged: redis-py's own pipelines take three times as long
        per key.
        """
        import redis
        from redis.exceptions import AuthorizationError

        connection, deadline = self._client.connection, time.monotonic() + self._timeout
        answers: list[Any] = []
        unreadable: dict[int, str] = {}
        try:
            connection.send_packed_command([self._requests(self._keys(keys))])
            for position in range(keys.num_rows):
                try:
                    answers.append(connection.read_response(disable_decoding=True))
                except redis.ResponseError as error:
                    unreadable[position] = self._error_message(error)
                    answers.append(None)
                if time.monotonic() > deadline:  # redis-py's time-out covers each part of an answer, not the whole
                    raise TimeoutError(f"{position + 1} of {keys.num_rows} answers in {self._timeout:g} s")
        except (redis.AuthenticationError, AuthorizationError) as error:
            raise self._table._refusal(error) from error
        positions = [
            position
            for position, answer in enumerate(answers)
            # HMGET cannot tell an absent hash from one without these fields.
            if answer is not None and answer.count(None) < len(self._fields)
        ]
        arrays = []
        for index, column_field in enumerate(self._columns):
            values, wrong = convert_column(
                [answers[position][index] for position in positions], column_field, from_text
            )
            arrays.append(values)
            unreadable |= {positions[position]: why for position, why in wrong.items()}
        return Found(pa.RecordBatch.from_arrays(arrays, schema=self._columns), positions, unreadable)

    def _error_message(self, error: Exception) -> str:
        """Return the server's message about one key; raise errors that concern all keys."""
        from redis.exceptions import NoPermissionError

        message = str(error)
        if isinstance(error, NoPermissionError):  # redis-py has removed the code from the message
            raise self._table._refusal(message)
        if message.startswith("WRONGTYPE"):
            return "what it has there is no hash"
        if message.startswith(("NOPERM", "NOAUTH", "MOVED", "unknown command")):
            raise self._table._refusal(message)
        raise error

    def _requests(self, keys: pa.Array) -> pa.Buffer:
        """Serialise one HMGET request per key in the Redis protocol, and concatenate them."""
        sizes = pc.binary_length(keys).cast(pa.string()).cast(pa.binary())
        head = f"*{2 + len(self._fields)}\r\n$5\r\nHMGET\r\n$"
        tail = "".join(f"\r\n${len(name.encode())}\r\n{name}" for name in self._fields)
        requests = _concat([_bytes(head), sizes, _bytes("\r\n"), keys, _bytes(f"{tail}\r\n")])
        everything = pa.ListArray.from_arrays(pa.array([0, len(requests)], pa.int32()), requests)
        return pc.binary_join(everything, _bytes(""))[0].as_buffer()

    def _keys(self, keys: pa.RecordBatch) -> pa.Array:
        """Format the hashes' keys: bytes unchanged, decimals without exponent, all else as Arrow casts it to string."""
        pieces = []
        for text, name in self._parts:
            pieces.append(_bytes(text))
            if name is None:
                continue
            if name not in keys.schema.names:
                raise UsageError(
                    f"The keys '{self._table.key}' of '{self._table.name}' name a column that the key does not have "
                    f"({', '.join(keys.schema.names)}).",
                    action="Name in braces the key's columns, as the table has them.",
                )
            column = keys.column(name)
            pieces.append(column if pa.types.is_binary(column.type) else _to_text(column).cast(pa.binary()))
        return _concat(pieces)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _bytes(text: str) -> pa.Scalar:
    return pa.scalar(text.encode(), pa.binary())


def _concat(pieces: Sequence[pa.Array | pa.Scalar]) -> pa.Array:
    return pc.binary_join_element_wise(*pieces, _bytes(""))


def _to_text(column: pa.Array) -> pa.Array:
    if pa.types.is_decimal(column.type) and column.type.scale > _MAX_PLAIN_SCALE:
        return pa.array([format(value, "f") for value in column.to_pylist()], pa.string())
    return column.cast(pa.string())
