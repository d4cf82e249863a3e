"""What a pipe carries to wherever Spark runs it: everything a slot must know to serve one operator of one query."""

from __future__ import annotations

import uuid
from typing import Literal

import msgspec

from millpond.conf import KEY_GROUP_BITS
from millpond.spec.kinds.union import OperatorSpec
from millpond.spec.operators import Field

Lookahead = str
"""Who announces keys (Keyed Prefetching §IV-A), in the order of the plan: `source`, whoever looks at what the source
will read a batch later; stages of the user's plan, by their names; `exchange`, the map side of the operator's
exchange."""


class SlotSettings(msgspec.Struct, frozen=True):
    """The settings that slots and pipes obey; times in seconds.

    Attributes:
        memory: bytes that one slot may hold for state, buffers and caches.
        commit_mode: `async` lets commits lag by one batch, `sync` ends no batch before its own commit is durable.
        directory: host-local directory below which sockets, sealed files and caches live; empty for the host's default.
        cache_disk: bytes of local disk for copies of files, per slot; None for as much as there is.
        cache_admission: when a file is copied (see `HistoryPolicy`).
        hedging: second requests for each first one to an object store, at most (see `HedgedFiles`).
        compaction: `local` compacts in the slot, `remote` asks workers first.
        compaction_timeout: how long a slot waits for a worker's sign of life before it compacts itself.
        cache_policy: which rows leave memory first (see `RmwTable`).
        hot: from how many times on that a key came lately it is not announced (see `Sketch`).
        read_batch_ratio, max_space_amplification: of the unaligned append store (see `UnalignedTable`).
        start_timeout: how long a slot may take to answer when it is asked for.
        silence_timeout: how long a slot may give no sign of life before it counts as hung and is killed.
        open_timeout: how long a partition waits for a commit that is on its way from another host.
        attempt_timeout: how long an attempt waits for an earlier attempt at the same batch that still sends input.
        commit_timeout: how long a batch waits for a commit to become durable.
        exit_timeout: how long a slot whose application is gone goes on finishing pending commits.
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


class PipeTask(msgspec.Struct, frozen=True):
    """One Millpond operator of one run of a query.

    Attributes:
        application: Spark's application id; slots are shared by its queries and executors on one host.
        query: the streaming query's id (stable across restarts), as Spark knows it.
        run: the id of this run.
        operator: index of the operator in the query.
        spec: what it computes.
        partitions: number of partitions.
        slots: number of slots per host; partition `p` is served by slot `p % slots`.
        location: URL of the state; everything lies below its folder `millpond/`.
        generation: the generation that this run writes.
        offsets: URL of the query's offset log, which maps a batch's time to its id.
        settings: what slots and pipes obey.
        template: Python module that the template process runs.
        initial: the generation of the run that has written what operators begin with (see `slot.batch.initial`); 0 if
            the query's first batch is done, or they begin with nothing.
        adopts: whether what comes is not rows of a batch but state of Spark's, of which no output is wanted.
        lookaheads: who may announce keys of the operator, in the order of the plan.
        jvm: process id and start (`Process`) of the JVM that runs all tasks; None where they run on several hosts.
        exchange: `spark` shuffles the rows; `local` rows or their parcels, which say where the rows lie in files.
        combined: the columns that rows have beside the operator's if they were combined before the exchange; empty
            where that does not happen.
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

    @property
    def key(self) -> str:
        """What slots, and folders of the host, know the query by: a copy of its checkpoint has the same id."""
        return f"{self.query}-{uuid.uuid5(uuid.NAMESPACE_URL, self.location).hex[:8]}"

    def partition_of(self, key_hash: int) -> int:
        """The partition that a key hash (signed or unsigned 64 bits) falls into."""
        group = (key_hash & 0xFFFF_FFFF_FFFF_FFFF) >> (64 - KEY_GROUP_BITS)
        return group * self.partitions >> KEY_GROUP_BITS

    def hash_range(self, partition: int) -> tuple[int, int]:
        """The interval `[low, high)` of unsigned key hashes that a partition holds; `high` may be 2⁶⁴."""
        shift = 64 - KEY_GROUP_BITS
        first = -(-(partition << KEY_GROUP_BITS) // self.partitions)
        last = -(-((partition + 1) << KEY_GROUP_BITS) // self.partitions)
        return first << shift, last << shift
