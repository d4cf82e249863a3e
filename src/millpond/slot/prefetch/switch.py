"""Whether an operator wants hints: said by its slots, and read by whoever could send them, all on one host.

There is a file for each operator and slot that wants them: where nothing was missing from memory, the price of hints is
that of looking for it, once a task.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from millpond.slot.batch.task import PipeTask

_FOLDER = "hints"


class HintSwitch:
    """One operator's switch, as one slot sets it.

    Args:
        directory: of the application's slots on this host. task: the operator. slot: the number of the slot.
    """

    def __init__(self, directory: Path, task: PipeTask, slot: int) -> None:
        self._file = _folder(directory, task) / str(slot)
        self._on = False

    def set(self, on: bool) -> None:
        """Ask for hints, or for none any more. What the disk refuses costs the hints."""
        if on == self._on:
            return
        with suppress(OSError):
            if on:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.touch()
            else:
                self._file.unlink(missing_ok=True)
            self._on = on


def wanted(directory: Path, task: PipeTask) -> frozenset[int]:
    """The slots that want hints for an operator."""
    try:
        return frozenset(int(entry.name) for entry in _folder(directory, task).iterdir())
    except OSError:
        return frozenset()


def _folder(directory: Path, task: PipeTask) -> Path:
    return directory / _FOLDER / f"{task.key}-{task.generation}-{task.operator}"
