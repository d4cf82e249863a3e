"""The objects by which compactions are asked for, claimed and answered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from millpond.checkpoint.formats.documents import (
    DIGITS,
    FORMAT,
    digits,
    read_document,
    write_document,
    write_own_document,
)
from millpond.errors import StateDamagedError
from millpond.files.backends.filesystem import FileInfo, FileSystem, MissingFileError
from millpond.files.refs import RunRef

FOLDER = "compaction/"
LIMIT = 3600.0
"""Seconds after which no slot waits for a result any more."""

MARGIN = 600.0
"""Seconds more until a request counts as left by a slot that died: clocks differ."""

_REQUEST, _LEASE, _FREE, _DONE = ".request", ".lease.", ".free.", ".done"

Document = TypeVar("Document", bound=msgspec.Struct)


class Request(msgspec.Struct, frozen=True):
    """What is to be done.

    Attributes:
        id: names it for ever. generation: of the run that asks. job: as its store encodes it.
    """

    id: str
    generation: int
    job: bytes
    format: int = FORMAT


class Lease(msgspec.Struct, frozen=True):
    """Who has a request in hand."""

    worker: str
    format: int = FORMAT


class Done(msgspec.Struct, frozen=True):
    """What was made: files, or why there are none. `attempt` tells those that made it."""

    attempt: str
    files: tuple[RunRef, ...] = ()
    error: str = ""
    seconds: float = 0.0
    format: int = FORMAT


@dataclass(frozen=True)
class Known:
    """What a listing has of one request.

    Attributes:
        request: None if that is gone.
        lease: number of the newest lease; 0: none. free: of the newest that was given up.
        done: whether it is answered.
        others: leases, what gives them up, and results.
    """

    generation: int
    request: FileInfo | None = None
    lease: int = 0
    free: int = 0
    done: bool = False
    others: tuple[FileInfo, ...] = ()

    @property
    def taken(self) -> bool:
        """Whether somebody has it in hand, unless they have fallen silent."""
        return self.lease > self.free


def request_name(generation: int, identity: str) -> str:
    """The object that asks."""
    return f"{_prefix(generation, identity)}{_REQUEST}"


def lease_name(generation: int, identity: str, number: int) -> str:
    """The object that claims a request, or goes on with a claim; numbers begin at 1."""
    return f"{_prefix(generation, identity)}{_LEASE}{number:06d}"


def free_name(generation: int, identity: str, number: int) -> str:
    """The object that gives a lease up."""
    return f"{_prefix(generation, identity)}{_FREE}{number:06d}"


def done_name(generation: int, identity: str) -> str:
    """The object that answers."""
    return f"{_prefix(generation, identity)}{_DONE}"


def file_prefix(identity: str) -> str:
    """What the names of files begin with that are made for a request."""
    return f"{identity}-"


def made_for(name: str) -> str:
    """For which request a file was made; empty if for none."""
    identity, dash, _ = name.rpartition("/")[2].partition("-")
    return identity if dash else ""


def put_request(files: FileSystem, request: Request) -> None:
    """Ask."""
    write_own_document(files, request_name(request.generation, request.id), request)


def put_done(files: FileSystem, generation: int, identity: str, done: Done) -> None:
    """Answer; `AlreadyExistsError` if there is an answer."""
    write_document(files, done_name(generation, identity), done, create=True)


def read_request(files: FileSystem, generation: int, identity: str) -> Request | None:
    """A request; None if it is gone, or was cut off when it was written."""
    return _read(files, request_name(generation, identity), Request)


def read_done(files: FileSystem, generation: int, identity: str) -> Done | None:
    """The answer, None if there is none.

    Raises:
        StateDamagedError: it was cut off when it was written; there will be no other.
    """
    try:
        return read_document(files, done_name(generation, identity), Done)
    except MissingFileError:
        return None


def claim_lease(files: FileSystem, generation: int, identity: str, number: int, worker: str) -> None:
    """Claim a request, or go on with a claim; `AlreadyExistsError` if the number is taken."""
    write_document(files, lease_name(generation, identity, number), Lease(worker), create=True)


def give_up_lease(files: FileSystem, generation: int, identity: str, number: int, worker: str) -> None:
    """Let others take a request at once; `AlreadyExistsError` if that is said already."""
    write_document(files, free_name(generation, identity, number), Lease(worker), create=True)


def holder(files: FileSystem, generation: int, identity: str, number: int) -> str:
    """Who has taken a number; empty if that is not known."""
    found = _read(files, lease_name(generation, identity, number), Lease)
    return "" if found is None else found.worker


def requests(files: FileSystem) -> dict[str, Known]:
    """All that is there, by request: one listing."""
    return known_in(files.list(FOLDER))


def known_in(infos: Iterable[FileInfo]) -> dict[str, Known]:
    """What a listing of the folder has, by request."""
    found: dict[str, Known] = {}
    for info in infos:
        number, _, rest = info.name.removeprefix(FOLDER).partition("/")
        identity, dot, kind = rest.partition(".")
        if not number.isdigit() or len(number) != DIGITS or not dot:
            continue
        known = found.get(identity) or Known(int(number))
        if dot + kind == _REQUEST:
            found[identity] = replace(known, request=info)
            continue
        found[identity] = replace(
            known,
            lease=max(known.lease, _numbered(dot + kind, _LEASE)),
            free=max(known.free, _numbered(dot + kind, _FREE)),
            done=known.done or dot + kind == _DONE,
            others=(*known.others, info),
        )
    return found


def withdraw(files: FileSystem, generation: int, identity: str) -> None:
    """Remove a request with all that belongs to it: from now on its files may be collected, unless they are named."""
    files.delete(request_name(generation, identity))
    for info in files.list(f"{_prefix(generation, identity)}."):
        files.delete(info.name)


def _prefix(generation: int, identity: str) -> str:
    return f"{FOLDER}{digits(generation)}/{identity}"


def _numbered(kind: str, prefix: str) -> int:
    """The number behind a prefix; 0 if the name has another."""
    number = kind.removeprefix(prefix)
    return int(number) if number != kind and number.isdigit() else 0


def _read(files: FileSystem, name: str, kind: type[Document]) -> Document | None:
    try:
        return read_document(files, name, kind)
    except StateDamagedError:
        return None
