"""State schemas: the description of the query that owns a checkpoint, so that a different query is refused.

`query.json` holds the first state schema. A query may change in ways that its state can follow
(`spark.millpond.onChangedState=evolve`). Each such change writes a new state schema, an object below `schemas/`. Its
number is the generation of the first run with it; `query.json` has number 0.

A state schema is immutable, except for the aliases under which its state is shown. The base of each generation names
the schema that the run uses. Each manifest and each delta names the schema that wrote it. So rows of old and new
schemas coexist, and an older version can be read with the schema that wrote it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from millpond.checkpoint.formats.documents import FORMAT, digits, read_document, write_document
from millpond.checkpoint.generation import newest_base
from millpond.files.backends.filesystem import FileSystem

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
        computed: SQL of what Spark's analyser computes below the operator for it: windows of event time, grouping sets,
            expressions of a `Window` node; and columns that names alone do not distinguish. The spec has only names.
    """

    name: str
    spec: dict[str, Any]
    tables: dict[str, Any]
    functions: tuple[str, ...] = ()
    fields: int = 0
    columns: tuple[str, ...] = ()
    aliased: bool = False
    computed: tuple[str, ...] = ()


class BetweenSchema(msgspec.Struct, frozen=True):
    """The expressions that Spark evaluates on a changelog between two operators, or on a side of a join for its state.

    They must stay the same: a deletion must produce exactly the row that the insertion produced, and rows of a join are
    compared with those of earlier runs.

    Attributes:
        below, above: names of the operators, for people; of a join, the side and the join.
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


def overwrite_schema(files: FileSystem, query: StateSchema) -> None:
    """Overwrite the `query.json` of a query that has committed nothing."""
    write_document(files, QUERY_FILE, query)


def newest_schema(files: FileSystem) -> int:
    """Return the number of the last begun run's state schema; 0 (`query.json`) if there was no run."""
    # Not the newest file: a start that failed may have left one that no base names.
    base = newest_base(files)
    return base.schema_number if base is not None else 0


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
