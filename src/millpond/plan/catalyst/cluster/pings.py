"""Pings to executors. One that does not answer hangs, or is cut off, and is given up before Spark would do so."""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError

from millpond.plan.catalyst.cluster.hosts import host_of
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import items

log = logging.getLogger("millpond")

_MASTER = "BlockManagerMaster"
"""Name of the driver's endpoint that knows the executors' block managers."""
_PINGS_PER_TIMEOUT = 6
_MAX_STEP_SECONDS = 1.0
"""Seconds between two polls that count at most, so that a pause of the driver is not held against the executors."""
_LOST_SECONDS = 60.0
"""Seconds within which Spark reports the loss of a removed executor."""
_FAILURE_NANOSECONDS = 7200 * 10**9
"""After which a ping fails by itself: longer than `spark.millpond.executor.timeout` can be."""
_pings: dict[str, ExecutorPings] = {}  # by application; a process has one at a time


@dataclass
class _Ping:
    """The last ping to one executor.

    Attributes:
        reply: Scala's future; None once it is completed.
        unanswered_seconds: how long there has been no reply.
        next_at: when the next ping is sent, by the monotonic clock.
    """

    reply: Any
    unanswered_seconds: float
    next_at: float


class ExecutorPings:
    """Pings to all executors of an application. Thread-safe: all of its queries poll the same object.

    Spark waits for `spark.network.timeout` (120 s) after an executor's last heartbeat. Until then, a batch waits for
    the tasks that run there. A ping asks an executor for the state of a block that does not exist, which takes it
    milliseconds, whatever tasks it runs. An executor without a reply is removed from Spark's scheduler as Spark itself
    does it. If it goes on later, its cluster manager ends it.

    Tasks that fetch blocks of a removed executor wait for Spark's connection timeout at each of several tries. Later
    tasks of the same stage get the same list of blocks, and wait as well.

    Args:
        catalyst: of a session of the application, which runs on a cluster.

    Attributes:
        timeout: seconds without a reply after which an executor is removed: the shortest that a query asks for.
    """

    def __init__(self, catalyst: Catalyst) -> None:
        self.timeout = math.inf
        self._catalyst = catalyst
        self._context = catalyst.spark.sparkContext._jsc.sc()
        self._backend = self._context.schedulerBackend()
        environment = self._backend.rpcEnv()
        endpoint = environment.setupEndpointRef(environment.address(), _MASTER)
        storage = "org.apache.spark.storage"
        self._master = catalyst.new(f"{storage}.{_MASTER}", endpoint, endpoint, self._context.conf(), False)
        block = catalyst.object(f"{storage}.BlockId").apply("rdd_0_0")
        self._message = catalyst.new(f"{storage}.BlockManagerMessages$GetBlockStatus", block, False)
        self._any = catalyst.object("scala.reflect.ClassTag").Any()
        failure = catalyst.object("scala.concurrent.duration.Duration").fromNanos(_FAILURE_NANOSECONDS)
        self._failure = catalyst.new("org.apache.spark.rpc.RpcTimeout", failure, "spark.millpond.executor.timeout")
        self._lock = threading.Lock()
        self._pings: dict[str, _Ping] = {}
        self._removed: dict[str, tuple[str, float]] = {}  # by executor: the host, and when, by the monotonic clock
        self._polled = time.monotonic()

    @classmethod
    def of(cls, catalyst: Catalyst, timeout: float) -> ExecutorPings | None:
        """Return the pings of an application; None on a Spark that cannot send them, and log a warning."""
        application = str(catalyst.spark.sparkContext.applicationId)
        try:
            if application not in _pings:
                _pings.clear()
                _pings[application] = cls(catalyst)
        except (Py4JError, TypeError) as error:
            log.warning("only Spark notices executors that hang, after spark.network.timeout: %s", error)
            return None
        pings = _pings[application]
        pings.timeout = min(pings.timeout, timeout)
        return pings

    def remove_silent(self) -> None:
        """Send the pings that are due, and remove the executors without a reply."""
        with self._lock:
            now = time.monotonic()
            step = min(now - self._polled, _MAX_STEP_SECONDS)
            self._polled = now
            executors = [str(executor) for executor in items(self._backend.getExecutorIds())]
            alive = [executor for executor in executors if executor not in self._removed]
            self._pings = {executor: self._pings[executor] for executor in alive if executor in self._pings}
            for executor in alive:
                if self._ping(executor, now, step) > self.timeout:
                    self._remove(executor, now)

    def removed_hosts(self) -> frozenset[str]:
        """Return the hosts of executors that have been removed a short time ago."""
        with self._lock:
            now = time.monotonic()
            return frozenset(host for host, at in self._removed.values() if now - at < _LOST_SECONDS)

    def _ping(self, executor: str, now: float, step: float) -> float:
        """Send a ping if it is due; return for how many seconds there has been no reply."""
        ping = self._pings.get(executor)
        if ping is not None and ping.reply is not None:
            # A failure is a reply as well: the connection is closed, and Spark knows it.
            ping.reply = None if ping.reply.isCompleted() else ping.reply
            ping.unanswered_seconds = 0.0 if ping.reply is None else ping.unanswered_seconds + step
        if ping is None or (ping.reply is None and now >= ping.next_at):
            endpoint = self._master.getExecutorEndpointRef(executor)
            if endpoint.isDefined():
                reply = endpoint.get().ask(self._message, self._failure, self._any)
                ping = self._pings[executor] = _Ping(reply, 0.0, now + self.timeout / _PINGS_PER_TIMEOUT)
        return 0.0 if ping is None else ping.unanswered_seconds

    def _remove(self, executor: str, now: float) -> None:
        address = str(self._context.statusStore().executorSummary(executor).hostPort())
        scheduler = "org.apache.spark.scheduler"
        why = f"it has not answered for {self.timeout:g} s (spark.millpond.executor.timeout)"
        nothing = self._catalyst.object("scala.Option").empty()
        loss = self._catalyst.new(f"{scheduler}.ExecutorProcessLost", why, nothing, False)
        messages = f"{scheduler}.cluster.CoarseGrainedClusterMessages"
        # The cluster manager may not reach the executor either: so the scheduler is asked first.
        self._backend.driverEndpoint().send(self._catalyst.new(f"{messages}$RemoveExecutor", executor, loss))
        self._removed[executor] = (host_of(address), now)
        log.warning("the executor at %s does not answer: its tasks run elsewhere from now on", address)
        # In a thread of its own, as the cluster manager may take its time, or never answer.
        threading.Thread(target=self._kill, args=(executor,), name="millpond-killing", daemon=True).start()

    def _kill(self, executor: str) -> None:
        with suppress(Py4JError):  # Spark's log says why
            self._context.killAndReplaceExecutor(executor)
