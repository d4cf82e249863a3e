"""A table's merge in the background: its result is taken once, and failures are raised when they do not end."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future

import pytest

from millpond.errors import StateDamagedError, TransientError
from millpond.stores.runs.background_merge import BackgroundMerge


def ended(result: int | BaseException) -> Future[int]:
    future: Future[int] = Future()
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future


def test_a_result_is_taken_once_with_its_inputs() -> None:
    merge = BackgroundMerge[str, int]()
    assert merge.take() is None
    future: Future[int] = Future()
    merge.track(["a", "b"], future)
    assert merge.take() is None
    assert merge.inputs == ["a", "b"]
    future.set_result(7)
    assert merge.running
    assert merge.take() == (["a", "b"], 7)
    assert not merge.running
    assert not merge.inputs
    assert merge.take() is None


def test_a_closed_merge_is_cancelled() -> None:
    merge, future = BackgroundMerge[str, int](), Future[int]()
    merge.track(["a"], future)
    merge.close()
    assert future.cancelled()
    assert not merge.running
    assert merge.take() is None
    merge.close()


@pytest.mark.parametrize("error", [TransientError("no"), OSError("the disk is full"), CancelledError()])
def test_the_fifth_failure_in_a_row_is_raised(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    merge = BackgroundMerge[str, int]()

    def take(result: int | BaseException) -> int | None:
        merge.track(["a", "b", "c"], ended(result))
        done = merge.take()
        assert not merge.running
        return None if done is None else done[1]

    for _ in range(4):
        assert take(error) is None
    assert take(7) == 7
    for _ in range(4):
        assert take(error) is None
    assert len(caplog.messages) == 8
    assert caplog.messages[0].startswith("Background work on 3 files of state failed and will be tried again: ")
    with pytest.raises(type(error)):
        take(error)
    assert not merge.running


def test_damage_is_raised_at_once() -> None:
    merge = BackgroundMerge[str, int]()
    merge.track(["a"], ended(StateDamagedError("A state file is damaged.")))
    with pytest.raises(StateDamagedError):
        merge.take()
    assert not merge.running
