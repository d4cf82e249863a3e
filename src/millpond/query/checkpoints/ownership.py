"""Ownership of state outside of the checkpoint: one checkpoint owns it.

A copy of a checkpoint has the original's query id, and so the same folder below `spark.millpond.state.location`. Each
run notes the generation of its state in its checkpoint, before that generation has a base. So the checkpoint that knows
the newest generation of the state is the one that used the state last.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from millpond.checkpoint.formats.documents import FORMAT, digits, read_document, write_document
from millpond.checkpoint.generation import base_name, generations_with_base
from millpond.errors import StateIncompatibleError
from millpond.files.backends.filesystem import FileSystem
from millpond.files.locations.opening import same_place
from millpond.query.checkpoints.copied_checkpoint import is_copy
from millpond.query.logs.query_logs import QueryLogs

_FOLDER = "millpond/claims/"

_FORK = (
    "To run both, give this one a state of its own: copy the state's folder below another location, and set "
    "spark.millpond.state.location to that."
)


class _Claim(msgspec.Struct, frozen=True):
    """A generation that a run has claimed: URLs of its checkpoint and of its state."""

    checkpoint: str
    state: str
    format: int = FORMAT


@dataclass(frozen=True)
class Ownership:
    """A checkpoint and its state.

    Attributes:
        checkpoint: URL of the checkpoint.
        checkpoint_files: the files of the checkpoint.
        state: URL of the state.
        files: the state's `millpond/` folder.
    """

    checkpoint: str
    checkpoint_files: FileSystem
    state: str
    files: FileSystem

    def check(self) -> None:
        """Refuse a state that another checkpoint has used since, or might use.

        Raises:
            StateIncompatibleError: this checkpoint, or the one that used the state last, is a copy.
            TransientError: the checkpoint that used the state last is at another location, which does not answer.
        """
        newest = max(generations_with_base(self.files), default=None)
        if newest is None:
            return
        if not self.checkpoint_files.exists(_name(newest)):
            raise StateIncompatibleError(
                f"The checkpoint {self.checkpoint} does not know the last run of its state (generation {newest}): "
                "a copy of the checkpoint, or the one that it was copied from, has gone on with the state since.",
                action=f"Start the checkpoint that ran last. {_FORK}",
                file=self.files.locate(base_name(newest)),
            )
        last = read_document(self.checkpoint_files, _name(newest), _Claim)
        moved = not same_place(last.checkpoint, self.checkpoint)
        if moved and same_place(last.state, self.state) and self._is_copy_of(last.checkpoint, _name(newest)):
            raise StateIncompatibleError(
                f"The checkpoint {self.checkpoint} is a copy of {last.checkpoint}, and both would write to one state.",
                action=f"Delete the checkpoint that is not wanted. {_FORK}",
                file=self.files.locate(base_name(newest)),
            )

    def note(self, generation: int) -> None:
        """Note a generation that was just claimed, and delete notes that no check will read."""
        write_document(self.checkpoint_files, _name(generation), _Claim(self.checkpoint, self.state))
        newest = max(generations_with_base(self.files), default=0)
        for info in self.checkpoint_files.list(_FOLDER):
            if info.name < _name(newest):
                self.checkpoint_files.delete(info.name)

    def _is_copy_of(self, other: str, note: str) -> bool:
        """Return whether a second checkpoint of the same query exists, which is not this one under another name."""
        query = QueryLogs(self.checkpoint_files).query_id()
        advice = f"If that place is gone for good, write where this one lies into {self.checkpoint_files.locate(note)}."
        return is_copy(
            self.checkpoint_files, _FOLDER, other, lambda there: QueryLogs(there).query_id() == query, advice=advice
        )


def state_of_last_run(checkpoint_files: FileSystem) -> str | None:
    """Return the state's location in the last run from a checkpoint; None if it was in the checkpoint."""
    names = [info.name for info in checkpoint_files.list(_FOLDER) if info.name.endswith(".json")]
    return read_document(checkpoint_files, names[-1], _Claim).state if names else None


def _name(generation: int) -> str:
    return f"{_FOLDER}{digits(generation)}.json"
