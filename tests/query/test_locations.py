"""Sinks by their formats, and the state of temporary checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millpond.files.locations.opening import open_filesystem
from millpond.query.starting import locations
from millpond.query.starting.locations import _delete_all, is_refused, runs_planned


@pytest.mark.parametrize(
    ("sink", "runs"),
    [
        ("kafka", True),
        ("Kafka", True),
        ("foreachBatch", True),
        ("parquet", False),
        ("Parquet", False),
        ("CSV", False),
        ("delta", None),
        ("", None),
    ],
)
def test_sinks_are_known_whatever_the_case_of_their_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sink: str, runs: bool | None
) -> None:
    monkeypatch.setattr(locations, "qualified", lambda _, path: path)
    spark: Any = None
    (tmp_path / "_spark_metadata").mkdir()
    (tmp_path / "_spark_metadata" / "3").touch()
    assert runs_planned(spark, sink, str(tmp_path), 3) is runs


@pytest.mark.parametrize(
    ("sink", "path", "mode", "refused"),
    [
        ("parquet", "/out", "append", False),
        ("JSON", "/out", "update", True),
        ("orc", "/out", "complete", True),
        ("text", None, "append", True),
        ("delta", None, "complete", False),
        ("foreachBatch", None, "update", False),
        ("", None, "update", False),
    ],
)
def test_file_sinks_need_a_path_and_rows_that_do_not_change(
    sink: str, path: str | None, mode: str, refused: bool
) -> None:
    assert is_refused(sink, path, mode) == refused


@pytest.mark.parametrize("scheme", ["", "memory:"])
def test_a_location_is_deleted_as_a_whole(tmp_path: Path, scheme: str) -> None:
    state, other = (open_filesystem(f"{scheme}{tmp_path}/{query}") for query in ("ended", "other"))
    for files in (state, other):
        files.put("millpond/query.json", [b"{}"])
        files.put("millpond/commits/1", [b"{}"])
    _delete_all(state)
    _delete_all(state)
    assert state.list("") == []
    assert len(other.list("")) == 2
    assert not (tmp_path / "ended").exists()
