"""The state schema of a query in its checkpoint: later starts must match it, or replace it before the first commit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from millpond.checkpoint.formats.documents import write_document
from millpond.checkpoint.recovery import Recovery
from millpond.checkpoint.state_schema import (
    QUERY_FILE,
    OperatorSchema,
    StateSchema,
    newest_schema,
    plain,
    read_schema,
    read_schemas,
    schema_name,
)
from millpond.conf import OnChangedState
from millpond.errors import StateDamagedError, StateIncompatibleError
from millpond.files.backends.filesystem import FileSystem, MissingFileError
from millpond.humanize import counted
from millpond.key_groups import KEY_GROUPS
from millpond.operators.kinds.registry import state_tables
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.changelog.between import between_schemas
from millpond.plan.decision.computed import computed_below
from millpond.plan.decision.decision import Decision
from millpond.plan.state_column_names import state_column_names
from millpond.query.logs.query_logs import QueryLogs, is_rolled_back
from millpond.query.schema.comparison import (
    compare,
    may_evolve,
    schema_mismatch_error,
    with_new_columns,
    with_old_aliases,
    write_or_check_schema,
)
from millpond.query.schema.evolution import evolve_schema, new_operator_schema, persistent_spec, with_state_names
from millpond.query.schema.missing_state import missing_state_error
from millpond.spec.kinds.union import OperatorSpec

log = logging.getLogger("millpond")


def state_schema_of(decision: Decision, catalyst: Catalyst) -> StateSchema:
    """Build the state schema of a query: its operators, their tables, and the expressions between them.

    Args:
        decision: the operators on Millpond.
        catalyst: of the user's session.
    """
    columns = state_column_names(decision.root)
    aggregates = {one.operator.index for one in decision.root.walk() if one.operator and one.node.kind == "Aggregate"}
    computed = {
        decided.operator.index: computed_below(decided.node, decided.operator)
        for decided in decision.root.walk()
        if decided.operator is not None and decided.operator.index is not None
    }
    operators = tuple(
        OperatorSchema(
            name=operator.title,
            spec=persistent_spec(operator.spec),
            tables={name: plain(table.schema) for name, table in state_tables(operator.spec).items()},
            functions=operator.functions,
            columns=columns.get(index, ()),
            aliased=index in aggregates,
            computed=computed[index],
        )
        for index, operator in enumerate(decision.on_millpond)
        if operator.spec is not None
    )
    return StateSchema(KEY_GROUPS, operators, between_schemas(catalyst, decision))


class StartSchema(NamedTuple):
    """The state schema of a query at its start.

    Attributes:
        query: the state schema.
        number: its number; None if the query has changed: `write_evolved_schema` decides at the recovery version.
        from_scratch: whether the query begins without state of earlier starts, because no batch was committed.
    """

    query: StateSchema
    number: int | None = 0
    from_scratch: bool = False

    def specs(self, specs: Sequence[OperatorSpec]) -> list[OperatorSpec]:
        """Return the specs of its operators, with the state's names of functions."""
        return [with_state_names(spec, schema) for spec, schema in zip(specs, self.query.operators, strict=True)]


def check_schema(
    files: FileSystem,
    query_logs: QueryLogs,
    checkpoint_files: FileSystem,
    query: StateSchema,
    specs: Sequence[OperatorSpec],
    *,
    changed: OnChangedState = "error",
    on_spark: int = 0,
) -> StartSchema:
    """Write the query's state schema, or check that the existing one matches the query or can evolve to it.

    While Spark has committed no batch, another query may take over the checkpoint. A planned batch then runs with the
    new query, as in Spark, and its state starts from the beginning.

    Args:
        files: the `millpond/` folder of the state.
        query_logs: Spark's logs in the checkpoint.
        checkpoint_files: the checkpoint.
        query: the state schema of the query.
        specs: its operators.
        changed: the reaction to a changed query (`spark.millpond.onChangedState`).
        on_spark: the number of operators with state on Spark.

    Raises:
        StateIncompatibleError: the checkpoint belongs to another query, or to Spark's own state store; or the state has
            committed batches that Spark's logs do not have.
        StateDamagedError: the state, or part of it, is missing.
    """
    # A start that was interrupted in a replay has removed the commit of a batch that is done.
    nothing_done = query_logs.last_committed < 0 and not is_rolled_back(checkpoint_files)
    try:
        number, query = _match_or_write(
            files, query_logs, checkpoint_files, query, specs, "error" if nothing_done else changed, on_spark
        )
    except StateIncompatibleError:
        if not nothing_done:
            raise
        _check_nothing_committed(files, checkpoint_files)
        log.warning("another query was started on this checkpoint and committed nothing: this one takes its place")
        return StartSchema(query, from_scratch=True)
    # With a planned batch, state of that batch may be durable and is used.
    from_scratch = nothing_done and query_logs.last_planned < 0
    if from_scratch:
        _check_nothing_committed(files, checkpoint_files)
    return StartSchema(query, number, from_scratch)


