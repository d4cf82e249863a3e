"""The template process: it imports everything, loads the kernels, and forks slots that start at once.

It must never start a thread. A fork copies only the calling thread, but also every lock that other threads hold.
"""

from __future__ import annotations

import errno
import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from millpond.errors import TransientError
from millpond.files.disk import reason, remedy
from millpond.slot.process.connection import Connection, accept
from millpond.slot.process.identity import Process, identify
from millpond.slot.process.lifecycle import LOCK_SECONDS, POLL_SECONDS, SlotDirectory
from millpond.slot.process.messages import RequestSlot, SlotStarted

log = logging.getLogger("millpond")

_LOG_FORMAT = "%(asctime)s {name}: %(message)s"
"""Template and slots of a host share one log."""

Serve = Callable[[SlotDirectory, int, socket.socket], None]
"""Runs a slot until it ends; takes its directory, its number and its listening socket."""

Prepare = Callable[[SlotDirectory], None]
"""Loads everything that all slots need before the first fork; it must leave no thread running."""


class Template:
    """Server that answers requests for a slot and forks the slot if it does not run.

    Args:
        directory: the application's slot directory.
        listener: the template's listening socket.
        serve: function that a forked slot runs.
    """

    def __init__(self, directory: SlotDirectory, listener: socket.socket, serve: Serve) -> None:
        self.directory = directory
        self.listener = listener
        self.serve = serve
        self._slots: dict[int, str] = {}  # names of the forked slots, by process id
        self._stopping = False

    def run(self) -> None:
        """Serve until the application has ended or SIGTERM arrives, then wait for the forked slots to exit."""
        # The default, so that `waitpid` reports the slots that have exited.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.directory.record_process("template", identify())
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            log.warning("The template has %d threads: what it forks may hang.", threads)
        self.directory.sweep_siblings()
        poller = select.poll()  # `select` cannot watch descriptors above 1,023
        poller.register(self.listener, select.POLLIN)
        while not self._stopping:
            ready = poller.poll(POLL_SECONDS * 1000)
            self._reap()
            if ready:
                self._answer()
            elif not self.directory.needed():
                break
        self.listener.close()
        while self._reap():
            if not self.directory.needed():
                # A suspended slot cannot notice that the application has ended.
                self._kill_stopped()
            time.sleep(POLL_SECONDS / 10)
        self.directory.sweep(LOCK_SECONDS)

    def _end(self, *_: object) -> None:
        self._stopping = True

    def _kill_stopped(self) -> None:
        for process in self.directory.running().values():
            if process.stopped():
                process.kill()

    def _reap(self) -> bool:
        """Collect the slots that have ended, and log why they died; return whether any slot is left."""
        try:
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                self._log_end(ended)
                # Collected only now: once the process is gone, its callers find the reason in the log.
                os.waitpid(ended.si_pid, 0)
        except ChildProcessError:
            return False
        return True

    def _log_end(self, ended: os.waitid_result) -> None:
        name = self._slots.pop(ended.si_pid, "a child")
        if ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
            signal_name = signal.strsignal(ended.si_status)
            log.warning("%s (process %d) died of signal %d (%s)", name, ended.si_pid, ended.si_status, signal_name)
        elif ended.si_status:
            log.warning("%s (process %d) exited with status %d", name, ended.si_pid, ended.si_status)

    def _answer(self) -> None:
        sock = accept(self.listener)
        if sock is None:
            return
        connection = Connection(sock, silence=5.0)
        try:
            request = connection.expect(RequestSlot)
            try:
                granted = SlotStarted(self._start_slot(request, connection))
            except TransientError as error:
                connection.send_error(error)
            except OSError as error:
                connection.send_error(_not_started(request.slot, error, self.directory))
            else:
                connection.send(granted)
        except OSError:
            return  # the requesting process has gone or is silent
        finally:
            connection.close()

    def _start_slot(self, request: RequestSlot, connection: Connection) -> Process:
        if not self.directory.needed():
            raise TransientError("The application has ended, so no slot is started for it.")
        name = f"slot-{request.slot}"
        current = self.directory.recorded_process(name)
        if current is not None and current.alive():
            if current != request.replace:
                return current
            # The old process must be dead before its successor reads its sealed files: then it cannot commit any more.
            if not current.kill():
                raise TransientError(f"Slot {request.slot} (process {current.pid}) is hung and cannot be killed.")
        # The socket listens before the fork, so a client can connect before the slot runs.
        listener = self.directory.listen(name)
        pid = os.fork()
        if pid == 0:
            connection.close()
            self._become_slot(request.slot, listener)
        listener.close()
        self._slots[pid] = name
        process = identify(pid)
        self.directory.record_process(name, process)
        return process

    def _become_slot(self, number: int, listener: socket.socket) -> None:
        code = 1
        try:
            logging.basicConfig(format=_LOG_FORMAT.format(name=f"slot-{number}"), force=True)
            self.listener.close()
            # The handler of the template does not concern the slot, which sets its own.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self.serve(self.directory, number, listener)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            # Not `sys.exit`: the fork must not run the template's exit handlers.
            os._exit(code)


def _not_started(number: int, error: OSError, directory: SlotDirectory) -> TransientError:
    forking = error.errno in (errno.EAGAIN, errno.ENOMEM)
    return TransientError(
        f"Slot {number} cannot be started: {reason(error)}.",
        action="Free memory, or allow this user more processes (ulimit -u), and start again."
        if forking
        else remedy(error, str(directory.path), "point TMPDIR to another local disk and start again"),
        file=str(directory.path),
    )


def main(serve: Serve, prepare: Prepare = lambda _: None) -> None:
    """Run the template: `python -m <module> DIRECTORY SOCKET-DESCRIPTOR`."""
    directory = SlotDirectory(Path(sys.argv[1]))
    listener = socket.socket(fileno=int(sys.argv[2]))
    os.chdir("/")
    logging.basicConfig(format=_LOG_FORMAT.format(name="template"))
    faulthandler.enable(all_threads=False)  # a crashing slot writes its stack trace to the log
    prepare(directory)
    gc.collect()
    gc.freeze()  # a garbage collection would write to, and so copy, every page that slots share with this process
    Template(directory, listener, serve).run()


if __name__ == "__main__":
    from millpond.slot.serve import compile_ahead, serve

    main(serve, compile_ahead)
