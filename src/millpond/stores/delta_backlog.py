"""The deltas of a table that no file covers yet, and when they are enough for a flush."""

from __future__ import annotations

# A flush is due at this number of deltas, or at a number of bytes: recovery reads all deltas since the last flush.
_MAX_DELTAS = 64
_MIN_FLUSH_BYTES = 32 << 20  # bytes of deltas from which a flush is due: half of the budget, within these bounds
_MAX_FLUSH_BYTES = 512 << 20


class DeltaBacklog:
    """The deltas that a recovery of one table would read.

    Args:
        budget: bytes of memory that the tables of a slot share.
    """

    def __init__(self, budget: int) -> None:
        self._flush_bytes = min(max(budget // 2, _MIN_FLUSH_BYTES), _MAX_FLUSH_BYTES)
        self._deltas: list[tuple[int, int]] = []  # version and bytes

    @property
    def due(self) -> bool:
        """Whether the deltas are many or long, so that they should be covered."""
        return len(self._deltas) >= _MAX_DELTAS or sum(size for _, size in self._deltas) >= self._flush_bytes

    def add(self, version: int, size: int) -> None:
        """Record a delta's bytes, and the version that it made (0: recovery has loaded it)."""
        self._deltas.append((version, size))

    def cover(self, version: int) -> None:
        """Drop the deltas up to a version: recovery no longer reads them."""
        self._deltas = [delta for delta in self._deltas if delta[0] > version]