def _check_nothing_committed(files: FileSystem, checkpoint_files: FileSystem) -> None:
    """Check that the state is not newer than a first batch that was never committed.

    Raises:
        StateIncompatibleError: the state has more than one version, which the start would lose.
    """
    version = Recovery(files).newest()
    if version > 1:
        raise StateIncompatibleError(
            f"Spark's commit log at {checkpoint_files.url} has no committed batch, and the state is that after "
            f"{counted(version, 'batch', 'batches')}: it would be lost.",
            action="Write the location as for the last run, or put back what was in offsets/ and commits/; to start "
            "again, delete both folders and the state, or start with a new checkpointLocation.",
            version=version,
            file=files.url,
        )


def write_evolved_schema(
    files: FileSystem,
    recovery: Recovery,
    version: int,
    schema_at_start: StartSchema,
    specs: Sequence[OperatorSpec],
    changed: OnChangedState,
) -> StartSchema:
    """Write the state schema of a changed query, for a run that goes on with a version.

    The state schema has the number of the run's generation, so that no other run writes it. It is written before the
    run's base names it. A run that fails in between leaves a file that no base names.

    Args:
        files: the `millpond/` folder of the state.
        recovery: the recovery of the run.
        version: the version that the run goes on with.
        schema_at_start: the state schema of the query.
        specs: its operators.
        changed: as for `check_schema`.

    Raises:
        StateIncompatibleError: the query that made the version cannot evolve to this one.
    """
    made_by = recovery.schema_number(version)
    if schema_at_start.number is not None:
        if version and made_by not in read_schemas(files, schema_at_start.number):
            raise StateIncompatibleError(
                "The version that the query goes on with was made by the query as it was changed to at another time.",
                action="Start the query as it was then, or set spark.millpond.onChangedState to 'evolve'.",
                version=version,
                file=files.locate(schema_name(made_by)),
            )
        return schema_at_start
    before = read_schema(files, made_by)
    result = evolve_schema(before, made_by, schema_at_start.query, specs, changed)
    if isinstance(result, list):
        raise schema_mismatch_error(
            result, files.locate(schema_name(made_by)), follows=may_evolve(before, schema_at_start.query)
        )
    if with_old_aliases(before, result.query) == before:
        log.warning("the query is again what made version %d of its state, and goes on with that", version)
        return StartSchema(before, made_by)
    assert recovery.generation is not None
    number = recovery.generation.number
    write_document(files, schema_name(number), result.query)
    log.warning("the query has changed, and its state follows:\n  %s", "\n  ".join(result.messages or ["as it is"]))
    return StartSchema(result.query, number)


def _match_or_write(
    files: FileSystem,
    query_logs: QueryLogs,
    checkpoint_files: FileSystem,
    query: StateSchema,
    specs: Sequence[OperatorSpec],
    changed: OnChangedState,
    on_spark: int,
) -> tuple[int | None, StateSchema]:
    """Return the state schema and its number; None as number if it has changed and the state may evolve."""
    number, before = 0, None
    with suppress(
        MissingFileError, StateDamagedError
    ):  # a first start died while writing it: `write_or_check_schema` reports it
        number = newest_schema(files)
        before = read_schema(files, number)
    if before is not None and len(before.operators) == len(specs):
        operators = [
            new_operator_schema(operator, with_state_names(spec, old), old.fields)
            for operator, spec, old in zip(query.operators, specs, before.operators, strict=True)
        ]
        as_named = msgspec.structs.replace(query, operators=tuple(operators))
        unmoved = all(old.functions == new.functions for old, new in zip(before.operators, operators, strict=True))
        if (changed != "evolve" or unmoved) and not compare(before, as_named):
            if before != (before := with_new_columns(before, query)):
                write_document(files, schema_name(number), before)
            return number, before
        if changed != "error" or any(spec.facts.variables_may_change for spec in specs):
            # The newest schema may have no committed batch: the recovery version decides which schema made it.
            tries = [
                evolve_schema(schema, number, query, specs, changed)
                for number, schema in read_schemas(files, number).items()
            ]
            if isinstance(tries[0], list) and all(isinstance(attempt, list) for attempt in tries):
                raise schema_mismatch_error(
                    tries[0], files.locate(schema_name(number)), follows=may_evolve(before, query)
                )
            return None, query
    if not files.exists(QUERY_FILE) and query_logs.last_committed >= 0:
        raise missing_state_error(
            files, query_logs, checkpoint_files, query, on_spark if any(spec.facts.stateful for spec in specs) else None
        )
    write_or_check_schema(files, query)
    return 0, query
