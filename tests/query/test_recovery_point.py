"""The versions that a start builds on, and the batches that it repeats, after a change of the query's plan."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from millpond.checkpoint.generation import claim, read_base
from millpond.checkpoint.recovery import Recovery
from millpond.query.starting.recovery_point import write_base_and_find_replays
from tests.checkpoint.rig import Slot, memory


@pytest.mark.parametrize(
    ("plan", "runs", "kept"),
    [
        ("as before", True, True),
        ("as before", False, True),
        ("another", True, False),  # the sink runs the batch with this plan, which makes other state
        ("another", False, True),  # the sink skips the batch: its rows are those of the plan before
    ],
)
def test_state_that_another_plan_made_of_a_planned_batch(tmp_path: Path, plan: str, runs: bool, kept: bool) -> None:
    files = memory()
    generation = claim(files, run="before", partitions=1)
    Recovery(files, generation, 1).write_base([0], "as before")
    slot = Slot(files, generation.number, tmp_path)
    first = slot.seal(slot.open(0, 0), b"0")
    slot.seal(first.manifest, b"1")  # of batch 1, which is planned and not committed
    slot.settle()
    slot.die()
    generation = claim(files, run="now", partitions=1)
    logs = SimpleNamespace(last={"offsets": 1, "commits": 0}.get, next_batch=1)
    replays = write_base_and_find_replays(
        Recovery(files, generation, 1),
        logs,  # type: ignore[arg-type]
        plan,
        runs_planned=lambda batch: runs,
    )
    assert replays == []
    assert [base.version for base in read_base(files, generation.number).versions] == ([1, 2] if kept else [1])
