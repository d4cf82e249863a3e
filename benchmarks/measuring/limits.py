"""Limit memory by control group (v1 and v2), or drop files from the page cache where control groups are not allowed."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


class MemoryGroup:
    """A control group with a memory limit, page cache counted.

    Args:
        limit: bytes.

    Raises:
        OSError: this user may not make a control group here; the message names the file or folder.
    """

    def __init__(self, limit: int) -> None:
        self.path, limit_file, self._peak_file = self._create()
        try:
            (self.path / limit_file).write_text(str(limit))
        except OSError:
            self.close()
            raise

    def _create(self) -> tuple[Path, str, str]:
        name = f"millpond-benchmark-{uuid.uuid4().hex[:12]}"
        groups = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
        if "memory" in groups:
            path = _ROOT / "memory" / groups["memory"].lstrip("/") / name
            path.mkdir()
            return path, "memory.limit_in_bytes", "memory.max_usage_in_bytes"
        parent = _ROOT / groups.get("", "/").lstrip("/")
        if "memory" not in (parent / "cgroup.subtree_control").read_text().split():
            # Processes and controllers may not share a group in v2, so a sibling of our own group is the place.
            parent = parent.parent
            if "memory" not in (parent / "cgroup.subtree_control").read_text().split():
                raise OSError(f"{parent} hands no memory controller to its children")
        path = parent / name
        path.mkdir()
        return path, "memory.max", "memory.peak"

    @property
    def entrance(self) -> Path:
        """File to which a process writes its id to enter the group."""
        return self.path / "cgroup.procs"

    def peak(self) -> int:
        """Return the most bytes in use at once, page cache included; 0 if the kernel does not report it."""
        with suppress(OSError, ValueError):
            return int((self.path / self._peak_file).read_text())
        return 0

    def close(self) -> None:
        """Remove the group; its processes must have ended."""
        with suppress(OSError):
            self.path.rmdir()


def drop_page_cache(folder: Path) -> int:
    """Drop the cached pages of all files below a folder, dirty ones after writing them. Return the number of files."""
    files = 0
    for parent, _, names in os.walk(folder):  # skips folders that are removed meanwhile
        for name in names:
            path = Path(parent, name)
            with suppress(OSError):
                if not path.is_file():
                    continue
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fdatasync(descriptor)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    files += 1
                finally:
                    os.close(descriptor)
    return files
