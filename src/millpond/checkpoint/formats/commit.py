"""The format of commit objects and of sealed files on local disk: a checked header, then the deltas.

    0   8 bytes   magic `MILLCMIT`
    8   u32       format version
    12  u32       length of the header
    16  u64       XXH3 of bytes 0–15 and the header
    24            header (`CommitHeader`, msgpack)
    …             deltas, in the order of the header's manifests and their tables

All numbers are little-endian. The header refers to a delta in the object itself by an empty `commit` and an offset from
the end of the header. So the same bytes can be put under any name.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence

import msgspec
import xxhash

from millpond.checkpoint.formats.documents import FORMAT, damaged_error, digits, format_error
from millpond.checkpoint.formats.manifest import DeltaRef, PartitionManifest, Sealed, TableState, checksum
from millpond.files.backends.filesystem import Buffer, FileInfo, FileSystem

MAGIC = b"MILLCMIT"
FIRST_READ_BYTES = 1 << 16
"""Size in bytes of the first read of an object, which contains most headers completely."""

_PREFIX = struct.Struct("<8sII")
_CHECK = struct.Struct("<Q")
_START = _PREFIX.size + _CHECK.size
_NAME = re.compile(r"commits/\d+-\d+-[^./]+\.\d+")


class CommitHeader(msgspec.Struct, frozen=True):
    """The header of a commit object; `payload` is the total length of its deltas in bytes."""

    generation: int
    slot: str
    version: int
    payload: int
    manifests: tuple[PartitionManifest, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CommitHeader)


def commit_name(version: int, generation: int, slot: str, number: int) -> str:
    """Return `commits/<version>-<generation>-<slot>.<number>`; names sort by version, then generation."""
    return f"{commit_prefix(version, generation)}{slot}.{number}"


def commit_prefix(version: int, generation: int) -> str:
    """Return the name prefix of one generation's commits of a version."""
    return f"commits/{version:012d}-{digits(generation)}-"


def parse_commit_name(name: str) -> tuple[int, int]:
    """Parse the name of a commit (see `only_commits`) into version and generation."""
    version, generation, _ = name.removeprefix("commits/").split("-", 2)
    return int(version), int(generation)


def only_commits(infos: Iterable[FileInfo]) -> list[FileInfo]:
    """Return the commits among listed objects; other programs may leave files beside them."""
    return [info for info in infos if _NAME.fullmatch(info.name)]


def encode_commit(
    generation: int, slot: str, group: Sequence[tuple[Sealed, PartitionManifest]]
) -> tuple[list[Buffer], CommitHeader]:
    """Encode a commit object.

    Each table's deltas become the parent's deltas that are newer than `flushed`, then its own.

    Args:
        generation: generation of the run.
        slot: uuid of the slot.
        group: sealed deltas of one version, each with the final manifest whose deltas come before its own: that of its
            parent, or of an earlier attempt at the version with the same deltas, if `Sealed.pieces` is empty.

    Returns:
        The pieces of the object (the encoded header first), and the header.
    """
    pieces: list[Buffer] = []
    manifests = []
    offset = 0
    for sealed, parent in group:
        tables = {}
        for name, table in sealed.manifest.tables.items():
            before = parent.tables[name].deltas if name in parent.tables else ()
            # Runs cover the deltas up to `flushed`, so the manifest does not name them any more.
            kept = tuple(delta for delta in before if delta.version > table.runs.flushed)
            own = sealed.pieces.get(name, [])
            length = sum(memoryview(piece).nbytes for piece in own)
            if length:
                manifest = sealed.manifest
                rows = sealed.rows.get(name, 0)
                kept += (
                    DeltaRef(
                        "", offset, length, manifest.version, checksum(own), rows, schema_number=manifest.schema_number
                    ),
                )
                pieces.extend(own)
                offset += length
            tables[name] = TableState(table.runs, kept)
        manifests.append(msgspec.structs.replace(sealed.manifest, tables=tables))
    version = group[0][0].manifest.version
    header = CommitHeader(generation, slot, version, offset, tuple(manifests))
    return [encode_header(header), *pieces], header


