"""Copies of checkpoints and of forks are distinguished from their originals, or the start ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millpond.checkpoint.generation import claim
from millpond.checkpoint.recovery import Recovery
from millpond.errors import SettingError, StateIncompatibleError, TransientError
from millpond.files.backends.filesystem import FileSystem
from millpond.files.locations.opening import join_url, open_filesystem, same_place
from millpond.query.checkpoints import copied_checkpoint
from millpond.query.checkpoints.fork import check_fork, fork
from millpond.query.checkpoints.ownership import Ownership
from millpond.query.logs.query_logs import QueryLogs
from tests.query.test_forks import Query, somewhere
from tests.servers.hdfs import configured

_numbers = itertools.count()


def copied(source: str, target: str) -> None:
    one, other = open_filesystem(source), open_filesystem(target)
    for info in one.list(""):
        other.put(info.name, [one.get(info.name)])


def owner(checkpoint: str, state: str) -> Ownership:
    return Ownership(checkpoint, open_filesystem(checkpoint), state, open_filesystem(join_url(state, "millpond")))


def checkpoint_and_copy() -> tuple[str, str, str]:
    """Two checkpoints, and the one state to which both would write, of which the first has had a run."""
    base = f"memory:copies{next(_numbers)}"
    first = owner(f"{base}/one", f"{base}/state")
    QueryLogs(first.checkpoint_files).identify()
    generation = claim(first.files, run="one", partitions=1, key_groups=64)
    first.note(generation.number)
    Recovery(first.files, generation, 1).write_base([0])
    copied(f"{base}/one", f"{base}/two")
    return f"{base}/one", f"{base}/two", f"{base}/state"


def fork_and_copy(tmp_path: Path) -> tuple[str, str]:
    place, copy = somewhere(), somewhere()
    fork(Query(somewhere(), tmp_path).go(10).location, place)
    copied(place, copy)
    return place, copy


class Answers:
    """Opens the place `url` as a store that first gives the answers, and is itself then."""

    def __init__(self, url: str, *answers: Exception) -> None:
        self.url = url
        self.answers = list(answers)

    def __call__(self, url: str, **options: Any) -> FileSystem:
        files = open_filesystem(url)
        assert url.startswith(self.url)
        real = files.get

        def get(name: str) -> bytes:
            if self.answers:
                raise self.answers.pop(0)
            return real(name)

        files.get = get  # type: ignore[method-assign]
        return files


def starts_of(tmp_path: Path) -> list[tuple[str, Callable[[], None]]]:
    """For a fork and for a checkpoint: where it is, and the check of its copy."""
    place, copy = fork_and_copy(tmp_path)
    one, two, state = checkpoint_and_copy()
    return [
        (place, lambda: check_fork(copy, open_filesystem(copy))),
        (one, lambda: owner(two, state).check()),
    ]


def test_a_start_ends_if_nobody_knows_whether_it_is_of_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down = TransientError("The store failed: 503 Slow Down.")
    for place, check in starts_of(tmp_path):
        monkeypatch.setattr(copied_checkpoint, "open_filesystem", Answers(place, *[slow_down] * 100))
        with pytest.raises(TransientError, match=r"is a copy of .* is not known: .* 503.* gone for good"):
            check()
        monkeypatch.setattr(copied_checkpoint, "open_filesystem", Answers(place, slow_down))
        with pytest.raises(StateIncompatibleError, match="is a copy of"):
            check()


def test_a_place_that_cannot_be_reached_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, check in starts_of(tmp_path):
        refusing = Answers(place, SettingError("The store refuses access."))
        monkeypatch.setattr(copied_checkpoint, "open_filesystem", refusing)
        check()


def test_a_copy_is_told_however_its_state_is_written() -> None:
    _, two, state = checkpoint_and_copy()
    with pytest.raises(StateIncompatibleError, match="is a copy of"):
        owner(two, state.replace("memory:", "memory:/")).check()


@pytest.mark.parametrize(
    ("url", "other", "same"),
    [
        ("s3://bucket/a", "s3a://bucket/a/", True),
        ("s3n://bucket/a", "s3a://bucket/a", True),
        ("s3://bucket/a", "s3://bucket/b", False),
        ("s3://bucket/a", "s3://bucket/A", False),
        ("s3://bucket/a", "gs://bucket/a", False),
        ("file:///a/b/", "/a/b", True),
        ("file:/a/b", "file:///a/c/../b", True),
        ("file:/a/b", "/a/c", False),
        ("file:////a/b", "/a/b", True),
        ("//a//b", "/a/b", True),
        ("hdfs:/a", "hdfs://a", False),
        ("webhdfs://h/a", "webhdfs://H:9870//a/", True),
        ("webhdfs://one:1,two:2/a", "webhdfs://two:2,one:1/a", True),
        ("webhdfs://h/a", "webhdfs://h/A", False),
        ("webhdfs://h/a", "webhdfs://h:9871/a", False),
    ],
)
def test_places_are_told_apart(url: str, other: str, same: bool) -> None:
    assert same_place(url, other) is same


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("hdfs://h/a", True),
        ("hdfs://h:8020//a", True),
        ("hdfs:///a/", True),
        ("hdfs:/a", True),
        ("webhdfs://h/a", True),
        ("hdfs://h:8021/a", False),
        ("hdfs://g/a", False),
        ("hdfs://h/a/b", False),
    ],
)
def test_places_on_hdfs_are_told_apart_by_its_configuration(url: str, same: bool, tmp_path: Path) -> None:
    with configured(tmp_path, {"fs.defaultFS": "hdfs://h:8020"}):
        assert same_place("hdfs://h:8020/a", url) is same
