"""Messages between slot clients, slots and the template.

Each message is a tagged msgpack structure. It states which tables or rows follow it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from millpond.slot.process.identity import Process
from millpond.tasks.operator_task import Lookahead, OperatorTask


class RequestSlot(msgspec.Struct, tag=True):
    """To the template: request a slot. If the process `replace` holds that slot, kill it first."""

    slot: int
    replace: Process | None = None


class SlotStarted(msgspec.Struct, tag=True):
    """From the template: the slot's process, whose socket listens."""

    process: Process


class Hello(msgspec.Struct, tag=True):
    """To a slot, first on every connection: check that it is alive."""


class Welcome(msgspec.Struct, tag=True):
    """From a slot: reply to `Hello` with its own process."""

    process: Process


class RunBatch(msgspec.Struct, tag=True):
    """To a slot: start of a partition's input for one batch.

    Attributes:
        task: the operator.
        partition: the partition.
        batch: the batch id; None where Spark does not provide it. Then the offset log and the marker's time decide.
        attempt: Spark's task attempt id, unique in an application.
        verify_batch: whether the id may belong to another batch: a user's thread keeps the id that it inherited when
            it started.
        paths: directories on this host with modules that the application was given (`addPyFile`).
    """

    task: OperatorTask
    partition: int
    batch: int | None
    attempt: int
    verify_batch: bool = False
    paths: list[str] = []


class Done(msgspec.Struct, tag=True):
    """From a slot, after the last output row: the effect of the batch on the partition."""

    batch: int
    metrics: dict[str, float]


class Call(msgspec.Struct, tag=True):
    """From a slot, after all input has arrived: call the user's processor for some keys. Tables of columns follow.

    Each table is a schema and one record batch (see `operators.processors.calls`).

    Attributes:
        phase: reason of the call: rows of the `initial` state, `rows` of the batch, due `timers`, or `end` to close it.
        processing: the batch's processing time that the processor sees.
        watermark: the watermark that the processor sees.
        tables: names of the tables that follow.
    """

    phase: Literal["initial", "rows", "timers", "end"]
    processing: int
    watermark: int
    tables: list[str]


class Fetch(msgspec.Struct, tag=True):
    """To a slot, during a call: read parts of a state variable. A table that lists the parts follows.

    The answer is one table.

    Attributes:
        table: name of the state table that holds the parts.
    """

    table: str


class Called(msgspec.Struct, tag=True):
    """To a slot, after the processor's output rows: its state changes.

    Attributes:
        tables: names of the tables that follow, each a schema and one record batch.
    """

    tables: list[str]


class Hints(msgspec.Struct, tag=True):
    """To a slot, without a reply: prefetch hints for rows that will arrive. A schema and one record batch follow.

    The batch has the hashes of the keys, then the columns that the operator needs (`Spec.hint_columns`).

    Attributes:
        task: the operator.
        partition: partition of the keys.
        batch: the batch that will read the keys.
        lookahead: sender of the hints. A message without rows gives the time at which it could have sent hints.
    """

    task: OperatorTask
    partition: int
    batch: int
    lookahead: Lookahead


class Open(msgspec.Struct, tag=True):
    """To a slot: open partitions at a version ahead of their first batch.

    Attributes:
        tasks: the operators of one query.
        partitions: partitions of each operator.
        version: the version that their first batch reads.
    """

    tasks: list[OperatorTask]
    partitions: list[int]
    version: int


class Opened(msgspec.Struct, tag=True):
    """From a slot: reply to `Open`.

    A partition that could not be opened is opened again by its first batch, which reports the error.
    """


class Drain(msgspec.Struct, tag=True):
    """To a slot: finish a query's pending commits and release its partitions; `query` is its `OperatorTask.key`.

    A `generation` is given when that run has ended: partitions of a later run are kept.
    """

    query: str
    timeout: float
    generation: int | None = None


class Drained(msgspec.Struct, tag=True):
    """From a slot: (operator, partition, version) of each partition of the query, all durable."""

    versions: list[tuple[int, int, int]]


class Status(msgspec.Struct, tag=True):
    """To a slot: ask for the status of a query (its `OperatorTask.key`)."""

    query: str


class QueryStatus(msgspec.Struct, tag=True):
    """From a slot: reply to `Status`. The client merges the replies of a host's slots into one.

    A batch is answered once the versions that its output waits for are durable.

    Attributes:
        answered: (operator, partition, last answered batch) of each open partition that has answered a batch.
        commit_failures: why commits fail, for each slot where they have failed for some seconds.
        failed_commits: number of failed commit attempts in this run of the query.
        lost_calls: keys for which user code was running when its process died, for each slot where that happened.
    """

    answered: list[tuple[int, int, int]] = []
    commit_failures: list[str] = []
    failed_commits: int = 0
    lost_calls: list[str] = []


Message = (
    RequestSlot
    | SlotStarted
    | Hello
    | Welcome
    | RunBatch
    | Call
    | Fetch
    | Called
    | Done
    | Hints
    | Open
    | Opened
    | Drain
    | Drained
    | Status
    | QueryStatus
)
