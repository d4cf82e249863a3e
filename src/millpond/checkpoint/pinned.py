"""`query.json`: what the query that owns a checkpoint looks like, so that another one is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from millpond.checkpoint.documents import FORMAT, read_document, write_document
from millpond.checkpoint.generation import numbers
from millpond.errors import StateDamagedError, StateIncompatibleError
from millpond.files.filesystem import AlreadyExistsError, FileSystem, MissingFileError

NAME = "query.json"


class PinnedOperator(msgspec.Struct, frozen=True):
    """One operator as plain data: where it stands in the plan, its spec, its tables' schemas by name."""

    name: str
    spec: dict[str, Any]
    tables: dict[str, Any]


class PinnedQuery(msgspec.Struct, frozen=True):
    """What must not change between runs of a query."""

    key_groups: int
    operators: tuple[PinnedOperator, ...]
    format: int = FORMAT


def plain(struct: object) -> Any:
    """A spec or schema (msgspec struct) as plain data."""
    return msgspec.json.decode(msgspec.json.encode(struct))


def pin(files: FileSystem, query: PinnedQuery) -> None:
    """Write `query.json`, or compare with the one that is there. Call it before anything else at start.

    Raises:
        StateIncompatibleError: the checkpoint belongs to a query that differs; the message lists how.
        StateDamagedError: `query.json` is altered.
    """
    try:
        write_document(files, NAME, query, create=True)
        return
    except AlreadyExistsError:
        pass
    try:
        before = read_document(files, NAME, PinnedQuery)
    except StateDamagedError:
        if numbers(files):
            raise
        write_document(files, NAME, query)  # a first start died while writing it; there is no state yet
        return
    lines = list(_differences(plain(before), plain(query), "")) if before != query else []
    if lines:
        raise StateIncompatibleError(
            "The query differs from the one that wrote this checkpoint:\n  " + "\n  ".join(lines) + "\n",
            action="Change it back, or start with a new checkpointLocation.",
            file=files.locate(NAME),
        )


def read_pinned(files: FileSystem) -> PinnedQuery | None:
    """What is pinned, or None if no query has used this location."""
    try:
        return read_document(files, NAME, PinnedQuery)
    except MissingFileError:
        return None


def _differences(before: Any, now: Any, where: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            path = f"{where}.{key}" if where else str(key)
            if key not in now:
                yield f"{path}: was {before[key]!r}, is gone"
            elif key not in before:
                yield f"{path}: is new: {now[key]!r}"
            else:
                yield from _differences(before[key], now[key], path)
    elif isinstance(before, list) and isinstance(now, list):
        for index in range(max(len(before), len(now))):
            path = f"{where}[{index}]"
            if index >= len(now):
                yield f"{path}: was {before[index]!r}, is gone"
            elif index >= len(before):
                yield f"{path}: is new: {now[index]!r}"
            else:
                yield from _differences(before[index], now[index], path)
    elif before != now:
        yield f"{where}: was {before!r}, is {now!r}"
