"""Large anonymous mappings: reserved address space, so that growing contents never move."""

from __future__ import annotations

import errno
import mmap
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.errors import SettingError

_NORESERVE = 0x4000  # Linux's MAP_NORESERVE, which the mmap module names only from Python 3.13 on
_MIN_HUGE_BYTES = 32 << 20  # used bytes from which huge pages back a mapping, and the step in which they do
PAGE = mmap.PAGESIZE


class ReservedMapping:
    """`size` bytes of zeroed address space; pages take memory when they are first written.

    Attributes:
        size: bytes of address space.
        address: of the first byte.

    Raises:
        SettingError: the process has no address space left.
    """

    def __init__(self, size: int) -> None:
        self.size = -(-max(size, PAGE) // PAGE) * PAGE
        # Reserved address space must not count as committed memory: tables reserve more than the host may have.
        try:
            self._map = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise SettingError(
                f"The slot's process has no {self.size / (1 << 30):.1f} GiB of address space left for a table: each "
                "partition and each window has tables, which reserve a multiple of the slot's memory.",
                action="Use fewer partitions per slot, or lower spark.millpond.slot.memory; ulimit -v must not be set.",
            ) from error
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.address = int(self._bytes.__array_interface__["data"][0])
        self._huge_end = 0

    def view(self, dtype: Any) -> NDArray[Any]:
        """View the whole mapping as an array."""
        return self._bytes[: self.size - self.size % np.dtype(dtype).itemsize].view(dtype)

    def advise_huge_pages(self, used: int) -> None:
        """Prepare the first `used` bytes for use: in a large mapping, back them by huge pages.

        Only the used part and a quarter more is backed: a huge page for a few rows would waste memory.
        """
        if used >= _MIN_HUGE_BYTES and used > self._huge_end:
            until = min(self.size, used + used // 4) // _MIN_HUGE_BYTES * _MIN_HUGE_BYTES
            if until > self._huge_end:
                # A kernel without transparent huge pages refuses the hint (EINVAL); the mapping works without them.
                with suppress(OSError):
                    self._map.madvise(mmap.MADV_HUGEPAGE, self._huge_end, until - self._huge_end)
                self._huge_end = until

    def release(self, start: int, stop: int) -> None:
        """Return the whole pages between two offsets; they read as zeros afterwards."""
        first = -(-start // PAGE) * PAGE
        last = stop // PAGE * PAGE
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def close(self) -> None:
        """Release all memory. The address space is freed with the last array that refers to it."""
        self.release(0, self.size)
