"""Compactors of a world: the real worker, which may die at any request, and stall for any time before it answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import msgspec

from millpond.checkpoint.compaction.requests import CompactionResult, Request, claim_lease
from millpond.compactor.worker import Worker
from millpond.errors import TransientError
from millpond.files.backends.filesystem import FileSystem
from millpond.files.refs import RunRef
from millpond.stores.runs.pace import Pace
from tests.chaos.sums import Merge, merge

if TYPE_CHECKING:
    from tests.chaos.world import World

Stalled = Callable[[], None]
"""An answer that a worker gives when it goes on."""


class Compactor(Worker):
    """A worker that may stall between its work and its answer, for any time."""

    world: World

    def _answer(self, files: FileSystem, request: Request, done: CompactionResult) -> None:
        if not self.world.quiet and self.world.random.random() < 0.3:
            self.world.stalled.append(partial(super()._answer, files, request, done))
            raise TransientError("It has stalled.")
        super()._answer(files, request, done)


class Merger(Compactor):
    """One that merges the runs of `sums.py`, and gives signs of life now and then."""

    def _run_job(self, files: FileSystem, request: Request, pace: Pace) -> list[RunRef]:
        job = msgspec.msgpack.decode(request.job, type=Merge)
        while self.world.random.random() < 0.3:
            lease, _ = self._seen[request.id]
            self._seen[request.id] = lease + 1, self.clock()
            claim_lease(files, request.generation, request.id, lease + 1, self.name)
        made = merge(files, job, f"{request.id}-")
        return [made] if made is not None else []


def made_for(world: World, kind: type[Compactor]) -> Worker:
    """A compactor of a world."""
    world.hosts.mkdir(parents=True, exist_ok=True)
    made = kind([world.state], str(world.hosts), clock=world.clock, renews_lease=False)
    made.world = world
    return cast(Worker, made)
