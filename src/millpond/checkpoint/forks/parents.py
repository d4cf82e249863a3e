"""`parents.json`: the locations whose objects a fork shares, and opening a state location with them."""

from __future__ import annotations

from typing import Any

import msgspec

from millpond.checkpoint.formats.documents import FORMAT, read_document
from millpond.files.backends.filesystem import FileSystem, MissingFileError
from millpond.files.locations.forked import with_parents
from millpond.files.locations.opening import join_url, open_filesystem, same_place

PARENTS_FILE = "parents.json"


class Parent(msgspec.Struct, frozen=True):
    """A checkpoint whose files a fork reads: its location, and the name of the fork's pin there."""

    location: str
    pin: str


class Parents(msgspec.Struct, frozen=True):
    """The parents of a fork. The fork's object names refer to a parent by its position, from 0.

    Attributes:
        fork: URL of the fork's `millpond/` folder when the fork was created.
        parents: the parents, in order.
        making: unique id of the creation, by which the creator recognises the document that it wrote.
    """

    fork: str
    parents: tuple[Parent, ...]
    format: int = FORMAT
    making: str = ""

    def was_created_at(self, url: str) -> bool:
        """Return whether the fork was created at a URL; different spellings of one URL are equal."""
        return same_place(self.fork, url)


def open_state(location: str, **options: Any) -> FileSystem:
    """Open the `millpond/` folder of a location, including its parents' objects if it is a fork.

    Args:
        location: URL of the checkpoint, or of the state if that has its own location.
        options: see `open_filesystem`.

    Raises:
        SettingError: see `open_filesystem`.
        StateDamagedError: `parents.json` is altered.
    """
    files = open_filesystem(join_url(location, "millpond"), **options)
    known = read_parents(files)
    if known is None or not known.parents:
        return files
    return with_parents(files, [open_parent(parent, **options) for parent in known.parents])


def open_parent(parent: Parent, **options: Any) -> FileSystem:
    """Open the `millpond/` folder of a parent, for the objects that it owns."""
    return open_filesystem(join_url(parent.location, "millpond"), **options)


def read_parents(files: FileSystem) -> Parents | None:
    """Read the parents of a location; return None if it is not a fork."""
    try:
        return read_document(files, PARENTS_FILE, Parents)
    except MissingFileError:
        return None
