"""State that lies away from its checkpoint belongs to one checkpoint alone.

A copy of a checkpoint has the original's query id, and with it the same folder below `spark.millpond.state.location`.
Each run notes in its checkpoint which generation of the state it is, before that generation has a base: so the
checkpoint that knows the state's newest generation is the one that went on with the state last.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from millpond.checkpoint.formats.documents import FORMAT, digits, read_document, write_document
from millpond.checkpoint.generation import base_name, begun
from millpond.errors import StateIncompatibleError
from millpond.files.backends.filesystem import FileSystem, same_place
from millpond.query.ledger.copies import is_copy
from millpond.query.ledger.ledger import Ledger

_FOLDER = "millpond/claims/"

_FORK = (
    "To run both, give this one a state of its own: copy the state's folder below another location, and set "
    "spark.millpond.state.location to that."
)


class _Claim(msgspec.Struct, frozen=True):
    """A generation that a run has claimed: the checkpoint that it ran from, and where its state lies."""

    checkpoint: str
    state: str
    format: int = FORMAT


@dataclass(frozen=True)
class Ownership:
    """A checkpoint and the state that it goes on with.

    Attributes:
        checkpoint: its URL.
        ledger_files: what lies there.
        state: URL of the state.
        files: the state's `millpond/` folder.
    """

    checkpoint: str
    ledger_files: FileSystem
    state: str
    files: FileSystem

    def check(self) -> None:
        """Refuse a state that another checkpoint has gone on with, or might.

        Raises:
            StateIncompatibleError: this checkpoint, or the one that last went on with the state, is a copy.
            TransientError: the one that did lies elsewhere, and does not answer.
        """
        newest = max(begun(self.files), default=None)
        if newest is None:
            return
        if not self.ledger_files.exists(_name(newest)):
            raise StateIncompatibleError(
                f"The checkpoint {self.checkpoint} does not know the last run of its state (generation {newest}): "
                "a copy of the checkpoint, or the one that it was copied from, has gone on with the state since.",
                action=f"Start the checkpoint that ran last. {_FORK}",
                file=self.files.locate(base_name(newest)),
            )
        last = read_document(self.ledger_files, _name(newest), _Claim)
        moved = not same_place(last.checkpoint, self.checkpoint)
        if moved and same_place(last.state, self.state) and self._is_copy_of(last.checkpoint, _name(newest)):
            raise StateIncompatibleError(
                f"The checkpoint {self.checkpoint} is a copy of {last.checkpoint}, and both would write to one state.",
                action=f"Delete the checkpoint that is not wanted. {_FORK}",
                file=self.files.locate(base_name(newest)),
            )

    def note(self, generation: int) -> None:
        """Note a generation that was just claimed, and forget those that no check will ask for."""
        write_document(self.ledger_files, _name(generation), _Claim(self.checkpoint, self.state))
        newest = max(begun(self.files), default=0)
        for info in self.ledger_files.list(_FOLDER):
            if info.name < _name(newest):
                self.ledger_files.delete(info.name)

    def _is_copy_of(self, other: str, note: str) -> bool:
        """Whether another checkpoint is there, of the same query: not this one under another name."""
        query = Ledger(self.ledger_files).query_id()
        gone = f"If that place is gone for good, write where this one lies into {self.ledger_files.locate(note)}."
        return is_copy(self.ledger_files, _FOLDER, other, lambda there: Ledger(there).query_id() == query, gone=gone)


def state_of_last_run(ledger_files: FileSystem) -> str | None:
    """Where the last run from a checkpoint had its state, if not in the checkpoint."""
    names = [info.name for info in ledger_files.list(_FOLDER) if info.name.endswith(".json")]
    return read_document(ledger_files, names[-1], _Claim).state if names else None


def _name(generation: int) -> str:
    return f"{_FOLDER}{digits(generation)}.json"
