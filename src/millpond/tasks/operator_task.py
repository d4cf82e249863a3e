"""The task of a slot stage: everything that a slot needs to serve one operator of one query."""

from __future__ import annotations

import uuid
from typing import Literal

import msgspec

from millpond.key_groups import hash_ranges, partition_of
from millpond.layout import HashRange
from millpond.spec.kinds.union import OperatorSpec
from millpond.spec.operators import Field

Lookahead = str
"""Name of a lookahead, a point of the plan that sends prefetch hints (Keyed Prefetching §IV-A).

In plan order: `source`, which sees what the source will read a batch later; stages of the user's plan, by their names;
`exchange`, the map side of the operator's exchange."""


class SlotSettings(msgspec.Struct, frozen=True):
    """Settings of slots and slot stages; times are in seconds.

    Attributes:
        memory: bytes that one slot may use for state, buffers and caches.
        commit_mode: `async` lets commits lag by one batch; `sync` ends a batch only when its own commit is durable.
        directory: host-local directory for sockets, sealed files and caches; empty for the host's default.
        cache_disk: bytes of local disk for copies of files, per query and slot; None for half of the free space that
            other queries leave, shared by the slots.
        cache_admission: when a file is copied (see `HistoryPolicy`).
        hedging: maximum ratio of second requests to first ones, to an object store (see `HedgedFiles`).
        compaction: `local` compacts in the slot, `remote` asks workers first.
        compaction_timeout: how long a slot waits for a worker's sign of life before it compacts itself.
        cache_policy: which rows leave memory first (see `RmwTable`).
        hot: number of recent occurrences from which a key is not prefetched, as it is surely in memory (see `Sketch`).
        read_batch_ratio: of the unaligned append store (see `UnalignedTable`).
        max_space_amplification: of the unaligned append store (see `UnalignedTable`).
        start_timeout: how long a slot may take to answer a request to start.
        silence_timeout: how long a slot may send no heartbeat before it counts as hung and is killed.
        open_timeout: how long a partition waits for a pending commit of another host.
        attempt_timeout: how long an attempt waits for the next input of an earlier attempt at the same batch.
        commit_timeout: how long a batch waits for a commit to become durable.
        exit_timeout: how long a slot goes on finishing pending commits after its application has ended.
    """

    memory: int = 1 << 30
    commit_mode: Literal["async", "sync"] = "async"
    directory: str = ""
    cache_disk: int | None = None
    cache_admission: float = 2.0
    hedging: float = 0.05
    read_batch_ratio: float = 0.02
    max_space_amplification: float = 1.5
    start_timeout: float = 30.0
    silence_timeout: float = 60.0
    open_timeout: float = 30.0
    attempt_timeout: float = 60.0
    commit_timeout: float = 120.0
    exit_timeout: float = 30.0
    cache_policy: Literal["timestamp", "lru", "clock"] = "timestamp"
    hot: int = 8
    compaction: Literal["local", "remote"] = "local"
    compaction_timeout: float = 60.0


class OperatorTask(msgspec.Struct, frozen=True):
    """One Millpond operator of one run of a query.

    Attributes:
        application: Spark's application id; its queries and executors on one host share slots.
        query: the streaming query's id in Spark, stable across restarts.
        run: the id of this run.
        operator: index of the operator in the query.
        spec: what it computes.
        partitions: number of partitions.
        slots: number of slots per host; slot `p % slots` serves partition `p`.
        location: URL of the state; everything is below its folder `millpond/`.
        generation: the generation that this run writes.
        offsets: URL of the query's offset log, which maps a batch's time to its id.
        settings: settings of slots and slot stages.
        template: Python module that the template process runs.
        initial: generation of the run that wrote the operators' initial state (see `tasks.initial_state`); 0 if the
            query's first batch is committed or there is no initial state.
        adopts: whether the input is Spark's own state, to be adopted without output, instead of rows of a batch.
        lookaheads: lookaheads that may send hints for the operator, in plan order.
        jvm: process id and start time (`Process`) of the JVM that runs all tasks; None where they run on several hosts.
        exchange: `spark` shuffles rows; `local` exchanges rows or block references, which give the location of rows in
            files.
        combined: columns that rows have in addition if they were combined before the exchange; empty if rows never are.
        located: whether each task of a slot stage begins with the marker of its partition, and Spark's partitioning key
            is the third column.
        restarts: how often the application has started the query again after lost hosts.
    """

    application: str
    query: str
    run: str
    operator: int
    spec: OperatorSpec
    partitions: int
    slots: int
    location: str
    generation: int
    offsets: str
    settings: SlotSettings = SlotSettings()
    template: str = "millpond.slot.template"
    exchange: Literal["local", "spark"] = "spark"
    adopts: bool = False
    lookaheads: tuple[Lookahead, ...] = ()
    initial: int = 0
    jvm: tuple[int, int] | None = None
    combined: tuple[Field, ...] = ()
    located: bool = False
    restarts: int = 0

    @property
    def may_move(self) -> bool:
        """Whether tasks run on several hosts, so that two attempts at a batch may run in different slots."""
        return self.jvm is None

    @property
    def key(self) -> str:
        """Key of the query in slots and host folders.

        It includes the location, since a copy of a checkpoint has the same query id.
        """
        return f"{self.query}-{uuid.uuid5(uuid.NAMESPACE_URL, self.location).hex[:8]}"

    def partition_of(self, key_hash: int) -> int:
        """Return the partition of a key hash (signed or unsigned 64 bits)."""
        return partition_of(key_hash, self.partitions)

    def hash_range(self, partition: int) -> HashRange:
        """Return the range of a partition's key hashes."""
        return hash_ranges(self.partitions)[partition]
