"""Eviction policy: the access times (stamps) that rows get; rows with the lowest stamps are evicted first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from millpond.stores.runs.prefetcher import PrefetchFigures

Policy = Literal["timestamp", "lru", "clock"]
"""`timestamp`: evicts the least recently used rows, by batch or event time, unless they are hinted (Keyed Prefetching
§IV-D); `lru`: the least recently used rows; `clock`: rows that were not used since the last eviction."""

_MIN_SHARE, _MAX_SHARE = 0.125, 0.5
"""Share of a table's memory for prefetched keys."""
_SHARE_STEP = 1.5
_MAX_UNUSED_SHARE = 0.02
"""Share of unused prefetched keys from which the memory for prefetching shrinks."""

_USES_BITS = 16
_MAX_STAMP = (1 << 48) - 1


class Stamps:
    """The stamps of one table's rows. Rows that expire have their time of expiry as stamp, whatever the policy.

    Args:
        policy: the eviction policy.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._version = self._uses = 0

    def begin(self, version: int) -> None:
        """Start the batch that reads state `version`."""
        self._version, self._uses = version, 0

    @property
    def second_chances(self) -> bool:
        """Whether an eviction clears the stamps of the rows that stay."""
        return self._policy == "clock"

    def used(self, stamps: NDArray[np.int64] | int) -> NDArray[np.int64] | int:
        """Return the stamps of rows used now; `stamps` are their access times."""
        if self._policy == "timestamp":
            return stamps
        if self._policy == "clock":
            # 1: used since the last eviction, which has set the stamps of the remaining rows to 0.
            return 1
        self._uses += 1
        # The version is in the high bits, so that stamps keep ascending after a restart.
        return min(self._version << _USES_BITS | min(self._uses, (1 << _USES_BITS) - 1), _MAX_STAMP)

    def hinted(self, stamp: int) -> int:
        """Return the stamp of hinted rows."""
        # Stamps are only ever raised, so 0 leaves a row as it is: hints do not count as uses.
        return stamp if self._policy == "timestamp" else 0


class PrefetchShare:
    """The share of a table's memory that prefetched keys may take.

    Prefetched keys have the last place among evictable rows, because they are needed later than rows already used
    (Keyed Prefetching §IV-D). The share grows while there is no room for all hinted keys and all prefetched ones are
    used. It shrinks when prefetched keys stay unused.

    Attributes:
        value: the share.
    """

    def __init__(self) -> None:
        self.value = 0.25

    def learn(self, figures: PrefetchFigures) -> None:
        """Adjust the share to the prefetch figures of a batch."""
        if figures.read - figures.used > _MAX_UNUSED_SHARE * figures.read:
            self.value = max(_MIN_SHARE, self.value / _SHARE_STEP)
        elif figures.read and figures.dropped:
            self.value = min(_MAX_SHARE, self.value * _SHARE_STEP)
