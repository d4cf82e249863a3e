"""Clusters whose hosts die, hang, are cut off, come and go at random moments; the rows come out right.

`MILLPOND_HOST_SCHEDULES` schedules are drawn, 40 by default. Each takes minutes.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from millpond.query.checkpoints.orphans import orphans_of
from tests.chaos.life import JOB
from tests.chaos.truth import EXPECTED, expected_updates, read_file_sink, read_updates, write_input
from tests.integration.test_hosts import run_job
from tests.support.cluster import Hosts, hosts
from tests.support.network import Network

SCHEDULES = int(os.environ.get("MILLPOND_HOST_SCHEDULES", "40"))
QUERIES = ("aggregate", "windows", "join", "processor", "deduplicate")
EVENTS = ("kill", "executor", "stop", "cut", "slow", "add", "decommission", "driver")
BATCHES = range(1, 7)
"""Batches after which something may happen; the job has eight."""
LIVES = 4
DAY = 86_400.0

pytestmark = [pytest.mark.xdist_group("hosts"), pytest.mark.timeout(900), pytest.mark.rare]


class Schedule:
    """Two to four events that befall a cluster, each after a batch. Some host always works.

    Args:
        cluster: hosts in a network of their own.
        job: name of what the killed driver's command line has.
    """

    def __init__(self, cluster: Hosts, job: str, rng: random.Random) -> None:
        self.cluster = cluster
        self.job = job
        self.rng = rng
        self.events = [(batch, rng.choice(EVENTS)) for batch in sorted(rng.sample(BATCHES, rng.randint(2, 4)))]
        self.happened: list[str] = []
        self._away: dict[int, tuple[str, int]] = {}

    def on_batch(self, batch: int) -> None:
        """Do what is due after a batch; hosts that hang or are cut off come back after two more."""
        for number, (what, since) in list(self._away.items()):
            if batch >= since + 2:
                self._return(number, what)
        while self.events and self.events[0][0] <= batch:
            self._happen(self.events.pop(0)[1], batch)

    def heal(self) -> None:
        """All hosts that live are back."""
        for number, (what, _) in list(self._away.items()):
            self._return(number, what)

    def _happen(self, event: str, batch: int) -> None:
        cluster = self.cluster
        number = self.rng.choice([number for number in cluster.numbers if number not in self._away])
        self.happened.append(f"{event} of host {number} after batch {batch}")
        if event == "add":
            cluster.add(cluster.numbers[-1] + 1)
        elif event == "driver":
            self.heal()
            self._kill_driver()
        elif event in ("stop", "cut", "kill") and len(cluster.numbers) - len(self._away) == 1:
            if cluster.has_executor(number):
                cluster.kill_executor(number)
        elif event == "stop":
            self._away[number] = event, batch
            cluster.signal(number, signal.SIGSTOP)
        elif event == "cut":
            assert cluster.network is not None
            self._away[number] = event, batch
            cluster.network.cut(number)
        elif event == "slow":
            cluster.signal(number, signal.SIGSTOP)
            threading.Timer(2.0, self._resume, (number,)).start()
        elif event == "kill":
            cluster.kill(number)
        elif cluster.has_executor(number):
            cluster.decommission(number) if event == "decommission" else cluster.kill_executor(number)

    def _resume(self, number: int) -> None:
        with suppress(KeyError):  # it was killed meanwhile
            self.cluster.signal(number, signal.SIGCONT)

    def _return(self, number: int, what: str) -> None:
        del self._away[number]
        if what == "stop":
            self.cluster.signal(number, signal.SIGCONT)
        elif self.cluster.network is not None:
            self.cluster.network.heal(number)

    def _kill_driver(self) -> None:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if str(JOB) in process.cmdline() and self.job in process.cmdline():
                    for one in [*process.children(recursive=True), process]:
                        one.kill()


@contextmanager
def networked(folder: Path, count: int, seed: int) -> Iterator[Hosts]:
    """A cluster with a network of its own."""
    network = Network(seed)
    try:
        with hosts(folder, count, network=network) as cluster:
            yield cluster
    finally:
        network.close()


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_rows_are_right_whatever_happens_to_hosts(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    rows = write_input(tmp_path / "in", seed)
    query = QUERIES[seed % len(QUERIES)]
    latency = rng.choice([0, 2, 23])
    settings = {
        "spark.millpond.executor.timeout": "4",
        "spark.millpond.restarts": "9",
        "spark.decommission.enabled": "true",
    } | ({"spark.millpond.commit.mode": "sync"} if rng.random() < 0.25 else {})
    with networked(tmp_path, rng.choice([2, 3]), seed) as cluster:
        schedule = Schedule(cluster, str(tmp_path / "checkpoint"), rng)
        for _ in range(LIVES):
            done, log = run_job(
                tmp_path,
                cluster,
                schedule.on_batch,
                f"faults+file:{tmp_path}/state?latency_ms={latency}",
                query=query,
                pause=rng.choice([0.0, 0.5]),
                **settings,
            )
            if done:
                break
            assert any(event.startswith("driver") for event in schedule.happened), log[-6000:]
        assert done, log[-6000:]
        schedule.heal()
        assert_gone(cluster)
    if query == "aggregate":
        assert read_updates(tmp_path / "out") == expected_updates(rows, tmp_path / "checkpoint"), schedule.happened
    else:
        assert read_file_sink(tmp_path / "out") == EXPECTED[query](rows), schedule.happened
    _, orphans = orphans_of(str(tmp_path / "checkpoint"), now=time.time() + 30 * DAY)
    assert not orphans.missing


def assert_gone(cluster: Hosts) -> None:
    """Once the application has ended, its hosts have no process left but Spark's workers."""
    until = time.monotonic() + 90
    while time.monotonic() < until:
        left = [process for number in cluster.numbers for process in cluster.slots(number)]
        if not left:
            return
        time.sleep(0.2)
    pytest.fail(f"processes are left: {left}")
