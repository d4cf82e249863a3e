"""An application without Spark: a real start, a slot in this process, and a loop in place of Spark's batches."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from pathlib import Path

from millpond.checkpoint.forks.parents import open_state
from millpond.checkpoint.generation import claim
from millpond.checkpoint.recovery import Recovery
from millpond.checkpoint.state_schema import OperatorSchema, StateSchema, plain
from millpond.files.locations.opening import open_filesystem
from millpond.operators.kinds.registry import state_tables
from millpond.query.logs.query_logs import QueryLogs, RollBack
from millpond.query.schema.comparison import write_or_check_schema
from millpond.query.starting.recovery_point import write_base_and_find_replays
from millpond.slot.partition.partitions import PartitionServer
from millpond.spec.kinds.union import OperatorSpec
from millpond.tasks.operator_task import OperatorTask, SlotSettings


class Application(ABC):
    """One query of one operator; all its files are below `folder`.

    Args:
        scheme: of the URL of the state's location, such as `faults+file:`; empty for a path.
    """

    def __init__(
        self, folder: Path, spec: OperatorSpec, partitions: int, scheme: str = "", settings: SlotSettings | None = None
    ) -> None:
        self.folder = folder
        self.spec = spec
        self.partitions = partitions
        self.location = f"{scheme}{folder}"
        self.settings = settings or SlotSettings(directory=str(folder), open_timeout=0.0)
        self.files = open_state(self.location)
        checkpoint = open_filesystem(str(folder))
        self.query_logs = QueryLogs(checkpoint)
        self.checkpoint = checkpoint
        self.server: PartitionServer | None = None

    def start(self) -> None:
        """Recover, and replay batches, so that the slot can run the batch after the last committed one."""
        self.pin()
        generation = claim(self.files, run="run", partitions=self.partitions)
        self.roll_back = RollBack(self.checkpoint, self.query_logs, self.files, generation.number)
        self.roll_back.undo_interrupted()
        recovery = Recovery(self.files, generation, 1)
        again = write_base_and_find_replays(recovery, self.query_logs, schema_number=self.schema_number(recovery))
        self.task = OperatorTask(
            application="app",
            query="query",
            run="run",
            operator=0,
            spec=self.spec,
            partitions=self.partitions,
            slots=1,
            location=self.location,
            generation=generation.number,
            offsets=str(self.folder / "offsets"),
            settings=self.settings,
        )
        host = self.folder / "host"
        host.mkdir(exist_ok=True)
        self.server = PartitionServer(host)
        for batch in again:
            with self.roll_back.replaying(batch):
                self.run(batch)
                self.server.drain(self.task.key, 10)

    def pin(self) -> None:
        """Write the state schema, or check it."""
        tables = {name: plain(table.schema) for name, table in state_tables(self.spec).items()}
        write_or_check_schema(self.files, StateSchema(1 << 15, (OperatorSchema("operator", plain(self.spec), tables),)))

    def schema_number(self, recovery: Recovery) -> int:
        """Return the number of the query's state schema, for a recovery that has read the checkpoint."""
        return 0

    @abstractmethod
    def planned(self, batch: int) -> bytes:
        """Return a batch's entry of Spark's offset log."""

    @abstractmethod
    def run(self, batch: int) -> None:
        """Run one batch, and check its rows."""

    def go(self, batches: int) -> None:
        """Run and commit batches as Spark does, from the first uncommitted one up to `batches`, exclusive."""
        for batch in range(self.query_logs.last_committed + 1, batches):
            self.query_logs.put("offsets", batch, self.planned(batch))
            self.run(batch)
            self.query_logs.put("commits", batch, b"commit %d" % batch)

    def through(self, batches: int) -> None:
        """Start, run batches as `go` does, and close even after an error."""
        try:
            self.start()
            self.go(batches)
        finally:
            self.close()

    def close(self) -> None:
        """End the slot, and wait for its threads: in an application they end with its process."""
        if self.server is not None:
            self.server.close()
            at_rest()


def at_rest() -> None:
    """Wait until the threads of closed slots have ended, because tests copy their files."""
    for thread in threading.enumerate():
        if thread.name.startswith(("millpond-merge", "millpond-write")):
            thread.join(30)
            assert not thread.is_alive(), f"{thread.name} was not closed"
