"""Comparison of a query's state schema with that of the run before; names that mean the same are no difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from millpond.checkpoint.formats.documents import write_document
from millpond.checkpoint.generation import claimed_generations
from millpond.checkpoint.state_schema import (
    QUERY_FILE,
    BetweenSchema,
    OperatorSchema,
    StateSchema,
    newest_schema,
    plain,
    read_schema,
    schema_name,
)
from millpond.errors import StateDamagedError, StateIncompatibleError
from millpond.files.backends.filesystem import AlreadyExistsError, FileSystem
from millpond.files.backends.retry import with_retries
from millpond.query.schema.differences import differences


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
        operators = tuple(map(with_old_keys, operators, before.operators))
    between = _keep_equivalent(before.between, query.between)
    return msgspec.structs.replace(query, operators=operators, between=between, parent=before.parent)


def with_new_columns(before: StateSchema, query: StateSchema) -> StateSchema:
    """Return the old state schema with the new query's names of state columns."""
    pairs = zip(before.operators, query.operators, strict=True)
    operators = tuple(msgspec.structs.replace(old, columns=new.columns) for old, new in pairs)
    return msgspec.structs.replace(before, operators=operators)


def with_old_keys(operator: OperatorSchema, before: OperatorSchema) -> OperatorSchema:
    """Return the operator with its old state columns, and its old key names where only aliases differ.

    Key names are replaced if the old and the new ones are aliases of the same grouping expressions.
    """
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
