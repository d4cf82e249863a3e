"""Pinning a query to its checkpoint: what of it must stay as it was, or is replaced while nothing is committed."""

from __future__ import annotations

import logging
from typing import Any

from millpond.checkpoint.pinned import NAME, PinnedOperator, PinnedQuery, pin, plain, read_pinned
from millpond.errors import StateIncompatibleError
from millpond.files.backends.filesystem import FileSystem
from millpond.operators.kinds.registry import state_tables
from millpond.plan.catalyst.nodes import Catalyst
from millpond.plan.changelog.between import pinned_between
from millpond.plan.reading.decision import Decision
from millpond.query.ledger.ledger import Ledger, is_rolled_back
from millpond.query.ledger.ownership import state_of_last_run
from millpond.words import counted

log = logging.getLogger("millpond")


def pinned_query(decision: Decision, key_groups: int, catalyst: Catalyst) -> PinnedQuery:
    """What is pinned of a query: its operators, the tables they keep, and what is evaluated between them.

    Args:
        decision: which operators run on Millpond. key_groups: of the query's state. catalyst: of the user's session.
    """
    operators = tuple(
        PinnedOperator(
            name=operator.title,
            spec=_lasting(plain(operator.spec)),
            tables={name: plain(table.schema) for name, table in state_tables(operator.spec).items()},
            functions=operator.functions,
        )
        for operator in decision.ours
        if operator.spec is not None
    )
    return PinnedQuery(key_groups, operators, pinned_between(catalyst, decision))


def may_begin_anew(files: FileSystem, ledger: Ledger, ledger_files: FileSystem, query: PinnedQuery) -> bool:
    """Pin the query; whether it is to begin without what earlier starts have left, as none of them got anywhere.

    As long as Spark has committed nothing, another query may take the checkpoint over. A batch that is planned
    runs with it then, as natively, and its state is made from the beginning.

    Args:
        files: where the state is. ledger, ledger_files: Spark's checkpoint. query: what is to be pinned.

    Raises:
        StateIncompatibleError: the checkpoint belongs to another query, or to Spark's own state store.
    """
    nothing_done = ledger.last("commits") < 0 and not is_rolled_back(ledger_files)
    try:
        _pin(files, ledger, ledger_files, query)
    except StateIncompatibleError:
        if not nothing_done:
            raise
        log.warning("another query was started on this checkpoint and committed nothing: this one takes its place")
        return True
    return nothing_done and ledger.last("offsets") < 0


def _pin(files: FileSystem, ledger: Ledger, ledger_files: FileSystem, query: PinnedQuery) -> None:
    if read_pinned(files) is None and ledger.last("commits") >= 0:
        done = (
            f"Spark's ledger at {ledger_files.url} has "
            f"{counted(ledger.last('commits') + 1, 'batch', 'batches')}, but there is no state"
        )
        elsewhere = state_of_last_run(ledger_files)
        if elsewhere is not None:
            raise StateIncompatibleError(
                f"{done} here: the last run had it at {elsewhere}.",
                action="Set spark.millpond.state.location as it was, or to where that folder lies now.",
                file=files.locate(NAME),
            )
        raise StateIncompatibleError(
            f"{done} of Millpond's: the checkpoint was made by Spark's own state store.",
            action="Start with a new checkpointLocation, or go on with spark.millpond.enabled=false.",
            file=files.locate(NAME),
        )
    pin(files, query)


def _lasting(spec: dict[str, Any]) -> dict[str, Any]:
    """What of a spec must not change between starts: what happens on overflow may, and how far sessions reach."""
    spec.pop("gap", None)
    for call in spec.get("calls", ()):
        call["options"].pop("eval_mode", None)
    return spec
