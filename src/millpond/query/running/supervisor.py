"""Supervision of a query on a cluster: hosts that hang are given up, and a loss of state restarts the query.

Commits lag by at most one batch. When a host is lost, the next batch may therefore need a version that no longer exists
anywhere. Spark cannot repeat the batch that made it while the query runs; a start can (`query.starting`). So the
supervisor starts the query again, in a new generation, behind the handle that the user has.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from py4j.protocol import Py4JError
from pyspark import InheritableThread, SparkContext
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery

from millpond.checkpoint.checkpoint import Checkpoint, NotDurableError
from millpond.checkpoint.forks.parents import open_state
from millpond.checkpoint.generation import Restart, RestartReason, check_overtaken
from millpond.errors import FencedError, MillpondError, StateIncompatibleError, TransientError
from millpond.files.backends.retry import SHORT_RETRY
from millpond.humanize import counted, first_line
from millpond.plan.catalyst.cluster.pings import ExecutorPings
from millpond.query.logs.query_logs import QueryLogs
from millpond.query.running.handle import RunningQuery
from millpond.query.running.placement import Placement
from millpond.tasks.operator_task import OperatorTask

log = logging.getLogger("millpond")

POLL_SECONDS = 0.3
"""Seconds between two looks at the hosts. While a lost host is preferred, Spark waits 3 s for it in each stage."""
_COMMIT_SECONDS = 3.0
"""Seconds that the commits of a lost host may take: its slots may outlive the executor, and finish them."""
_STUCK_SECONDS = 10.0
_STUCK_BATCHES = 3.0
"""After hosts have hung, a batch is stuck when it takes longer, in seconds and in durations of the batches before.

