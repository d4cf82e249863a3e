"""The private directory in which one application's slots on one host live, and who may still need them.

```
<directory>/millpond-<uid>/<host>-<application>/      mode 0700
    lock                 held while a user registers, the template is started, or the directory is swept
    template.sock, template.pid
    slot-<i>.sock, slot-<i>.pid
    owners/<pid>-<start> one empty file per JVM that uses the slots
    compiling            there while the driver has not told its user that kernels are compiled
    sealed/…, cache/…    sealed deltas not yet durable; files without names
    exchange/…, hints/…  rows on their way to slots; who wants keys announced
    queries/…           the queries that run
    log                  what template and slots say
```

Beside it, `copies/` has what outlives applications: copies of files in object stores (`partition/copies.py`).

Whoever runs here looks at `owners/` twice a second and ends when none of them is alive. Names hold the host and its
process namespace, so that directories shared between containers are never misjudged.

A user registers with the lock held, and with the lock held a directory without users is renamed, then removed: so no
registration is lost, and what was found under the name stays until its users are gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec

from millpond.errors import SettingError, TransientError
from millpond.files.disk import reason, remedy
from millpond.slot.batch.task import PipeTask
from millpond.slot.process.identity import Process, identify, namespace

POLL = 0.5
"""Seconds between two looks at whether the application still lives."""

PATIENCE = 10.0
"""Seconds for which the last to leave waits for the directory's lock."""

_ADDRESS_LIMIT = 100
_SWEPT = 100
"""How often a directory may be swept while somebody registers: each time it takes another application's sweep."""
_REMOVED = ".removed-"
"""What the names of directories that nobody uses any more begin with."""
_LAST_LINES = 20


