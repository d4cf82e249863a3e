"""Which tests the quick suite has, and how much is drawn: marks that follow from what a test uses.

A test that asks for more time than the default limit is slow. The quick suite has a part of each module's costly tests,
those with the most cases first, and a part of their cases. Beyond that, digests of names choose, and nothing by hand.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import settings

EXAMPLES = float(os.environ.get("MILLPOND_EXAMPLES", "1"))
"""Which part of the examples is drawn that tests ask for."""
SECONDS = float(os.environ.get("MILLPOND_SECONDS", "inf"))
"""How long after its start a worker begins further tests."""
ORDER = os.environ.get("MILLPOND_ORDER", "")
"""Draws the order of files, so that a limit in time leaves out others each time; empty: as they are collected."""

QUICK_TESTS, QUICK_CASES = 2, 10
"""The quick suite has one in so many of a module's costly tests, and of such a test's cases; at least one."""
RARE_CASES, FEWEST_WITH_RARE = 4, 3
"""Of the costly cases of a test that are left, one in so many runs in `make test-all` alone, if there are some."""
COSTLY = {"spark", "process", "server", "costly"}

FEWEST_EXAMPLES = 5
SERVERS = {"seaweedfs", "hdfs", "kafka", "redis_server", "postgres_server"}
"""Fixtures that start a server."""
PROCESSES = {"owned"}
"""Fixtures that start processes."""
STARTERS = {"subprocess", "multiprocessing"}
"""Modules that start processes, where a test names them."""


def scaled(count: int, least: int = 1) -> int:
    """Reduce a number of drawn cases to the part that is run."""
    return min(count, max(least, round(count * EXAMPLES)))


def mark(items: Sequence[pytest.Item]) -> None:
    """Mark collected tests by what they use; then mark as slow what the quick suite leaves out."""
    usual = float(items[0].config.getini("timeout")) if items else 0.0
    for item in items:
        limit = item.get_closest_marker("timeout")
        for name in _marks(item):
            item.add_marker(name)
        if limit is not None and limit.args[0] > usual and item.get_closest_marker("every") is None:
            item.add_marker("slow")
        _scale(item)
    for tests in _costly(items).values():
        chosen = _part({name: -len(cases) for name, cases in tests.items()}, QUICK_TESTS)
        for test, cases in tests.items():
            quick = _part(dict.fromkeys(cases, 0), QUICK_CASES) if test in chosen else set()
            slow = cases.keys() - quick
            rare = _part(dict.fromkeys(slow, 0), RARE_CASES) if len(slow) >= FEWEST_WITH_RARE else set()
            for name in slow:
                cases[name].add_marker("slow")
            for name in rare:
                cases[name].add_marker("rare")


def longest_first(items: list[pytest.Item]) -> None:
    """Put what takes long before the rest, so that no worker is left alone with it at the end."""
    weights = ("chaos", "slow", "server", "process", "spark")

    def weight(item: pytest.Item) -> int:
        names = {mark.name for mark in item.iter_markers()}
        ranks = [rank for rank, name in enumerate(weights) if name in names or f"/{name}/" in item.nodeid]
        return min(ranks, default=len(weights))

    items.sort(key=weight)


def drawn(items: list[pytest.Item]) -> None:
    """Put files in the order that `MILLPOND_ORDER` draws, if it does; their tests stay together."""
    if ORDER:
        items.sort(key=lambda item: hashlib.sha256((ORDER + item.nodeid.partition("::")[0]).encode()).digest())


def plain(nodeid: str) -> str:
    """Return a test's name without the group that it has under xdist."""
    return nodeid.rpartition("@")[0] if nodeid.rfind("@") > nodeid.rfind("]") else nodeid


def _marks(item: pytest.Item) -> list[str]:
    fixtures = set(getattr(item, "fixturenames", ()))
    code = getattr(getattr(item, "function", None), "__code__", None)
    starts = code is not None and bool(STARTERS & set(code.co_names))
    return [
        *(["spark"] if "spark" in fixtures else []),
        *(["oracle"] if "spark" in fixtures and "/differential/" in item.nodeid else []),
        *(["server"] if fixtures & SERVERS else []),
        *(["process"] if fixtures & PROCESSES or starts else []),
    ]


def _part(ranks: Mapping[str, int], share: int) -> set[str]:
    """Choose one in `share` names, at least one: those of low ranks, among equals by digest."""
    ordered = sorted(ranks, key=lambda name: (ranks[name], hashlib.sha256(name.encode()).digest()))
    return set(ordered[: -(-len(ordered) // share)])


def _costly(items: Sequence[pytest.Item]) -> dict[str, dict[str, dict[str, pytest.Item]]]:
    """Collect costly cases by module and test; `every` keeps a test's cases in the quick suite."""
    found: dict[str, dict[str, dict[str, pytest.Item]]] = defaultdict(lambda: defaultdict(dict))
    for item in items:
        names = {mark.name for mark in item.iter_markers()}
        if names & COSTLY and not names & {"slow", "every"}:
            name = plain(item.nodeid)
            found[name.partition("::")[0]][name.partition("[")[0]][name] = item
    return found


def _scale(item: pytest.Item) -> None:
    """Draw fewer examples in a test of Hypothesis; it has no option for that where a test says itself how many."""
    if EXAMPLES == 1:
        return
    test = getattr(item, "function", None)
    own = getattr(test, "_hypothesis_internal_use_settings", None)
    if isinstance(own, settings) and not hasattr(test, "millpond_scaled"):
        test._hypothesis_internal_use_settings = settings(own, max_examples=scaled(own.max_examples, FEWEST_EXAMPLES))
        test.millpond_scaled = True
