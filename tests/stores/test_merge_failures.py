"""Failures of merges in the background."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future

import pytest

from millpond.errors import StateDamagedError, TransientError
from millpond.stores.merge_failures import MergeFailures


def ended(result: int | BaseException) -> Future[int]:
    future: Future[int] = Future()
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future


@pytest.mark.parametrize("error", [TransientError("no"), OSError("the disk is full"), CancelledError()])
def test_the_fifth_failure_in_a_row_is_raised(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    failures = MergeFailures()
    for _ in range(4):
        assert failures.result(ended(error), 3) is None
    assert failures.result(ended(7), 3) == 7
    for _ in range(4):
        assert failures.result(ended(error), 3) is None
    assert len(caplog.messages) == 8
    assert caplog.messages[0].startswith("Merging 3 files of state failed and will be tried again: ")
    with pytest.raises(type(error)):
        failures.result(ended(error), 3)


def test_damage_is_raised_at_once() -> None:
    with pytest.raises(StateDamagedError):
        MergeFailures().result(ended(StateDamagedError("A state file is damaged.")), 3)
