"""Which rows leave memory first, said by the stamps that they get: those of the lowest stamps go."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Policy = Literal["timestamp", "lru", "clock"]
"""`timestamp`: those that were used longest ago, by batch or event time, and are not announced (Keyed Prefetching
§IV-D); `lru`: those that were used longest ago; `clock`: those that were not used since rows had to leave last."""

_USES_BITS = 16
_LATEST = (1 << 48) - 1


class Stamps:
    """The stamps of one table's rows. Rows that expire have those of their time whatever the policy.

    Args:
        policy: whose.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._version = self._uses = 0

    def begin(self, version: int) -> None:
        """Start the batch that reads state `version`."""
        self._version, self._uses = version, 0

    @property
    def second_chances(self) -> bool:
        """Whether rows that stay when others leave lose their stamps."""
        return self._policy == "clock"

    def used(self, stamps: NDArray[np.int64] | int) -> NDArray[np.int64] | int:
        """Of rows that are used now; `stamps` are those by time."""
        if self._policy == "timestamp":
            return stamps
        if self._policy == "clock":
            return 1
        self._uses += 1
        return min(self._version << _USES_BITS | min(self._uses, (1 << _USES_BITS) - 1), _LATEST)

    def announced(self, stamp: int) -> int:
        """Of rows that will be used."""
        return stamp if self._policy == "timestamp" else 0
