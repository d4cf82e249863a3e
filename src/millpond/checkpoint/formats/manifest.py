"""The nouns of a checkpoint: what one version of one partition consists of.

A manifest is complete: whoever holds the newest one needs no older one to read the state. A version *v* is the state
after batch *v − 1*.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import xxhash

from millpond.files.backends.filesystem import Buffer, views
from millpond.files.refs import TableManifest, Window


class DeltaRef(msgspec.Struct, frozen=True):
    """Where the delta of one table that made `version` lies: `length` bytes from `offset` in the object `commit`.

    Attributes:
        checksum: of the bytes. rows: how many it has.
        skip: how many of them, from the first, do not count. window: the hashes of those that do (see `RunRef`).
        shape: the query's whose tables its rows are of (see `checkpoint.pinned`).
    """

    commit: str
    offset: int
    length: int
    version: int
    checksum: int
    rows: int = 0
    skip: int = 0
    window: Window | None = None
    shape: int = 0


class TableState(msgspec.Struct, frozen=True):
    """One table at one version: its runs, and the deltas (oldest first) of the versions behind `runs.flushed`."""

    runs: TableManifest
    deltas: tuple[DeltaRef, ...] = ()


class PartitionManifest(msgspec.Struct, frozen=True):
    """One version of one partition of one operator.

    Attributes:
        id: names this seal, unique for ever; the same in every commit object that holds it.
        parent: the `id` that this version was computed from; None for the first version.
        lineage: checksum over the inputs of all batches up to this version. Two manifests of one version with the same
            lineage are interchangeable, whoever computed them.
        input_checksum, input_rows: order-independent checksum and count of the rows of batch `version - 1`.
        tables: by name; the state at this version.
        metrics: figures of batch `version - 1`, by name (see `millpond.metrics.DURABLE`).
        shape: of the query that computed it (see `checkpoint.pinned`).
    """

    operator: int
    partition: int
    version: int
    id: str = ""
    parent: str | None = None
    lineage: int = 0
    input_checksum: int = 0
    input_rows: int = 0
    tables: dict[str, TableState] = {}
    metrics: dict[str, int] = {}
    shape: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """Operator and partition."""
        return self.operator, self.partition


@dataclass
class Sealed:
    """A version that is computed but not yet durable: its manifest without deltas, and its own deltas by table.

    Attributes:
        pieces: of each delta. rows: how many each has. bytes: of all pieces.
    """

    manifest: PartitionManifest
    pieces: dict[str, list[Buffer]]
    rows: dict[str, int] = field(default_factory=dict)
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.bytes = sum(memoryview(p).nbytes for pieces in self.pieces.values() for p in pieces)

    @property
    def key(self) -> tuple[int, int, int]:
        """Operator, partition and version."""
        return self.manifest.operator, self.manifest.partition, self.manifest.version


def seal(
    parent: PartitionManifest,
    tables: Mapping[str, tuple[TableManifest, Sequence[Buffer]]],
    *,
    input_checksum: int,
    input_rows: int,
    rows: Mapping[str, int] | None = None,
    metrics: Mapping[str, int] | None = None,
    shape: int = 0,
) -> Sealed:
    """The next version of a partition.

    Args:
        parent: what it was computed from: the manifest that `Checkpoint.open_partition` gave, or that of the `Sealed`
            before. (The deltas of the parent are looked up at commit time; those in `parent` are not used.)
        tables: by name, the runs as of now and the pieces of the sealed delta, in order; they must not change any more.
        rows: how many each delta has, by the table's name.
        input_checksum, input_rows: order-independent checksum (unsigned 64 bits) and number of the batch's input rows.
        metrics: figures of the batch to keep in the manifest.
        shape: of the query that computed it.
    """
    version = parent.version + 1
    manifest = PartitionManifest(
        operator=parent.operator,
        partition=parent.partition,
        version=version,
        id=uuid.uuid4().hex,
        parent=parent.id or None,
        lineage=_lineage(parent.lineage, version, input_checksum, input_rows, shape),
        input_checksum=input_checksum,
        input_rows=input_rows,
        tables={name: TableState(runs) for name, (runs, _) in tables.items()},
        metrics=dict(metrics or {}),
        shape=shape,
    )
    return Sealed(
        manifest,
        {name: list(pieces) for name, (_, pieces) in tables.items()},
        dict(rows or {}),
    )


def checksum(pieces: Sequence[Buffer]) -> int:
    """XXH3 (64 bits) of the pieces in order; releases the interpreter lock."""
    digest = xxhash.xxh3_64()
    for piece in views(pieces):
        digest.update(piece)
    return digest.intdigest()


def _lineage(parent: int, version: int, input_checksum: int, input_rows: int, shape: int) -> int:
    # What queries of two shapes make of the same rows is not the same.
    words = b"".join(w.to_bytes(8, "little") for w in (parent, version, input_checksum, input_rows, shape))
    return xxhash.xxh3_64_intdigest(words)