class SlotDirectory:
    """Paths, locks and registrations of one application on this host. Creating the object creates nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, task: PipeTask) -> SlotDirectory:
        """The directory that serves this task's application on this host."""
        return cls.named(task.settings.directory or tempfile.gettempdir(), task.application)

    @classmethod
    def named(cls, directory: str, application: str) -> SlotDirectory:
        """The directory of an application below a host-local directory."""
        return cls(Path(directory) / f"millpond-{os.getuid()}" / f"{_short(namespace())}-{_short(application)}")

    def enter(self, user: Process) -> None:
        """Make the directory, private to this user, and keep the slots alive as long as this process lives.

        Raises:
            TransientError: the process is dead. Nothing is made for it, and what was made is removed.
            SettingError: it cannot be made, belongs to somebody else, or others may enter it.
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
            for _ in range(_SWEPT):
                with contextlib.suppress(FileNotFoundError):  # swept meanwhile
                    self._create()
                    if not registration.exists():
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

    def leave(self, user: Process) -> None:
        """Let the slots end though this process lives on."""
        (self.path / "owners" / f"{user.pid}-{user.start}").unlink(missing_ok=True)

    def _create(self) -> None:
        for path in (self.path.parent, self.path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            stat = path.lstat()
            if stat.st_uid != os.getuid() or stat.st_mode & 0o077 or path.is_symlink():
                raise PermissionError(f"{path} is not private to user {os.getuid()}")
        (self.path / "owners").mkdir(exist_ok=True)

    # who needs it ---------------------------------------------------------------------------------------------

    def needed(self) -> bool:
        """Whether a registered process still lives; forgets the dead."""
        alive = False
        try:
            for entry in self._entries("owners"):
                pid, _, start = entry.name.partition("-")
                if Process(int(pid), int(start)).alive():
                    alive = True
                else:
                    entry.unlink(missing_ok=True)
        except OSError:  # no more files may be opened, say: nobody knows, so nothing ends
            return True
        return alive

    # who runs here --------------------------------------------------------------------------------------------

    def note(self, name: str, process: Process) -> None:
        """Write down that `name` (`template`, `slot-0`) is this process."""
        self._write(f"{name}.pid", process)

    def noted(self, name: str) -> Process | None:
        """The process last written down as `name`, dead or alive."""
        return self._read(f"{name}.pid")

    def note_loading(self, process: Process) -> None:
        """Write down that this process is to be the template."""
        self._write("loading", process)

    def loading(self) -> bool:
        """Whether a template has been started that has not noted itself yet: it still imports."""
        process = self._read("loading")
        return process is not None and process.alive() and process != self.noted("template")

    def _write(self, name: str, process: Process) -> None:
        fresh = self.path / f"{name}.{os.getpid()}"
        fresh.write_bytes(msgspec.json.encode(process))
        fresh.rename(self.path / name)

    def _read(self, name: str) -> Process | None:
        try:
            return msgspec.json.decode((self.path / name).read_bytes(), type=Process)
        except (OSError, msgspec.DecodeError):
            return None

    def running(self) -> dict[str, Process]:
        """Template and slots that are alive, by name."""
        found = {}
        for entry in self._entries("."):
            if entry.suffix == ".pid":
                process = self.noted(entry.stem)
                if process is not None and process.alive():
                    found[entry.stem] = process
        return found

    def _entries(self, folder: str) -> list[Path]:
        try:
            return list((self.path / folder).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    @property
    def compiling(self) -> Path:
        """An empty file: the first batches wait for kernels, and the driver has not told its user so yet."""
        return self.path / "compiling"

    def last_words(self) -> str:
        """Where the log is, and how it ends: what a process wrote before it died."""
        path = self.path / "log"
        try:
            lines = path.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        except OSError:
            lines = []
        return f"See {path}." + (" It ends:\n" + "\n".join(lines) if lines else "")

    # sockets --------------------------------------------------------------------------------------------------

    def listen(self, name: str) -> socket.socket:
        """A listening socket at `name`, in place of whatever was there."""
        fresh = f"{name}.sock.{os.getpid()}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with self._address(fresh) as address:
            sock.bind(address)
        sock.listen(1024)
        (self.path / fresh).rename(self.path / f"{name}.sock")
        return sock

    def connect(self, name: str, timeout: float) -> socket.socket:
        """A connection to `name`.

        Raises:
            OSError: nobody listens there (any more), or the queue stays full for `timeout` seconds.
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
        if len(address.encode()) < _ADDRESS_LIMIT:
            yield address
            return
        # The kernel takes 107 bytes: name the directory by a descriptor instead.
        folder = os.open(self.path, os.O_PATH | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{folder}/{file}"
        finally:
            os.close(folder)

    # starting and sweeping ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self, *, wait: bool = True) -> Iterator[bool]:
        """Hold the directory's lock, which dies with its holder; False if somebody else holds it and `wait` is off.

        Raises:
            FileNotFoundError: there is no directory, or it was swept while this waited.
        """
        lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            if not self._is_current(lock):
                raise FileNotFoundError(errno.ENOENT, "it was swept", str(self.path))
            yield True
        finally:
            os.close(lock)

    def _is_current(self, lock: int) -> bool:
        try:
            return os.path.samestat(os.fstat(lock), os.stat(self.path / "lock"))
        except OSError:
            return False

    def sweep(self, patience: float = 0.0) -> bool:
        """Remove the directory if nobody needs it and nobody else runs in it; whether it was removed.

        Args:
            patience: seconds to go on asking for a lock that somebody else holds. The last to leave needs some: another
                application that sweeps may just be looking.
        """
        deadline = time.monotonic() + patience
        while True:
            try:
                with self.locked(wait=False) as held:
                    if held:
                        if self.needed() or set(self.running().values()) - {identify()}:
                            return False
                        removed = self.path.with_name(f"{_REMOVED}{uuid.uuid4().hex}")
                        self.path.rename(removed)  # whoever comes now begins anew, and loses nothing to what follows
                        shutil.rmtree(removed, ignore_errors=True)
                        return True
            except OSError:
                return False
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL / 10)

    def sweep_siblings(self) -> None:
        """Remove what applications of this host that died without cleaning up have left."""
        host = self.path.name.partition("-")[0]
        for path in self._entries(".."):
            if path.name.startswith(_REMOVED):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith(f"{host}-") and path.name != self.path.name:
                SlotDirectory(path).sweep()


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
