"""Small JSON files with a checksum: a line of JSON, then a line `xxh3:<16 hex digits>` over the first."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import xxhash

from millpond.errors import StateDamagedError, StateIncompatibleError
from millpond.files.backends.filesystem import FileSystem
from millpond.files.backends.retry import put_once

FORMAT = 6
"""Format version of the checkpoint; every document has it in its field `format`."""

DIGITS = 15
"""Digits of a generation's number in object names."""

Document = TypeVar("Document", bound=msgspec.Struct)


def write_document(files: FileSystem, name: str, document: msgspec.Struct, *, create: bool = False) -> None:
    """Put `document` under `name`; see `FileSystem.put` for `create`."""
    files.put(name, _encoded(document), create=create)


def write_document_once(files: FileSystem, name: str, document: msgspec.Struct) -> None:
    """Put a document if absent; no other writer may write the same bytes under this name (see `put_once`)."""
    put_once(files, name, _encoded(document))


def _encoded(document: msgspec.Struct) -> list[bytes]:
    body = msgspec.json.encode(document)
    return [body, b"\nxxh3:%016x\n" % xxhash.xxh3_64_intdigest(body)]


def read_document(files: FileSystem, name: str, kind: type[Document]) -> Document:
    """Read and check a document.

    Raises:
        StateDamagedError: the document is cut short or altered.
        MissingFileError: the document does not exist; a subclass of `StateDamagedError`.
        StateIncompatibleError: a Millpond with another format wrote it.
    """
    url = files.locate(name)
    body, _, check = files.get(name).partition(b"\n")
    if check != b"xxh3:%016x\n" % xxhash.xxh3_64_intdigest(body):
        raise damaged_error(url, "is cut short or altered")
    fields: Any = msgspec.json.decode(body)
    if isinstance(fields, dict) and fields.get("format", FORMAT) != FORMAT:
        raise format_error(url, fields["format"])
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise damaged_error(url, f"cannot be read: {error}") from error


def damaged_error(url: str, how: str) -> StateDamagedError:
    """Return the error for a checkpoint file that differs from what was written; `how` completes its sentence."""
    return StateDamagedError(
        f"A checkpoint file {how}.",
        action="Restore it from a backup, or go back to an earlier batch (`millpond docs restarts-and-changes`).",
        file=url,
    )


def format_error(url: str, found: int) -> StateIncompatibleError:
    """Return the error for a file of a format that this version does not read."""
    return StateIncompatibleError(
        f"A checkpoint file has format {found}; this version of Millpond reads format {FORMAT}.",
        action="Use the version of Millpond that wrote it, or start with a new checkpointLocation.",
        file=url,
    )


def digits(number: int) -> str:
    """Format a generation's number for names: zero-padded, so that names sort as numbers do."""
    return f"{number:0{DIGITS}d}"
