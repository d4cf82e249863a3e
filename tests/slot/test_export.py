"""`millpond state export`: state as Parquet files, on a disk and on S3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from millpond.errors import TransientError
from millpond.files.backends.filesystem import FileSystem
from millpond.files.backends.local import LocalFiles
from millpond.files.locations.opening import open_filesystem
from millpond.state_reader import export as exporting
from millpond.state_reader.export import export_state
from millpond.state_reader.reader import StateReader
from tests.servers.s3 import s3

from .test_damage import PARTITIONS
from .test_state_command import BATCHES, history, state

__all__ = ["history", "state"]


def held(location: object, version: int) -> list[dict[str, Any]]:
    """The rows of a version."""
    reader = StateReader(str(location))
    rows = [row for p in range(PARTITIONS) for batch in reader.read(0, p, version) for row in batch.to_pylist()]
    return sorted(rows, key=lambda row: row["k"])


def written(files: FileSystem) -> list[dict[str, Any]]:
    """The rows that were exported."""
    names = [f"operator-0/part-{partition:05d}.parquet" for partition in range(PARTITIONS)]
    assert [info.name for info in files.list("")] == ["_SUCCESS", *names]
    tables = [pq.read_table(pa.BufferReader(files.get(name))) for name in names]
    return sorted((row for table in tables for row in table.to_pylist()), key=lambda row: row["k"])


@pytest.mark.parametrize("version", [None, BATCHES - 1])
def test_a_version_is_exported(history: Path, tmp_path: Path, state: Callable[..., tuple], version: int | None) -> None:
    asked = [] if version is None else ["--version", version]
    code, (told,) = state("export", history, tmp_path / "out", *asked)
    rows = held(history, version or BATCHES)
    assert rows
    assert code == 0
    said = f"version {version or BATCHES}, {PARTITIONS} files, {len(rows)} rows"
    assert told == f"file:{tmp_path}/out: {said}"
    assert written(open_filesystem(str(tmp_path / "out"))) == rows
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["_SUCCESS", "operator-0"]


def test_an_export_goes_to_an_object_store(history: Path) -> None:
    with s3() as bucket:
        export_state(str(history), f"{bucket}/out", operator=0)
        assert written(open_filesystem(f"{bucket}/out")) == held(history, BATCHES)


def test_nothing_is_replaced(history: Path, tmp_path: Path, state: Callable[..., tuple]) -> None:
    (tmp_path / "operator-0").mkdir()
    there = tmp_path / "operator-0" / "part-00001.parquet"
    there.write_bytes(b"mine")
    code, (told,) = state("export", history, tmp_path)
    assert code == 1
    assert told.startswith("[USAGE] There is something here already")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [there]
    assert there.read_bytes() == b"mine"


@pytest.mark.parametrize(("argument", "value"), [("--version", 17), ("--operator", 1), ("--operator", -1)])
def test_what_is_not_there_is_said_before_anything_is_written(
    history: Path, tmp_path: Path, state: Callable[..., tuple], argument: str, value: int
) -> None:
    code, (told,) = state("export", history, tmp_path / "out", argument, value)
    assert code == 1
    assert told.startswith("[USAGE] ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("puts", range(1 + PARTITIONS + 1))
def test_an_interrupted_export_does_not_look_whole(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, puts: int
) -> None:
    """The store fails at each put: the mark, the files, the end."""
    put, left = LocalFiles.put, [puts]

    def failing(self: LocalFiles, *arguments: Any, **named: Any) -> None:
        if self.path == str(tmp_path / "out"):
            left[0] -= 1
            if left[0] < 0:
                raise TransientError("The store is gone.")
        put(self, *arguments, **named)

    monkeypatch.setattr(LocalFiles, "put", failing)
    with pytest.raises(TransientError, match="gone"):
        export_state(str(history), str(tmp_path / "out"))
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    assert (tmp_path / "out" / "_EXPORTING").exists() == (puts > 0)


def test_memory_holds_one_row_group(history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, batches = 20_000, 60

    def read(*_: object) -> Iterator[pa.RecordBatch]:
        for number in range(batches):
            keys = pa.array(range(number * rows, (number + 1) * rows), pa.int64())
            yield pa.RecordBatch.from_arrays([keys, keys, keys], names=["k", "count_0", "sum_1"])

    monkeypatch.setattr(StateReader, "read", read)
    monkeypatch.setattr(exporting, "_GROUP_BYTES", 1 << 20)
    before, peak = pa.total_allocated_bytes(), [0]
    write = pq.ParquetWriter.write_table

    def watched(self: pq.ParquetWriter, *arguments: Any, **named: Any) -> None:
        write(self, *arguments, **named)
        peak[0] = max(peak[0], pa.total_allocated_bytes() - before)

    monkeypatch.setattr(pq.ParquetWriter, "write_table", watched)
    export_state(str(history), str(tmp_path / "out"))
    found = pq.ParquetFile(tmp_path / "out" / "operator-0" / "part-00000.parquet")
    assert found.metadata.num_rows == rows * batches
    assert found.metadata.num_row_groups == batches // 3
    assert peak[0] < 12 << 20  # all rows take 29 MB
