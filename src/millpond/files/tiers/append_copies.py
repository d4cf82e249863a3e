"""Append files with a copy on the local disk if there is room: mapped if copied, else read from the remote store."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

from millpond.files.backends.filesystem import Buffer
from millpond.files.formats.append_file import MappedBytes, RemoteBytes
from millpond.files.tiers.local_copies import LocalCache


class CachedBytes:
    """The bytes of one append file, from its local copy while there is one (see `Bytes`).

    A copy has the same bytes as the file, including compression. If a copy is damaged, it is deleted and the remote
    file is read.

    Args:
        name: name of the file.
        remote_bytes: the file in the state location.
        copies: the cache of local copies.
        mapped: the local copy, if there is one.
        missed: called after each remote read, with the number of ranges.

    Attributes:
        forgotten: whether the file is no longer part of the state.
    """

    def __init__(
        self,
        name: str,
        remote_bytes: RemoteBytes,
        copies: LocalCache,
        mapped: MappedBytes | None,
        missed: Callable[[CachedBytes, int], None],
    ) -> None:
        self.name = name
        self.remote_bytes = remote_bytes
        self.place = remote_bytes.place
        self.size = remote_bytes.size
        self.forgotten = False
        self._copies = copies
        self._missed = missed
        self._last_read = threading.local()  # its `copy`: whether this thread's last read was from the copy
        self._mapped: MappedBytes | None = None
        if mapped is not None:
            self.adopt(mapped)

    @property
    def remote(self) -> bool:
        """See `Bytes.remote`."""
        return self._mapped is None

    def adopt(self, mapped: MappedBytes) -> None:
        """Use a local copy from now on, unless its size is wrong or it was evicted meanwhile."""
        own = weakref.ref(self)  # append files are not closed, so the cache's callback must not keep this object alive

        def on_evicted() -> None:
            if (reader := own()) is not None:
                reader._mapped = None

        if mapped.size == self.size and self._copies.subscribe(self.name, on_evicted):
            self._mapped = mapped

    def get(self, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """See `Bytes.get`."""
        mapped = self._mapped
        self._last_read.copy = mapped is not None
        lengths = sum(length for _, length in ranges) / max(1, self.size)
        self._copies.read(self.name, lengths, 0 if mapped is None else len(ranges))
        if mapped is not None:
            return mapped.get(ranges)
        pieces = self.remote_bytes.get(ranges)
        self._missed(self, len(ranges))
        return pieces

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """See `Bytes.prefetch`."""
        mapped = self._mapped
        if mapped is not None:
            mapped.prefetch(ranges)

    def part(self, offset: int, length: int) -> RemoteBytes:
        """See `Bytes.part`."""
        return self.remote_bytes.part(offset, length)

    def report_damage(self) -> bool:
        """See `Bytes.report_damage`: delete the copy, unless another thread that read from it has done so already."""
        if not getattr(self._last_read, "copy", False):
            return False
        if self._mapped is not None:
            self._mapped = None
            self._copies.drop(self.name)
        return True
