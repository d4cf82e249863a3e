"""`query.json`: what the query that owns a checkpoint looks like, so that another one is refused."""

from __future__ import annotations

from typing import Any

import msgspec

from millpond.checkpoint.differences import differences
from millpond.checkpoint.formats.documents import FORMAT, read_document, write_document
from millpond.checkpoint.generation import numbers
from millpond.errors import StateDamagedError, StateIncompatibleError
from millpond.files.backends.filesystem import AlreadyExistsError, FileSystem, MissingFileError
from millpond.files.backends.patience import patiently

NAME = "query.json"


class PinnedOperator(msgspec.Struct, frozen=True):
    """One operator as plain data: where it stands in the plan, its spec, its tables' schemas by name.

    `functions` are its aggregate functions in the words of the query, only to tell them: others may compute the same.
    """

    name: str
    spec: dict[str, Any]
    tables: dict[str, Any]
    functions: tuple[str, ...] = ()


class PinnedBetween(msgspec.Struct, frozen=True):
    """What Spark evaluates between two operators where rows change: for rows to be taken back it has to stay the same.

    Attributes:
        below, above: the operators, for people. computes: node by node, bottom up, as SQL.
        functions: the user's own that it calls: name, and digest of the code.
        time_zones: by which it computes. settings: of the session, that change what expressions are.
        digest: of all that it computes, to the letter.
    """

    below: str
    above: str
    computes: tuple[str, ...]
    functions: tuple[tuple[str, str], ...]
    time_zones: tuple[str, ...]
    settings: dict[str, str]
    digest: str


class PinnedQuery(msgspec.Struct, frozen=True):
    """What must not change between runs of a query."""

    key_groups: int
    operators: tuple[PinnedOperator, ...]
    between: tuple[PinnedBetween, ...] = ()
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
        # If an answer was lost, the next try finds what this one has written.
        patiently(lambda: write_document(files, NAME, query, create=True))
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
    query = msgspec.structs.replace(query, between=_as_before(before.between, query.between))
    lines = differences(plain(before), plain(query)) if before != query else []
    if lines:
        raise StateIncompatibleError(
            "The query differs from the one that wrote this checkpoint:\n  " + "\n  ".join(lines) + "\n",
            action="Change it back, or start with a new checkpointLocation.",
            file=files.locate(NAME),
        )


def _as_before(before: tuple[PinnedBetween, ...], now: tuple[PinnedBetween, ...]) -> tuple[PinnedBetween, ...]:
    """The same, in the words of the run before where it is the same."""
    known = {_meaning(one): one for one in before}
    return tuple(known.get(_meaning(one), one) for one in now)


def _meaning(one: PinnedBetween) -> tuple[object, ...]:
    return one.digest, one.functions, one.time_zones, tuple(one.settings.items())


def repin(files: FileSystem, query: PinnedQuery) -> None:
    """Write `query.json` in place of another query's that has committed nothing."""
    write_document(files, NAME, query)


def read_pinned(files: FileSystem) -> PinnedQuery | None:
    """What is pinned, or None if no query has used this location."""
    try:
        return read_document(files, NAME, PinnedQuery)
    except MissingFileError:
        return None
