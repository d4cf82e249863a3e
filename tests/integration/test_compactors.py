"""Queries whose state is compacted by processes beside them, which are killed and stalled, on a disk and on S3.

Each batch's rows are those that Spark gives; nothing is left behind, and nothing is removed that somebody needs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millpond.checkpoint.compaction.requests import RequestState, list_requests, request_of_file
from millpond.checkpoint.forks.parents import open_state
from millpond.checkpoint.generation import claimed_generations
from millpond.checkpoint.retention.needs import IN_FLIGHT_BATCHES, committed_at, read_needs
from millpond.errors import MillpondError
from millpond.files.backends.filesystem import FileSystem
from millpond.files.locations.opening import open_filesystem
from millpond.query.checkpoints.orphans import orphans_of
from millpond.query.checkpoints.ownership import state_of_last_run
from millpond.query.progress.reader import ProgressReader
from millpond.state_reader.reader import StateReader
from tests.integration.held_compactor import AFTER, BEFORE, STEPS
from tests.servers.s3 import pointed_at
from tests.servers.seaweedfs import BUCKET
from tests.slot.conftest import with_tests_on_path

JOB = Path(__file__).with_name("compaction_job.py")
COMPACTOR = Path(__file__).with_name("held_compactor.py")
ROWS, KEYS = 60_000, 200_000
"""Rows of a batch, and keys: more than a slot's memory holds, so that each batch writes files."""

MOST_BATCHES = 60
LEASE = "2"
PATIENCE = 300.0
TAIL = 6000
"""Characters of each log that an error shows."""

CONFS = {
    "spark.millpond.compaction": "remote",
    "spark.millpond.slot.memory": "16m",
    "spark.millpond.slots": "1",
    "spark.sql.streaming.minBatchesToRetain": "2",
}


