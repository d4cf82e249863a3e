"""The local exchange: rows reach their partition through files, and stay there for later attempts."""

import mmap
from collections.abc import Callable
from itertools import pairwise

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from pyspark import TaskContext

import millpond.tasks.block_references as slot_parcels
import millpond.worker.spark_task as worker
from millpond.errors import MillpondError, TransientError
from millpond.query.running.runs import release
from millpond.slot.partition.partitions import PartitionServer
from millpond.slot.process.identity import identify
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.slot.process.messages import RunBatch
from millpond.spec.kinds.deduplicate import DeduplicateSpec
from millpond.spec.operators import Field
from millpond.stores.rmw.table import RmwTable
from millpond.tasks.block_references import BLOCK_REFERENCE, exchange_folder, open_references, split_into_passes
from millpond.tasks.operator_task import OperatorTask
from millpond.worker.exchange import ExchangeWrite
from tests.support.waiting import wait_until

from .conftest import TIME, FakeContext, begin, hashes_in, key_hash, table_of

Write = Callable[..., list[pa.RecordBatch]]


@pytest.fixture
def task(task: OperatorTask) -> OperatorTask:
    """With the columns of `random_rows`."""
    columns = (Field("k", "bigint"), Field("s", "string"))
    return msgspec.structs.replace(task, spec=DeduplicateSpec(columns=columns, keys=(0,)))


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch) -> Write:
    """Runs the map side as a Spark task does."""
    monkeypatch.setattr(worker, "freeze_modules", lambda: None)

    def run(task: OperatorTask, *batches: pa.RecordBatch, batch: int = 0, attempt: int = 0) -> list[pa.RecordBatch]:
        monkeypatch.setattr(TaskContext, "get", lambda: FakeContext(batch, attempt))
        return list(ExchangeWrite(task)(iter(batches)))

    return run


def random_rows(count: int, seed: int = 0) -> pa.RecordBatch:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 1000, count)
    return pa.RecordBatch.from_pydict(
        {
            "__hash": pa.array(rng.integers(-(1 << 63), (1 << 63) - 1, count)),
            "k": pa.array(values, mask=values % 7 == 0),
            "s": pa.array([None if v % 5 == 0 else "x" * (v % 40) for v in values.tolist()]),
        }
    )


def received(references: list[pa.RecordBatch], task: OperatorTask) -> dict[int, list[tuple[object, ...]]]:
    """The rows by the partition that Spark sends their reference to."""
    rows: dict[int, list[tuple[object, ...]]] = {}
    for batch in references:
        assert [batch.schema.names[at] for at in (0, -2, -1)] == [BLOCK_REFERENCE, "__hash", "__mark"]
        assert all(column.null_count == batch.num_rows for column in batch.columns[1:-2]), "rows lie in files"
        for reference, low, mark in zip(*(batch.column(at).to_pylist() for at in (0, -2, -1)), strict=True):
            assert mark is False
            own = rows.setdefault(task.partition_of(low), [])
            for piece in open_references([reference]):
                own += zip(*(column.to_pylist() for column in piece.columns), strict=True)
    return rows


@pytest.mark.parametrize("partitions", [1, 2, 3, 200, 1000])
def test_every_row_reaches_its_partition(task: OperatorTask, write: Write, partitions: int) -> None:
    task = msgspec.structs.replace(task, partitions=partitions)
    batches = [random_rows(5_000, 1), random_rows(0), random_rows(1, 2), random_rows(777, 3)]
    rows = received(write(task, *batches), task)
    expected: dict[int, list[tuple[object, ...]]] = {}
    for batch in batches:
        for row in sorted(zip(*(column.to_pylist() for column in batch.columns), strict=True), key=group):
            expected.setdefault(task.partition_of(row[0]), []).append(row)
    assert rows == expected, "by key group, otherwise in their old order"


def group(row: tuple[int, ...]) -> int:
    return (row[0] & (1 << 64) - 1) >> 49


