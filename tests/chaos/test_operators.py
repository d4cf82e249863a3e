"""Seeded schedules of crashes and failures for every kind of operator: each batch gives the rows of an uncrashed run.

`MILLPOND_SEED=n` repeats one of them; `MILLPOND_SCHEDULES=5000` (`make chaos`) runs 5,000, over all kinds.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.kinds import KINDS
from tests.chaos.neighbours import check_location
from tests.chaos.operators import STREAMS, OperatorWorld, small, truth
from tests.chaos.test_schedules import CRASHES, FIRST, SCHEDULES, USUAL, crash_at, drive, random_world, survive
from tests.selection import EXAMPLES, scaled

BATCHES = 10
MORE = 3
"""Batches that run undisturbed after a start at an older version."""
THOROUGH = SCHEDULES > USUAL
EACH = scaled(2) if SCHEDULES == USUAL else max(1, SCHEDULES // len(KINDS))
"""Schedules of each kind."""


def _world(directory: Path, seed: int, *, kind: str, decide: Callable[[str], str], **others: Any) -> OperatorWorld:
    """A world; with a processor, whose variables have a table each, less goes wrong with each file, so that it ends."""
    spared = random.Random(seed)

    def less(step: str) -> str:
        return "ok" if spared.random() < 0.6 else decide(step)

    choose = decide if KINDS[kind].user is None else less
    return OperatorWorld(directory, seed, kind=kind, decide=choose, **others)


def survive_all(kind: str, seed: int, tmp_path: Path) -> OperatorWorld:
    """A random schedule; then a start at each version that is retained, or at some; and no garbage is left."""
    choice = random.Random(seed * 104_729)
    stream, bits = seed % STREAMS, choice.choice([64, 64, 4])
    truth(kind, stream, bits)  # as things are usually
    make = partial(
        _world,
        kind=kind,
        stream=stream,
        bits=bits,
        local=choice.random() < 0.4,
    )
    with small(choice.choice([1, 1, 2, 64]), choice.choice([1, 2, 32])):
        world = random_world(seed, tmp_path, make)
        assert isinstance(world, OperatorWorld)
        world.unrepeatable = False
        world.memory = choice.choice([world.kind.least, 64 << 20, 64 << 20])  # hardly any, so that rows leave for files
        world.disk = choice.choice([0, 1 << 20])

        def go_back() -> None:
            oldest = max(0, BATCHES - max(world.retain, 3) + 1)
            between = range(BATCHES, oldest, -1)
            for version in (*(between if THOROUGH else choice.sample(between, 1)), oldest):
                world.end_application("kill")
                world.go_back(version)
                drive(world, BATCHES + MORE if version == oldest else min(version + 2, BATCHES))

        def end() -> None:
            go_back()
            check_location(world, choice.random() < 0.5)

        survive(world, seed, BATCHES, afterwards=end)
    return world


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_an_uncrashed_run(kind, tmp_path):
    first = FIRST if "MILLPOND_SEED" in os.environ else EACH * list(KINDS).index(kind)  # no two kinds fare alike
    for seed in range(first, first + EACH):
        survive_all(kind, seed, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_crash_at_every_operation(kind, tmp_path):
    """At some of them, that is, others for each kind."""
    ways = ("kill", "stop", "drain")
    first = list(KINDS).index(kind)
    died = set()
    truth(kind, 0)
    with small(1):
        for number in range(1 + first, 2000, 3 if THOROUGH else round(211 / EXAMPLES)):
            over = False
            for fate in CRASHES if THOROUGH else (CRASHES[number % 4],):
                make = partial(OperatorWorld, kind=kind, local=number % 2 == 1)
                world, over = crash_at(tmp_path, number, fate, ways[number % 3], make)
                died |= {line.partition(":")[0] for line in world.trace if line.endswith("crash")}
            if over:
                break
    if THOROUGH:
        assert {"state put commits", "disk put sealed"} <= died
