"""Versions of the state as they were: over restarts, other numbers of partitions, and what was taken back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from millpond.checkpoint.formats.manifest import seal
from millpond.checkpoint.retention.collector import Collector
from millpond.errors import UsageError
from millpond.layout import HashRange
from millpond.slot.process.messages import RunBatch
from millpond.state_reader.reader import StateReader, format_versions
from millpond.stores import delta_backlog
from tests.checkpoint.rig import Slot

from .conftest import hashes_in, table_of
from .test_damage import Counts, rows_of


class Job(Counts):
    """Counts and sums by key, in any number of partitions; `branch` changes what batches bring."""

    def __init__(self, folder: Path, partitions: int, branch: int = 0) -> None:
        super().__init__(folder)
        self.partitions = partitions
        self.branch = branch

    def planned(self, batch: int) -> bytes:
        return b"offsets %d of %d" % (batch, self.branch)

    def run(self, batch: int) -> None:
        assert self.server is not None
        rows = {key: value + 1000 * self.branch for key, value in rows_of(batch).items()}
        keys = np.array(list(rows), np.int64)
        hashes = hashes_in(0, 1, keys)
        for number in range(self.partitions):
            inside = HashRange(*self.task.hash_range(number)).covers(hashes.view(np.uint64))
            mark = np.int64(np.uint64(self.task.hash_range(number)[0]).astype(np.int64)) + batch
            own = keys[inside].tolist()
            piece = pa.RecordBatch.from_pydict(
                {
                    "__hash": pa.array(np.append(mark, hashes[inside]), pa.int64()),
                    "__mark": pa.array([True] + [False] * len(own)),
                    "k": pa.array([None, *own], pa.int64()),
                    "v": pa.array([None, *(rows[key] for key in own)], pa.int64()),
                }
            )
            for _ in self.server.run(RunBatch(self.task, number, batch, 0), iter([piece])):
                pass
        # Flushed files are written before the next batch, so that every run needs the deltas of the same versions.
        self.server._writers.submit(lambda: None).result()


def expected(branches: list[int]) -> dict[int, tuple[int, int]]:
    """Count and sum by key, after batches that were each brought by a branch."""
    found: dict[int, tuple[int, int]] = {}
    for batch, branch in enumerate(branches):
        for key, value in rows_of(batch).items():
            count, total = found.get(key, (0, 0))
            found[key] = count + 1, total + value + 1000 * branch
    return found


def read(reader: StateReader, version: int) -> dict[int, tuple[int, ...]]:
    """The rows of a version, each key once."""
    found: dict[int, tuple[int, ...]] = {}
    for number in range(reader.partitions_at(version)):
        rows = table_of(reader.read(0, number, version))
        assert not rows.keys() & found.keys()
        found |= rows
    return found


def roll_back(folder: Path, last: int) -> None:
    """Take Spark's logs back to a batch."""
    for name in ("offsets", "commits"):
        for path in (folder / name).iterdir():
            if path.name.isdigit() and int(path.name) > last:
                path.unlink()
                path.with_name(f".{path.name}.crc").unlink(missing_ok=True)


def test_every_version_is_read_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_backlog, "_MAX_DELTAS", 2)
    for partitions, batches in ((2, 3), (5, 6), (1, 7), (3, 10)):
        Job(tmp_path, partitions).through(batches)
    reader = StateReader(str(tmp_path))
    assert reader.versions() == list(range(1, 11))
    assert reader.newest() == 10
    assert [reader.partitions_at(version) for version in range(1, 11)] == [2, 2, 5, 5, 5, 1, 3, 3, 3, 3]
    for version in reader.versions():
        assert read(reader, version) == expected([0] * version)
    # By the run that a version is of, it is read alike whatever has begun since then.
    for version in (1, 4, 6, 8):
        then = StateReader(str(tmp_path), reader.generation_of(version))
        assert read(then, version) == expected([0] * version)


def test_what_was_taken_back_is_not_shown(tmp_path: Path) -> None:
    Job(tmp_path, 2).through(7)
    roll_back(tmp_path, 3)  # version 4 is the state after batch 3
    Job(tmp_path, 3, branch=1).through(6)
    roll_back(tmp_path, 4)
    Job(tmp_path, 2, branch=2).through(6)
    reader = StateReader(str(tmp_path))
    assert reader.versions() == [1, 2, 3, 4, 5, 6]
    for version in range(1, 7):
        branches = [0, 0, 0, 0, 1, 2][:version]
        assert read(reader, version) == expected(branches), version
    with pytest.raises(UsageError, match="There are versions 1 to 6"):
        reader.choose(7)


def test_a_collector_keeps_what_retained_versions_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_backlog, "_MAX_DELTAS", 2)
    for partitions, batches in ((2, 5), (4, 9), (3, 14)):
        Job(tmp_path, partitions).through(batches)
    reader = StateReader(str(tmp_path))
    now = [max(info.modified for info in reader.files.list(""))]
    collector = Collector(
        reader.files, reader.claim.number, retain=8, grace=60, clock=lambda: now[0], elapsed=lambda: now[0]
    )
    collector.collect(13)
    now[0] += 61 + 8 * 86400
    assert collector.collect(13).objects
    after = StateReader(str(tmp_path))
    versions = after.versions()
    assert versions[-10:] == list(range(5, 15))
    assert len(versions) < 14
    for version in versions:
        assert read(after, version) == expected([0] * version)
    for version in set(range(1, 5)) - set(versions):
        with pytest.raises(UsageError, match="is not stored"):
            StateReader(str(tmp_path)).choose(version)


def test_a_version_that_attempts_do_not_agree_on_is_not_shown(tmp_path: Path) -> None:
    Job(tmp_path, 1).through(2)
    reader = StateReader(str(tmp_path))
    manifest = reader.manifest(0, 0, 1)
    slot = Slot(reader.files, reader.claim.number, tmp_path / "other")
    slot.committer.submit(
        slot.sealed.write(
            seal(
                manifest,
                {name: (one.runs, [b""]) for name, one in manifest.tables.items()},
                input_checksum=7,
                input_rows=1,
            ),
            reader.claim.number,
        )
    )
    slot.committer.mark_durable(manifest)
    slot.settle()
    again = StateReader(str(tmp_path))
    assert again.versions() == [1]
    assert not again.is_complete(2)


@pytest.mark.parametrize(
    ("versions", "said"),
    [([3], "version 3"), ([3, 4], "versions 3 to 4"), ([1, 4, 5, 9], "versions 1, 4 to 5, 9")],
)
def test_versions_are_told(versions: list[int], said: str) -> None:
    assert format_versions(versions) == said
