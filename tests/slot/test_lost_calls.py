"""Errors after a Python worker dies while it runs code of the user."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from millpond.slot.partition.partitions import PartitionServer
from millpond.slot.process.connection import PeerGone
from millpond.slot.process.messages import RunBatch
from millpond.spec.kinds.processor import ProcessorSpec, Variable
from millpond.spec.operators import Field
from millpond.tasks.operator_task import OperatorTask

from .conftest import begin, grouped

COUNTING = ProcessorSpec(
    (Field("k", "bigint"), Field("v", "bigint")),
    (0,),
    (Field("k", "bigint"),),
    (Variable("count", "value", "struct<n:bigint>"),),
    "none",
    "update",
)


def dies(*_: Any) -> Any:
    raise PeerGone("the connection was closed")


def test_where_the_worker_was(task: OperatorTask, tmp_path: Path) -> None:
    task = msgspec.structs.replace(task, spec=COUNTING, partitions=1, slots=1)
    begin(task)
    server = PartitionServer(tmp_path / "slot")
    try:
        assert not server.status(task.key).lost_calls
        with pytest.raises(OSError, match="closed"):
            list(server.run(RunBatch(task, 0, 0, 1), iter([grouped(0, [7], [1])]), caller=dies))
        assert server.status(task.key).lost_calls == ["operator 0, partition 0, batch 0, rows of (7,)"]
        with pytest.raises(OSError, match="closed"):
            list(server.run(RunBatch(task, 0, 0, 2), iter([grouped(0, list(range(9)), [1] * 9)]), caller=dies))
        assert server.status(task.key).lost_calls[0].endswith(" and 4 more")
    finally:
        server.close()
