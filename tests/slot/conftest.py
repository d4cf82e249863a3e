import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from millpond.checkpoint.generation import claim
from millpond.checkpoint.recovery import Recovery
from millpond.files.locations.opening import join_url, open_filesystem
from millpond.slot.partition.partitions import PartitionServer
from millpond.slot.process.identity import identify
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.kinds.deduplicate import DeduplicateSpec
from millpond.spec.operators import AggregateCall, Field
from millpond.tasks.operator_task import OperatorTask, SlotSettings


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mp"))
    yield path
    for directory in path.glob("millpond-*/*"):
        for process in SlotDirectory(directory).running().values():
            process.kill()
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def task(folder: Path) -> OperatorTask:
    return OperatorTask(
        application="app-1",
        query="query-1",
        run="run-1",
        operator=0,
        spec=DeduplicateSpec(columns=(Field("k", "bigint"),), keys=(0,)),
        partitions=4,
        slots=2,
        location=str(folder / "state"),
        generation=1,
        offsets=str(folder / "offsets"),
        settings=SlotSettings(directory=str(folder), silence_timeout=15.0, start_timeout=60.0),
        template="tests.slot.echo",
        jvm=own_jvm(),
    )


def own_jvm() -> tuple[int, int]:
    """This process, as the JVM that the slots of a task end with (`OperatorTask.jvm`)."""
    process = identify()
    return process.pid, process.start


def hasty(task: OperatorTask) -> OperatorTask:
    """The same, with less patience for a silent slot."""
    return msgspec.structs.replace(task, settings=msgspec.structs.replace(task.settings, silence_timeout=3.0))


@dataclasses.dataclass
class FakeContext:
    """The part of Spark's TaskContext that a slot stage uses."""

    batch: int | None = 0
    attempt: int = 0

    def getLocalProperty(self, name: str) -> str | None:
        return str(self.batch) if name == "streaming.sql.batchId" and self.batch is not None else None

    def taskAttemptId(self) -> int:
        return self.attempt


def key_hash(partition: int, partitions: int, low: int = 0) -> int:
    """A hash (signed) that falls into a partition."""
    group = -(-(partition << 15) // partitions)
    value = (group << 49) | low
    return value - (1 << 64) if value >= 1 << 63 else value


def hashes_in(partition: int, partitions: int, keys: np.ndarray) -> np.ndarray:
    """Well-mixed hashes of some keys, all of one partition (`partitions` is a power of two)."""
    bits = partitions.bit_length() - 1
    mixed = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xFF51AFD7ED558CCD)
    return (mixed >> np.uint64(bits) | np.uint64(partition << (64 - bits))).astype(np.int64)


def rows(partition: int = 0, *, partitions: int = 4, count: int = 10, name: str = "k") -> pa.RecordBatch:
    """One batch: the marker row, then `count` rows of the partition."""
    hashes = [key_hash(partition, partitions, i) for i in range(count + 1)]
    return pa.RecordBatch.from_pydict(
        {
            "__hash": pa.array(hashes, pa.int64()),
            "__mark": pa.array([True] + [False] * count),
            name: pa.array([None, *range(count)], pa.int64()),
        }
    )


def with_tests_on_path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])}


GROUPED = AggregateSpec(
    keys=(Field("k", "bigint"),),
    inputs=(Field("v", "bigint"),),
    calls=(
        AggregateCall("count", (), "bigint"),
        AggregateCall("sum", (0,), "bigint"),
    ),
    output_mode="update",
)
TIME = 1_700_000_000_000


@pytest.fixture
def counting(task: OperatorTask) -> OperatorTask:
    """A real operator: count and sum of `v` by `k`, on a new checkpoint."""
    task = msgspec.structs.replace(task, spec=GROUPED, template="millpond.slot.template", partitions=1, slots=1)
    begin(task)
    return task


def begin(task: OperatorTask, versions: tuple[int, ...] = (0,)) -> None:
    """Do a driver's steps before the query starts: claim the generation, find the versions that it builds on."""
    files = open_filesystem(join_url(task.location, "millpond"))
    claimed = claim(files, run=task.run, partitions=task.partitions)
    assert claimed.number == task.generation
    Recovery(files, claimed, 1).write_base(versions)


def grouped(
    partition: int, keys: list[int], values: list[int], *, partitions: int = 1, time: int = TIME
) -> pa.RecordBatch:
    """A batch of the counting operator: marker row first."""
    hashes = np.append(
        key_hash(partition, partitions, time), hashes_in(partition, partitions, np.array(keys, np.int64))
    )
    return pa.RecordBatch.from_pydict(
        {
            "__hash": pa.array(hashes, pa.int64()),
            "__mark": pa.array([True] + [False] * len(keys)),
            "k": pa.array([None, *keys], pa.int64()),
            "v": pa.array([None, *values], pa.int64()),
        }
    )


def table_of(batches: Iterable[pa.RecordBatch]) -> dict[int, tuple[int, ...]]:
    """Output rows by key."""
    found = {}
    for batch in batches:
        for key, *values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            found[key] = tuple(values)
    return found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PartitionServer]:
    """A slot in this process."""
    server = PartitionServer(tmp_path / "slot")
    yield server
    server.close()


@pytest.fixture
def large(counting: OperatorTask) -> OperatorTask:
    """A count by key with little memory, whose keys may be announced."""
    settings = msgspec.structs.replace(counting.settings, memory=16 << 20)
    return msgspec.structs.replace(counting, settings=settings, exchange="spark", lookaheads=("exchange",))