class Beside:
    """A compactor beside a query. It is on its way when this is made; once it has started it stands still."""

    def __init__(self, query: Query, location: str, name: str) -> None:
        self.query = query
        self.name = name
        self.log = query.folder / f"{name}.log"
        self.gate = query.folder / name
        self.gate.mkdir()
        self._held = 0  # position in the log from which on it reports requests at which it is to stand
        command = [sys.executable, str(COMPACTOR), str(self.gate), location, "--poll", "0.1", "--lease", LEASE]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=with_tests_on_path(), stdout=log, stderr=log)
        query.others.append(self)

    def started(self) -> Beside:
        self.query.wait_until(f"{self.name} has started", lambda: " for " in self.said())
        self.stall()
        return self

    def said(self) -> str:
        return self.log.read_text()

    def says(self, identity: str, *how: str) -> None:
        """It comes to say one of these of a request."""
        lines = [f"request {identity} {one}" for one in how]
        self.query.wait_until(f"{self.name} says {' or '.join(lines)}", lambda: any(it in self.said() for it in lines))

    def stall(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        stopped = psutil.STATUS_STOPPED
        self.query.wait_until(f"{self.name} is stopped", lambda: psutil.Process(self.process.pid).status() == stopped)

    def stand_at(self, *steps: str) -> None:
        """Let it stand at these steps of each request from now on."""
        for name in ("open", *STEPS):
            (self.gate / name).unlink(missing_ok=True)
        for step in set(STEPS) - set(steps):
            (self.gate / step).touch()
        self._held = len(self.said())

    def let(self, identity: str) -> None:
        """It need not stand at this request."""
        (self.gate / identity).touch()

    def standing(self, step: str) -> list[str]:
        """The requests at which it stands, or stood, since it was asked to."""
        return re.findall(rf"request (\w+) stands {step} its work", self.said()[self._held :])

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def go_on(self) -> None:
        """It goes on, and stands at nothing."""
        (self.gate / "open").touch()
        self.resume()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """End it as a user would, by SIGTERM."""
        self.process.terminate()
        assert self.process.wait(PATIENCE) == 0, self.said()


class Query:
    """The job, start after start, and what it has read and written."""

    def __init__(self, folder: Path, confs: dict[str, str]) -> None:
        self.folder = folder
        self.confs = confs
        self.parts = 0
        self.others: list[Beside] = []
        for name in ("in", "out", "figures"):
            (folder / name).mkdir()

    @contextmanager
    def running(self, **more: str) -> Iterator[None]:
        """The job runs meanwhile, with settings; at the end it is stopped, or killed if something went wrong."""
        (self.folder / "stop").unlink(missing_ok=True)
        settings = {f"spark.millpond.{name.replace('_', '.')}": value for name, value in more.items()}
        with (self.folder / "job.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(JOB), str(self.folder)],
                env=with_tests_on_path() | {"CONFS": json.dumps(CONFS | self.confs | settings)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield
            if self.process.poll() is None:
                (self.folder / "stop").touch()
                assert self.process.wait(PATIENCE) == 0, self.told_by_all()
                self.wait_until("the slots have ended", lambda: not self._slots())
        finally:
            self.kill()

    def wait_until(self, what: str, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE
        while not (found := condition()):
            dead = [one.name for one in self.others if one.process.poll()]
            if dead or time.monotonic() > deadline:
                why = f"{', '.join(dead)} failed" if dead else f"it never came true in {PATIENCE:.0f} s"
                raise AssertionError(f"Waited until {what}: {why}.\n{self.told_by_all()}")
            time.sleep(0.01)
        return found

    def told_by_all(self) -> str:
        """The logs of all that run here, and the requests that are there, for errors."""
        told = [f"--- {path.name}\n{path.read_text()[-TAIL:]}" for path in sorted(self.folder.glob("*.log"))]
        with suppress(MillpondError):
            told += ["--- requests", *(f"{identity}: {known}" for identity, known in self.known().items())]
        return "\n".join(told)

    def kill(self) -> None:
        """Kill the driver, the slots and all others at once: no process sees another end, and cleans up."""
        doomed = self._slots()
        with suppress(psutil.Error):
            doomed += psutil.Process(self.process.pid).children(recursive=True)
        for process in doomed:
            with suppress(psutil.Error):
                process.suspend()
        for process in doomed:
            with suppress(psutil.Error):
                process.kill()
        self.process.kill()
        self.process.wait()

    def _slots(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("MILLPOND_TEST_COMPACTION") == str(self.folder) and _is_slot(process):
                    found.append(process)
        return found

    def batch(self) -> None:
        """One more file, and its batch."""
        number, rng = self.parts, np.random.default_rng(self.parts)
        assert number < MOST_BATCHES, self.told_by_all()
        rows = {
            "key": rng.integers(0, KEYS, ROWS),
            "amount": rng.integers(-50, 50, ROWS),
            "part": np.full(ROWS, number, np.int32),
        }
        pq.write_table(pa.table(rows), self.folder / "in" / ".new")
        os.utime(self.folder / "in" / ".new", (1_700_000_000 + number,) * 2)
        (self.folder / "in" / ".new").rename(self.folder / "in" / f"{number:04d}.parquet")
        self.parts += 1
        self.wait_until(
            f"batch {number} is done",
            lambda: self.process.poll() is not None or (len(self._outputs()) == self.parts and self.settled),
        )
        assert self.process.poll() is None, self.told_by_all()

    def until(self, condition: Callable[[], Any]) -> Any:
        """Batch after batch, until something is so."""
        while not (found := condition()):
            self.batch()
        return found

    @property
    def settled(self) -> bool:
        """Whether the last batch has reported its figures."""
        return (self.folder / "figures" / f"{self.process.pid}-{self.parts - 1}.json").exists()

    def told(self, name: str) -> int:
        """A figure, added up over the batches of the present run."""
        paths = (self.folder / "figures").glob(f"{self.process.pid}-*.json")
        return sum(json.loads(path.read_text())[name] for path in paths)

    def _outputs(self) -> list[Path]:
        return [path for path in (self.folder / "out").iterdir() if (path / "_SUCCESS").exists()]

    @cached_property
    def files(self) -> FileSystem:
        checkpoint = str(self.folder / "checkpoint")
        return open_state(state_of_last_run(open_filesystem(checkpoint)) or checkpoint)

    def known(self) -> dict[str, RequestState]:
        return list_requests(self.files)

    def open_requests(self) -> set[str]:
        """Those without an answer."""
        return {identity for identity, known in self.known().items() if known.request and not known.has_result}

    def held(self, worker: Beside, step: str) -> str:
        """Stall a worker, the only one that goes on, at a step of a request that it has in hand; which it is."""
        for _ in range(MOST_BATCHES):
            worker.stall()
            worker.stand_at(step)
            self.until(self.open_requests)
            worker.resume()
            self.wait_until(
                f"{worker.name} stands {step} its work", lambda: worker.standing(step) or not self.open_requests()
            )
            worker.stall()
            if found := self.open_requests().intersection(worker.standing(step)[-1:]):
                return found.pop()
        raise AssertionError(f"{worker.name} was never caught at work.\n{self.told_by_all()}")

    def named(self) -> set[str]:
        """Files that commits name."""
        return set().union(*(read_needs(self.files, info) for info in self.files.list("commits/")))

    def check_rows(self) -> None:
        """Each batch has the keys of its file, with their rows of all files so far."""
        rows, amounts, seen = np.zeros(KEYS, np.int64), np.zeros(KEYS, np.int64), 0
        for path in sorted(self._outputs(), key=lambda path: int(path.name.removeprefix("batch="))):
            table = pq.read_table(path, partitioning=None).sort_by("key")
            last = int(table["part"].to_numpy().max())
            keys = np.empty(0, np.int64)
            for number in range(seen, last + 1):
                file = pq.read_table(self.folder / "in" / f"{number:04d}.parquet", partitioning=None)
                added = file["key"].to_numpy()
                rows += np.bincount(added, minlength=KEYS)
                np.add.at(amounts, added, file["amount"].to_numpy())
                keys = np.union1d(keys, added)
            seen = last + 1
            np.testing.assert_array_equal(table["key"].to_numpy(), keys)
            np.testing.assert_array_equal(table["rows"].to_numpy(), rows[keys])
            np.testing.assert_array_equal(table["amount"].to_numpy(), amounts[keys])
        assert seen == self.parts
        self.rows = rows

    def check_state(self) -> None:
        """The newest version can be read, all of it, and has every key."""
        reader = StateReader(self.files.url.removesuffix("/millpond"))
        version = reader.versions()[-1]
        assert version == self.parts
        held = sum(batch.num_rows for number in range(reader.partitions) for batch in reader.read(0, number, version))
        assert held == np.count_nonzero(self.rows)

    def collect(self) -> None:
        """Remove files as `millpond state gc` does in some hours; then no unneeded file is left."""
        checkpoint = str(self.folder / "checkpoint")
        files, orphans = orphans_of(checkpoint, now=time.time() + 4 * 3600)
        assert not orphans.missing
        assert all(infos for kind, infos in orphans.unneeded.items() if kind.startswith(("files that no", "requests")))
        orphans.remove(files)
        assert not list(files.list("compaction/"))
        assert not list(files.list("staging/"))
        commits = files.list("commits/")
        recent = committed_at(commits, self.parts - 1 - IN_FLIGHT_BATCHES)
        named = self.named()
        assert not [one.name for one in files.list("files/") if one.name not in named and one.modified < recent]
        assert not orphans_of(checkpoint)[1].missing


def _is_slot(process: psutil.Process) -> bool:
    return any("millpond.slot" in part for part in process.cmdline())


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.xdist_group("seaweedfs")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("store", ["disk", "s3"])
def test_workers_and_the_query_are_killed_and_stalled(
    store: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, cleanup: ExitStack
) -> None:
    monkeypatch.setenv("MILLPOND_TEST_COMPACTION", str(tmp_path))
    cleanup.enter_context(pointed_at(request.getfixturevalue("seaweedfs")) if store == "s3" else nullcontext())
    apart = {"spark.millpond.state.location": f"s3://{BUCKET}/compaction"} if store == "s3" else {}
    location = str(tmp_path / "checkpoint")
    query = Query(tmp_path, apart)

    def worker(name: str) -> Beside:
        made = Beside(query, location if apart else f"faults+{location}?latency_ms=20", name)
        cleanup.callback(made.kill)
        return made

    with query.running(partitions="2", compaction_timeout="600"):  # if a worker dies or stalls, another takes over
        first, second, third = [one.started() for one in [worker("first"), worker("second"), worker("third")]]
        query.batch()
        assert query.files.url.startswith("s3:" if apart else "file:")

        first.go_on()
        query.until(lambda: query.told("remote_compactions") > 0)
        query.until(lambda: any(request_of_file(name) for name in query.named()))

        left = query.held(first, BEFORE)
        first.kill()
        query.others.remove(first)
        second.go_on()
        second.says(left, "done")
        before = query.told("remote_compactions")
        query.until(lambda: query.told("remote_compactions") > before)

        left = query.held(second, AFTER)
        third.go_on()
        third.says(left, "done")
        before = query.told("remote_compactions")
        query.until(lambda: query.told("remote_compactions") > before)
        second.go_on()  # its result is not waited for; it is an answer if the request goes after its last look
        second.says(left, "failed, and", "was answered by", "was withdrawn", "done")
        second.end()

        assert query.told("local_compactions") == 0
        assert query.told("compaction_ms") == 0
        assert query.told("remote_compacted_bytes") > 0
        looked = ProgressReader(location).read()
        assert sum(batch.compactions["remote_compactions"] for batch in looked.batches) > 0
        left = query.held(third, AFTER)
        unanswered = query.open_requests()
        assert left in unanswered
        query.kill()
        assert unanswered <= {at for at, known in query.known().items() if known.request}

    with query.running(partitions="3", compaction_timeout="2"):
        query.batch()
        third.stand_at(BEFORE, AFTER)  # at what this run asks for, too
        third.let(left)
        third.resume()
        third.says(left, "failed, and", "was withdrawn")
        third.end()
        assert left not in query.known() or not query.known()[left].has_result
        query.until(lambda: query.told("local_compactions") > 0 and query.told("compaction_ms") > 0)
        assert query.told("remote_compactions") == 0
        query.batch()
        last = claimed_generations(query.files)[-1]

        def waiting() -> list[str]:  # a sign of life that comes too late may stay, and is collected
            return [at for at, known in query.known().items() if known.generation == last and known.request]

        query.wait_until("the last run waits for no request", lambda: not waiting())
    assert not waiting(), query.told_by_all()

    assert not {request_of_file(name) for name in query.named()} & unanswered
    query.check_rows()
    query.collect()
    assert not {request_of_file(info.name) for info in query.files.list("files/")} & unanswered
    query.check_state()
