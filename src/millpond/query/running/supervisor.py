"""Restarts of a query inside the application, after a host was lost with state that was not durable.

Commits lag by at most one batch. When a host is lost, the next batch may therefore need a version that no longer exists
anywhere. Spark cannot repeat the batch that made it while the query runs; a start can (`query.starting`). So the
supervisor starts the query again, in a new generation, behind the handle that the user has.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from pyspark import InheritableThread
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery

from millpond.checkpoint.checkpoint import Checkpoint
from millpond.checkpoint.forks.parents import open_state
from millpond.errors import MillpondError, TransientError
from millpond.files.backends.retry import SHORT_RETRY
from millpond.humanize import counted
from millpond.query.logs.query_logs import QueryLogs
from millpond.query.running.handle import RunningQuery
from millpond.query.running.placement import Placement
from millpond.tasks.operator_task import OperatorTask

log = logging.getLogger("millpond")

POLL_SECONDS = 0.3
"""Seconds between two looks at the hosts. While a lost host is preferred, Spark waits 3 s for it in each stage."""
_COMMIT_SECONDS = 3.0
"""Seconds that the commits of a lost host may take: its slots may outlive the executor, and finish them."""
_WINDOW_SECONDS = 600.0
"""Seconds within which restarts are counted."""


@dataclass
class Loss:
    """State that lost hosts had.

    Attributes:
        hosts: the hosts.
        partitions: the partitions whose tasks ran there.
        deadline: when the version has to be durable, by the monotonic clock.
        version: the version that the batch after the last committed one reads; None until Spark's log has been read.
    """

    hosts: frozenset[str]
    partitions: frozenset[int]
    deadline: float
    version: int | None = None


class Supervisor:
    """Follows a query: places its partitions, and starts it again after a loss.

    Args:
        query: the handle of the running query.
        placement: of its partitions.
        tasks: the operators of the run that goes on; `restart` changes them.
        query_logs: Spark's logs of the query.
        restart: starts the query again and returns Spark's new query.
        limit: restarts within ten minutes.
    """

    def __init__(
        self,
        query: RunningQuery,
        placement: Placement,
        tasks: Sequence[OperatorTask],
        query_logs: QueryLogs,
        restart: Callable[[], StreamingQuery],
        limit: int,
    ) -> None:
        self._query = query
        self._placement = placement
        self._tasks = tasks
        self._query_logs = query_logs
        self._restart = restart
        self._limit = limit
        self._restarted: deque[float] = deque()

    def start(self) -> None:
        """Follow the query, in a thread with the local properties of this one, until it has ended."""
        InheritableThread(target=self._run, name="millpond-supervisor", daemon=True).start()

    def _run(self) -> None:
        failure: MillpondError | None = None
        try:
            running = StreamingQuery(self._query._jsq)
            while (loss := self._follow(running)) is not None and not self._query.stopping:
                running = self._start_again(loss)
                self._query.continue_as(running)
                if self._query.stopping:
                    running.stop()
        except MillpondError as error:
            failure = None if self._query.stopping else error
        except Exception as error:  # the JVM is gone
            log.debug("the query is not supervised any more: %s", error)
        finally:
            self._query.end(failure)

    def _follow(self, running: StreamingQuery) -> Loss | None:
        """Return when the run has ended, or has to end: the loss that ended it, or None."""
        loss: Loss | None = None
        while True:
            failed = False
            try:
                if running.awaitTermination(POLL_SECONDS):
                    return None
            except StreamingQueryException:
                failed = True
            loss = self._add_lost_hosts(loss)
            if failed:
                return loss
            if loss is not None and self._is_mended(loss):
                loss = None
            if loss is not None and time.monotonic() > loss.deadline:
                return loss

    def _add_lost_hosts(self, loss: Loss | None) -> Loss | None:
        hosts, partitions = self._placement.update()
        if not partitions:
            return loss
        deadline = time.monotonic() + _COMMIT_SECONDS
        if loss is None:
            return Loss(hosts, partitions, deadline)
        return Loss(hosts | loss.hosts, partitions | loss.partitions, deadline, loss.version)

    def _is_mended(self, loss: Loss) -> bool:
        """Return whether the batch after the loss has found its state, or will find it."""
        try:
            version = self._query_logs.last("commits") + 1
            if loss.version is None:
                loss.version = version
            return version > loss.version or self._is_durable(loss.partitions, version)
        except MillpondError as error:
            log.debug("whether the state of lost hosts is durable is not known: %s", error)
            return False

    def _is_durable(self, partitions: Set[int], version: int) -> bool:
        task = self._tasks[0]
        checkpoint = Checkpoint(open_state(task.location, retry_config=SHORT_RETRY), task.generation)
        for operator in range(len(self._tasks)):
            for partition in sorted(partitions):
                checkpoint.open_partition(operator, partition, version)
        return True

    def _start_again(self, loss: Loss) -> StreamingQuery:
        hosts = ", ".join(sorted(loss.hosts))
        while True:
            now = time.monotonic()
            while self._restarted and now - self._restarted[0] > _WINDOW_SECONDS:
                self._restarted.popleft()
            if len(self._restarted) >= self._limit:
                self._stop()
                raise TransientError(
                    f"Hosts ({hosts}) were lost with state that was not durable, and the query has been restarted "
                    f"{counted(self._limit, 'time')} within ten minutes, as often as spark.millpond.restarts allows.",
                    action="Start the query again: it repeats the batch.",
                    query=self._tasks[0].query,
                    version=loss.version,
                )
            self._restarted.append(now)
            log.warning(
                "query %s: hosts were lost (%s) with %s whose last version was not durable; the query is started "
                "again, and repeats the batch",
                *(self._tasks[0].query, hosts, counted(len(loss.partitions), "partition")),
            )
            try:
                return self._restart()
            except TransientError as error:
                log.warning("query %s was not started again: %s", self._tasks[0].query, error)
            except Exception as error:
                raise TransientError(
                    f"A host was lost, and the query could not be started again: {_first_line(error)}.",
                    action="Start the query again: it repeats the last batch.",
                    query=self._tasks[0].query,
                ) from error

    def _stop(self) -> None:
        running = StreamingQuery(self._query._jsq)
        if running.isActive:
            running.stop()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].removesuffix(".")