The batch after the loss of a host opens state from the store: measured, up to ten times as long as others.
"""
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 2.0, 60.0
"""Seconds between a start that failed and the next one; four times as long before each further one."""
_WINDOW_SECONDS = 600.0
"""Seconds within which restarts are counted."""


@dataclass
class Loss:
    """State that lost hosts had, until the batches that need it have found it.

    The batch that runs when a host is lost reads the version before it. It also makes a version, of which a lost host
    may have sealed a part: Spark does not run tasks again that have finished. So both versions are watched.

    Attributes:
        hosts: the hosts.
        partitions: the partitions that were placed there.
        hung: those of the hosts that hang.
        last: the version that the batch makes that ran when the last of the hosts was lost; None until Spark's log has
            been read.
        version: the version that the current batch reads, while it is not durable.
        deadline: when it has to be durable, by the monotonic clock.
        stuck_at: when the batch that ran then counts as stuck, by the monotonic clock, if hosts hang: tasks elsewhere
            may wait for minutes for their blocks.
        reason: why the query is started again, if it is.
    """

    hosts: frozenset[str]
    partitions: frozenset[int]
    hung: frozenset[str]
    last: int | None = None
    version: int | None = None
    deadline: float = 0.0
    stuck_at: float = math.inf
    reason: RestartReason = "state_lost"


class Supervisor:
    """Follows a query: gives up executors that hang, places its partitions, and starts it again after a loss.

    Args:
        query: the handle of the running query.
        placement: of its partitions.
        pings: to the application's executors; None if only Spark looks for those that hang.
        tasks: the operators of the run that goes on; `restart` changes them.
        query_logs: Spark's logs of the query.
        restart: starts the query again, for this reason, in place of the run of this generation; returns Spark's new
            query, or raises `FencedError` if a newer run has taken over.
        limit: restarts within ten minutes.
    """

    def __init__(
        self,
        query: RunningQuery,
        placement: Placement,
        pings: ExecutorPings | None,
        tasks: Sequence[OperatorTask],
        query_logs: QueryLogs,
        restart: Callable[[Restart, int], StreamingQuery],
        limit: int,
    ) -> None:
        self._query = query
        self._placement = placement
        self._pings = pings
        self._tasks = tasks
        self._query_logs = query_logs
        self._restart = restart
        self._limit = limit
        self._restarted: deque[float] = deque()
        self._restarts = 0

    def start(self) -> None:
        """Follow the query, in a thread with the local properties of this one, until it has ended."""
        InheritableThread(target=self._run, name="millpond-supervisor", daemon=True).start()

    def _run(self) -> None:
        failure: MillpondError | None = None
        try:
            running: StreamingQuery | None = StreamingQuery(self._query._jsq)
            while running is not None and (loss := self._follow(running)) is not None:
                running = self._start_again(loss)
                if running is not None:
                    self._query.continue_as(running)
                    if self._query.stopping.is_set():
                        running.stop()
        except MillpondError as error:
            failure = None if self._query.stopping.is_set() else error
            self._stop()
        except Exception as error:
            if _application_runs():
                log.warning(
                    "query %s goes on, but is not started again after a lost host any more: its supervision failed",
                    self._tasks[0].query,
                    exc_info=True,
                )
            else:
                log.debug("the query is not supervised any more: %s", error)
        finally:
            self._query.end(failure)

    def _follow(self, running: StreamingQuery) -> Loss | None:
        """Return when the run has ended, or has to end: the loss that ended it, or None."""
        loss: Loss | None = None
        while True:
            failure = ""
            try:
                if running.awaitTermination(POLL_SECONDS):
                    return None
            except StreamingQueryException as error:
                failure = str(error)
            loss = self._add_lost_hosts(loss)
            # A newer run, maybe of another application, has taken over: this one must not take the query back.
            if loss is None or FencedError.code in failure:
                if failure:
                    return None
                continue
            if failure:
                loss.reason = "run_failed"
                return loss
            try:
                if self._is_over(loss, running):
                    loss = None
                elif loss.version is not None and time.monotonic() > loss.deadline:
                    return loss
                elif time.monotonic() > loss.stuck_at:
                    loss.reason = "batch_stuck"
                    return loss
            except FencedError:
                loss = None  # the run fails by itself
            except MillpondError as error:
                log.debug("whether the state of lost hosts is durable is not known: %s", error)

    def _add_lost_hosts(self, loss: Loss | None) -> Loss | None:
        hung = self._hung_hosts()
        hosts, partitions = self._placement.update()
        hung &= hosts
        # A host without partitions of the query may have rows for others, or state: tasks may run anywhere.
        if not hosts:
            return loss
        if loss is not None:
            hosts, partitions, hung = hosts | loss.hosts, partitions | loss.partitions, hung | loss.hung
        return Loss(hosts, partitions, hung)

    def _hung_hosts(self) -> frozenset[str]:
        """Give up the executors that do not answer; return the hosts of those given up a short time ago."""
        if self._pings is None:
            return frozenset()
        try:
            self._pings.remove_silent()
            return self._pings.removed_hosts()
        except Py4JError as error:  # asked again soon
            log.debug("whether executors hang is not known: %s", error)
            return frozenset()

    @contextmanager
    def _pinging(self) -> Iterator[None]:
        """Look for executors that hang in another thread: a start waits for the batches that it repeats."""
        ended = threading.Event()

        def ping() -> None:
            while not ended.wait(POLL_SECONDS):
                self._hung_hosts()

        thread = threading.Thread(target=ping, name="millpond-pinging", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _is_over(self, loss: Loss, running: StreamingQuery) -> bool:
        """Return whether all batches that need state of the lost hosts have found it, or will find it."""
        version = self._query_logs.last_committed + 1
        in_batch = self._query_logs.last_planned >= version
        if loss.last is None:
            loss.last = version + 1
            if loss.hung and in_batch:
                loss.stuck_at = time.monotonic() + max(_STUCK_SECONDS, _STUCK_BATCHES * _longest_batch(running))
        if version >= loss.last:
            loss.stuck_at = math.inf  # the batch that ran has ended
        if version > loss.last:
            return True
        durable = self._is_durable(loss.partitions, version)
        if durable:
            loss.version = None
        elif loss.version != version:
            loss.version, loss.deadline = version, time.monotonic() + _COMMIT_SECONDS
        # A task may have run on another host than the one where its partition was placed.
        is_last = version == loss.last or not in_batch
        return durable and is_last and self._is_durable(range(self._tasks[0].partitions), version)

    def _is_durable(self, partitions: Iterable[int], version: int) -> bool:
        """Return whether partitions of all operators have a version; raise if the store does not say."""
        task = self._tasks[0]
        checkpoint = Checkpoint(open_state(task.location, retry_config=SHORT_RETRY), task.generation)
        try:
            for operator in range(len(self._tasks)):
                for partition in partitions:
                    checkpoint.open_partition(operator, partition, version)
        except NotDurableError as error:
            log.debug("version %d is not durable: %s", version, error)
            return False
        return True

    def _start_again(self, loss: Loss) -> StreamingQuery | None:
        """Start the query again.

        Returns:
            Spark's new query; None if the user stops it meanwhile, or if the run has failed and may not be repeated.

        Raises:
            MillpondError: the query cannot be started again, or a newer run has taken over.
        """
        own = self._tasks[0].generation
        restart = Restart(self._restarts + 1, loss.reason, tuple(sorted(loss.hosts)))
        pause, last_failure = _FIRST_PAUSE_SECONDS, ""
        # Only here: each try below counts, however long it takes. A start that always fails would be tried for ever.
        while self._restarted and time.monotonic() - self._restarted[0] > _WINDOW_SECONDS:
            self._restarted.popleft()
        while not self._query.stopping.is_set():
            if len(self._restarted) >= self._limit and loss.reason == "run_failed":
                log.warning("query %s is not started again: spark.millpond.restarts is used up", self._tasks[0].query)
                return None
            if len(self._restarted) >= self._limit:
                allowed = (
                    f"It has been started again {counted(self._limit, 'time')} within ten minutes, as often as "
                    f"spark.millpond.restarts allows."
                    if self._limit
                    else "It is not started again: spark.millpond.restarts is 0, or its checkpoint is temporary."
                )
                raise TransientError(
                    f"The query cannot go on: {restart}. {allowed}{last_failure}",
                    action="Start the query again: it repeats the batch.",
                    query=self._tasks[0].query,
                )
            self._restarted.append(time.monotonic())
            log.warning(
                "query %s: %s; the query is started again, and repeats the batch", self._tasks[0].query, restart
            )
            try:
                files = open_state(self._tasks[0].location, retry_config=SHORT_RETRY)
                check_overtaken(files, own, restart, self._tasks[0].query)
                self._stop()  # a start refuses to, if spark.sql.streaming.stopActiveRunOnRestart is false
                with self._pinging():
                    running = self._restart(restart, own)
                self._restarts = restart.number
                return running
            except Exception as error:
                if not _may_succeed_later(error):
                    if isinstance(error, MillpondError):
                        raise
                    raise TransientError(
                        f"A host was lost, and the query could not be started again: {first_line(error)}.",
                        action="Start the query again: it repeats the last batch.",
                        query=self._tasks[0].query,
                    ) from error
                log.warning("query %s was not started again: %s", self._tasks[0].query, first_line(error))
                last_failure = f" The last start failed: {first_line(error)}."
            self._query.stopping.wait(pause)
            pause = min(4 * pause, _LAST_PAUSE_SECONDS)
        return None

    def _stop(self) -> None:
        running = StreamingQuery(self._query._jsq)
        if running.isActive:
            running.stop()


def _may_succeed_later(error: Exception) -> bool:
    """Return whether another start may succeed after a start has failed with this error."""
    if isinstance(error, StreamingQueryException):
        # The batch that the start repeats has failed, and Spark passes its error on as text. Most causes may pass, such
        # as a source that does not answer.
        return not any(f"[{lasting.code}]" in str(error) for lasting in (FencedError, StateIncompatibleError))
    return isinstance(error, TransientError)


def _longest_batch(running: StreamingQuery) -> float:
    """Return the seconds of the longest of the run's recent batches."""
    durations = (progress["durationMs"].get("triggerExecution", 0) for progress in running.recentProgress)
    return max(durations, default=0) / 1000


def _application_runs() -> bool:
    context = SparkContext._active_spark_context
    try:
        return context is not None and not context._jsc.sc().isStopped()
    except Exception:  # the JVM is gone
        return False
