"""The merges of one table in the background, of runs, parts or segments: one at a time, with their failures counted."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from typing import Generic, TypeVar

from millpond.errors import TransientError
from millpond.stores.runs.run import discard_result

# A short outage causes fewer: the store's client retries the requests of a merge for minutes.
_MAX_FAILURES = 5

_log = logging.getLogger(__name__)

Input = TypeVar("Input")
Result = TypeVar("Result")


class BackgroundMerge(Generic[Input, Result]):
    """The merge of one table that runs in the background, if there is one; also the write of names of matched rows.

    Not thread-safe: used by the table's writer.

    The first failures are logged, and the last of several in a row is raised. A query runs on without merges, but files
    pile up and reads get slower, so it must not do so unnoticed.

    Attributes:
        inputs: files of the running merge; empty without one.
    """

    def __init__(self) -> None:
        self.inputs: Sequence[Input] = ()
        self._result: Future[Result] | None = None
        self._failures = 0

    @property
    def running(self) -> bool:
        """Whether a merge is running, or is done and `take` has not returned its result yet."""
        return self._result is not None

    def track(self, inputs: Sequence[Input], result: Future[Result]) -> None:
        """Track a submitted merge until `take` returns its result."""
        assert self._result is None, "one merge at a time"
        self.inputs, self._result = inputs, result

    def take(self) -> tuple[Sequence[Input], Result] | None:
        """Return the inputs and the result of a merge that is done.

        Returns None if no merge is done, or if it failed: its inputs are still in the state to be merged.

        Raises:
            MillpondError: the merge has failed: at once if a file is damaged, else after several failures in a row.
            OSError: the same, because of the local disk.
        """
        inputs, result = self.inputs, self._result
        if result is None or not result.done():
            return None
        self.inputs, self._result = (), None
        try:
            merged = result.result()
        except (TransientError, OSError, CancelledError) as error:
            self._failures += 1
            if self._failures >= _MAX_FAILURES:
                raise
            _log.warning("Background work on %d files of state failed and will be tried again: %s", len(inputs), error)
            return None
        self._failures = 0
        return inputs, merged

    def close(self) -> None:
        """Cancel the running merge; its result is not used."""
        if self._result is not None:
            discard_result(self._result)
        self.inputs, self._result = (), None
