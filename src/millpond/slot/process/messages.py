"""What pipes, slots and the template say to each other.

Each message is a tagged msgpack structure; what tables or rows follow one, it says.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from millpond.slot.batch.task import Lookahead, PipeTask
from millpond.slot.process.identity import Process


class Ask(msgspec.Struct, tag=True):
    """To the template: a slot is needed; the process `replace`, if it holds that slot, is to be killed first."""

    slot: int
    replace: Process | None = None


class Granted(msgspec.Struct, tag=True):
    """From the template: the slot's process; its socket listens."""

    process: Process


class Hello(msgspec.Struct, tag=True):
    """To a slot, first on every connection: are you there?"""


class Welcome(msgspec.Struct, tag=True):
    """From a slot: yes, and this is my process."""

    process: Process


class Run(msgspec.Struct, tag=True):
    """To a slot: here comes a partition's input for one batch.

    Attributes:
        task: the operator.
        partition: which partition.
        batch: the batch id, or None where Spark does not tell; then the offset log and the marker's time decide.
        attempt: Spark's task attempt id, unique in an application.
        unsure: whether the id may be another batch's: a thread of the user's keeps what it once inherited.
        paths: where modules that the application was given (`addPyFile`) lie on this host.
    """

    task: PipeTask
    partition: int
    batch: int | None
    attempt: int
    unsure: bool = False
    paths: list[str] = []


class Done(msgspec.Struct, tag=True):
    """From a slot, after the last output row: what the batch did to the partition."""

    batch: int
    metrics: dict[str, float]


class Call(msgspec.Struct, tag=True):
    """From a slot, after all input is in: the user's processor is to be called for some keys; tables of columns follow.

    Each of them is a schema and one record batch (see `operators.processors.calls`).

    Attributes:
        phase: what it is to be called with: rows of the `initial` state, `rows` of the batch, `timers` that are due;
            `end`: it is to be closed.
        processing, watermark: the times of the batch, as the processor is told them.
        tables: names of the tables that follow.
    """

    phase: Literal["initial", "rows", "timers", "end"]
    processing: int
    watermark: int
    tables: list[str]


class Fetch(msgspec.Struct, tag=True):
    """To a slot, while a call runs: parts of a variable are wanted; which ones, the table says that follows.

    It is answered by one table.

    Attributes:
        table: the name of the table that has the parts.
    """

    table: str


class Called(msgspec.Struct, tag=True):
    """To a slot, after the rows that the processor gave out: what it changed.

    Attributes:
        tables: names of the tables that follow, each a schema and one record batch.
    """

    tables: list[str]


class Hints(msgspec.Struct, tag=True):
    """To a slot, which does not answer: keys of which rows are on their way; a schema and one record batch follow, with
    their hashes, and behind these what the operator asks for (`Spec.announced`).

    Attributes:
        task: the operator.
        partition: which partition the keys are of.
        batch: the batch that will ask for them.
        lookahead: who has seen them. Without rows it says when it would have sent hints, were it asked to.
    """

    task: PipeTask
    partition: int
    batch: int
    lookahead: Lookahead


class Open(msgspec.Struct, tag=True):
    """To a slot: these partitions will be asked for, at this version.

    Attributes:
        tasks: the operators of one query.
        partitions: which partitions of each.
        version: the state that their first batch reads.
    """

    tasks: list[PipeTask]
    partitions: list[int]
    version: int


class Opened(msgspec.Struct, tag=True):
    """From a slot: they are open, or will be opened by whoever asks for them, who then learns what is wrong."""


class Drain(msgspec.Struct, tag=True):
    """To a slot: finish a query's pending commits and let go of its partitions; `query` is its `PipeTask.key`.

    With a `generation`, because the run of that has ended: a later run is left alone.
    """

    query: str
    timeout: float
    generation: int | None = None


class Drained(msgspec.Struct, tag=True):
    """From a slot: per partition of the query (operator, partition, version), all durable now."""

    versions: list[tuple[int, int, int]]


class Status(msgspec.Struct, tag=True):
    """To a slot: how far are you with this query (its `PipeTask.key`)?"""

    query: str


class Answered(msgspec.Struct, tag=True):
    """From a slot: (operator, partition, batch) of each partition that it holds and has answered a batch of.

    A batch is answered once what its output waits for is durable. `trouble` says why commits fail, if they do;
    `failed_commits` counts the tries that failed in this run of the query; `lost_call` says for which keys code of the
    user was called when its process went.
    """

    batches: list[tuple[int, int, int]]
    trouble: str = ""
    failed_commits: int = 0
    lost_call: str = ""


Message = (
    Ask
    | Granted
    | Hello
    | Welcome
    | Run
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
    | Answered
)
