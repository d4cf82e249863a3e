"""The private directory of one application's slots on one host, and the registration of the JVMs that need them.

```
<directory>/millpond-<uid>/<host>-<application>/      mode 0700
    lock                 held while a user registers, the template is started, or the directory is swept
    template.sock, template.pid
    slot-<i>.sock, slot-<i>.pid
    owners/<pid>-<start> one empty file per JVM that uses the slots
    compiling            exists until the driver has reported that kernels are compiled
    sealed/…, cache/…    sealed deltas not yet durable; files without names
    exchange/…, hints/…  rows on their way to slots; requests for prefetch hints
    queries/…            one note per running query
    log                  output of the template and the slots
```

Beside it, `copies/` holds data that outlives applications: copies of files in object stores (`partition/copies.py`).

The template and the slots check `owners/` twice a second and exit when all of those JVMs are dead. Directory names
contain the host and its process namespace, so that directories shared between containers are never misjudged.

A user registers while holding the lock. A directory without users is also renamed and removed under the lock. So no
registration is lost, and a directory is never removed while it has users.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from millpond.errors import SettingError, TransientError
from millpond.files.disk import reason, remedy
from millpond.files.folder_lock import REMOVED, lock_folder, remove_locked
from millpond.slot.process.identity import Process, executor_host, identify, namespace
from millpond.tasks.operator_task import OperatorTask

POLL_SECONDS = 0.5
"""Seconds between two checks of whether the application is alive."""

LOCK_SECONDS = 10.0
"""Seconds for which the last process to exit waits for the directory's lock."""

_MAX_ADDRESS_BYTES = 100
_MAX_SWEEPS = 100
"""Number of times that the directory may be swept during one registration. Each sweep is by another application."""
_LOG_TAIL_LINES = 40
_LOG_TAIL_BYTES = 16 << 10


