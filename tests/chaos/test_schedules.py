"""Seeded schedules of crashes and failures, without Spark: restart until done, and the rows are right.

`MILLPOND_SEED=n` repeats one of them; `MILLPOND_SCHEDULES=5000` (`make chaos`) runs 5,000, from there on.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from millpond.checkpoint.retention.orphans import MIN_AGE_SECONDS
from millpond.errors import FencedError, StateDamagedError, TransientError, UsageError
from tests.chaos.neighbours import Neighbours
from tests.chaos.tripwire import Crash
from tests.chaos.world import TaskFailed, World
from tests.selection import EXAMPLES, scaled

USUAL = scaled(400)
"""Schedules of the usual run; some of other kinds are beside them."""
SCHEDULES = int(os.environ.get("MILLPOND_SCHEDULES", "1" if "MILLPOND_SEED" in os.environ else USUAL))
FIRST = int(os.environ.get("MILLPOND_SEED", "0"))
SEEDS = list(range(FIRST, FIRST + SCHEDULES))
BATCHES = 6
CHUNK = 10
MOST_FAILURES = 500
"""Of a store in one schedule: one that never gets better lets no batch through that writes dozens of files."""

CRASHES = ("before crash", "after crash", "torn crash", "late crash")
FAILURES = ("before failure", "after failure", "torn failure", "late failure", "twice")


def drive(world: World, batches: int, *, between: Callable[[], None] = lambda: None) -> int:
    """Start, and start again, until Spark has committed `batches` batches; returns how many starts it took."""
    for starts in range(1, 1000):
        try:
            world.start()
            while world.query_logs.last_committed < batches - 1:
                between()
                world.run_batch()
        except StateDamagedError:
            raise  # nothing here damages files: Spark's logs must never be ahead of the recoverable state
        except (Crash, TaskFailed, TransientError, FencedError):
            world.end_application(world.random.choice(["kill", "stop", "drain"]))
            continue
        return starts
    raise AssertionError("it does not come to an end")


def random_world(seed: int, tmp_path: Path, make: Callable[..., World] = World) -> World:
    """A world with troubles of its own; `make` gets what `World` does."""
    choice = random.Random(seed * 7919)
    crash, fail = choice.choice([(0.02, 0.0), (0.01, 0.05), (0.0, 0.15), (0.04, 0.04), (0.1, 0.0)])
    left = [choice.randrange(1, 12), MOST_FAILURES]

    def decide(step: str) -> str:
        if choice.random() < crash and left[0]:
            left[0] -= 1
            return choice.choice(CRASHES)
        if choice.random() < (fail if " put " in step else fail / 5) and left[1]:  # obstore repeats reads by itself
            left[1] -= 1
            return choice.choice(FAILURES)
        return "ok"

    world = make(
        tmp_path,
        seed,
        partitions=choice.randrange(1, 5),
        slots=choice.randrange(1, 4),
        hosts=choice.randrange(1, 3),
        decide=decide,
        rescales=choice.random() < 0.7,
        workers=choice.choice([0, 1, 2]),
    )
    world.unrepeatable = choice.random() < 0.3
    world.sync = world.unrepeatable or choice.random() < 0.1
    world.skipping_sink = choice.random() < 0.5
    world.chatty = choice.choice([0.0, 0.3, 0.7])
    world.retain = choice.choice([2, 2, 4])
    return world


def run_schedule(seed: int, tmp_path: Path) -> Neighbours:
    """A random schedule, among neighbours."""
    world = random_world(seed, tmp_path)
    world.state_retain = world.random.choice([0, 0, 3, 6])
    world.grace = world.random.choice([0.0, 60.0, 600.0])
    neighbours = Neighbours(world)
    survive(world, seed, BATCHES, others=neighbours.look_in, afterwards=neighbours.end)
    return neighbours


def survive(
    world: World,
    seed: int,
    batches: int,
    *,
    others: Callable[[], None] = lambda: None,
    afterwards: Callable[[], None] = lambda: None,
) -> World:
    """Run a number of batches through the world's troubles and some more.

    Args:
        world: with what goes wrong in it. seed: of further troubles. batches: how many.
        others: called before each batch. afterwards: called at the end.
    """
    kills = random.Random(seed)

    def between() -> None:
        others()
        what = kills.random()
        if what < 0.05:
            world.kill_slot(kills.randrange(world.slot_count))
        elif what < 0.10:
            world.stop_slot(kills.randrange(world.slot_count))
        elif what < 0.13:
            world.lose_host(kills.randrange(world.host_count))
        elif what < 0.20:
            world.wake_zombie()
        elif what < 0.25:
            world.arrive()
        elif what < 0.30:
            raise Crash("driver")

    try:
        drive(world, batches, between=between)
        world.quiet = True
        drive(world, world.planned_batches)
        while any(zombie.committer.step() for zombie in world.zombies):
            pass
        world.check_end(world.committed + 1)
        afterwards()
    except BaseException:
        print(f"MILLPOND_SEED={seed}", *world.trace[-60:], sep="\n  ")
        raise
    finally:
        world.clean()
    return world


@pytest.mark.parametrize("chunk", [SEEDS[i : i + CHUNK] for i in range(0, len(SEEDS), CHUNK)], ids=lambda c: f"{c[0]}+")
def test_random_schedules(chunk, tmp_path):
    for seed in chunk:
        run_schedule(seed, tmp_path)


STEPS = {
    "disk put sealed": "seal a delta on the local disk",
    "disk delete sealed": "forget a delta that is durable",
    "state put commits": "put a commit",
    "state list generations": "look for a newer generation",
    "state put generations": "claim a generation, write its base",
    "state put json": "pin the query",
    "state list commits": "list what is durable",
    "state get commits": "read a manifest",
    "state put files": "write a run",
    "state delete commits": "collect garbage",
    "spark put offsets": "plan a batch",
    "spark put commits": "commit a batch",
    "spark delete offsets": "set a planned batch aside",
    "spark delete commits": "roll a batch back",
    "spark put millpond": "journal a roll-back",
    "sink write rows": "the sink takes a batch",
}


def crash_at(
    tmp_path: Path, number: int, fate: str, how: str, make: Callable[..., World] = World
) -> tuple[World, bool]:
    """Eight batches, the driver gone once in between with commits pending and a batch planned.

    The process that performs the `number`-th operation dies of it, and the one that does the 25th after it.
    """
    seen = [0]
    died: list[str] = []

    def decide(step: str) -> str:
        seen[0] += 1
        return fate if seen[0] in (number, number + 25) else "ok"

    def between() -> None:
        if world.committed == 3 and not died:
            died.append("driver")
            world.next_batch()
            raise Crash("driver")

    world = make(tmp_path, 3, partitions=2, slots=2, decide=decide)
    world.chatty = 0.0
    world.random.choice = lambda options: how if how in options else options[0]  # type: ignore[method-assign]
    try:
        drive(world, 8, between=between)
        world.quiet = True
        world.check_end(8)
    except BaseException:
        print(number, fate, how, *world.trace[-60:], sep="\n  ")
        raise
    finally:
        world.clean()
    return world, seen[0] < number


@pytest.mark.parametrize("fate", CRASHES)
def test_crash_at_every_operation(tmp_path, fate):
    died = set()
    ways = ("kill", "stop", "drain")
    thorough = SCHEDULES > USUAL
    for number in range(1, 1000, 1 if thorough else round(11 / EXAMPLES)):
        over = False
        for how in ways if thorough else (ways[number % 3],):
            world, over = crash_at(tmp_path, number, fate, how)
            died |= {line.partition(":")[0] for line in world.trace if line.endswith("crash")}
        if over:
            break
    if thorough:
        assert set(STEPS) <= died, f"never died at {set(STEPS) - died}"


def test_merges_that_are_sent_for_long_outlive_all_collections(tmp_path):
    """Their files are as old as the beginning of their uploads, which take up to a day."""
    for seed in range(20):
        world = World(tmp_path, seed)
        neighbours = Neighbours(world, alone=True)

        def between(world=world, neighbours=neighbours):
            with suppress(UsageError):
                neighbours.collect(world)
            world.clock.now += MIN_AGE_SECONDS

        drive(world, 20, between=between)
        world.check_end(20)
        world.clean()
