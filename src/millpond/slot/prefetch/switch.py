"""Which hints an operator wants: said by its partitions, and read by whoever could send them, all on one host.

There is a file for each operator and partition that wants hints. Its name says whose: one look at a folder tells all,
and a change is a renaming, at no moment of which nothing is wanted. Where nothing was missing from memory, the price of
hints is that look, once a task.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

from millpond.slot.batch.task import Lookahead, PipeTask

_FOLDER = "hints"
_LONGEST = 100
"""Bytes of a lookahead's name in that of a file, of which there are two and 255 bytes in all."""

MOST = 1 << 20
"""Keys that a partition looks at for one batch, at most: more would be read too late anyway, and to look at them would
keep its rows waiting."""


class HintSwitch:
    """One operator's switch in one partition; off at first, whatever a slot that is gone has left.

    Args:
        directory: of the application's slots on this host. task: the operator. partition: the number of the partition.
    """

    def __init__(self, directory: Path, task: PipeTask, partition: int) -> None:
        self._folder = _folder(directory, task)
        self._partition = partition
        self._file: Path | None = None
        with suppress(OSError):
            for left in self._folder.glob(f"{partition},*"):
                left.unlink(missing_ok=True)

    def set(self, lookaheads: Collection[Lookahead]) -> None:
        """Ask for hints of some lookaheads, or of none any more. What the disk refuses costs the hints."""
        names = ",".join([str(self._partition), *(_written(one) for one in sorted(lookaheads))])
        file = self._folder / names if lookaheads else None
        if file == self._file:
            return
        with suppress(OSError):
            if file is None:
                assert self._file is not None
                self._file.unlink(missing_ok=True)
            else:
                self._folder.mkdir(parents=True, exist_ok=True)
                if self._file is None or not self._file.exists():
                    file.touch()
                else:
                    self._file.replace(file)
            self._file = file

    def close(self) -> None:
        """Ask for none, and leave nothing behind."""
        self.set(())
        with suppress(OSError):  # other partitions may still ask
            self._folder.rmdir()


def wanted(directory: Path, task: PipeTask) -> dict[int, tuple[str, ...]]:
    """The partitions that want hints for an operator, and of which lookaheads."""
    found = {}
    known = {_written(one): one for one in task.lookaheads}
    with suppress(OSError):
        for file in _folder(directory, task).iterdir():
            partition, *names = file.name.split(",")
            if partition.isdecimal():  # a file system may have files of its own there
                found[int(partition)] = tuple(known.get(name) or unquote(name) for name in names)
    return found


def _written(lookahead: Lookahead) -> str:
    """A lookahead's name as a part of that of a file."""
    name = quote(lookahead, safe="")
    return name if len(name) <= _LONGEST else hashlib.sha256(name.encode()).hexdigest()


def _folder(directory: Path, task: PipeTask) -> Path:
    return directory / _FOLDER / f"{task.key}-{task.generation}-{task.operator}"
