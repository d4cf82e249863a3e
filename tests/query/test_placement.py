"""Partitions over hosts: even, few moves, and slots of a host used alike."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from millpond.query.running.placement import spread

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