@pytest.mark.parametrize("most", [1, 100, 3_000, 5_777])
def test_more_rows_than_fit_come_in_ranges(task: OperatorTask, write: Write, most: int) -> None:
    batches = [random_rows(5_000, 1), random_rows(1, 2), random_rows(777, 3)]
    (references,) = write(msgspec.structs.replace(task, partitions=1), *batches)
    passes = list(split_into_passes(open_references(references.column(0).to_pylist()), lambda rows: -(-rows // most)))
    pieces = [piece.to_pylist() for _, piece in passes]
    rows = [tuple(row.values()) for piece in pieces for row in piece]
    everything = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
    assert sorted(rows, key=group) == sorted(everything, key=group), "each once; those of a group in their old order"
    if most < len(everything):
        lows = [min(group(tuple(row.values())) for row in piece) for piece in pieces if piece]
        highs = [max(group(tuple(row.values())) for row in piece) for piece in pieces if piece]
        assert len(lows) > 1
        assert all(high < low for high, low in zip(highs, lows[1:], strict=False)), "ascending, apart"
        assert max(map(len, pieces)) < 2 * most + 100
        for (low, high), piece in passes:
            assert all(low <= row["__hash"] & (1 << 64) - 1 < high for row in piece.to_pylist())
    else:
        assert all(range_ is None for range_, _ in passes)


def test_a_large_pass_comes_in_pieces_apart_from_each_other(
    task: OperatorTask, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [random_rows(5_000, 1), random_rows(3_000, 2)]
    (references,) = write(msgspec.structs.replace(task, partitions=1), *batches)
    monkeypatch.setattr(slot_parcels, "_PIECE_BYTES", sum(batch.nbytes for batch in batches) // 9)
    passes = list(split_into_passes(open_references(references.column(0).to_pylist()), lambda rows: 2))
    assert [range_ is not None for range_, _ in passes] == [True, False, False, False] * 2
    rows = [tuple(row.values()) for _, piece in passes for row in piece.to_pylist()]
    everything = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
    assert sorted(rows, key=group) == sorted(everything, key=group), "each once; those of a group in their old order"
    groups = [[group(tuple(row.values())) for row in piece.to_pylist()] for _, piece in passes]
    assert all(max(one) < min(following) for one, following in pairwise(groups))
    first, _, _, _, second, *_ = passes
    assert first[0] is not None
    assert second[0] is not None
    assert first[0].hi == second[0].lo
    assert all(row["__hash"] & (1 << 64) - 1 < first[0].hi for _, piece in passes[:4] for row in piece.to_pylist())


def test_a_piece_with_more_text_than_arrow_holds_comes_in_several_batches() -> None:
    """A key group cannot be divided. The text is never read here, so that it takes no memory."""
    length = 1100 << 20
    text = pa.py_buffer(mmap.mmap(-1, length))
    large = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, length], np.int32)), text)
    hashes = pa.array([1], pa.int64())
    batches = [
        pa.record_batch({"__hash": hashes, "s": strings})
        for strings in (large, large, pa.array(["first"]), pa.array(["second"]))
    ]
    passes = list(split_into_passes(batches, lambda rows: 2))
    assert [range_ is not None for range_, _ in passes] == [True, False, False]
    assert [rows.num_rows for _, rows in passes] == [1, 1, 2]
    assert passes[2][1].column("s").to_pylist() == ["first", "second"]


def test_no_rows_make_no_parcels(task: OperatorTask, write: Write) -> None:
    assert write(task) == []
    assert write(task, random_rows(0)) == []


def test_attempts_do_not_disturb_each_other(task: OperatorTask, write: Write) -> None:
    first = write(task, random_rows(100, 1), attempt=1)
    second = write(task, random_rows(100, 2), attempt=2)
    assert received(first, task) != received(second, task)
    assert sum(map(len, received(first, task).values())) == 100


def test_a_lost_file_is_named(task: OperatorTask, write: Write) -> None:
    (references,) = write(task, random_rows(100))
    reference = references.column(0)[0].as_py()
    (file,) = (exchange_folder(SlotDirectory.of(task).path, task) / "0").iterdir()
    file.unlink()
    with pytest.raises(TransientError, match="can no longer be read") as caught:
        list(open_references([reference]))
    assert str(file) in str(caught.value)


def test_a_disk_that_takes_nothing_is_an_error(task: OperatorTask, write: Write) -> None:
    folder = exchange_folder(SlotDirectory.of(task).path, task)
    SlotDirectory.of(task).register(identify())
    folder.parent.mkdir()
    folder.write_text("in the way")
    with pytest.raises(MillpondError, match=r"cannot be written: Not a directory.*or point TMPDIR"):
        write(task, random_rows(10))


@pytest.fixture
def exchanging(counting: OperatorTask) -> OperatorTask:
    """The counting operator behind the local exchange, two partitions in one slot."""
    return msgspec.structs.replace(counting, exchange="local")


def sent(references: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Input of partition 0's slot stage: its marker and its references."""
    (batch,) = references
    others = [pa.nulls(1 + batch.num_rows, column.type) for column in batch.columns[1:-2]]
    return pa.RecordBatch.from_arrays(
        [
            pa.array([key_hash(0, 1, TIME), *batch.column("__hash").to_pylist()], pa.int64()),
            pa.array([True] + [False] * batch.num_rows),
            pa.array([None, *batch.column(BLOCK_REFERENCE).to_pylist()], pa.binary()),
            *others,
        ],
        names=["__hash", "__mark", *batch.schema.names[:-2]],
    )


def counted(keys: list[int], values: list[int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            "__hash": pa.array(hashes_in(0, 1, np.array(keys, np.int64))),
            "k": pa.array(keys, pa.int64()),
            "v": pa.array(values, pa.int64()),
        }
    )


def test_files_outlive_attempts_and_slots_but_not_the_next_batch(exchanging: OperatorTask, write: Write) -> None:
    task = exchanging
    path = SlotDirectory.of(task).path
    first = sent(write(task, counted([1, 2], [10, 20]), counted([1], [30]), batch=0))

    def answer(
        server: PartitionServer, batch: int, references: pa.RecordBatch, attempt: int
    ) -> dict[int, tuple[int, ...]]:
        return table_of(server.run(RunBatch(task, 0, batch, attempt), iter([references])))

    server, successor = PartitionServer(path), PartitionServer(path, 1)
    try:
        expected = {1: (2, 40), 2: (1, 20)}
        assert answer(server, 0, first, 0) == expected
        assert answer(server, 0, first, 1) == expected, "an attempt that is repeated"
        server.drain(task.key, 10.0)
        before = exchange_folder(path, task)
        assert before.exists()
        begun = msgspec.structs.replace(task, generation=2)
        begin(begun, (0,))
        task = begun
        again = sent(write(task, counted([1, 2], [10, 20]), counted([1], [30]), batch=0))
        assert answer(successor, 0, again, 0) == expected
        second = sent(write(task, counted([2], [5]), batch=1, attempt=9))
        folder = exchange_folder(path, task)
        assert (folder / "0").exists()
        assert answer(successor, 1, second, 1) == {2: (2, 25)}
        wait_until(lambda: not (folder / "0").exists())
        assert (folder / "1").exists()
        assert not before.exists(), "a newer run has begun"
    finally:
        server.close()
        successor.close()
    assert (folder / "1").exists()
    assert release(task)
    assert not folder.exists()


def test_a_slot_that_ends_leaves_the_rows_to_the_others(exchanging: OperatorTask, write: Write) -> None:
    """They may be those of other partitions, and a repeated attempt at its own runs in the slot that follows it."""
    path = SlotDirectory.of(exchanging).path
    references = sent(write(exchanging, counted([1, 2], [10, 20]), batch=0))
    ending, successor = PartitionServer(path), PartitionServer(path)
    try:
        run = RunBatch(exchanging, 0, 0, 0)
        assert table_of(ending.run(run, iter([references]))) == {1: (1, 10), 2: (1, 20)}
        ending.close()
        assert table_of(successor.run(run, iter([references]))) == {1: (1, 10), 2: (1, 20)}
    finally:
        successor.close()


def test_batches_larger_than_memory_come_in_passes(
    exchanging: OperatorTask, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts and sums stay right while passes begin, and after the slot has changed."""
    task = msgspec.structs.replace(exchanging, settings=msgspec.structs.replace(exchanging.settings, memory=8 << 20))
    restricted = []
    original = RmwTable.restrict
    monkeypatch.setattr(
        RmwTable, "restrict", lambda self, range_: (restricted.append(range_), original(self, range_))[1]
    )
    rng = np.random.default_rng(5)
    counts, sums = np.zeros(300_000, np.int64), np.zeros(300_000, np.int64)
    path = SlotDirectory.of(task).path
    server, passes = PartitionServer(path), []
    try:
        for batch in range(8):
            if batch == 5:
                server.drain(task.key, 60.0)
                server.close()
                task = msgspec.structs.replace(task, generation=2)
                begin(task, (batch,))
                server = PartitionServer(path, 1)
            keys = rng.integers(0, len(counts), 120_000 if batch != 3 else 500)
            values = rng.integers(-9, 9, len(keys))
            np.add.at(counts, keys, 1)
            np.add.at(sums, keys, values)
            columns = [pa.array(hashes_in(0, 1, keys)), pa.array(keys), pa.array(values)]
            rows = pa.RecordBatch.from_arrays(columns, names=["__hash", "k", "v"])
            references = sent(write(task, rows.slice(0, 50_000), rows.slice(50_000), batch=batch, attempt=batch))
            restricted.clear()
            output = pa.Table.from_batches(server.run(RunBatch(task, 0, batch, 0), iter([references])))
            passes.append(len(restricted))
            changed = np.unique(keys)
            found = output.column(0).to_numpy()
            order = np.argsort(found)
            assert (found[order] == changed).all()
            assert (output.column(1).to_numpy()[order] == counts[changed]).all()
            assert (output.column(2).to_numpy()[order] == sums[changed]).all()
    finally:
        server.close()
    assert passes[0] == passes[3] == 0
    assert min(passes[2], passes[4], passes[5], passes[7]) > 3
