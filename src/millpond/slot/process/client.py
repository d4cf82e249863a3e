"""Slot client of a Spark worker or the driver: connects to a slot, starting the slot and its template if needed."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from threading import Thread
from typing import TypeVar

from millpond.errors import FencedError, TransientError
from millpond.slot.process.connection import Connection, PeerSilent
from millpond.slot.process.identity import NO_THREADS, Process, identify, owner
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.slot.process.messages import (
    Drain,
    Drained,
    Hello,
    Open,
    Opened,
    QueryStatus,
    RequestSlot,
    SlotStarted,
    Status,
    Welcome,
)
from millpond.tasks.operator_task import OperatorTask

log = logging.getLogger(__name__)

_A = TypeVar("_A")

_MAX_LOADING_SECONDS = 600.0
"""Seconds that a template may take to import everything on a busy machine."""
DRAIN_SECONDS = 30.0
"""Seconds for which a query that ends or restarts waits for pending commits."""

_RETRY_PAUSE_SECONDS = 0.002

_MAX_FAILED_STARTS = 3
"""Times that a template may end with an exit code before it serves: a package that is missing stays missing."""


class SlotFinder:
    """Finds the slots of one application on this host and starts those that do not run.

    Args:
        task: the location, the number of slots, and the timeouts.

    Raises:
        TransientError: this process has no JVM ancestor.
    """

    def __init__(self, task: OperatorTask) -> None:
        self.task = task
        self.directory = SlotDirectory.of(task)
        self.user = owner(task.jvm)

    def find(self, number: int) -> tuple[Connection, Process]:
        """Connect to a slot that answers; return the connection and the slot's process.

        A dead slot is replaced. A slot that does not answer is killed and replaced.

        Raises:
            TransientError: no slot answered in time, or the application has ended.
        """
        settings = self.task.settings
        deadline = time.monotonic() + settings.start_timeout + settings.silence_timeout
        name = f"slot-{number}"
        while True:
            self.directory.register(self.user)
            hung = False
            connection = None
            try:
                connection = self._open(name, settings.silence_timeout)
                connection.send(Hello())
                welcome: Welcome = connection.expect(Welcome)
                return connection, welcome.process
            except OSError as error:
                hung = isinstance(error, PeerSilent | TimeoutError)
                reason = error
                if connection is not None:
                    connection.close()
            if time.monotonic() > deadline:
                raise TransientError(
                    f"Slot {number} does not answer ({reason}).",
                    action=self.directory.log_tail(),
                    query=self.task.query,
                )
            self.replace(number, self.directory.recorded_process(name) if hung else None)
            if not hung:
                time.sleep(_RETRY_PAUSE_SECONDS)  # the old slot may be finishing its commits before it exits

    def replace(self, number: int, process: Process | None = None) -> Process:
        """Start a slot through the template; if `process` still is that slot, it is killed first.

        Raises:
            TransientError: the template cannot be started or does not answer.
        """
        settings = self.task.settings
        timeout = 2 * settings.start_timeout  # once to detect a hung template, once to start another
        deadline = time.monotonic() + timeout
        latest = deadline + _MAX_LOADING_SECONDS
        reason: object = None
        template: subprocess.Popen[bytes] | None = None
        failed_starts = 0
        while time.monotonic() < deadline and failed_starts < _MAX_FAILED_STARTS:
            asked = self.directory.recorded_process("template")
            try:
                connection = self._open("template", settings.start_timeout)
            except OSError as error:
                reason = error
                if template is not None and (template.poll() or 0) > 0:
                    reason = f"it ended with exit code {template.returncode}"
                    failed_starts += 1
                if failed_starts < _MAX_FAILED_STARTS:
                    template = self._start_template()
                continue
            try:
                connection.send(RequestSlot(number, process))
                granted: SlotStarted = connection.expect(SlotStarted)
                return granted.process
            except PeerSilent as error:
                reason = error
                if self.directory.loading() and time.monotonic() < latest:
                    log.warning("slots are not ready: what they need is still being loaded")
                    deadline = time.monotonic() + timeout
                    continue
                # Kill only the template that was asked, not one that has just replaced it.
                if asked is not None and asked == self.directory.recorded_process("template"):
                    asked.kill()
            except OSError as error:
                reason = error
            finally:
                connection.close()
        raise TransientError(
            f"The template process that starts slots gives no answer ({reason}).",
            action=self.directory.log_tail(),
            query=self.task.query,
        )

    def _open(self, name: str, silence: float) -> Connection:
        return Connection(self.directory.connect(name, silence), silence)

    def _start_template(self) -> subprocess.Popen[bytes] | None:
        """Start a template, unless another process has started one meanwhile."""
        self.directory.register(self.user)  # raises if the application is dead: a template would exit at once
        with self.directory.locked():
            try:
                self.directory.connect("template", 1.0).close()
                return None
            except TimeoutError:
                return None
            except OSError:
                pass
            # The socket exists before the process does: from now on, requests wait in its queue.
            listener = self.directory.listen("template")
            try:
                # The object must stay referenced: a child that is not reaped keeps its pid, even if it dies at once.
                template = self._spawn(listener)
                self.directory.record_loading(identify(template.pid))
                return template
            finally:
                listener.close()

    def _spawn(self, listener: socket.socket) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **NO_THREADS, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        output = os.open(self.directory.path / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        try:
            return subprocess.Popen(
                [sys.executable, "-m", self.task.template, str(self.directory.path), str(listener.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[listener.fileno()],
                start_new_session=True,
                env=environment,
            )
        finally:
            os.close(output)


def start_slots(task: OperatorTask) -> Thread:
    """Start a query's slots on this host in the background, before the first batch needs them; best effort.

    A slot that does not start is started again by its first user, which reports the error.

    Args:
        task: the task of any operator of the query.
    """

    def start() -> None:
        finder = SlotFinder(task)
        with contextlib.suppress(OSError, TransientError):
            for number in range(min(task.slots, task.partitions)):
                finder.find(number)[0].close()
            _warn_compiling(finder.directory)

    thread = Thread(target=start, name="millpond-start-slots", daemon=True)
    thread.start()
    return thread


def open_partitions(tasks: Sequence[OperatorTask], version: int) -> None:
    """Have slots open a query's partitions in the background while Spark plans the first batch; best effort.

    A partition that is not opened is opened by the first batch, which reports the error.

    Args:
        tasks: the tasks of all operators.
        version: the version that the first batch reads.
    """
    first = tasks[0]

    def ask(number: int) -> None:
        with contextlib.suppress(OSError, TransientError):
            connection, _ = SlotFinder(first).find(number)
            try:
                connection.silence = None
                connection.send(Open(list(tasks), list(range(number, first.partitions, first.slots)), version))
                connection.expect(Opened)
            finally:
                connection.close()

    for number in range(min(first.slots, first.partitions)):
        Thread(target=ask, args=(number,), name="millpond-open", daemon=True).start()


def _warn_compiling(directory: SlotDirectory) -> None:
    """Warn once per application that kernels are being compiled."""
    with contextlib.suppress(FileNotFoundError):
        # The process that removes the file is the only one to warn.
        directory.compiling.unlink()
        log.warning("Millpond compiles what this query needs, once on this machine: its first batches take longer")


def drain(task: OperatorTask, timeout: float = DRAIN_SECONDS, *, ended: bool = False) -> dict[tuple[int, int], int]:
    """Have every slot on this host finish the query's pending commits and release its partitions.

    Args:
        task: the task of any operator of the query.
        timeout: seconds to wait for the store, per slot.
        ended: whether the run has ended; then later runs are kept.

    Returns:
        The durable version of each partition that a slot held, by (operator, partition).

    Raises:
        MillpondError: a slot could not make everything durable; the commit's own error.
        FencedError: a newer run has taken over; all other slots have answered.
    """
    directory = SlotDirectory.of(task)
    running = directory.running().values()
    message = Drain(task.key, timeout, task.generation if ended else None)
    answers = _ask_all(directory, message, Drained, timeout + task.settings.silence_timeout)
    deadline = time.monotonic() + timeout
    if not directory.needed():  # the application has ended: its slots no longer answer, but finish their commits
        while any(process.alive() for process in running) and time.monotonic() < deadline:
            time.sleep(_RETRY_PAUSE_SECONDS)
    return {(operator, partition): version for answer in answers for operator, partition, version in answer.versions}


def query_status(directory: SlotDirectory, query: str, silence: float) -> QueryStatus:
    """Return the status of a query over all of an application's slots on this host.

    Args:
        directory: the directory of the slots.
        query: key of the query (`OperatorTask.key`).
        silence: seconds for which a slot may send nothing.

    Raises:
        TransientError: a slot does not answer.
    """
    replies = _ask_all(directory, Status(query), QueryStatus, silence)
    return QueryStatus(
        answered=[place for reply in replies for place in reply.answered],
        commit_failures=sorted({failure for reply in replies for failure in reply.commit_failures}),
        failed_commits=sum(reply.failed_commits for reply in replies),
        lost_calls=sorted({call for reply in replies for call in reply.lost_calls}),
    )


def _ask_all(directory: SlotDirectory, message: Drain | Status, answer: type[_A], silence: float) -> list[_A]:
    asked: dict[str, Connection] = {}
    try:
        for name in sorted(directory.running()):
            if name == "template":
                continue
            try:
                asked[name] = Connection(directory.connect(name, silence), silence)
                asked[name].send(message)
            except (ConnectionError, FileNotFoundError):
                continue  # the slot has just exited, after finishing its commits
        answers: list[_A] = []
        fenced: FencedError | None = None
        for connection in asked.values():
            try:
                answers.append(connection.expect(answer))
            except FencedError as error:
                fenced = error  # raised last: it must not hide that another slot has not released the run
        if fenced is not None:
            raise fenced
        return answers
    except OSError as error:
        raise TransientError(
            f"A slot does not answer ({error}).", action=directory.log_tail(), query=message.query
        ) from error
    finally:
        for connection in asked.values():
            connection.close()