def encode_header(header: CommitHeader) -> bytes:
    """Encode the bytes of a commit object up to its deltas."""
    body = _encoder.encode(header)
    prefix = _PREFIX.pack(MAGIC, FORMAT, len(body))
    return prefix + _CHECK.pack(_header_checksum(prefix, body)) + body


def resolve(header: CommitHeader, name: str, start: int) -> CommitHeader:
    """Resolve the header's references to its own deltas.

    Args:
        header: the header as decoded.
        name: name of the commit object.
        start: end of the header in the object, in bytes.

    Returns:
        The header, its own deltas with the object's name and offsets from the beginning of the object.
    """

    def located(delta: DeltaRef) -> DeltaRef:
        return msgspec.structs.replace(delta, commit=name, offset=delta.offset + start) if not delta.commit else delta

    manifests = tuple(
        msgspec.structs.replace(
            manifest,
            tables={
                key: TableState(table.runs, tuple(map(located, table.deltas))) for key, table in manifest.tables.items()
            },
        )
        for manifest in header.manifests
    )
    return msgspec.structs.replace(header, manifests=manifests)


def header_end(pieces: Sequence[Buffer]) -> int:
    """Return the offset in bytes of the deltas in an object that `encode_commit` made."""
    return memoryview(pieces[0]).nbytes


def read_header(files: FileSystem, name: str, size: int | None = None) -> CommitHeader:
    """Read and check the header of the commit object `name`; its deltas are resolved to that name.

    Args:
        files: the location's `millpond/` folder.
        name: name of the object.
        size: length of the object in bytes, if known from a listing.

    Raises:
        StateDamagedError: the object is cut short or altered. (The contents of deltas are checked when they are read,
            their total length already here.)
        StateIncompatibleError: the object has a format that this version does not read.
        MissingFileError: the object does not exist.
    """
    url = files.locate(name)
    size = files.size(name) if size is None else size
    if size < _START:
        raise damaged_error(url, "is cut short")
    first = memoryview(files.get_range(name, 0, min(size, FIRST_READ_BYTES)))
    magic, form, length = _PREFIX.unpack_from(first)
    if magic != MAGIC:
        raise damaged_error(url, "is not a commit")
    if form != FORMAT:
        raise format_error(url, form)
    end = _START + length
    if end > size:
        raise damaged_error(url, "is cut short")
    body = first[_START:end] if end <= len(first) else memoryview(files.get_range(name, _START, length))
    (expected,) = _CHECK.unpack_from(first, _PREFIX.size)
    if _header_checksum(bytes(first[: _PREFIX.size]), body) != expected:
        raise damaged_error(url, "is altered")
    try:
        header = _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise damaged_error(url, f"cannot be read: {error}") from error
    if end + header.payload != size:
        raise damaged_error(
            url, "is cut short" if end + header.payload > size else "has bytes at its end that do not belong"
        )
    return resolve(header, name, end)


def read_checked_header(files: FileSystem, name: str, size: int | None = None) -> CommitHeader:
    """Read the header of a commit object, and check that the object was written under this name."""
    header = read_header(files, name, size)
    check_commit_name(files, name, header)
    return header


def check_commit_name(files: FileSystem, name: str, header: CommitHeader) -> None:
    """Check that an object was written under its name; it would otherwise count for another version or another run.

    Raises:
        StateDamagedError: it was written under another name.
    """
    if not name.startswith(f"{commit_prefix(header.version, header.generation)}{header.slot}."):
        written = f"version {header.version}, generation {header.generation}, slot {header.slot}"
        error = damaged_error(files.locate(name), f"has a wrong name: it was written for {written}")
        raise error.at(version=parse_commit_name(name)[0])


def _header_checksum(prefix: bytes, body: Buffer) -> int:
    digest = xxhash.xxh3_64(prefix)
    digest.update(body)
    return digest.intdigest()
