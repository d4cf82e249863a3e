"""Saved results of rows: a JSON file for each, with everything that a reader needs to repeat the run."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

import msgspec

from benchmarks import ROOT
from benchmarks.measuring.result import Machine
from benchmarks.papers.figures import Figures
from benchmarks.papers.row import Row
from millpond.demo.machine import java_version

RECORD = Path(__file__).with_name("results")
"""The results of record, from which `docs/benchmarks/papers.md` is made."""
UNKNOWN = "unknown"
"""The commit of a source tree without git."""
_PACKAGES = ("pyspark", "pyarrow", "numpy", "numba")


class Saved(msgspec.Struct, kw_only=True):
    """The result of one row.

    Attributes:
        row: name of the row.
        commit: of the source tree; ends with `+` if files differed from it.
        quick: whether it was a quick run.
        settings: the commands, as a shell takes them.
        machine: on which it was measured.
        versions: of Python, Java and packages.
        day: on which it was measured.
        seconds: time that it took.
        figures: of each run, each with its seed.
        absent: engines that were not installed.
        error: why there are no figures, or not all.
        unfinished: whether the time of a quick run was over before all commands had ended.
    """

    row: str
    commit: str
    quick: bool
    settings: list[str]
    machine: Machine
    versions: dict[str, str]
    day: str = ""
    seconds: float = 0.0
    figures: list[Figures] = []
    absent: list[str] = []
    error: str | None = None
    unfinished: bool = False


class Results:
    """The saved results in a folder.

    Args:
        folder: made when the first result is saved.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, row: Row) -> Saved | None:
        """Return the result of a row, or None if it was not measured."""
        path = self._path(row.name)
        return msgspec.json.decode(path.read_bytes(), type=Saved) if path.exists() else None

    def put(self, saved: Saved) -> None:
        """Save a result in place of an earlier one, atomically for readers."""
        path = self._path(saved.row)
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_suffix(".staged")
        staged.write_bytes(msgspec.json.format(msgspec.json.encode(saved), indent=1) + b"\n")
        staged.replace(path)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def same_run(saved: Saved | None, row: Row, commit: str, *, quick: bool) -> bool:
    """Return whether a result is complete, and of this commit and these settings: then it need not be measured again.

    A tree whose files differ from the commit (`abc+`), or a tree without git, is never known to be the same.
    """
    known = not commit.endswith("+") and commit != UNKNOWN
    return (
        saved is not None
        and known
        and saved.error is None
        and not saved.unfinished
        and (saved.commit, saved.quick, saved.settings) == (commit, quick, row.settings(quick=quick))
    )


def current_commit() -> str:
    """Return the commit of the source tree; with `+` if files differ from it, `unknown` without git."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    changed = ["git", "-C", str(ROOT), "status", "--porcelain", "--", ".", ":!docs", ":!benchmarks/papers/results"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        return commit + ("+" if subprocess.run(changed, capture_output=True, text=True, check=True).stdout else "")
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN


def versions() -> dict[str, str]:
    """Return the versions of Java and of the packages that decide how fast a row is."""
    return {"java": java_version(), **{name: metadata.version(name) for name in _PACKAGES}}
