"""Objects of the remote compaction protocol: requests, leases and results."""

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
    write_document_once,
)
from millpond.errors import StateDamagedError
from millpond.files.backends.filesystem import FileInfo, FileSystem, MissingFileError
from millpond.files.refs import RunRef

FOLDER = "compaction/"
MAX_WAIT_SECONDS = 3600.0
"""Longest time in seconds that a slot waits for a result."""

CLOCK_MARGIN_SECONDS = 600.0
"""Seconds beyond `MAX_WAIT_SECONDS` until a request counts as left by a dead slot: clocks differ."""

_REQUEST, _LEASE, _FREE, _DONE = ".request", ".lease.", ".free.", ".done"

Document = TypeVar("Document", bound=msgspec.Struct)


class Request(msgspec.Struct, frozen=True):
    """A compaction job.

    Attributes:
        id: unique id, never used again.
        generation: generation of the run that asks.
        job: the job as its store encodes it.
    """

    id: str
    generation: int
    job: bytes
    format: int = FORMAT


class Lease(msgspec.Struct, frozen=True):
    """The worker that holds a request."""

    worker: str
    format: int = FORMAT


class CompactionResult(msgspec.Struct, frozen=True):
    """The result of a request: files, or an error. `attempt` identifies the attempt that wrote it."""

    attempt: str
    files: tuple[RunRef, ...] = ()
    error: str = ""
    seconds: float = 0.0
    format: int = FORMAT


@dataclass(frozen=True)
class RequestState:
    """The objects of one request in a listing.

    Attributes:
        request: the request object; None if it was removed.
        lease: number of the newest lease; 0 if there is no lease.
        released: number of the newest released lease; 0 if no lease was released.
        has_result: whether a result exists.
        replies: lease, release and result objects.
    """

    generation: int
    request: FileInfo | None = None
    lease: int = 0
    released: int = 0
    has_result: bool = False
    replies: tuple[FileInfo, ...] = ()

    @property
    def leased(self) -> bool:
        """Whether a worker holds the request; the worker may have died since."""
        return self.lease > self.released


def request_name(generation: int, identity: str) -> str:
    """Return the name of a request object."""
    return f"{_prefix(generation, identity)}{_REQUEST}"


def lease_name(generation: int, identity: str, number: int) -> str:
    """Return the name of a lease object, which claims a request or renews the claim; numbers begin at 1."""
    return f"{_prefix(generation, identity)}{_LEASE}{number:06d}"


def release_name(generation: int, identity: str, number: int) -> str:
    """Return the name of the object that releases a lease."""
    return f"{_prefix(generation, identity)}{_FREE}{number:06d}"


def result_name(generation: int, identity: str) -> str:
    """Return the name of a result object."""
    return f"{_prefix(generation, identity)}{_DONE}"


def file_prefix(identity: str) -> str:
    """Return the name prefix of files that are made for a request."""
    return f"{identity}-"


def request_of_file(name: str) -> str:
    """Return the id of the request that a file was made for; empty if it was not made on request."""
    identity, dash, _ = name.rpartition("/")[2].partition("-")
    return identity if dash else ""


def put_request(files: FileSystem, request: Request) -> None:
    """Write a request."""
    write_document_once(files, request_name(request.generation, request.id), request)


def put_result(files: FileSystem, generation: int, identity: str, done: CompactionResult) -> None:
    """Write the result of a request; raise `AlreadyExistsError` if there is one."""
    write_document(files, result_name(generation, identity), done, create=True)


def read_request(files: FileSystem, generation: int, identity: str) -> Request | None:
    """Read a request; return None if it was removed, or was cut off when it was written."""
    return _read(files, request_name(generation, identity), Request)


def read_result(files: FileSystem, generation: int, identity: str) -> CompactionResult | None:
    """Read the result of a request; return None if there is no result yet.

    Raises:
        StateDamagedError: the result was cut off when it was written; no other will follow.
    """
    try:
        return read_document(files, result_name(generation, identity), CompactionResult)
    except MissingFileError:
        return None


def claim_lease(files: FileSystem, generation: int, identity: str, number: int, worker: str) -> None:
    """Claim a request, or renew the claim; raise `AlreadyExistsError` if the number is taken."""
    write_document(files, lease_name(generation, identity, number), Lease(worker), create=True)


def release_lease(files: FileSystem, generation: int, identity: str, number: int, worker: str) -> None:
    """Release a lease so that other workers can claim at once; raise `AlreadyExistsError` if it is released already."""
    write_document(files, release_name(generation, identity, number), Lease(worker), create=True)


def lease_holder(files: FileSystem, generation: int, identity: str, number: int) -> str:
    """Return the worker that holds a lease number; empty if unknown."""
    lease = _read(files, lease_name(generation, identity, number), Lease)
    return "" if lease is None else lease.worker


def list_requests(files: FileSystem) -> dict[str, RequestState]:
    """List the objects of all requests, by request id, in one listing."""
    return group_by_request(files.list(FOLDER))


def group_by_request(infos: Iterable[FileInfo]) -> dict[str, RequestState]:
    """Group a listing of the folder by request id."""
    by_request: dict[str, RequestState] = {}
    for info in infos:
        number, _, rest = info.name.removeprefix(FOLDER).partition("/")
        identity, dot, kind = rest.partition(".")
        if not number.isdigit() or len(number) != DIGITS or not dot:
            continue
        state = by_request.get(identity) or RequestState(int(number))
        if dot + kind == _REQUEST:
            by_request[identity] = replace(state, request=info)
            continue
        by_request[identity] = replace(
            state,
            lease=max(state.lease, _number_after(dot + kind, _LEASE)),
            released=max(state.released, _number_after(dot + kind, _FREE)),
            has_result=state.has_result or dot + kind == _DONE,
            replies=(*state.replies, info),
        )
    return by_request


def remove_request(files: FileSystem, generation: int, identity: str) -> None:
    """Remove a request and its leases and results. Its files can then be collected unless a manifest names them."""
    # The request goes first: workers check that it exists before they write a result.
    files.delete(request_name(generation, identity))
    for info in files.list(f"{_prefix(generation, identity)}."):
        files.delete(info.name)


def _prefix(generation: int, identity: str) -> str:
    return f"{FOLDER}{digits(generation)}/{identity}"


def _number_after(kind: str, prefix: str) -> int:
    """Return the number behind a prefix; 0 if the name has another prefix."""
    number = kind.removeprefix(prefix)
    return int(number) if number != kind and number.isdigit() else 0


def _read(files: FileSystem, name: str, kind: type[Document]) -> Document | None:
    try:
        return read_document(files, name, kind)
    except StateDamagedError:
        return None
