"""Finding a slot from a Spark worker or the driver: connect, or have the template fork it, or start the template."""

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
from typing import NamedTuple, TypeVar

from millpond.errors import TransientError
from millpond.slot.batch.task import PipeTask
from millpond.slot.process.connection import Connection, PeerGone, PeerSilent
from millpond.slot.process.identity import NO_THREADS, Process, identify, owner
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.slot.process.messages import Answered, Ask, Drain, Drained, Granted, Hello, Open, Opened, Status, Welcome

log = logging.getLogger(__name__)

_A = TypeVar("_A")

_LONGEST_LOADING = 600.0
"""Seconds that a template may take to import everything, on a machine where others are busy."""
DRAIN = 30.0
"""Seconds in which a query that ends, or starts again, waits for commits that are pending."""

_PAUSE = 0.002


class SlotFinder:
    """Finds the slots of one application on this host, starting what does not run.

    Args:
        task: says where, how many, and how long to wait.

    Raises:
        TransientError: no JVM is above this process.
    """

    def __init__(self, task: PipeTask) -> None:
        self.task = task
        self.directory = SlotDirectory.of(task)
        self.user = owner(task.jvm)

    def find(self, number: int) -> tuple[Connection, Process]:
        """A connection to a slot that has answered, and the slot's process.

        A slot that is dead is replaced; one that does not answer is killed and replaced.

        Raises:
            TransientError: no slot answered in time, or the application has ended.
        """
        settings = self.task.settings
        deadline = time.monotonic() + settings.start_timeout + settings.silence_timeout
        name = f"slot-{number}"
        while True:
            self.directory.enter(self.user)
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
                    action=self.directory.last_words(),
                    query=self.task.query,
                )
            self.replace(number, self.directory.noted(name) if hung else None)
            if not hung:
                time.sleep(_PAUSE)  # it may be finishing its commits before it ends

    def replace(self, number: int, process: Process | None = None) -> Process:
        """Have a slot forked; if `process` still holds the place, it is killed first.

        Raises:
            TransientError: the template cannot be started or does not answer.
        """
        settings = self.task.settings
        patience = 2 * settings.start_timeout  # once to find a hung template, once to start another
        deadline = time.monotonic() + patience
        latest = deadline + _LONGEST_LOADING
        reason: object = None
        while time.monotonic() < deadline:
            asked = self.directory.noted("template")
            try:
                connection = self._open("template", settings.start_timeout)
            except OSError as error:
                reason = error
                self._start_template()
                continue
            try:
                connection.send(Ask(number, process))
                granted: Granted = connection.expect(Granted)
                return granted.process
            except PeerSilent as error:
                reason = error
                if self.directory.loading() and time.monotonic() < latest:
                    log.warning("slots are not ready: what they need is still being loaded")
                    deadline = time.monotonic() + patience
                    continue
                if asked is not None and asked == self.directory.noted("template"):  # not one that has just come up
                    asked.kill()
            except OSError as error:
                reason = error
            finally:
                connection.close()
        raise TransientError(
            f"The template process that starts slots gives no answer ({reason}).",
            action=self.directory.last_words(),
            query=self.task.query,
        )

    def _open(self, name: str, silence: float) -> Connection:
        return Connection(self.directory.connect(name, silence), silence)

    def _start_template(self) -> None:
        self.directory.enter(self.user)  # what is started for a dead application would only end again
        with self.directory.locked():
            try:
                self.directory.connect("template", 1.0).close()
                return  # somebody else was faster
            except TimeoutError:
                return
            except OSError:
                pass
            # The socket exists before the process does: whoever asks from now on waits in its queue.
            listener = self.directory.listen("template")
            try:
                template = self._spawn(listener)  # held, so that it is known by its number even if it dies at once
                self.directory.note_loading(identify(template.pid))
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


def start_ahead(task: PipeTask) -> Thread:
    """Start a query's slots on this host in the background, before the first batch asks for them.

    A slot that does not come up is left to whoever needs it, who then tells why.

    Args:
        task: any pipe task of the query.
    """

    def start() -> None:
        finder = SlotFinder(task)
        with contextlib.suppress(OSError, TransientError):
            for number in range(min(task.slots, task.partitions)):
                finder.find(number)[0].close()
            _tell_compiling(finder.directory)

    thread = Thread(target=start, name="millpond-start-slots", daemon=True)
    thread.start()
    return thread


