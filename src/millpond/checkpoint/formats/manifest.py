"""Manifests: the runs and deltas that make up one version of one partition.

A manifest is complete: the newest one suffices to read the state. A version *v* is the state after batch *v − 1*.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import xxhash

from millpond.files.backends.filesystem import Buffer, views
from millpond.files.refs import HashInterval, TableManifest


class DeltaRef(msgspec.Struct, frozen=True):
    """A reference to one table's delta of `version`: `length` bytes from `offset` in the object `commit`.

    Attributes:
        checksum: XXH3 of the bytes.
        rows: number of rows.
        skip: number of leading rows that do not count.
        visible: hashes of the rows that count; None for all (see `RunRef`).
        schema_number: number of the state schema of its rows (see `checkpoint.state_schema`).
    """

    commit: str
    offset: int
    length: int
    version: int
    checksum: int
    rows: int = 0
    skip: int = 0
    visible: HashInterval | None = None
    schema_number: int = 0


class TableState(msgspec.Struct, frozen=True):
    """One table at one version: its runs, and the deltas (oldest first) of the versions after `runs.flushed`."""

    runs: TableManifest
    deltas: tuple[DeltaRef, ...] = ()


class PartitionManifest(msgspec.Struct, frozen=True):
    """One version of one partition of one operator.

    Attributes:
        id: unique id of this seal; the same in every commit object that holds it.
        parent: the `id` that this version was computed from; None for the first version.
        lineage: checksum over the inputs of all batches up to this version. Two manifests of one version with the same
            lineage are interchangeable, even if different slots computed them.
        input_checksum, input_rows: order-independent checksum and count of the rows of batch `version - 1`.
        tables: the state at this version, by table name.
        metrics: metrics of batch `version - 1`, by name (see `millpond.metrics.DURABLE_METRICS`).
        schema_number: number of the state schema of the query that computed it (see `checkpoint.state_schema`).
        host: host that computed it, as Spark names it; empty under a local master.
        attempt: with synchronous commits, a number of Spark's task attempt that grows with each; else 0. Output may
            differ between attempts then, and Spark uses that of the last.
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
    schema_number: int = 0
    host: str = ""
    attempt: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """Operator and partition."""
        return self.operator, self.partition


@dataclass
class Sealed:
    """A version that is computed but not yet durable: its manifest without deltas, and its own deltas by table.

    Attributes:
        pieces: bytes of each table's delta, in order, by table name.
        rows: number of rows of each delta, by table name.
        same_as: id of the attempt before at the same version, if its deltas are the same; else None.
        bytes: total size of all pieces.
    """

    manifest: PartitionManifest
    pieces: dict[str, list[Buffer]]
    rows: dict[str, int] = field(default_factory=dict)
    same_as: str | None = None
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
    schema_number: int = 0,
    host: str = "",
    attempt: int = 0,
) -> Sealed:
    """Build the next version of a partition.

    Args:
        parent: the manifest that it was computed from: from `Checkpoint.open_partition`, or from the previous `Sealed`.
            (The parent's deltas are looked up at commit time; the deltas in `parent` are not used.)
        tables: current runs and the pieces of the sealed delta, by table name; the pieces must not change any more.
        rows: number of rows of each delta, by table name.
        input_checksum, input_rows: order-independent checksum (unsigned 64 bits) and number of the batch's input rows.
        metrics: metrics of the batch to keep in the manifest.
        schema_number: number of the state schema of the query that computed it.
        host: host that computed it.
        attempt: see `PartitionManifest`.
    """
    version = parent.version + 1
    manifest = PartitionManifest(
        operator=parent.operator,
        partition=parent.partition,
        version=version,
        # A new id for each seal: it identifies the attempt, while `lineage` identifies its input.
        id=uuid.uuid4().hex,
        parent=parent.id or None,
        lineage=_lineage(parent.lineage, version, input_checksum, input_rows, schema_number),
        input_checksum=input_checksum,
        input_rows=input_rows,
        tables={name: TableState(runs) for name, (runs, _) in tables.items()},
        metrics=dict(metrics or {}),
        schema_number=schema_number,
        host=host,
        attempt=attempt,
    )
    return Sealed(
        manifest,
        {name: list(pieces) for name, (_, pieces) in tables.items()},
        dict(rows or {}),
    )


def seal_again(sealed: Sealed, attempt: int) -> Sealed:
    """Build the same version for a later attempt, which gives the same output.

    Args:
        sealed: the version, as an earlier attempt sealed it.
        attempt: number of the later attempt (see `PartitionManifest`).
    """
    manifest = msgspec.structs.replace(sealed.manifest, id=uuid.uuid4().hex, attempt=attempt)
    return replace(sealed, manifest=manifest)


def checksum(pieces: Sequence[Buffer]) -> int:
    """Compute the XXH3 (64 bits) of the pieces in order; releases the GIL."""
    digest = xxhash.xxh3_64()
    for piece in views(pieces):
        digest.update(piece)
    return digest.intdigest()


def _lineage(parent: int, version: int, input_checksum: int, input_rows: int, schema_number: int) -> int:
    # The schema is part of the lineage: queries with different state schemas compute different state from one input.
    words = b"".join(w.to_bytes(8, "little") for w in (parent, version, input_checksum, input_rows, schema_number))
    return xxhash.xxh3_64_intdigest(words)
