"""Partitions over hosts: even, few moves, and slots of a host used alike."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import millpond.query.running.placement as placing
from millpond.plan.catalyst.cluster.hosts import host_of
from millpond.query.running.placement import Placement, spread

NAMES = st.lists(st.sampled_from([f"host{n}" for n in range(7)]), min_size=1, unique=True)


def test_two_hosts_use_all_of_their_slots() -> None:
    assert spread(4, 2, ["a", "b"], {}) == {0: "a", 3: "a", 1: "b", 2: "b"}


@given(st.integers(1, 40), st.integers(1, 8), st.lists(NAMES, min_size=1, max_size=6))
def test_partitions_are_even_and_few_move(partitions: int, slots: int, changes: list[list[str]]) -> None:
    before: dict[int, str] = {}
    for hosts in changes:
        placed = spread(partitions, slots, hosts, before)
        assert sorted(placed) == list(range(partitions))
        counts = Counter(dict.fromkeys(hosts, 0)) + Counter(placed.values())
        counts.update(dict.fromkeys(hosts, 0))
        assert max(counts.values()) - min(counts.values()) <= 1
        assert set(placed.values()) <= set(hosts)
        # A partition moves only if its host is gone, or has more than the even share.
        held = Counter(host for host in before.values() if host in hosts)
        rooms = [partitions // len(hosts) + (number < partitions % len(hosts)) for number in range(len(hosts))]
        kept = sum(min(count, room) for (_, count), room in zip(held.most_common(), rooms, strict=False))
        assert sum(placed[partition] == host for partition, host in before.items()) == kept
        before = placed


def test_the_same_hosts_change_nothing() -> None:
    placed = spread(10, 3, ["a", "b", "c"], {})
    assert spread(10, 3, ["c", "a", "b"], placed) == placed


def test_a_host_that_is_lost_while_the_query_starts_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"a:1", "b:1"}
    executors = SimpleNamespace(
        addresses=lambda: frozenset(addresses), take_tasks=lambda addresses: sorted(map(host_of, addresses))
    )
    located: Any = SimpleNamespace(keys=range(4), prefer=lambda catalyst, moved: None)
    monkeypatch.setattr(placing, "Catalyst", lambda spark: None)
    monkeypatch.setattr(placing, "ExecutorHosts", lambda catalyst: executors)
    monkeypatch.setattr(placing, "LocatedPartitions", lambda catalyst, partitions: located)
    placement = Placement(None)  # type: ignore[arg-type]
    placement.located(4, 1)
    assert placement.update() == (frozenset(), frozenset())
    addresses.remove("b:1")
    placement.located(4, 1)
    addresses.add("b:2")
    placement.located(4, 1)  # a start rewrites the query several times
    assert placement.update() == (frozenset("b"), frozenset({1, 3}))
    assert placement.update() == (frozenset(), frozenset())
