"""Other processes at the location of a world: they fork it, read it, and collect its garbage from outside.

All is the real code. A fork is a world of its own; it goes on beside the one that it was made from, is forked itself,
or is deleted. At the end exactly the files that are no longer needed must be gone.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from millpond.checkpoint.forks.parents import read_parents
from millpond.checkpoint.forks.pins import read_pins, release
from millpond.checkpoint.formats.commit import parse_commit_name
from millpond.checkpoint.formats.manifest import PartitionManifest
from millpond.checkpoint.generation import claimed_generations
from millpond.checkpoint.recovery import Recovery
from millpond.checkpoint.retention.needs import IN_FLIGHT_BATCHES, committed_at, read_needs
from millpond.checkpoint.retention.orphans import MAX_UPLOAD_SECONDS, MIN_KEPT_GENERATIONS, find_orphans
from millpond.errors import FencedError, StateDamagedError, TransientError, UsageError
from millpond.files.backends.filesystem import AlreadyExistsError, FileSystem
from millpond.files.locations.forked import parse_shared
from millpond.files.locations.opening import open_filesystem
from millpond.query.checkpoints.fork import fork
from millpond.query.checkpoints.orphans import orphans_of
from millpond.query.logs.query_logs import METADATA
from millpond.state_reader.reader import StateReader
from tests.chaos.sums import State, deltas_of, runs_of
from tests.chaos.tripwire import Crash
from tests.chaos.world import TaskFailed, World

Troubles = (Crash, TaskFailed, TransientError, FencedError)
"""What ends a process, or has it try again."""

MONTH = 30 * 86400.0


class Reading(NamedTuple):
    """A version that somebody reads: as it was opened, when, and what its rows may be."""

    world: World
    manifests: list[PartitionManifest]
    files: FileSystem
    opened: float
    rows: list[State]


@dataclass
class Neighbours:
    """All who live beside a world.

    Attributes:
        family: the world and its forks. begun: which of them have a driver. died: whether the world's has died.
        alone: whether the world does nothing while others are at it.
        reading: what is being read. forks, dropped, readings, collections: how many there were.
    """

    world: World
    family: list[World] = field(default_factory=list)
    begun: set[int] = field(default_factory=set)
    reading: list[Reading] = field(default_factory=list)
    alone: bool = False
    died: bool = False
    forks: int = 0
    dropped: int = 0
    readings: int = 0
    collections: int = 0

    def __post_init__(self) -> None:
        self.random = self.world.random
        self.family.append(self.world)
        self._unfinished: list[str] = []  # where forks were interrupted

    def look_in(self) -> None:
        """Between two batches of the world at most one of them does something."""
        what = self.random.random()
        try:
            if what < 0.2:
                self.fork(self.random.choice(self.family))
            elif what < 0.4 and len(self.family) > 1:
                self.live(self.random.choice(self.family[1:]))
            elif what < 0.43 and len(self.family) > 1:
                self.drop(self.random.choice(self.family[1:]))
            elif what < 0.65:
                self.open_version(self.random.choice(self.family))
            elif what < 0.75:
                self.collect(self.random.choice(self.family))
        except Crash:
            pass  # a process of its own
        if self.reading and self.random.random() < 0.3:
            with suppress(Crash):
                self.read(self.reading.pop(self.random.randrange(len(self.reading))))
        self.world.clock.now += self.random.choice([0.0, 1.0, 30.0, 700.0, 4000.0])
        if self.died:
            self.died = False
            raise Crash("driver")

    def _world_goes_on(self) -> None:
        """The world does something while others are at it, between two of their requests."""
        world = self.world
        if self.alone or self.died or world.quiet or self.random.random() > 0.15:
            return
        try:
            what = self.random.random()
            if what < 0.3:
                world.run_batch()
            elif what < 0.5:
                world.collect()
            elif what < 0.6:
                world.arrive()
            else:
                world.maybe_commit()
        except Troubles:
            self.died = True

    # --- forks

    def fork(self, origin: World) -> None:
        """`millpond state fork` of a world, which may end at any point."""
        self.forks += 1
        place = f"{self.world.location.rpartition('/')[0]}/fork{self.forks}"
        version = self.random.choice([None, None, max(1, origin.committed), origin.committed + 1])
        try:
            with origin.wired(mortal=True), self.world.meanwhile(self._world_goes_on):
                fork(origin.location, place, version)
        except UsageError:
            pass  # there is no such version (yet)
        except StateDamagedError as error:
            if "is not whole" not in str(error) and "cut short" not in str(error):  # not durable yet, or torn
                raise
        except (TransientError, AlreadyExistsError, Crash):
            pass  # what was sent twice was there already
        with origin.wired(safe=True):
            if not open_filesystem(place).exists(METADATA):
                self._unfinished.append(place)
                return
        made = World(self.world.hosts.parent, self.random.getrandbits(32), origin=self.world, location=place)
        made.retain, made.state_retain, made.grace = origin.retain, origin.state_retain, origin.grace
        made.sync, made.unrepeatable = origin.sync, origin.unrepeatable
        made.partitions, made.slot_count, made.rescales = origin.partitions, origin.slot_count, origin.rescales
        made.skipping_sink = False
        made.sink = {batch: list(written) for batch, written in origin.sink.items() if batch <= made.committed}
        self.family.append(made)

    def live(self, made: World) -> None:
        """A fork starts, or runs a batch."""
        try:
            if id(made) in self.begun:
                made.run_batch()
            else:
                made.start()
                self.begun.add(id(made))
        except Troubles:
            self.begun.discard(id(made))
            made.end_application(self.random.choice(["kill", "stop", "drain"]))

    def drop(self, made: World) -> None:
        """Somebody deletes a fork from which no other has files: its folder, then its pins."""
        if read_pins(made.raw):
            return
        self.family.remove(made)
        self.begun.discard(id(made))
        self.dropped += 1
        made.end_application("kill")
        made.kill_zombies()
        self._delete(made.location)

    def _delete(self, place: str) -> None:
        with self.world.wired(safe=True):
            parents = None
            with suppress(StateDamagedError):  # cut off when it was written: there is no pin yet
                parents = read_parents(open_filesystem(f"{place}/millpond"))
            files = open_filesystem(place)
            for info in files.list(""):
                files.delete(info.name)
            for parent in parents.parents if parents is not None else ():
                release(parent)

    # --- readers

    def open_version(self, world: World) -> None:
        """Open one of the versions that are kept to be read, or that of a batch that runs."""
        committed = world.committed
        oldest = committed + 2 - max(world.retain, world.state_retain)
        try:
            with world.wired(mortal=True), self.world.meanwhile(self._world_goes_on):
                reader = StateReader(world.location)
                known = [version for version in reader.known() if oldest <= version <= committed + 2]
                opened = world.clock.now
                version = reader.choose(self.random.choice(known) if known else None)
                manifests = list(reader.manifests(version).values())
        except (UsageError, TransientError):
            return
        except StateDamagedError as error:
            if "cut short" not in str(error):  # a torn put
                raise
            return
        if oldest <= version <= committed + 1:
            self.reading.append(Reading(world, manifests, reader.files, opened, [world.truth(version)]))
        elif version == committed + 2 and version == world.committed + 2:  # as some run has made it, in all partitions
            rows = [world.truth(version, run) for run in world.runs]
            self.reading.append(Reading(world, manifests, reader.files, opened, rows))

    def read(self, one: Reading) -> None:
        """Read the rows of a version that was opened some time ago: they are right, and there for the grace period."""
        found: State = {}
        try:
            for manifest in one.manifests:
                found |= runs_of(one.files, manifest) | deltas_of(one.files, manifest)
        except TransientError:
            return
        except StateDamagedError:
            assert one.world.clock.now - one.opened >= one.world.grace or one.world not in self.family
            return
        self.readings += 1
        assert found in one.rows, "somebody reads wrong rows"

    # --- garbage

    def collect(self, world: World) -> None:
        """`millpond state gc`, while the query runs."""
        try:
            with world.wired(mortal=True), self.world.meanwhile(self._world_goes_on):
                files, found = orphans_of(world.location, now=world.clock.now)
                assert not found.missing, found.missing
                found.remove(files)
        except (UsageError, TransientError):
            return
        except StateDamagedError as error:
            if "no version from" not in str(error) and "cut short" not in str(error):  # a torn put
                world.forget_torn_pin(error)
            return
        self.collections += 1

    # --- the end

    def end(self) -> None:
        """Check at the end that forks are whole and that files that are not needed are gone everywhere."""
        for place in self._unfinished:
            self._delete(place)
        for made in self.family[1:]:
            if id(made) in self.begun:
                made.end_application("kill")
        for made in reversed(self.family):  # forks first: they give back what they do not need any more
            check_location(made, self.random.random() < 0.5)
        if len(self.family) > 1 and self.random.random() < 0.5:
            while self.family[1:]:
                for made in [one for one in self.family[1:] if not read_pins(one.raw)]:
                    self.drop(made)
            check_location(self.world, self.random.random() < 0.5)
            assert not read_pins(self.world.raw)


def check_location(world: World, outside: bool) -> None:
    """With nothing going on, garbage is collected; then there is what is needed, and nothing else.

    Args:
        world: an application that has ended. outside: whether `state gc` does it, or the query itself.
    """
    world.stop_all()
    world.clock.now += MAX_UPLOAD_SECONDS
    kept = max(world.retain, world.state_retain, IN_FLIGHT_BATCHES)
    batches = world.committed + 1 + kept + 2 * IN_FLIGHT_BATCHES + 1
    world.calm = True
    world.start()
    while world.committed < batches - 1:
        world.run_batch()
        world.clock.now += MAX_UPLOAD_SECONDS
    world.stop_all()
    replayed = -1
    while replayed < len(world.replayed):  # what compactors were asked for before is not waited for any more
        replayed = len(world.replayed)
        world.start()
        world.stop_all()
    world.clock.now += MONTH
    if outside:
        found = find_orphans(world.raw, world.planned, now=world.times() + MONTH)
        assert not found.missing, found.missing
        with world.wired(safe=True):
            found.remove(world.raw)
        assert len(claimed_generations(world.raw)) <= MIN_KEPT_GENERATIONS
    else:
        world._collector._clock = lambda: world.times() + MONTH
        for ago in (IN_FLIGHT_BATCHES, IN_FLIGHT_BATCHES, 0, 0):  # nothing has been written since
            world.collect(ago)
            world.clock.now += MONTH
    world.check_end(world.committed + 1)
    unneeded = left_over(world, world.committed - kept)
    assert not unneeded, unneeded


def left_over(world: World, oldest: int) -> list[str]:
    """The objects of a location that no version from `oldest` on needs; all that are needed are there."""
    files = world.raw
    there = {info.name for info in files.list("")}
    commits = [info for info in files.list("commits/") if parse_commit_name(info.name)[0] >= oldest]
    needed = {info.name for info in commits}
    for info in commits:
        needed |= read_needs(files, info)
    for name in needed:
        assert files.exists(name), f"{name} is missing"
    assert Recovery(files).newest() >= oldest
    pins = read_pins(files)
    needed |= {name for pin in pins.values() for name in pin.objects} | set(pins)
    for pin in pins.values():
        assert set(pin.objects) <= there, "what a fork needs is missing"
    shared = {at.parent for at in map(parse_shared, needed) if at is not None}
    parents = read_parents(files)
    assert parents is None or shared <= set(range(len(parents.parents)))
    kept = needed | {"query.json", "parents.json"}
    if not world.calm_files:  # what was written of late may still come to be named
        young = committed_at(commits, min(oldest, world.committed - IN_FLIGHT_BATCHES)) - MAX_UPLOAD_SECONDS
        kept |= {info.name for info in files.list("files/") if info.modified >= young}
    return sorted(name for name in there - kept if not name.startswith(("generations/", "rolled-back/", "claims/")))
