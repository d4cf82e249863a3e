"""Failures of merges in the background: the first ones are logged, the last of several in a row is raised."""

from __future__ import annotations

import logging
from concurrent.futures import CancelledError, Future
from typing import TypeVar

from millpond.errors import TransientError

# A short outage causes fewer: the store's client retries the requests of a merge for minutes.
_MAX_FAILURES = 5

_log = logging.getLogger(__name__)

T = TypeVar("T")


class MergeFailures:
    """Counts the consecutive failures of one table's merges.

    A query runs on without merges, but files pile up and reads get slower, so it must not do so unnoticed.
    """

    def __init__(self) -> None:
        self._count = 0

    def result(self, merge: Future[T], inputs: int) -> T | None:
        """Return the result of a finished merge; None if it failed: its inputs are still in the state to be merged.

        Args:
            merge: done. inputs: number of its files.

        Raises:
            MillpondError: the merge has failed: at once if a file is damaged, else after several failures in a row.
            OSError: the same, because of the local disk.
        """
        try:
            result = merge.result()
        except (TransientError, OSError, CancelledError) as error:
            self._count += 1
            if self._count >= _MAX_FAILURES:
                raise
            _log.warning("Merging %d files of state failed and will be tried again: %s", inputs, error)
            return None
        self._count = 0
        return result
