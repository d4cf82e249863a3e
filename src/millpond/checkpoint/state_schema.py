"""State schemas: the description of the query that owns a checkpoint, so that a different query is refused.

`query.json` holds the first state schema. A query may change in ways that its state can follow
(`spark.millpond.onChangedState=evolve`). Each such change writes a new state schema, an object below `schemas/`. Its
number is the generation of the first run with it; `query.json` has number 0.

A state schema is immutable, except for the aliases under which its state is shown. The base of each generation names
the schema that the run uses. Each manifest and each delta names the schema that wrote it. So rows of old and new
schemas coexist, and an older version can be read with the schema that wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from millpond.checkpoint.differences import differences
from millpond.checkpoint.formats.documents import FORMAT, digits, read_document, write_document
from millpond.checkpoint.generation import claimed_generations, generations_with_base, read_base
from millpond.errors import StateDamagedError, StateIncompatibleError
from millpond.files.backends.filesystem import AlreadyExistsError, FileSystem, MissingFileError
from millpond.files.backends.retry import with_retries

QUERY_FILE = "query.json"
SCHEMA_FOLDER = "schemas/"


class OperatorSchema(msgspec.Struct, frozen=True):
    """The schema of one operator, as plain data.

    Attributes:
        name: title of the operator in the plan.
        spec: the operator's spec.
        tables: schemas of its tables, by table name.
        functions: SQL text of its aggregate functions, for messages, and to recognise them in a changed query.
        fields: number of names (`AggregateCall.field`) that columns of functions have had so far; 0 if the names follow
            from the positions.
        columns: names of `Spec.state_fields` in the query's output; empty if they are the spec's own. They may change
            from start to start.
        aliased: whether the names of keys are aliases, which may change from start to start; the operator's name then
            contains the grouping expressions.
    """

    name: str
    spec: dict[str, Any]
    tables: dict[str, Any]
    functions: tuple[str, ...] = ()
    fields: int = 0
    columns: tuple[str, ...] = ()
    aliased: bool = False


class BetweenSchema(msgspec.Struct, frozen=True):
    """The expressions that Spark evaluates on a changelog between two operators.

    They must stay the same: a deletion must produce exactly the row that the insertion produced.

    Attributes:
        below, above: names of the operators, for people.
        computes: SQL of each plan node, bottom up.
        functions: user-defined functions that they call: name, and digest of the code.
        time_zones: time zones of the expressions.
        settings: session settings that change results of expressions, by name.
        digest: digest of all expressions.
    """

    below: str
    above: str
    computes: tuple[str, ...]
    functions: tuple[tuple[str, str], ...]
    time_zones: tuple[str, ...]
    settings: dict[str, str]
    digest: str


class StateSchema(msgspec.Struct, frozen=True):
    """The properties of a query that must not change between runs; `parent` is the schema that it was evolved from."""

    key_groups: int
    operators: tuple[OperatorSchema, ...]
    between: tuple[BetweenSchema, ...] = ()
    parent: int = 0
    format: int = FORMAT


def plain(struct: object) -> Any:
    """Convert a spec or schema (msgspec struct) to plain data."""
    return msgspec.json.decode(msgspec.json.encode(struct))


def write_or_check_schema(files: FileSystem, query: StateSchema) -> None:
    """Write `query.json`, or compare the query with the last run's state schema. Call it first at start.

    Raises:
        StateIncompatibleError: the checkpoint belongs to a different query; the message lists the differences.
        StateDamagedError: the state schema is altered.
    """
    try:
        # If the answer is lost, the next try finds the object of this one, and the comparison below succeeds.
        with_retries(lambda: write_document(files, QUERY_FILE, query, create=True))
        return
    except AlreadyExistsError:
        pass
    try:
        schema_number = newest_schema(files)
        before = read_schema(files, schema_number)
    except StateDamagedError:
        if claimed_generations(files):
            raise
        write_document(files, QUERY_FILE, query)  # the first start died while it wrote the file; there is no state yet
        return
    lines = compare(before, query)
    if lines:
        raise schema_mismatch_error(lines, files.locate(schema_name(schema_number)), follows=may_evolve(before, query))


def compare(before: StateSchema, query: StateSchema) -> list[str]:
    """Describe each difference between two queries that matters for state, one line each."""
    query = with_old_aliases(before, query)
    return differences(plain(before), plain(query)) if before != query else []


def with_old_aliases(before: StateSchema, query: StateSchema) -> StateSchema:
    """Return the query with the aliases of the previous run wherever both are equivalent."""
    operators = query.operators
    if len(before.operators) == len(operators):
        operators = tuple(map(_with_aliases, operators, before.operators))
    between = _keep_equivalent(before.between, query.between)
    return msgspec.structs.replace(query, operators=operators, between=between, parent=before.parent)


def with_new_columns(before: StateSchema, query: StateSchema) -> StateSchema:
    """Return the old state schema with the new query's names of state columns."""
    pairs = zip(before.operators, query.operators, strict=True)
    operators = tuple(msgspec.structs.replace(old, columns=new.columns) for old, new in pairs)
    return msgspec.structs.replace(before, operators=operators)