def open_ahead(tasks: Sequence[PipeTask], version: int) -> None:
    """Have a query's slots on this host open their partitions in the background, while Spark plans the first batch.

    What does not come to be is left to that batch, which then tells why.

    Args:
        tasks: the pipe tasks of all operators.
        version: the state that the first batch reads.
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


def _tell_compiling(directory: SlotDirectory) -> None:
    """Say that kernels are compiled, once in an application."""
    with contextlib.suppress(FileNotFoundError):
        directory.compiling.unlink()
        log.warning("Millpond compiles what this query needs, once on this machine: its first batches take longer")


def drain(task: PipeTask, timeout: float = DRAIN, *, ended: bool = False) -> dict[tuple[int, int], int]:
    """Have every slot on this host finish the query's pending commits and let go of its partitions.

    Args:
        task: any pipe task of the query.
        timeout: seconds to wait for the store, per slot.
        ended: whether it is for the end of the task's run: later ones are left alone.

    Returns:
        The durable version of each partition that a slot held, by (operator, partition).

    Raises:
        MillpondError: a slot could not make everything durable; the commit's own error.
    """
    directory = SlotDirectory.of(task)
    running = directory.running().values()
    message = Drain(task.key, timeout, task.generation if ended else None)
    answers = _ask_all(directory, message, Drained, timeout + task.settings.silence_timeout)
    deadline = time.monotonic() + timeout
    if not directory.needed():  # the application has ended: its slots answer no more, but finish their commits
        while any(process.alive() for process in running) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
    return {(operator, partition): version for answer in answers for operator, partition, version in answer.versions}


def answered_batches(task: PipeTask) -> dict[tuple[int, int], int]:
    """The batch that each of the query's partitions on this host has answered last, by (operator, partition)."""
    answers = _ask_all(SlotDirectory.of(task), Status(task.key), Answered, task.settings.silence_timeout)
    return {(operator, partition): batch for answer in answers for operator, partition, batch in answer.batches}


def troubles(task: PipeTask) -> list[str]:
    """Why the query's commits fail, of each slot on this host where they have failed for some seconds."""
    return commit_health(SlotDirectory.of(task), task.key, task.settings.silence_timeout).troubles


def lost_calls(task: PipeTask) -> list[str]:
    """For which keys code of the user was called when its process went, on this host in this run of the query."""
    answers = _ask_all(SlotDirectory.of(task), Status(task.key), Answered, task.settings.silence_timeout)
    return sorted({answer.lost_call for answer in answers if answer.lost_call})


class CommitHealth(NamedTuple):
    """How a query's commits fare on this host: why they fail, if they do; tries that failed since it was started."""

    troubles: list[str]
    failed: int


def commit_health(directory: SlotDirectory, query: str, silence: float) -> CommitHealth:
    """Ask an application's slots on this host how the commits of a query fare.

    Args:
        directory: of the slots.
        query: as slots know it (`PipeTask.key`).
        silence: seconds that a slot may give no sign of life.

    Raises:
        TransientError: a slot does not answer.
    """
    answers = _ask_all(directory, Status(query), Answered, silence)
    troubles = sorted({answer.trouble for answer in answers if answer.trouble})
    return CommitHealth(troubles, sum(answer.failed_commits for answer in answers))


def _ask_all(directory: SlotDirectory, message: Drain | Status, answer: type[_A], silence: float) -> list[_A]:
    asked: dict[str, Connection] = {}
    try:
        for name in sorted(directory.running()):
            if name == "template":
                continue
            try:
                asked[name] = Connection(directory.connect(name, silence), silence)
                asked[name].send(message)
            except (ConnectionError, FileNotFoundError, PeerGone):
                continue  # it has just ended, having finished its commits
        return [connection.expect(answer) for connection in asked.values()]
    except OSError as error:
        raise TransientError(
            f"A slot does not answer ({error}).", action=directory.last_words(), query=message.query
        ) from error
    finally:
        for connection in asked.values():
            connection.close()
