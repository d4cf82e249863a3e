"""Which hints an operator wants: said by its slots, and read by whoever could send them, all on one host.

There is a file for each partition that wants hints, with the name of the lookahead that is to send them: where nothing
was missing from memory, the price of hints is that of looking for it, once a task.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from millpond.slot.batch.task import Lookahead, PipeTask

_FOLDER = "hints"


class HintSwitch:
    """The switch of one partition of an operator. Whatever an earlier process has left there does not count.

    Args:
        directory: of the application's slots on this host. task: the operator. partition: its number.
    """

    def __init__(self, directory: Path, task: PipeTask, partition: int) -> None:
        self._file = _folder(directory, task) / str(partition)
        self._lookahead: Lookahead | None = None
        with suppress(OSError):
            self._file.unlink(missing_ok=True)

    def set(self, lookahead: Lookahead | None) -> None:
        """Ask for hints of one lookahead, or for none any more. What the disk refuses costs the hints."""
        if lookahead == self._lookahead:
            return
        with suppress(OSError):
            if lookahead is not None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.write_text(lookahead)
            else:
                self._file.unlink(missing_ok=True)
            self._lookahead = lookahead


def wanted(directory: Path, task: PipeTask) -> dict[int, str]:
    """The partitions of an operator that want hints, and of which lookahead."""
    found = {}
    with suppress(OSError):
        for file in _folder(directory, task).iterdir():
            with suppress(OSError):
                found[int(file.name)] = file.read_text()
    return found


def _folder(directory: Path, task: PipeTask) -> Path:
    return directory / _FOLDER / f"{task.key}-{task.generation}-{task.operator}"
