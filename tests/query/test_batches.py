"""`CompleteBatch` with partitions whose outcome is not known."""

import traceback
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from py4j.protocol import Py4JJavaError

from millpond.errors import UsageError
from millpond.query.running.batches import BatchInterruptedError, CompleteBatch
from millpond.slot.process.messages import QueryStatus
from millpond.worker.slot_stage import PartitionDone

PROXY_ERROR = (
    r"py4j\.protocol\.Py4JJavaError: An error occurred while calling((.|\r\n|\r|\n)*)(java\.lang\.InterruptedException)"
)
"""What Spark looks for (`StreamExecution.PROXY_ERROR`)."""
SETTINGS = SimpleNamespace(directory="", silence_timeout=1.0)
TASK = SimpleNamespace(operator=0, partitions=2, query="q", key="q", application="a", settings=SETTINGS)


def done(batch: int, partition: int) -> PartitionDone:
    return PartitionDone(0, batch, partition, {})


@pytest.fixture
def coverage(monkeypatch: pytest.MonkeyPatch) -> Any:
    # The slots are on another host.
    monkeypatch.setattr("millpond.query.running.batches.query_status", lambda *_: QueryStatus())
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


@pytest.mark.parametrize(
    "sign", ["java.lang.InterruptedException", "org.apache.spark.SparkException: [SPARK_JOB_CANCELLED] Job"]
)
def test_a_stop_is_told_in_few_words(coverage: Any, sign: str) -> None:
    """Spark's regular expression for it needs stack for every character."""
    java = MagicMock(_target_id="o1")
    error = Py4JJavaError("An error occurred while calling o1.collect.", java)

    def function(df: Any, batch: int) -> None:
        raise error

    whole = (
        f"An error occurred while calling o1.collect.\n: {sign}" + "\n\tat java.base/of.some.Frame(Frame.java)" * 200
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Py4JJavaError, "__str__", lambda _: whole)
        with pytest.raises(BatchInterruptedError, match=PROXY_ERROR) as raised:
            CompleteBatch(function, [TASK], coverage, {}, {})(MagicMock(), 7)
        assert len("".join(traceback.format_exception(raised.value))) < 2000
        whole = "An error occurred while calling o1.collect.\n: java.lang.ArithmeticException"
        with pytest.raises(Py4JJavaError):
            CompleteBatch(function, [TASK], coverage, {}, {})(MagicMock(), 7)


def test_reports_do_not_pile_up(coverage: Any) -> None:
    for _ in range(3):
        complete(coverage, 0, 1)
        assert coverage.value == []
