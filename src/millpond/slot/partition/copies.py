"""Folders for local copies of a query's files, kept for its next start on this host.

```
<directory>/millpond-<uid>/copies/<query.id>-<hash of its location>/<slot>/
    lock     held by the slot that uses the folder
    *.run, *.append    copies; removed when unused for long
```

One slot at a time uses a folder. A slot that finds the lock taken, as an earlier application is still ending, uses the
application's own directory instead. Copies have the unique names of their files. Each block is checked when it is first
read.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from millpond.files.folder_lock import REMOVED, is_lock_of, lock_folder, remove_locked

KEPT_SECONDS = 86_400.0
"""Seconds for which unused copies are kept."""

_CLAIM_TRIES = 10
"""Number of tries to claim a folder that another process removes meanwhile."""


class CopiesFolder:
    """A folder of copies that this process owns until `release`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @property
    def is_current(self) -> bool:
        """Whether the folder still exists and has not been replaced by another."""
        return is_lock_of(self._lock, self.path)

    @property
    def bytes(self) -> int:
        """Total size of the folder's files in bytes."""
        with os.scandir(self.path) as entries:
            return sum(entry.stat().st_size for entry in entries)

    def release(self) -> None:
        """Release the folder for another slot."""
        with contextlib.suppress(OSError):
            os.utime(self._lock)
        os.close(self._lock)


def claim_copies(root: Path, query: str, slot: int) -> CopiesFolder | None:
    """Claim the folder of a query's slot; None if another process uses it or it cannot be created."""
    folder = root / query / str(slot)
    for _ in range(_CLAIM_TRIES):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = lock_folder(folder, wait=False)
        except FileNotFoundError:  # `remove_old_copies` removed it meanwhile
            continue
        except OSError:
            return None
        if lock is None:
            return None
        # `remove_old_copies` goes by this time.
        os.utime(lock)
        for partial in folder.glob("*.tmp"):  # partial copies of a process that died
            partial.unlink(missing_ok=True)
        return CopiesFolder(folder, lock)
    return None


def remove_old_copies(root: Path, kept: float = KEPT_SECONDS) -> None:
    """Remove folders that have not been used for `kept` seconds."""
    for query in _entries(root):
        if query.name.startswith(REMOVED):
            shutil.rmtree(query, ignore_errors=True)
            continue
        for folder in _entries(query):
            with contextlib.suppress(OSError):
                _remove_old(root, folder, time.time() - kept)
        with contextlib.suppress(OSError):  # the folder is not empty
            query.rmdir()


def _remove_old(root: Path, folder: Path, before: float) -> None:
    if _last_used(folder) > before:
        return
    lock = lock_folder(folder, wait=False)
    if lock is None:
        return
    try:
        # Checked again with the lock held: another slot may have used the folder meanwhile.
        if _last_used(folder) <= before:
            remove_locked(folder, root)
    finally:
        os.close(lock)


def _last_used(folder: Path) -> float:
    """Return when the folder was last claimed or released, or when a copy was added or removed."""
    return max(path.stat().st_mtime for path in (folder, folder / "lock") if path.exists())


def _entries(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []
