"""`parents.json`: where a fork finds what it shares; opening state with that in mind."""

from __future__ import annotations

from typing import Any

import msgspec

from millpond.checkpoint.formats.documents import FORMAT, read_document
from millpond.files.backends.filesystem import FileSystem, MissingFileError, join_url, open_filesystem, same_place
from millpond.files.backends.forked import with_parents

NAME = "parents.json"


class Parent(msgspec.Struct, frozen=True):
    """A checkpoint whose files a fork reads: its location, and the pin that keeps them there."""

    location: str
    pin: str


class Parents(msgspec.Struct, frozen=True):
    """What a fork shares, and with whom; in its names parents stand by their number, from 0.

    Attributes:
        fork: URL of its `millpond/` folder when it was made.
        making: unlike that of any other, so that who makes it knows what it has written.
    """

    fork: str
    parents: tuple[Parent, ...]
    format: int = FORMAT
    making: str = ""

    def made_at(self, url: str) -> bool:
        """Whether the fork was made at a URL, however Hadoop and others write that."""
        return same_place(self.fork, url)


def open_state(location: str, **options: Any) -> FileSystem:
    """Open the `millpond/` folder of a location, with what it shares if it is a fork.

    Args:
        location: URL of the checkpoint, or of the state if that lies elsewhere.
        options: see `open_filesystem`.

    Raises:
        SettingError: see `open_filesystem`.
        StateDamagedError: what tells of the parents is altered.
    """
    files = open_filesystem(join_url(location, "millpond"), **options)
    known = read_parents(files)
    if known is None or not known.parents:
        return files
    return with_parents(files, [open_parent(parent, **options) for parent in known.parents])


def open_parent(parent: Parent, **options: Any) -> FileSystem:
    """The `millpond/` folder of a parent, of which only its own objects are asked for."""
    return open_filesystem(join_url(parent.location, "millpond"), **options)


def read_parents(files: FileSystem) -> Parents | None:
    """What a location shares, None if it is no fork."""
    try:
        return read_document(files, NAME, Parents)
    except MissingFileError:
        return None
