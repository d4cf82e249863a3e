"""Pins: the objects of a checkpoint that forks share and garbage collection must keep (see `checkpoint.forks`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from millpond.checkpoint.forks.parents import Parent, Parents, open_parent
from millpond.checkpoint.formats.documents import FORMAT, read_document, write_document_once
from millpond.errors import StateDamagedError
from millpond.files.backends.filesystem import FileSystem, MissingFileError
from millpond.files.locations.forked import parse_shared

_FOLDER = "forks/"


class Pin(msgspec.Struct, frozen=True):
    """The objects of a checkpoint that one fork may read.

    Attributes:
        fork: URL of the fork's `millpond/` folder when the fork was created.
        version: the forked version.
        objects: names below the checkpoint's `millpond/`.
        created: seconds since the epoch.
    """

    fork: str
    version: int
    objects: tuple[str, ...]
    created: float
    format: int = FORMAT


def pin_name(identity: str) -> str:
    """Return the name of a pin's object."""
    return f"{_FOLDER}{identity}.json"


def write_pin(files: FileSystem, name: str, pin: Pin) -> None:
    """Write a pin under a new name, which is never used again."""
    write_document_once(files, name, pin)


def read_pins(files: FileSystem, known: Mapping[str, Pin] | None = None) -> dict[str, Pin]:
    """Read all pins, by name.

    Args:
        files: the location's `millpond/` folder.
        known: pins that were read before; they do not change, so they are not read again.

    Raises:
        StateDamagedError: a pin is altered, so its objects are unknown.
    """
    while True:
        pins = {}
        for info in files.list(_FOLDER):
            try:
                pins[info.name] = (known or {}).get(info.name) or read_document(files, info.name, Pin)
            except MissingFileError:
                break  # released after the listing: a new pin of the same objects may exist by now, so list again
            except StateDamagedError as error:
                raise StateDamagedError(
                    "A pin is altered, so what a fork needs is not known, and nothing is removed.",
                    action="Restore it from a backup, or delete it if that fork is gone for good.",
                    file=error.file,
                ) from error
        else:
            return pins


def pinned(pins: Mapping[str, Pin]) -> set[str]:
    """Return the names of all pinned objects, which must not be removed."""
    return {name for pin in pins.values() for name in pin.objects}


def unused_parents(parents: Parents | None, files: FileSystem, live: Iterable[str]) -> dict[int, Parent]:
    """Return the parents that no retained manifest refers to, by number.

    Args:
        parents: the fork's parents; None if the location is not a fork.
        files: the fork's `millpond/` folder. For a fork that was moved or copied the result is empty, because the pins
            may belong to another fork.
        live: all names in retained manifests.
    """
    if parents is None or not parents.was_created_at(files.url):
        return {}
    used = {shared.parent for shared in map(parse_shared, live) if shared is not None}
    return {number: parent for number, parent in enumerate(parents.parents) if number not in used}


def release(parent: Parent) -> None:
    """Delete this fork's pin, so that the parent may remove the objects. Idempotent."""
    open_parent(parent).delete(parent.pin)
