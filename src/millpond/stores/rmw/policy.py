"""Which rows leave memory first, said by the stamps that they get: those of the lowest stamps go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from millpond.stores.runs.prefetcher import Prefetches

Policy = Literal["timestamp", "lru", "clock"]
"""`timestamp`: those that were used longest ago, by batch or event time, and are not announced (Keyed Prefetching
§IV-D); `lru`: those that were used longest ago; `clock`: those that were not used since rows had to leave last."""

_SHARES = 0.125, 0.5
"""Of a table's memory, for keys that were read ahead: at least, and at most."""
_STEP = 1.5
_UNUSED = 0.02
"""Share of the keys read ahead that were not asked for, from which they have too much memory."""

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


class AheadShare:
    """How much of a table's memory keys may take that were read ahead.

    Theirs is the last place among those that leave, as they are needed later than what was used (Keyed Prefetching
    §IV-D): the share grows while there is no room for all and all are asked for, and shrinks when they are not.

    Attributes:
        value: the share.
    """

    def __init__(self) -> None:
        self.value = 0.25

    def learn(self, came: Prefetches) -> None:
        """See what came of the hints for a batch."""
        least, most = _SHARES
        if came.read - came.used > _UNUSED * came.read:
            self.value = max(least, self.value / _STEP)
        elif came.read and came.dropped:
            self.value = min(most, self.value * _STEP)
