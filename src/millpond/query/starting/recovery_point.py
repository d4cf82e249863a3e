"""The recovery point of a start: the durable version to build on, and the batches that Spark has to run again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from millpond.checkpoint.recovery import Recovery
from millpond.errors import StateDamagedError, StateIncompatibleError, TransientError
from millpond.humanize import counted
from millpond.query.logs.query_logs import QueryLogs

log = logging.getLogger("millpond")


def recovery_version(recovery: Recovery, query_logs: QueryLogs) -> int:
    """Return the version that a start goes on with: after the last batch that Spark has committed, or before it."""
    # A planned batch implies that the batch before it was committed.
    committed = max(query_logs.last_committed, query_logs.last_planned - 1)
    return committed + 1 if recovery.durable(committed + 1) else committed


def write_base_and_find_replays(
    recovery: Recovery,
    query_logs: QueryLogs,
    plan: str = "",
    *,
    even_if_changed: bool = True,
    evolves: bool = False,
    runs_planned: Callable[[int], bool | None] = lambda batch: None,
    schema_number: int = 0,
    retain: int = 0,
    version: int | None = None,
    titles: Sequence[str] = (),
) -> list[int]:
    """Write the generation's base, and return the batches that Spark has to run again, in order.

    Args:
        recovery: the recovery with the generation that was just claimed.
        query_logs: Spark's logs.
        plan: a digest of the plan up to the operators.
        even_if_changed: whether a batch that the sink has may be repeated by a run with another plan.
        evolves: whether the state follows changed queries; then the query that starts next runs the planned batch.
        runs_planned: whether the sink runs a batch that is planned and not committed; None if it is not known.
        schema_number, retain: see `Base`.
        version: the version for which the state schema was made; None if it fits all versions.
        titles: the titles of the operators, for messages.

    Raises:
        StateDamagedError: neither the version after the last committed batch nor the one before it is whole.
        StateIncompatibleError: a batch of the sink's has to run again, and the plan has changed.
        TransientError: an earlier run has committed a batch meanwhile.
    """
    planned = query_logs.last_planned
    committed = query_logs.next_batch - 1
    built_on, replays = [committed + 1], []
    # Commits lag by at most one batch, so the version before has to be whole.
    if not recovery.durable(committed + 1):
        missing = recovery.missing(committed)
        if missing:
            operator, partition = missing[0]
            raise StateDamagedError(
                f"Spark has committed batch {committed}, and commits/ has no whole state of "
                f"{'the operator' if operator >= len(titles) else repr(titles[operator])} as of then: "
                f"{counted(sum(place[0] == operator for place in missing), 'partition')} "
                f"of version {committed} or {committed + 1} cannot be put together"
                + (f"; damaged: {', '.join(recovery.damaged)}" if recovery.damaged else "")
                + ".",
                action="Restore the missing files below millpond/, or start with a new checkpointLocation; if "
                "Spark has run the query without Millpond since, `millpond docs troubleshooting` says what to do.",
                operator=str(operator),
                partition=partition,
                version=committed,
                file=recovery.files.locate("commits/"),
            )
        if plan != recovery.plan and not even_if_changed:
            reason = f"The state of batch {committed}, which the sink has, was not durable when the last run ended"
            raise _changed_plan_error(recovery, committed, reason)
        built_on, replays = [committed], [committed]
    if planned > committed:
        # A sink that already has the planned batch skips it, and the state must not depend on that. State of that
        # batch can be used only if the same state schema made it: a changed query makes other state. State of another
        # plan agrees with the rows of a sink that skips the batch. If the sink runs the batch, this run makes its own.
        runs = runs_planned(planned)
        made = not replays and recovery.durable(planned + 1) and recovery.schema_number(planned + 1) == schema_number
        if made and (plan == recovery.plan or not runs):
            built_on.append(planned + 1)
        elif not runs:
            # Before the first commit, any query may take over the checkpoint.
            has = runs is False and committed >= 0
            if has and plan != recovery.plan and not (even_if_changed or evolves):
                reason = f"Batch {planned}, which the sink has, was not committed when the last run ended"
                raise _changed_plan_error(recovery, planned, reason)
            replays.append(planned)
    if version is not None and built_on[0] != version:
        raise concurrent_run_error(recovery.files.url)  # the earlier run has committed a batch meanwhile
    recovery.write_base(built_on, plan, schema_number=schema_number, retain=retain)
    before, now = len(recovery.ranges(built_on[0])), recovery.partitions
    if built_on[0] and before != now:
        log.info("the state goes on in %s, each with its part of the %d before", counted(now, "partition"), before)
    return replays


def _changed_plan_error(recovery: Recovery, batch: int, reason: str) -> StateIncompatibleError:
    """Return the error for a batch that the sink has, and that a query with another plan would have to repeat."""
    return StateIncompatibleError(
        f"{reason}: it has to run once more, but what the query computes up to its stateful operators has changed "
        "since.",
        action="Start the query as it was, let it end by stop(), and change it then; or set "
        "spark.millpond.onChangedReplay to 'run' to make the state from the query as it is now.",
        version=batch,
        file=recovery.files.locate("generations/"),
    )


def concurrent_run_error(checkpoint: str) -> TransientError:
    """Return the error for a start while another run of the query goes on."""
    return TransientError(
        "An earlier run of the query was still going on while this one recovered.",
        action="See that it has ended (only one program may run a query), and start the query again.",
        file=checkpoint,
    )
