"""Append files in an object store: written as their rows come, copied to the local disk as far as that pays."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from millpond.errors import StateDamagedError
from millpond.files.backends import uploads
from millpond.files.backends.filesystem import Buffer
from millpond.files.formats.append_file import AppendFile, AppendFileWriter, ByteRange, RemoteBytes
from millpond.files.formats.blocks import sort_rows
from millpond.files.locations.counted import CountedFiles
from millpond.files.locations.opening import open_filesystem
from millpond.files.mapping import map_file
from millpond.files.refs import RunRef
from millpond.files.tiers.local_copies import LocalCache
from millpond.layout import HASH
from millpond.stores import append_files
from millpond.stores.append_files import AppendFiles
from tests.support.rows import FIXED, random_rows

ROWS = sort_rows(random_rows(20_000, FIXED, 1), FIXED)


class Place:
    """A store and a local disk."""

    def __init__(self, folder: Path, disk: int) -> None:
        self.folder = folder / "local"
        self.folder.mkdir(exist_ok=True)
        self.files = CountedFiles(open_filesystem(f"memory:{folder}"))
        self.copies = LocalCache(str(self.folder), disk)
        self.append_files = AppendFiles(self.files, str(self.folder), copies=self.copies)

    def write(self, fill: Callable[[AppendFileWriter], None]) -> tuple[RunRef, AppendFile]:
        return self.append_files.write(fill, [FIXED], ROWS.count)

    def gets(self) -> int:
        return self.files.counts()["gets"]


def fill(writer: AppendFileWriter) -> None:
    writer.begin(FIXED)
    writer.add(ROWS, ROWS.words[:, HASH])


def read(file: AppendFile) -> None:
    section = file.sections[0]
    words = np.concatenate([rows.words for rows in file.read(section, np.arange(section.count))])
    assert (words == ROWS.words).all()


def test_the_files_within_an_object_share_one_mapping_without_a_descriptor(tmp_path: Path) -> None:
    files = open_filesystem(str(tmp_path / "store"))
    store = AppendFiles(files, str(tmp_path))
    pieces: list[Buffer] = []
    writer = AppendFileWriter(pieces.append, compress=True)
    fill(writer)
    writer.finish()
    data = b"".join(pieces)
    names = ["commits/1", "commits/2"]
    for name in names:
        files.put(name, [data] * 3)

    def mapped() -> int:
        return sum(str(tmp_path) in line for line in Path("/proc/self/maps").read_text().splitlines())

    descriptors = len(os.listdir("/proc/self/fd"))
    ranges = [ByteRange(name, number * len(data), len(data)) for name in names for number in range(3)]
    opened = [file for at in ranges for file in store.open_range(at, [FIXED])]
    assert len(opened) == 6
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert mapped() == 2
    for file in opened:
        read(file)
    del file, opened[1:]
    assert mapped() == 1
    read(opened[0])
    opened.clear()
    assert mapped() == 0
    store.close()


def test_a_file_that_cannot_be_mapped_has_an_errno(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow's error has none if the mapping fails."""
    with pytest.raises(FileNotFoundError, match="nothing"):
        map_file(str(tmp_path / "nothing"))

    def fail(path: str) -> None:
        raise OSError("Memory mapping file failed: Cannot allocate memory")

    monkeypatch.setattr(pa, "memory_map", fail)
    with pytest.raises(OSError, match="Cannot allocate memory") as error:
        map_file("some/path")
    assert (error.value.errno, error.value.filename) == (errno.ENOMEM, "some/path")


@pytest.mark.parametrize("disk", [0, 1 << 30])
def test_a_file_is_sent_as_it_is_written_or_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: int
) -> None:
    monkeypatch.setattr(uploads, "PART_BYTES", 50_000)
    place = Place(tmp_path, disk)

    def broken(writer: AppendFileWriter) -> None:
        fill(writer)
        assert place.files.counts()["puts"] > 5
        assert disk or os.listdir(place.folder) == []
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        place.write(broken)
    assert os.listdir(place.folder) == []
    assert place.files.list("") == []
    ref, file = place.write(fill)
    assert place.files.size(ref.name) == ref.bytes
    read(file)
    place.append_files.close()


@pytest.mark.parametrize("staged", [False, True])
def test_what_was_written_is_read_from_its_copy_also_by_the_next(tmp_path: Path, staged: bool) -> None:
    first = Place(tmp_path, 1 << 30)
    if staged:
        ref, file = first.append_files.stage(fill, [FIXED], ROWS.count).publish()
    else:
        ref, file = first.write(fill)
    read(file)
    assert first.gets() == 0 < first.copies.blocks
    first.append_files.close()
    second = Place(tmp_path, 1 << 30)
    file = second.append_files.open(ref, [FIXED])
    read(file)
    assert second.gets() == 0 == second.append_files.remote_blocks
    second.append_files.drop_copy(ref, file)
    assert os.listdir(second.folder) == []
    assert second.copies.bytes == 0
    second.append_files.close()


