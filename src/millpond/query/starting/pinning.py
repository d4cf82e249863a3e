"""Pinning a query to its checkpoint: what of it must stay as it was, or is replaced while nothing is committed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from millpond.checkpoint.formats.documents import write_document
from millpond.checkpoint.pinned import (
    NAME,
    PinnedOperator,
    PinnedQuery,
    as_before,
    compare,
    differing,
    may_follow,
    newest_shape,
    pin,
    plain,
    read_shape,
    read_shapes,
    renamed,
    shape_name,
)
from millpond.checkpoint.recovery import Recovery
from millpond.conf import OnChangedState
from millpond.errors import StateDamagedError, StateIncompatibleError
from millpond.files.backends.filesystem import FileSystem, MissingFileError
from millpond.operators.kinds.registry import state_tables
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.changelog.between import pinned_between
from millpond.plan.reading.decision import Decision
from millpond.plan.shown import state_columns
from millpond.query.ledger.ledger import Ledger, is_rolled_back
from millpond.query.starting.evolution import evolved, lasting, named, repinned
from millpond.query.starting.missing import missing
from millpond.spec.kinds.union import OperatorSpec
from millpond.words import counted

log = logging.getLogger("millpond")


def pinned_query(decision: Decision, key_groups: int, catalyst: Catalyst) -> PinnedQuery:
    """What is pinned of a query: its operators, the tables they keep, and what is evaluated between them.

    Args:
        decision: which operators run on Millpond. key_groups: of the query's state. catalyst: of the user's session.
    """
    columns = state_columns(decision.root)
    aggregates = {one.operator.index for one in decision.root.walk() if one.operator and one.node.kind == "Aggregate"}
    operators = tuple(
        PinnedOperator(
            name=operator.title,
            spec=lasting(operator.spec),
            tables={name: plain(table.schema) for name, table in state_tables(operator.spec).items()},
            functions=operator.functions,
            columns=columns.get(index, ()),
            aliased=index in aggregates,
        )
        for index, operator in enumerate(decision.ours)
        if operator.spec is not None
    )
    return PinnedQuery(key_groups, operators, pinned_between(catalyst, decision))


class Pinned(NamedTuple):
    """What is pinned of a query at its start.

    Attributes:
        query: what it looks like. shape: its number; None if it has changed: what it is to become is settled once it is
            known on which version it goes on.
        anew: whether it begins without what earlier starts have left, as none of them got anywhere.
    """

    query: PinnedQuery
    shape: int | None = 0
    anew: bool = False

    def specs(self, specs: Sequence[OperatorSpec]) -> list[OperatorSpec]:
        """The specs of its operators, their functions named as in the state."""
        return [named(spec, one) for spec, one in zip(specs, self.query.operators, strict=True)]


def pin_query(
    files: FileSystem,
    ledger: Ledger,
    ledger_files: FileSystem,
    query: PinnedQuery,
    specs: Sequence[OperatorSpec],
    *,
    changed: OnChangedState = "error",
    left: int = 0,
) -> Pinned:
    """Pin the query, or see that the state of what is pinned is its own, or can become it.

    As long as Spark has committed nothing, another query may take the checkpoint over. A batch that is planned
    runs with it then, as natively, and its state is made from the beginning.

    Args:
        files: where the state is. ledger, ledger_files: Spark's checkpoint. query: what is to be pinned.
        specs: of its operators. changed: what happens if it has changed (`spark.millpond.onChangedState`).
        left: how many operators of the query have their state on Spark.

    Raises:
        StateIncompatibleError: the checkpoint belongs to another query, or to Spark's own state store; or the state is
            of a query that has committed batches, of which the ledger has none.
        StateDamagedError: the state is gone, or part of it.
    """
    nothing_done = ledger.last("commits") < 0 and not is_rolled_back(ledger_files)
    try:
        shape, query = _pin(files, ledger, ledger_files, query, specs, "error" if nothing_done else changed, left)
    except StateIncompatibleError:
        if not nothing_done:
            raise
        _see_nothing_done(files, ledger_files)
        log.warning("another query was started on this checkpoint and committed nothing: this one takes its place")
        return Pinned(query, anew=True)
    anew = nothing_done and ledger.last("offsets") < 0
    if anew:
        _see_nothing_done(files, ledger_files)
    return Pinned(query, shape, anew)


def _see_nothing_done(files: FileSystem, ledger_files: FileSystem) -> None:
    """See that there is no more state than a first batch that was never committed has made."""
    version = Recovery(files).newest()
    if version > 1:
        raise StateIncompatibleError(
            f"Spark's ledger at {ledger_files.url} has no committed batch, and the state is that after "
            f"{counted(version, 'batch', 'batches')}: it would be lost.",
            action="Write the location as for the last run, or put back what was in offsets/ and commits/; to begin "
            "anew, delete both folders and the state, or start with a new checkpointLocation.",
            version=version,
            file=files.url,
        )


def settle(
    files: FileSystem,
    recovery: Recovery,
    version: int,
    pinned: Pinned,
    specs: Sequence[OperatorSpec],
    changed: OnChangedState,
) -> Pinned:
    """Make the shape of a query that has changed, for a run that goes on with a version.

    The shape has the number of the run's generation, so that no other run writes it; and it is there before the run's
    base names it. A run that ends in between leaves what nobody names.

    Args:
        files: where the state is. recovery: of the run. version: what it goes on with.
        pinned: of the query. specs: of its operators. changed: as for `pin_query`.

    Raises:
        StateIncompatibleError: the state of that version is of a query that cannot become this one.
    """
    made_by = recovery.shape(version)
    if pinned.shape is not None:
        if version and made_by not in read_shapes(files, pinned.shape):
            raise StateIncompatibleError(
                "The version that the query goes on with was made by the query as it was changed to at another time.",
                action="Start the query as it was then, or set spark.millpond.onChangedState to 'evolve'.",
                version=version,
                file=files.locate(shape_name(made_by)),
            )
        return pinned
    before = read_shape(files, made_by)
    found = evolved(before, made_by, pinned.query, specs, changed)
    if isinstance(found, list):
        raise differing(found, files.locate(shape_name(made_by)), follows=may_follow(before, pinned.query))
    if as_before(before, found.query) == before:
        log.warning("the query is again what made version %d of its state, and goes on with that", version)
        return Pinned(before, made_by)
    assert recovery.generation is not None
    number = recovery.generation.number
    write_document(files, shape_name(number), found.query)
    log.warning("the query has changed, and its state follows:\n  %s", "\n  ".join(found.said or ["as it is"]))
    return Pinned(found.query, number)


def _pin(
    files: FileSystem,
    ledger: Ledger,
    ledger_files: FileSystem,
    query: PinnedQuery,
    specs: Sequence[OperatorSpec],
    changed: OnChangedState,
    left: int,
) -> tuple[int | None, PinnedQuery]:
    """The shape that is pinned of the query, None if it has changed and the state may follow, and the query."""
    shape, before = 0, None
    with suppress(MissingFileError, StateDamagedError):  # a first start died while writing it: `pin` tells
        shape = newest_shape(files)
        before = read_shape(files, shape)
    if before is not None and len(before.operators) == len(specs):
        operators = [
            repinned(one, named(spec, old), old.fields)
            for one, spec, old in zip(query.operators, specs, before.operators, strict=True)
        ]
        as_named = msgspec.structs.replace(query, operators=tuple(operators))
        unmoved = all(old.functions == new.functions for old, new in zip(before.operators, operators, strict=True))
        if (changed != "evolve" or unmoved) and not compare(before, as_named):
            if before != (before := renamed(before, query)):
                write_document(files, shape_name(shape), before)
            return shape, before
        if changed != "error" or any(spec.varies for spec in specs):
            # What the newest run was changed to may not have got anywhere: `settle` knows by which the state was made.
            tries = [evolved(one, number, query, specs, changed) for number, one in read_shapes(files, shape).items()]
            if isinstance(tries[0], list) and all(isinstance(found, list) for found in tries):
                raise differing(tries[0], files.locate(shape_name(shape)), follows=may_follow(before, query))
            return None, query
    if not files.exists(NAME) and ledger.last("commits") >= 0:
        raise missing(files, ledger, ledger_files, query, left if any(spec.stateful for spec in specs) else None)
    pin(files, query)
    return 0, query
