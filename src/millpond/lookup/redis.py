"""Redis: a hash for each key."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.compute as pc

from millpond.errors import UsageError
from millpond.lookup.convert import column, texts
from millpond.lookup.table import Found


@dataclass(frozen=True)
class RedisTable:
    """Hashes of a Redis server, or one that speaks like it: each is a row, its fields are columns, written as text.

    A key without hash, or whose hash has none of the columns that are asked for, is not there.

    Attributes:
        url: `redis://[[user]:password@]host[:port]/[database]`, `rediss://…` or `unix://…`, as redis-py reads it.
        key: the hashes' keys, with key columns in braces: `ad:{ad_id}`.
        fields: what columns are called in the hashes, where that is something else.
    """

    url: str = field(repr=False)
    key: str
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Where the hashes are, without passwords."""
        parts = urlsplit(self.url)
        place = parts.path if parts.scheme == "unix" else f"{parts.hostname or 'localhost'}:{parts.port or 6379}"
        return f"Redis {place}, hashes {self.key}"

    def connect(self, columns: pa.Schema, timeout: float) -> _RedisConnection:
        """Make a client with one connection (see `LookupTable`).

        Raises:
            UsageError: redis-py is not there, the URL or the key is malformed, or a column is no single value.
        """
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.exceptions import AuthorizationError
            from redis.retry import Retry
        except ImportError as error:
            raise UsageError(
                f"'{self.name}' needs the package redis, which is not installed where keys are looked up.",
                action="Install millpond[redis] there.",
            ) from error
        for one in columns:
            if pa.types.is_nested(one.type):
                raise UsageError(
                    f"'{self.name}' has texts, of which no {one.type} is made (column {one.name}).",
                    action="Ask for a string, and take it apart in the query (from_json).",
                )
        parts = parts_of(self.key)
        try:
            client = redis.Redis.from_url(
                self.url,
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                retry=Retry(NoBackoff(), 0),
                single_connection_client=True,
            )
        except (redis.AuthenticationError, AuthorizationError) as error:
            raise self._refused(error) from error
        except ValueError as error:
            raise UsageError(f"'{self.name}' cannot be reached by its URL: {error}.", action="Mend the URL.") from error
        return _RedisConnection(self, client, columns, parts)

    def _refused(self, said: object) -> UsageError:
        return UsageError(f"'{self.name}' refuses the request: {said}.", action="Mend the URL, or the user's rights.")


def parts_of(key: str) -> list[tuple[str, str | None]]:
    """A pattern of keys in parts: a text, and the column that comes after it.

    Raises:
        UsageError: it is malformed.
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
        self, table: RedisTable, client: Any, columns: pa.Schema, parts: Sequence[tuple[str, str | None]]
    ) -> None:
        self._table = table
        self._client = client
        self._columns = columns
        self._parts = parts
        self._fields = [table.fields.get(name, name) for name in columns.names]

    def fetch(self, keys: pa.RecordBatch) -> Found:
        """Read the fields of all hashes in one pipeline."""
        import redis
        from redis.exceptions import AuthorizationError

        pipeline = self._client.pipeline(transaction=False)
        for key in self._keys(keys):
            pipeline.hmget(key, self._fields)
        try:
            answers = pipeline.execute(raise_on_error=False)
        except (redis.AuthenticationError, AuthorizationError) as error:
            raise self._table._refused(error) from error
        unreadable: dict[int, str] = {}
        for position, answer in enumerate(answers):
            if isinstance(answer, redis.ResponseError):
                unreadable[position] = self._said(answer)
            elif isinstance(answer, Exception):
                raise answer
        there = [
            position
            for position, answer in enumerate(answers)
            if position not in unreadable and any(value is not None for value in answer)
        ]
        arrays = []
        for number, one in enumerate(self._columns):
            values, wrong = column([answers[position][number] for position in there], one, texts)
            arrays.append(values)
            unreadable |= {there[position]: why for position, why in wrong.items()}
        return Found(pa.RecordBatch.from_arrays(arrays, schema=self._columns), there, unreadable)

    def _said(self, error: Exception) -> str:
        """What the server says of one key. What it would say of any is raised."""
        said = str(error)
        if said.startswith("WRONGTYPE"):
            return "what it has there is no hash"
        if said.startswith(("NOPERM", "NOAUTH", "MOVED", "unknown command")):
            raise self._table._refused(said)
        raise error

    def _keys(self, keys: pa.RecordBatch) -> list[Any]:
        unknown = {name for _, name in self._parts if name is not None} - set(keys.schema.names)
        if unknown:
            raise UsageError(
                f"The keys '{self._table.key}' of '{self._table.name}' name a column that is none of the key's "
                f"({', '.join(keys.schema.names)}).",
                action="Name in braces the key's columns, as the table has them.",
            )
        pieces = []
        for text, name in self._parts:
            pieces.append(pa.scalar(text.encode()))
            if name is not None:
                column = keys.column(name)
                text_or_bytes = column if pa.types.is_binary(column.type) else column.cast(pa.string())
                pieces.append(text_or_bytes.cast(pa.binary()))
        return list(pc.binary_join_element_wise(*pieces, b"").to_pylist())

    def close(self) -> None:
        """End the connection."""
        self._client.close()