def _with_aliases(operator: OperatorSchema, before: OperatorSchema) -> OperatorSchema:
    """Return the operator with its old key names, if old and new ones are aliases of the same grouping expressions."""
    spec = operator.spec
    if operator.aliased and before.aliased and operator.name == before.name:
        parts = [part for part in _ALIASED if part in before.spec and part in spec]
        spec = {**spec, **{part: _names_of(before.spec[part], spec[part]) for part in parts}}
    return msgspec.structs.replace(operator, spec=spec, columns=before.columns)


_ALIASED = ("keys", "window")
"""Fields of aggregate specs that contain aliases of the query."""


def _names_of(before: Any, now: Any) -> Any:
    """Return fields with their old names, if only the names differ."""
    if isinstance(now, list) and isinstance(before, list) and len(now) == len(before):
        return list(map(_names_of, before, now))
    are_fields = isinstance(now, dict) and isinstance(before, dict)
    return before if are_fields and {**before, "name": ""} == {**now, "name": ""} else now


def schema_mismatch_error(lines: Sequence[str], file: str, *, follows: bool = True) -> StateIncompatibleError:
    """Return the error for a query that differs from its state schema.

    Args:
        lines: the differences.
        file: URL of the state schema.
        follows: whether state could follow with another setting.
    """
    return StateIncompatibleError(
        "The query differs from the one that wrote this checkpoint:\n  " + "\n  ".join(lines) + "\n",
        action="Change it back, start with a new checkpointLocation, or see which changes state can follow: of "
        "aggregates by spark.millpond.onChangedState (`millpond docs changing-a-query`)."
        if follows
        else "Change it back, or start with a new checkpointLocation: state cannot follow this change.",
        file=file,
    )


def may_evolve(before: StateSchema, query: StateSchema) -> bool:
    """Return whether an operator with aggregate functions differs; `spark.millpond.onChangedState` applies to these."""
    if len(before.operators) != len(query.operators):
        return False
    pairs = zip(before.operators, query.operators, strict=True)
    return any(old != new and bool(old.functions or new.functions) for old, new in pairs)


def _keep_equivalent(before: tuple[BetweenSchema, ...], now: tuple[BetweenSchema, ...]) -> tuple[BetweenSchema, ...]:
    """Replace each schema by the previous run's if both have the same meaning."""
    known = {_meaning(schema): schema for schema in before}
    return tuple(known.get(_meaning(schema), schema) for schema in now)


def _meaning(schema: BetweenSchema) -> tuple[object, ...]:
    return schema.digest, schema.functions, schema.time_zones, tuple(schema.settings.items())


def overwrite_schema(files: FileSystem, query: StateSchema) -> None:
    """Overwrite the `query.json` of a query that has committed nothing."""
    write_document(files, QUERY_FILE, query)


def read_state_schema(files: FileSystem) -> StateSchema | None:
    """Read the state schema of the last run; return None if no query has used this location."""
    try:
        return read_schema(files, newest_schema(files))
    except MissingFileError:
        return None


def newest_schema(files: FileSystem) -> int:
    """Return the number of the last begun run's state schema; 0 (`query.json`) if there was no run."""
    # Not the newest file: a start that failed may have left one that no base names.
    for number in reversed(generations_with_base(files)):
        with suppress(StateDamagedError):  # a torn put of a run that died before it began; else recovery raises
            return read_base(files, number).schema_number
    return 0


def schema_name(number: int) -> str:
    """Return the name of a state schema's object."""
    return f"{SCHEMA_FOLDER}{digits(number)}.json" if number else QUERY_FILE


def read_schema(files: FileSystem, number: int) -> StateSchema:
    """Read a state schema of the query."""
    return read_document(files, schema_name(number), StateSchema)


def read_schemas(files: FileSystem, newest: int) -> dict[int, StateSchema]:
    """Read a state schema and all its ancestors, by number, newest first."""
    schemas = {newest: read_schema(files, newest)}
    while newest:
        newest = schemas[newest].parent
        schemas[newest] = read_schema(files, newest)
    return schemas
