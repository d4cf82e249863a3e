"""What `CompleteBatch` does about partitions of which nothing is known."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from millpond.errors import UsageError
from millpond.query.batches import CompleteBatch
from millpond.slot.pipe import PartitionDone

TASK = SimpleNamespace(operator=0, partitions=2, query="q")


def done(batch: int, partition: int) -> PartitionDone:
    return PartitionDone(0, batch, partition, {})


@pytest.fixture
def coverage(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("millpond.query.batches.answered_batches", lambda task: {})  # the slots are on another host
    return SimpleNamespace(value=[])


def complete(coverage: Any, *read: int, rest: tuple[int, ...] = ()) -> MagicMock:
    df = MagicMock()
    save = df.write.format.return_value.mode.return_value.save
    save.side_effect = lambda: coverage.value.extend(done(7, p) for p in rest)
    CompleteBatch(lambda df, n: coverage.value.extend(done(n, p) for p in read), [TASK], coverage, {}, {})(df, 7)
    return save


def test_a_batch_that_was_read_is_not_read_again(coverage: Any) -> None:
    complete(coverage, 0, 1).assert_not_called()


def test_the_rest_is_read(coverage: Any) -> None:
    complete(coverage, 0, rest=(0, 1)).assert_called_once()


def test_what_ran_in_a_recovery_does_not_count(coverage: Any) -> None:
    coverage.value = [done(7, 0), done(7, 1)]
    complete(coverage, 0, rest=(0, 1)).assert_called_once()


def test_partitions_that_never_run_are_an_error(coverage: Any) -> None:
    with pytest.raises(UsageError, match=r"1 of 2 .* batch 7.*partition 1"):
        complete(coverage, 0, rest=(0,))


def test_reports_do_not_pile_up(coverage: Any) -> None:
    for _ in range(3):
        complete(coverage, 0, 1)
        assert coverage.value == []
