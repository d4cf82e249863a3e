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


class Slots:
    """Starts of slots that end when the test says so."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.up: set[str] = set()

    def ended(self, host: str, task: object) -> bool:
        self.begun += [] if host in self.begun else [host]
        return host in self.up

    def keep(self, hosts: list[str]) -> None:
        self.begun = [host for host in self.begun if host in hosts]


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> Slots:
    slots = Slots()
    monkeypatch.setattr(placing, "SlotStarts", lambda catalyst: slots)
    return slots


def placement_of(addresses: set[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Placement, dict[int, str]]:
    """Return a placement over executors at these addresses, and what it makes Spark prefer."""
    preferred: dict[int, str] = {}
    executors = SimpleNamespace(
        addresses=lambda: frozenset(addresses), take_tasks=lambda addresses: sorted(set(map(host_of, addresses)))
    )
    located: Any = SimpleNamespace(keys=range(4), prefer=lambda catalyst, moved: preferred.update(moved))
    monkeypatch.setattr(placing, "Catalyst", lambda spark: None)
    monkeypatch.setattr(placing, "ExecutorHosts", lambda catalyst: executors)
    monkeypatch.setattr(placing, "LocatedPartitions", lambda catalyst, partitions: located)
    return Placement(None), preferred  # type: ignore[arg-type]


TASK: Any = SimpleNamespace(partitions=4, slots=1)


def test_a_host_that_is_lost_while_the_query_starts_is_reported(monkeypatch: pytest.MonkeyPatch, slots: Slots) -> None:
    addresses = {"a:1", "b:1"}
    placement, _ = placement_of(addresses, monkeypatch)
    placement.located(TASK)
    assert placement.update() == (frozenset(), frozenset())
    addresses.remove("b:1")
    placement.located(TASK)
    addresses.add("b:2")
    placement.located(TASK)  # a start rewrites the query several times
    assert placement.update() == (frozenset("b"), frozenset({1, 3}))
    assert placement.update() == (frozenset(), frozenset())


def test_partitions_move_to_a_host_that_joins_once_its_slots_run(monkeypatch: pytest.MonkeyPatch, slots: Slots) -> None:
    addresses = {"a:1", "b:1"}
    placement, preferred = placement_of(addresses, monkeypatch)
    placement.located(TASK)
    assert slots.begun == []  # the first hosts need not wait: no partition has another place
    addresses.add("c:1")
    placement.update()
    assert (slots.begun, set(preferred.values())) == (["c"], {"a", "b"})
    addresses.remove("c:1")  # it leaves again, and comes back without slots
    placement.update()
    assert slots.begun == []
    addresses |= {"c:2", "d:1"}
    slots.up.add("c")
    placement.update()
    assert (slots.begun, set(preferred.values())) == (["c", "d"], {"a", "b"})  # both get partitions together
    slots.up.add("d")
    placement.update()
    assert set(preferred.values()) == {"a", "b", "c", "d"}


def test_without_other_hosts_one_that_joins_gets_partitions_at_once(
    monkeypatch: pytest.MonkeyPatch, slots: Slots
) -> None:
    addresses = {"a:1"}
    placement, preferred = placement_of(addresses, monkeypatch)
    placement.located(TASK)
    addresses.clear()
    addresses.add("b:1")
    placement.update()
    assert (slots.begun, set(preferred.values())) == ([], {"b"})
