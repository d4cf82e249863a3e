"""The state of a group: what is kept of what users give, and what they see of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.differential.group_state.checks import grouped
from tests.differential.group_state.functions import Script
from tests.differential.processors.checks import Turn, compare, script, spoken


@pytest.mark.parametrize("mode", ["update", "append"])
def test_operations(spark: SparkSession, tmp_path: Path, mode: str) -> None:
    """Read, written, removed, within a call, from batch to batch, across a restart."""
    told = "state.exists, state.getOption, state.get, str(state), state.hasTimedOut, state.oldTimeoutTimestamp"
    first = script(
        ("a", told.replace("state.get,", "")),
        ("a", f"state.update((1,)), {told}"),
        ("b", f"state.update((2,)), state.remove(), {told}"),
        ("b", "state.exists, state.getOption"),
        ("c", "state.update((3,)), state.update((4,)), state.getCurrentProcessingTimeMs() > 10**12"),
        ("d", "state.get"),
        ("e", "state.remove(), state.update((5,))"),
        (None, "state.update((6,))"),
    )
    second = script(
        ("a", told),
        ("a", "state.remove()"),
        ("b", "state.getOption"),
        ("c", f"{told}, state.update((None,))"),
        ("d", "state.exists"),
        ("e", told),
        (None, told),
    )
    third = script(*((key, "state.getOption") for key in ("a", "b", "c", "d", "e", None)))
    query = grouped(Script(), mode=mode)
    found = compare(spark, tmp_path, [Turn(query, [first, second], mode=mode), Turn(query, [third], mode=mode)])
    assert spoken(found, "a")[1] == ["(True, (1,), (1,), 'GroupState((1,))', False, -1)", "None"]
    assert spoken(found, "c")[2] == ["(None,)"]
