"""When the deltas of a table are due to be covered by files."""

from __future__ import annotations

import pytest

from millpond.stores.delta_backlog import DeltaBacklog


def test_many_deltas_are_due_until_they_are_covered() -> None:
    backlog = DeltaBacklog(1 << 30)
    for version in (0, 0, *range(4, 65)):  # two that recovery has loaded
        backlog.add(version, 1)
    assert not backlog.due
    backlog.add(65, 1)
    assert backlog.due
    backlog.cover(3)
    assert not backlog.due
    for version in (66, 67):
        backlog.add(version, 1)
    assert backlog.due


@pytest.mark.parametrize(("budget", "limit"), [(4 << 20, 32 << 20), (256 << 20, 128 << 20), (8 << 30, 512 << 20)])
def test_long_deltas_are_due(budget: int, limit: int) -> None:
    backlog = DeltaBacklog(budget)
    backlog.add(1, limit - 1)
    assert not backlog.due
    backlog.add(2, 1)
    assert backlog.due
