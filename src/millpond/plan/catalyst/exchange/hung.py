"""Executors that hang, or that the network has cut off: found by asking, and given up before Spark does so itself."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import items

log = logging.getLogger("millpond")

_MASTER = "BlockManagerMaster"
"""Name of the driver's endpoint that knows the executors' block managers."""
_QUESTIONS_PER_TIMEOUT = 6
_LONGEST_LOOK_SECONDS = 1.0
"""Seconds that one look counts at most, so that a pause of the driver itself is not held against the executors."""


@dataclass
class _Question:
    """A question to one executor.

    Attributes:
        answer: Scala's future of the answer; None when it has been given.
        waited: seconds without an answer.
        next_at: when the executor is asked again, by the monotonic clock.
    """

    answer: Any
    waited: float
    next_at: float


class HungExecutors:
    """Executors that do not answer.

    Spark waits for `spark.network.timeout` (120 s) after an executor's last sign of life. Until then a batch waits for
    the tasks that run there. Here the driver asks each executor for the state of a block that does not exist, which
    costs it next to nothing, and removes it from Spark's scheduler, as Spark would, when it has not answered for a
    shorter time. If such an executor goes on later, its cluster manager ends it.

    Tasks of other executors that are fetching its blocks go on waiting, each of them for several times as long, and
    those that follow them in the stage with them: executors learn only with the next stage that blocks are lost.

    Args:
        catalyst: of a session of the application, which runs on a cluster.
        timeout: seconds without an answer after which an executor is removed.
    """

    def __init__(self, catalyst: Catalyst, timeout: float) -> None:
        self._catalyst = catalyst
        self._timeout = timeout
        self._context = catalyst.spark.sparkContext._jsc.sc()
        self._backend = self._context.schedulerBackend()
        environment = self._backend.rpcEnv()
        endpoint = environment.setupEndpointRef(environment.address(), _MASTER)
        storage = "org.apache.spark.storage"
        self._master = catalyst.new(f"{storage}.{_MASTER}", endpoint, endpoint, self._context.conf(), False)
        block = catalyst.object(f"{storage}.BlockId").apply("rdd_0_0")
        self._message = catalyst.new(f"{storage}.BlockManagerMessages$GetBlockStatus", block, False)
        self._questions: dict[str, _Question] = {}
        self._looked = time.monotonic()

    @classmethod
    def of(cls, catalyst: Catalyst, timeout: float) -> HungExecutors | None:
        """Return an application's hung executors; None on a Spark that cannot be asked, and log a warning."""
        try:
            return cls(catalyst, timeout)
        except (Py4JError, TypeError) as error:
            log.warning("only Spark notices executors that hang, after spark.network.timeout: %s", error)
            return None

    def remove(self) -> list[str]:
        """Ask executors whose turn it is; remove those that have not answered in time, and return their addresses."""
        now = time.monotonic()
        passed = min(now - self._looked, _LONGEST_LOOK_SECONDS)
        self._looked = now
        executors = [str(executor) for executor in items(self._backend.getExecutorIds())]
        self._questions = {executor: self._questions[executor] for executor in executors if executor in self._questions}
        hung = [executor for executor in executors if self._waited(executor, now, passed) > self._timeout]
        return [self._remove(executor) for executor in hung]

    def _waited(self, executor: str, now: float, passed: float) -> float:
        """Return for how many seconds an executor has not answered."""
        question = self._questions.get(executor)
        if question is not None and question.answer is not None:
            # A failure is an answer as well: Spark knows of it.
            question.answer = None if question.answer.isCompleted() else question.answer
            question.waited = 0.0 if question.answer is None else question.waited + passed
        if question is None or (question.answer is None and now >= question.next_at):
            endpoint = self._master.getExecutorEndpointRef(executor)
            if endpoint.isDefined():
                answer = endpoint.get().ask(self._message, self._catalyst.object("scala.reflect.ClassTag").Any())
                question = _Question(answer, 0.0, now + self._timeout / _QUESTIONS_PER_TIMEOUT)
                self._questions[executor] = question
        return 0.0 if question is None else question.waited

    def _remove(self, executor: str) -> str:
        address = str(self._context.statusStore().executorSummary(executor).hostPort())
        scheduler = "org.apache.spark.scheduler"
        why = f"it has not answered for {self._timeout:g} s (spark.millpond.executor.timeout)"
        nothing = self._catalyst.object("scala.Option").empty()
        loss = self._catalyst.new(f"{scheduler}.ExecutorProcessLost", why, nothing, False)
        messages = f"{scheduler}.cluster.CoarseGrainedClusterMessages"
        # The cluster manager may not reach the executor either: so the scheduler is asked first.
        self._backend.driverEndpoint().send(self._catalyst.new(f"{messages}$RemoveExecutor", executor, loss))
        # In a thread of its own, as the cluster manager may take its time, or never answer.
        threading.Thread(target=self._kill, args=(executor,), name="millpond-killing", daemon=True).start()
        return address

    def _kill(self, executor: str) -> None:
        with suppress(Py4JError):  # Spark's log says why
            self._context.killAndReplaceExecutor(executor)
