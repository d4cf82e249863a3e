"""Pins: what forks have of a checkpoint, which its garbage collection has to leave (see the room's description)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from millpond.checkpoint.forks.parents import Parent, Parents, open_parent
from millpond.checkpoint.formats.documents import FORMAT, read_document, write_own_document
from millpond.errors import StateDamagedError
from millpond.files.backends.filesystem import FileSystem, MissingFileError
from millpond.files.backends.forked import parse_shared

_FOLDER = "forks/"


class Pin(msgspec.Struct, frozen=True):
    """What one fork may read of a checkpoint.

    Attributes:
        fork: URL of its `millpond/` folder when it was made.
        version: from which it was made.
        objects: names below the checkpoint's `millpond/`.
        created: seconds since the epoch.
    """

    fork: str
    version: int
    objects: tuple[str, ...]
    created: float
    format: int = FORMAT


def pin_name(identity: str) -> str:
    """The object of a pin."""
    return f"{_FOLDER}{identity}.json"


def write_pin(files: FileSystem, name: str, pin: Pin) -> None:
    """Write a pin, under a name that is never used again."""
    write_own_document(files, name, pin)


def read_pins(files: FileSystem, known: Mapping[str, Pin] | None = None) -> dict[str, Pin]:
    """All pins, by name.

    Args:
        files: the location's `millpond/` folder.
        known: pins that were read before; they do not change.

    Raises:
        StateDamagedError: one is altered, so what it holds is not known.
    """
    while True:
        found = {}
        for info in files.list(_FOLDER):
            try:
                found[info.name] = (known or {}).get(info.name) or read_document(files, info.name, Pin)
            except MissingFileError:
                break  # released since it was listed: another, which holds the same, may have come since, too
            except StateDamagedError as error:
                raise StateDamagedError(
                    "A pin is altered, so what a fork needs is not known, and nothing is removed.",
                    action="Restore it from a backup, or delete it if that fork is gone for good.",
                    file=error.file,
                ) from error
        else:
            return found


def pinned(pins: Mapping[str, Pin]) -> set[str]:
    """What must not be removed."""
    return {name for pin in pins.values() for name in pin.objects}


def unused_parents(parents: Parents | None, files: FileSystem, live: Iterable[str]) -> dict[int, Parent]:
    """The parents of which nothing is named any more, by number.

    Args:
        parents: of the fork; None if it is none.
        files: its `millpond/` folder. Of a fork that was moved or copied, none is said to be unused: the pins may be
            another's.
        live: all names in manifests that are retained.
    """
    if parents is None or not parents.made_at(files.url):
        return {}
    used = {at.parent for at in map(parse_shared, live) if at is not None}
    return {number: parent for number, parent in enumerate(parents.parents) if number not in used}


def release(parent: Parent) -> None:
    """Let a parent remove what this fork had of it; a second time does nothing."""
    open_parent(parent).delete(parent.pin)
