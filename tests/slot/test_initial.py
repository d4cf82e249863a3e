"""The files of an initial state: written by partition, read by the first batch."""

from __future__ import annotations

import msgspec
import pyarrow as pa
import pytest

from millpond.errors import TransientError
from millpond.files.locations.opening import open_filesystem
from millpond.tasks import initial_state
from millpond.tasks.initial_state import (
    Portion,
    delete_earlier_initial_state,
    delete_initial_state,
    read_rows,
    write_list,
)
from millpond.tasks.operator_task import OperatorTask
from millpond.worker.initial_state import InitialWrite

from .conftest import key_hash


def rows(partition: int, *values: int) -> pa.RecordBatch:
    hashes = [key_hash(partition, 4, value) for value in values]
    return pa.record_batch({"__hash": pa.array(hashes, pa.int64()), "v": pa.array(values, pa.int64())})


def written(task: OperatorTask, *batches: pa.RecordBatch) -> list[Portion]:
    found = [row for batch in InitialWrite(task)(iter(batches)) for row in batch.to_pylist()]
    return [Portion(**row) for row in found]


def test_rows_come_back_by_partition(task: OperatorTask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the attempts that count, in several files, in their order."""
    monkeypatch.setattr(initial_state, "_FILE_BYTES", 40)
    task = msgspec.structs.replace(task, initial=1)
    files = open_filesystem(f"{task.location}/millpond")
    empty = rows(2)
    assert not written(task, empty)
    written(task, rows(2, 7))  # an attempt that fails
    portions = written(task, empty, rows(2, 1, 2), rows(2, 3), empty, rows(2, 4, 5), rows(2, 6)) + written(
        task, rows(0, 8)
    )
    assert [one.partition for one in portions] == [2, 2, 0]
    write_list(files, task, portions)
    for partition, values in {0: [8], 1: [], 2: [1, 2, 3, 4, 5, 6]}.items():
        batches = list(read_rows(files, task, partition))
        assert [value for batch in batches for value in batch.column("v").to_pylist()] == values


@pytest.mark.parametrize("harm", ["gone", "cut", "cut at the end", "altered", "another", "no list"])
def test_what_cannot_be_read_is_written_anew(task: OperatorTask, harm: str) -> None:
    task = msgspec.structs.replace(task, initial=1)
    files = open_filesystem(f"{task.location}/millpond")
    portions = written(task, rows(0, 1, 77777))
    write_list(files, task, portions)
    name = portions[0].file
    if harm == "another":
        (other,) = written(task, rows(0, 1))
        files.put(name, [files.get(other.file)])
    elif harm.startswith("cut"):
        files.put(name, [files.get(name)[: 200 if harm == "cut" else -40]])
    elif harm == "altered":
        was, becomes = ((77777 + more).to_bytes(8, "little") for more in (0, 1))
        before, there, after = files.get(name).rpartition(was)
        assert there
        files.put(name, [before + becomes + after])
    else:
        files.delete(name if harm == "gone" else "initial/000000000000001-0.json")
    with pytest.raises(TransientError, match=r"initial state cannot be read.*Start the query again"):
        list(read_rows(files, task, 0))


def test_files_of_a_run_or_of_earlier_ones_are_removed(task: OperatorTask) -> None:
    files = open_filesystem(f"{task.location}/millpond")
    for run in (1, 2, 12):
        written(msgspec.structs.replace(task, initial=run), rows(0, 1))
    delete_initial_state(files, 1)
    assert {info.name[:24] for info in files.list("")} == {"initial/000000000000002-", "initial/000000000000012-"}
    delete_earlier_initial_state(files, 12)
    assert {info.name[:24] for info in files.list("")} == {"initial/000000000000012-"}
    delete_earlier_initial_state(files, 13)
    assert not files.list("")