class SlotDirectory:
    """Paths, locks and registrations of one application on this host. Creating the object creates nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, task: OperatorTask) -> SlotDirectory:
        """Return the directory that serves this task's application on this host."""
        return cls.named(task.settings.directory or tempfile.gettempdir(), task.application)

    @classmethod
    def named(cls, directory: str, application: str) -> SlotDirectory:
        """Return the directory of an application below a host-local directory."""
        return cls(Path(directory) / f"millpond-{os.getuid()}" / f"{_short(namespace())}-{_short(application)}")

    def register(self, user: Process) -> None:
        """Create the directory, private to this user, and register a process for whose lifetime the slots keep running.

        Raises:
            TransientError: the process is dead. Nothing is created for it, and an existing directory is removed.
            SettingError: the directory cannot be created, has another owner, or other users may enter it.
        """
        if not user.alive():
            self.sweep()
            raise TransientError(
                f"The application's JVM (process {user.pid}) has ended, so nothing is started for it.",
                action="Start the application again.",
                file=str(self.path),
            )
        registration = self.path / "owners" / f"{user.pid}-{user.start}"
        try:
            for _ in range(_MAX_SWEEPS):
                with contextlib.suppress(FileNotFoundError):  # the directory was swept meanwhile
                    self._create()
                    if not registration.exists():
                        # With the lock held, a sweep has either removed the directory already or sees this
                        # registration.
                        with self.locked():
                            registration.touch(0o600)
                    return
            raise TimeoutError("it is removed again and again")
        except OSError as error:
            raise SettingError(
                f"The directory for the slots of this host cannot be used: {reason(error)}.",
                action=remedy(error, str(self.path.parent), "point TMPDIR to another local disk, and start again"),
                file=str(self.path),
            ) from error

    def unregister(self, user: Process) -> None:
        """Unregister a process that lives on, so that the slots can exit."""
        (self.path / "owners" / f"{user.pid}-{user.start}").unlink(missing_ok=True)

    def _create(self) -> None:
        # Connections carry pickles, so no other user may reach the sockets.
        for path in (self.path.parent, self.path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            stat = path.lstat()
            if stat.st_uid != os.getuid() or stat.st_mode & 0o077 or path.is_symlink():
                raise PermissionError(f"{path} is not private to user {os.getuid()}")
        (self.path / "owners").mkdir(exist_ok=True)

    # registrations --------------------------------------------------------------------------------------------

    def needed(self) -> bool:
        """Return whether a registered process is alive; remove registrations of dead ones."""
        alive = False
        try:
            for entry in self._entries("owners"):
                pid, _, start = entry.name.partition("-")
                if Process(int(pid), int(start)).alive():
                    alive = True
                else:
                    entry.unlink(missing_ok=True)
        except OSError:  # too many open files, for example: if in doubt, keep running
            return True
        return alive

    def host(self) -> str:
        """Return this host as Spark names it; empty under a local master."""
        users = (Process(*map(int, entry.name.split("-"))) for entry in self._entries("owners"))
        return next(filter(None, map(executor_host, users)), "")

    # processes -----------------------------------------------------------------------------------------------

    def record_process(self, name: str, process: Process) -> None:
        """Record the process that runs as `name` (`template`, `slot-0`)."""
        self._write(f"{name}.pid", process)

    def recorded_process(self, name: str) -> Process | None:
        """Return the process last recorded as `name`, dead or alive."""
        return self._read(f"{name}.pid")

    def record_loading(self, process: Process) -> None:
        """Record the process that will become the template."""
        self._write("loading", process)

    def loading(self) -> bool:
        """Return whether a started template has not recorded itself yet: it is still importing."""
        process = self._read("loading")
        return process is not None and process.alive() and process != self.recorded_process("template")

    def _write(self, name: str, process: Process) -> None:
        # Write and rename, so that readers never see a partial file.
        fresh = self.path / f"{name}.{os.getpid()}"
        fresh.write_bytes(msgspec.json.encode(process))
        fresh.rename(self.path / name)

    def _read(self, name: str) -> Process | None:
        try:
            return msgspec.json.decode((self.path / name).read_bytes(), type=Process)
        except (OSError, msgspec.DecodeError):
            return None

    def running(self) -> dict[str, Process]:
        """Return the template and the slots that are alive, by name."""
        processes = {}
        for entry in self._entries("."):
            if entry.suffix == ".pid":
                process = self.recorded_process(entry.stem)
                if process is not None and process.alive():
                    processes[entry.stem] = process
        return processes

    def _entries(self, folder: str) -> list[Path]:
        try:
            return list((self.path / folder).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    @property
    def compiling(self) -> Path:
        """Marker file: first batches wait for kernels to compile, and the driver has not yet reported it."""
        return self.path / "compiling"

    def log_tail(self) -> str:
        """Return the place of the slots' log and its last lines, which show why a process died or a task failed."""
        path = self.path / "log"
        place = f"See {path} on host {os.uname().nodename}."
        try:
            with path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        except OSError:
            lines = []
        return f"{place} It ends:\n" + "\n".join(lines) if lines else place

    # sockets --------------------------------------------------------------------------------------------------

    def listen(self, name: str) -> socket.socket:
        """Create a listening socket at `name`, replacing an existing one."""
        # Bind under a temporary name and rename: an old socket is replaced atomically by one that already listens.
        fresh = f"{name}.sock.{os.getpid()}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with self._address(fresh) as address:
            sock.bind(address)
        sock.listen(1024)
        (self.path / fresh).rename(self.path / f"{name}.sock")
        return sock

    def connect(self, name: str, timeout: float) -> socket.socket:
        """Connect to `name`.

        Raises:
            OSError: no process listens there, or the queue stays full for `timeout` seconds.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout)
        try:
            with self._address(f"{name}.sock") as address:
                sock.connect(address)
        except BaseException:
            sock.close()
            raise
        return sock

    @contextlib.contextmanager
    def _address(self, file: str) -> Iterator[str]:
        address = str(self.path / file)
        if len(address.encode()) < _MAX_ADDRESS_BYTES:
            yield address
            return
        # The kernel limits socket addresses to 107 bytes: refer to the directory by a descriptor instead.
        folder = os.open(self.path, os.O_PATH | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{folder}/{file}"
        finally:
            os.close(folder)

    # starting and sweeping ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self, *, wait: bool = True) -> Iterator[bool]:
        """Hold the directory's lock; yield False if it is taken and `wait` is off. The kernel releases it when its
        holder dies.

        Raises:
            FileNotFoundError: the directory does not exist, or was swept during the wait.
        """
        lock = lock_folder(self.path, wait=wait)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                os.close(lock)

    def sweep(self, lock_timeout: float = 0.0) -> bool:
        """Remove the directory if no registered process and no other slot process is alive; return whether that was
        done.

        Args:
            lock_timeout: seconds to keep trying to get the lock. The last process to exit needs some: another
                application that sweeps may hold the lock briefly.
        """
        deadline = time.monotonic() + lock_timeout
        while True:
            try:
                with self.locked(wait=False) as locked:
                    if locked:
                        # With the lock held, no user can register between this check and the rename.
                        if self.needed() or set(self.running().values()) - {identify()}:
                            return False
                        remove_locked(self.path, self.path.parent)
                        return True
            except OSError:
                return False
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS / 10)

    def sweep_siblings(self) -> None:
        """Remove directories of applications on this host that died without cleaning up."""
        host = self.path.name.partition("-")[0]
        for path in self._entries(".."):
            if path.name.startswith(REMOVED):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith(f"{host}-") and path.name != self.path.name:
                SlotDirectory(path).sweep()


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
