"""The set of hints that an operator wants: written by its partitions, read by lookaheads on the same host.

There is one file for each operator and partition that wants hints; its name lists the lookaheads. One directory listing
thus shows all requests. A change is a rename, so that a request is never absent in between. Where no key misses memory,
hints cost one directory listing per task.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

from millpond.tasks.operator_task import Lookahead, OperatorTask

_FOLDER = "hints"
_MAX_NAME_BYTES = 100
"""Limit of a lookahead's encoded name in bytes. A file name has at most two of them and 255 bytes."""

MAX_HINTED_KEYS = 1 << 20
"""Maximum number of keys that a partition looks up for one batch. More would be read too late, and looking them up
would delay the batch's rows."""


class HintSwitch:
    """Switch of one operator in one partition. It starts off: requests of an earlier slot process are removed.

    Args:
        directory: the directory of the application's slots on this host.
        task: the operator.
        partition: the partition's number.
    """

    def __init__(self, directory: Path, task: OperatorTask, partition: int) -> None:
        self._folder = _folder(directory, task)
        self._partition = partition
        self._file: Path | None = None
        with suppress(OSError):
            # An earlier slot process may have died without withdrawing its requests.
            for stale in self._folder.glob(f"{partition},*"):
                stale.unlink(missing_ok=True)

    def set(self, lookaheads: Collection[Lookahead]) -> None:
        """Request hints from some lookaheads, or from none. If the disk refuses, there are no hints."""
        names = ",".join([str(self._partition), *(_encode_name(lookahead) for lookahead in sorted(lookaheads))])
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
                    # A rename: readers see the old request or the new one, but never none.
                    self._file.replace(file)
            self._file = file

    def close(self) -> None:
        """Withdraw the request and remove its files."""
        self.set(())
        with suppress(OSError):  # not empty: other partitions still want hints
            self._folder.rmdir()


def requested_hints(directory: Path, task: OperatorTask) -> dict[int, tuple[str, ...]]:
    """Return the partitions that want hints for an operator, with the lookaheads that they want."""
    requests = {}
    known = {_encode_name(lookahead): lookahead for lookahead in task.lookaheads}
    with suppress(OSError):
        for file in _folder(directory, task).iterdir():
            partition, *names = file.name.split(",")
            if partition.isdecimal():  # skip files that the file system itself put there
                requests[int(partition)] = tuple(known.get(name) or unquote(name) for name in names)
    return requests


def _encode_name(lookahead: Lookahead) -> str:
    """Encode a lookahead's name for use in a file name."""
    name = quote(lookahead, safe="")
    return name if len(name) <= _MAX_NAME_BYTES else hashlib.sha256(name.encode()).hexdigest()


def _folder(directory: Path, task: OperatorTask) -> Path:
    return directory / _FOLDER / f"{task.key}-{task.generation}-{task.operator}"
