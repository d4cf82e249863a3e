"""The files of an initial state, and the first batch of a query that begins with one."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import TaskContext
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

import millpond
from millpond.errors import TransientError
from millpond.plan.decide import decide
from millpond.query.starting import initial_state
from millpond.slot.process.lifecycle import SlotDirectory
from tests.checkpoint.rig import memory
from tests.query.test_recovery import Job


class Total(StatefulProcessor):
    """Adds up amounts, from what a key begins with; `harm` is done at the first attempt of each task, an error at all.

    Spark's workers import it.
    """

    def __init__(self, harm: str = "", slots: str = "") -> None:
        self.harm = harm
        self.slots = slots

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.total = handle.getValueState("total", "n bigint")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        assert self.total.get() is None
        self.total.update((initialState.amount,))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        if self.harm == "error":
            raise LookupError
        if TaskContext.get().attemptNumber() == 0 and self.harm:  # type: ignore[union-attr]
            if self.harm == "slot":
                directory = SlotDirectory(Path(self.slots))
                for name in directory.running() - {"template"}:
                    directory.recorded_process(name).kill()  # type: ignore[union-attr]
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        held = self.total.get()
        total = (held[0] if held else 0) + sum(row.amount for row in rows)
        self.total.update((total,))
        yield Row(key=key[0], n=total)


def totals(job: Job, keys: int = 100, processor: StatefulProcessor | None = None) -> DataFrame:
    """Each key below a number begins with a thousand times itself."""
    state = job.spark.range(keys).selectExpr("id * 1000 as amount", "id as key")
    groups = job.stream().groupBy("key")
    return groups.transformWithState(
        processor or Total(), "key bigint, n bigint", "update", "none", initialState=state.groupBy("key")
    )


def run(job: Job, frame: DataFrame) -> dict[int, int]:
    emitted: dict[int, int] = {}

    def keep(batch: DataFrame, number: int) -> None:
        emitted.update({row.key: row.n for row in batch.collect()})

    job._run(millpond.writeStream(frame).outputMode("update").foreachBatch(keep))
    return emitted


def files(job: Job) -> list[str]:
    return [path.name for path in (job.checkpoint / "millpond" / "initial").glob("*")]


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> Job:
    return Job(spark.newSession(), tmp_path)


@pytest.mark.parametrize("harm", ["slot", "worker"])
def test_killed_in_the_first_batch(job: Job, harm: str) -> None:
    job.write([1, 2, 500, 1])
    slots = SlotDirectory.named(tempfile.gettempdir(), job.spark.sparkContext.applicationId)
    assert run(job, totals(job, processor=Total(harm, str(slots.path)))) == {1: 1002, 2: 2001, 500: 1}
    state = millpond.read_state(job.spark, str(job.checkpoint), variable="total")
    held = {row.key: row.total.n for row in state.collect()}
    assert held == {key: key * 1000 for key in range(100)} | {1: 1002, 2: 2001, 500: 1}


def test_files_go_once_the_first_batch_is_committed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that gets nowhere leaves some, which the next one replaces: of another state, in other partitions."""
    monkeypatch.setattr("millpond.query.starting.initial_state._POLL_SECONDS", 0.1)
    job.write([7])
    job.spark.conf.set("spark.millpond.partitions", "3")
    with pytest.raises(StreamingQueryException, match="LookupError"):
        run(job, totals(job, processor=Total("error")))
    left = set(files(job))
    assert len(left) == 4
    job.spark.conf.set("spark.millpond.partitions", "5")
    assert run(job, totals(job, keys=8)) == {7: 7001}
    for _ in range(600):
        if not files(job):
            break
        time.sleep(0.1)
    assert not files(job)
    (job.checkpoint / "millpond" / "initial").mkdir(exist_ok=True)
    (job.checkpoint / "millpond" / "initial" / "000000000000001-0.json").touch()  # its run ended before it removed them
    job.write([7, 8])
    assert run(job, totals(job, keys=9)) == {7: 7002, 8: 1}
    assert not files(job)


def test_files_go_although_the_store_fails_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[int] = []
    answers = iter([TransientError("The store is away."), TransientError("The store is away."), None])

    def remove(files: Any, run: int) -> None:
        if (error := next(answers)) is not None:
            raise error
        removed.append(run)

    monkeypatch.setattr(initial_state, "delete_initial_state", remove)
    query: Any = SimpleNamespace(awaitTermination=lambda seconds: False)
    task: Any = SimpleNamespace(initial=3)
    logs: Any = SimpleNamespace(last_committed=0)
    initial_state._remove_when_committed(query, task, memory(), logs)
    assert removed == [3]


def test_keys_of_other_types_stay_on_spark(job: Job) -> None:
    job.write([1])
    state = job.spark.range(3).selectExpr("cast(id as int) as key", "id as amount")
    frame = (
        job.stream()
        .groupBy("key")
        .transformWithState(Total(), "key bigint, n bigint", "update", "none", initialState=state.groupBy("key"))
    )
    (operator,) = decide(frame, "update").operators
    assert operator.spec is None
    assert "grouped by int (the input is by bigint)" in str(operator.reason)