@pytest.mark.parametrize("where", ["rows", "directory", "length"])
def test_a_damaged_copy_is_not_believed(tmp_path: Path, where: str) -> None:
    first = Place(tmp_path, 1 << 30)
    ref, _ = first.write(fill)
    first.append_files.close()
    path = first.folder / os.path.basename(ref.name)
    data = bytearray(path.read_bytes())
    if where == "length":
        del data[-100:]
    else:
        at = 5000 if where == "rows" else len(data) - 60
        data[at : at + 40] = bytes(40)
    path.write_bytes(data)
    second = Place(tmp_path, 1 << 30)
    read(second.append_files.open(ref, [FIXED]))
    assert second.gets() > 0
    assert not path.exists()
    second.files.inner.put(ref.name, [data])
    with pytest.raises(StateDamagedError):
        read(second.append_files.open(ref, [FIXED]))
    second.append_files.close()


def test_a_damaged_copy_is_distrusted_by_all_who_have_read_it(tmp_path: Path) -> None:
    place = Place(tmp_path, 1 << 30)
    _, file = place.write(fill)
    with ThreadPoolExecutor(1) as other:
        other.submit(file.data.get, [(0, 8)]).result()
        file.data.get([(0, 8)])
        assert file.data.report_damage()
        assert other.submit(file.data.report_damage).result()
        for trusting in (file.data.get, lambda ranges: other.submit(file.data.get, ranges).result()):
            trusting([(0, 8)])
    assert not file.data.report_damage()
    place.append_files.close()


def test_a_folder_of_copies_that_is_deleted_is_made_again(tmp_path: Path) -> None:
    place = Place(tmp_path, 1 << 30)
    shutil.rmtree(place.folder)
    ref, file = place.write(fill)
    read(file)
    assert place.gets() == 0
    place.append_files.drop_copy(ref, file)
    assert os.listdir(place.folder) == []
    place.append_files.close()


def test_a_file_comes_here_once_it_is_read_often_if_there_is_room(tmp_path: Path) -> None:
    first = Place(tmp_path, 0)
    ref, file = first.write(fill)
    for _ in range(5):
        read(file)
    assert first.append_files.remote_blocks > 0 == first.copies.blocks
    first.append_files.close()
    for disk in (ref.bytes // 20, ref.bytes):
        place = Place(tmp_path, disk)
        file = place.append_files.open(ref, [FIXED])
        read(file)
        assert os.listdir(place.folder) == [], "a scan copies nothing"
        for _ in range(4):
            read(file)
            place.append_files._copier.submit(int).result()
        before = place.gets()
        read(file)
        assert (place.gets() == before) == (disk == ref.bytes)
        assert place.copies.bytes == (ref.bytes if disk == ref.bytes else 0)
        assert place.copies.copied == place.copies.bytes
        place.append_files.close()


def test_a_copy_of_a_file_that_is_forgotten_meanwhile_does_not_stay(tmp_path: Path) -> None:
    first = Place(tmp_path, 0)
    ref, _ = first.write(fill)
    first.append_files.close()
    place = Place(tmp_path, 1 << 30)
    file = place.append_files.open(ref, [FIXED])
    admit = place.copies.admit

    def late(name: str, staged: str, *, written: bool) -> bool:
        place.append_files.drop_copy(ref, file)
        return admit(name, staged, written=written)

    place.copies.admit = late  # type: ignore[method-assign]
    for _ in range(3):
        read(file)
    place.append_files._copier.submit(int).result()
    assert os.listdir(place.folder) == []
    assert place.copies.bytes == 0
    place.append_files.close()


def test_closing_does_not_wait_for_the_rest_of_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Place(tmp_path, 0)
    ref, _ = first.write(fill)
    first.append_files.close()
    monkeypatch.setattr(append_files, "_COPY_PIECE_BYTES", 1000)
    place = Place(tmp_path, 1 << 30)
    file = place.append_files.open(ref, [FIXED])
    get, copied, begun = RemoteBytes.get, [], threading.Event()

    def slow(data: RemoteBytes, ranges: list[tuple[int, int]]) -> list[Buffer]:
        if threading.current_thread().name.startswith("millpond-append-copy"):
            copied.append(ranges)
            begun.set()
            time.sleep(0.05)
        return get(data, ranges)

    monkeypatch.setattr(RemoteBytes, "get", slow)
    for _ in range(3):
        read(file)
    assert begun.wait(60)
    place.append_files.close()
    assert len(copied) < ref.bytes // 1000, "the copy went on to its end"
    assert os.listdir(place.folder) == []
