"""`query.json`: what the query that owns a checkpoint looks like, so that another one is refused.

A query may be changed in ways that its state can follow (`spark.millpond.onChangedState=evolve`). What it looks like
then is a new *shape*, an object below `shapes/` whose number is that of the generation that was the first to run it;
the number of `query.json` is 0. A shape never changes, but for the aliases under which its state is shown. Each
generation's base says which one it runs, each manifest and each delta by which one it was made. So there are old and
new rows beside each other, and whoever goes back to an older version finds what that was made by.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from millpond.checkpoint.differences import differences
from millpond.checkpoint.formats.documents import FORMAT, digits, read_document, write_document
from millpond.checkpoint.generation import begun, numbers, read_base
from millpond.errors import StateDamagedError, StateIncompatibleError
from millpond.files.backends.filesystem import AlreadyExistsError, FileSystem, MissingFileError
from millpond.files.backends.patience import patiently

NAME = "query.json"
SHAPES = "shapes/"


class PinnedOperator(msgspec.Struct, frozen=True):
    """One operator as plain data: where it stands in the plan, its spec, its tables' schemas by name.

    `functions` are its aggregate functions in the words of the query: to tell them, as others may compute the same, and
    to know them again where the query has changed. `fields` is how many names (`AggregateCall.field`) the columns of
    functions have had so far; 0 if they have those of their positions. `columns` are the names of `Spec.state_fields`
    in the query's output; empty if the spec's own are. They may change from start to start. So may the names of keys if
    it is `aliased`: its own name says by which expressions it groups.
    """

    name: str
    spec: dict[str, Any]
    tables: dict[str, Any]
    functions: tuple[str, ...] = ()
    fields: int = 0
    columns: tuple[str, ...] = ()
    aliased: bool = False


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
    """What must not change between runs of a query; `parent` is the shape that this one was made from."""

    key_groups: int
    operators: tuple[PinnedOperator, ...]
    between: tuple[PinnedBetween, ...] = ()
    parent: int = 0
    format: int = FORMAT


def plain(struct: object) -> Any:
    """A spec or schema (msgspec struct) as plain data."""
    return msgspec.json.decode(msgspec.json.encode(struct))


def pin(files: FileSystem, query: PinnedQuery) -> None:
    """Write `query.json`, or compare with what the last run has pinned. Call it before anything else at start.

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
        shape = newest_shape(files)
        before = read_shape(files, shape)
    except StateDamagedError:
        if numbers(files):
            raise
        write_document(files, NAME, query)  # a first start died while writing it; there is no state yet
        return
    lines = compare(before, query)
    if lines:
        raise differing(lines, files.locate(shape_name(shape)), follows=may_follow(before, query))


def compare(before: PinnedQuery, query: PinnedQuery) -> list[str]:
    """One line for each difference that matters between two queries."""
    query = as_before(before, query)
    return differences(plain(before), plain(query)) if before != query else []


def as_before(before: PinnedQuery, query: PinnedQuery) -> PinnedQuery:
    """Return the same query in the words of the run before, where it is the same: aliases do not count."""
    operators = query.operators
    if len(before.operators) == len(operators):
        operators = tuple(map(_with_aliases, operators, before.operators))
    between = _between_as_before(before.between, query.between)
    return msgspec.structs.replace(query, operators=operators, between=between, parent=before.parent)


def renamed(before: PinnedQuery, query: PinnedQuery) -> PinnedQuery:
    """Return what is pinned of a query that is the same but for the names under which its state is shown."""
    pairs = zip(before.operators, query.operators, strict=True)
    operators = tuple(msgspec.structs.replace(old, columns=new.columns) for old, new in pairs)
    return msgspec.structs.replace(before, operators=operators)


def _with_aliases(operator: PinnedOperator, before: PinnedOperator) -> PinnedOperator:
    """An operator with the names that its keys had, if they are aliases of the same grouping expressions."""
    spec = operator.spec
    if operator.aliased and before.aliased and operator.name == before.name:
        parts = [part for part in _ALIASED if part in before.spec and part in spec]
        spec = {**spec, **{part: _names_of(before.spec[part], spec[part]) for part in parts}}
    return msgspec.structs.replace(operator, spec=spec, columns=before.columns)


_ALIASED = ("keys", "window")
"""What of the specs of aggregates has the aliases of the query."""


def _names_of(before: Any, now: Any) -> Any:
    """Fields with the names of others, if only the names differ."""
    if isinstance(now, list) and isinstance(before, list) and len(now) == len(before):
        return list(map(_names_of, before, now))
    fields = isinstance(now, dict) and isinstance(before, dict)
    return before if fields and {**before, "name": ""} == {**now, "name": ""} else now


def differing(lines: Sequence[str], file: str, *, follows: bool = True) -> StateIncompatibleError:
    """The error for a query that the state does not follow.

    Args:
        lines: how it differs. file: where that is pinned.
        follows: whether state may follow with another setting.
    """
    return StateIncompatibleError(
        "The query differs from the one that wrote this checkpoint:\n  " + "\n  ".join(lines) + "\n",
        action="Change it back, start with a new checkpointLocation, or see which changes state can follow: of "
        "aggregates by spark.millpond.onChangedState (`millpond docs changing-a-query`)."
        if follows
        else "Change it back, or start with a new checkpointLocation: state cannot follow this change.",
        file=file,
    )


def may_follow(before: PinnedQuery, query: PinnedQuery) -> bool:
    """Whether an operator with functions differs: `spark.millpond.onChangedState` is about them."""
    if len(before.operators) != len(query.operators):
        return False
    pairs = zip(before.operators, query.operators, strict=True)
    return any(old != new and bool(old.functions or new.functions) for old, new in pairs)


def _between_as_before(before: tuple[PinnedBetween, ...], now: tuple[PinnedBetween, ...]) -> tuple[PinnedBetween, ...]:
    """The same, in the words of the run before where it is the same."""
    known = {_meaning(one): one for one in before}
    return tuple(known.get(_meaning(one), one) for one in now)


def _meaning(one: PinnedBetween) -> tuple[object, ...]:
    return one.digest, one.functions, one.time_zones, tuple(one.settings.items())


def repin(files: FileSystem, query: PinnedQuery) -> None:
    """Write `query.json` in place of another query's that has committed nothing."""
    write_document(files, NAME, query)


def read_pinned(files: FileSystem) -> PinnedQuery | None:
    """What the last run has pinned, or None if no query has used this location."""
    try:
        return read_shape(files, newest_shape(files))
    except MissingFileError:
        return None


def newest_shape(files: FileSystem) -> int:
    """The shape of the last run that has begun; that of `query.json` if there was none."""
    for number in reversed(begun(files)):
        with suppress(StateDamagedError):  # a torn put of a run that died before it began, or recovery tells of it
            return read_base(files, number).shape
    return 0


def shape_name(number: int) -> str:
    """The object of a shape."""
    return f"{SHAPES}{digits(number)}.json" if number else NAME


def read_shape(files: FileSystem, number: int) -> PinnedQuery:
    """A shape of the query."""
    return read_document(files, shape_name(number), PinnedQuery)


def read_shapes(files: FileSystem, newest: int) -> dict[int, PinnedQuery]:
    """A shape and all that it was made from, by number, newest first."""
    found = {newest: read_shape(files, newest)}
    while newest:
        newest = found[newest].parent
        found[newest] = read_shape(files, newest)
    return found
