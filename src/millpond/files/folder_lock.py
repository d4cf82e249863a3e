"""Locks of folders that several processes use and remove.

The lock of a folder is a `flock` on the file `lock` in it. The kernel releases it when its holder dies.

Between `open` and `flock`, another process may remove the folder, and a third one may create it again. Then the locked
file is that of the removed folder, and its lock protects nothing. So `lock_folder` checks after `flock` that the path
still leads to the locked file.

Only the holder of the lock removes a folder. Either the folder's name is never used again, or the folder is renamed
first (`remove_locked`): later processes create a new folder, which the removal cannot touch.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import uuid
from pathlib import Path

REMOVED = ".removed-"
"""Name prefix of folders that are being removed. If the removing process dies, another one finishes its work."""

_LOCK = "lock"


def lock_folder(folder: str | Path, *, wait: bool, create: bool = True) -> int | None:
    """Lock a folder; return the lock's descriptor, or None if another process holds the lock.

    Closing the descriptor releases the lock.

    Args:
        folder: the folder.
        wait: whether to wait until the lock is free, instead of returning None.
        create: whether to create the lock file if it is missing.

    Raises:
        FileNotFoundError: the folder does not exist, or was removed before it was locked; without `create` also if it
            has no lock file.
    """
    lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_lock_of(lock, folder):
            raise FileNotFoundError(errno.ENOENT, "the folder was removed", str(folder))
    except BlockingIOError:
        os.close(lock)
        return None
    except BaseException:
        os.close(lock)
        raise
    return lock


def is_lock_of(lock: int, folder: str | Path) -> bool:
    """Return whether a descriptor is that of the folder's lock file: the folder was neither removed nor replaced."""
    try:
        return os.path.samestat(os.fstat(lock), os.stat(os.path.join(folder, _LOCK)))
    except OSError:
        return False


def remove_locked(folder: Path, parent: Path) -> None:
    """Remove a folder whose lock this process holds.

    Args:
        folder: the folder.
        parent: a folder of the same file system, for the hidden name of the folder until it is removed. Its users
            remove folders whose names begin with `REMOVED`.

    Raises:
        OSError: the folder cannot be renamed; nothing is removed.
    """
    hidden = parent / f"{REMOVED}{uuid.uuid4().hex}"
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
