"""Append files with a copy on the local disk, if there is room for it: mapped when there, read from afar when not."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

from millpond.files.backends.filesystem import Buffer
from millpond.files.formats.append_file import MappedBytes, RemoteBytes
from millpond.files.tiers.local_copies import LocalCache


class CachedBytes:
    """The bytes of one append file, from its local copy while there is one (see `Bytes`).

    A copy is the file as it is, compressed. One that proves damaged is deleted, and the file read from afar.

    Args:
        name: of the file. afar: the file in the state location. copies: where local copies stand.
        mapped: the local copy, if there is one.
        missed: called after each reading from afar, with the number of ranges.

    Attributes:
        forgotten: the file is no longer part of the state.
    """

    def __init__(
        self,
        name: str,
        afar: RemoteBytes,
        copies: LocalCache,
        mapped: MappedBytes | None,
        missed: Callable[[CachedBytes, int], None],
    ) -> None:
        self.name = name
        self.afar = afar
        self.place = afar.place
        self.size = afar.size
        self.forgotten = False
        self._copies = copies
        self._missed = missed
        self._used = threading.local()  # whether this thread has read from the copy
        self._mapped: MappedBytes | None = None
        if mapped is not None:
            self.adopt(mapped)

    @property
    def remote(self) -> bool:
        """See `Bytes.remote`."""
        return self._mapped is None

    def adopt(self, mapped: MappedBytes) -> None:
        """Use a local copy from now on, unless it is gone already."""
        own = weakref.ref(self)  # files are not closed: who is asked to let go may be gone

        def lose() -> None:
            if (mine := own()) is not None:
                mine._mapped = None

        if mapped.size == self.size and self._copies.use(self.name, lose):
            self._mapped = mapped

    def get(self, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """See `Bytes.get`."""
        mapped = self._mapped
        self._used.copy = mapped is not None
        lengths = sum(length for _, length in ranges) / max(1, self.size)
        self._copies.read(self.name, lengths, 0 if mapped is None else len(ranges))
        if mapped is not None:
            return mapped.get(ranges)
        found = self.afar.get(ranges)
        self._missed(self, len(ranges))
        return found

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """See `Bytes.expect`."""
        mapped = self._mapped
        if mapped is not None:
            mapped.expect(ranges)

    def part(self, offset: int, length: int) -> RemoteBytes:
        """See `Bytes.part`."""
        return self.afar.part(offset, length)

    def distrust(self) -> bool:
        """See `Bytes.distrust`: the copy goes. Others may have read from it, too, and may have been faster."""
        if not getattr(self._used, "copy", False):
            return False
        if self._mapped is not None:
            self._mapped = None
            self._copies.drop(self.name)
        return True
