"""Documents of a checkpoint altered, cut short, removed or of a newer format: right rows, or an error that names one.

Beside `slot/test_damage.py`: marks of fenced runs, state schemas, parents and pins of forks, requests to compactors
with their leases and answers, and the files that these make; and of each kind, what a newer Millpond would have
written.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
import xxhash

from millpond.checkpoint.compaction.requests import (
    CompactionResult,
    Request,
    claim_lease,
    lease_name,
    put_request,
    put_result,
    read_request,
    read_result,
    request_name,
    result_name,
)
from millpond.checkpoint.forks.parents import PARENTS_FILE, open_state
from millpond.checkpoint.formats.documents import FORMAT
from millpond.checkpoint.generation import claimed_generations
from millpond.checkpoint.retention.collector import Collector
from millpond.compactor.worker import Worker
from millpond.errors import StateDamagedError, StateIncompatibleError
from millpond.files.refs import RunRef
from millpond.layout import TableSchema
from millpond.query.checkpoints.fork import fork
from millpond.slot.partition.remote_compaction import RemoteCompaction
from millpond.state_reader.reader import StateReader
from millpond.stores import delta_backlog
from millpond.stores.jobs import MergeRuns
from tests.slot.test_damage import BATCHES, Counts, rows_of

pytestmark = pytest.mark.costly

SEEDS = range(4)
HOW = ("flipped", "cut", "empty", "removed", "newer")

KINDS = {
    "fence": "original/millpond/generations/*.fenced",
    "query": "original/millpond/query.json",
    "claim": "original/millpond/generations/???????????????.json",
    "base": "original/millpond/generations/*.base.json",
    "commit": "original/millpond/commits/*",
    "run": "original/millpond/files/*.run",
    "pin": "original/millpond/forks/*.json",
    "parents": "new/millpond/parents.json",
    "query of a fork": "new/millpond/query.json",
    "first commit of a fork": "new/millpond/commits/*",
}
STARTED = BATCHES + 2
HARMLESS = {
    *((kind, "removed") for kind in ("query", "query of a fork", "claim", "base", "commit", "pin")),
    ("run", "flipped"),
}
"""What may be so each time: made again, or not needed any more. Of a mark of a fenced run, only the name counts."""


class Fork(Counts):
    """From where it was made it gets rows of its own."""

    def rows(self, batch: int) -> dict[int, int]:
        return rows_of(batch if batch < BATCHES else batch + 100)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that two runs have left, and a fork of it that has not been started."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "original").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_backlog, "_MAX_DELTAS", 2)
        for batches in (BATCHES - 3, BATCHES):
            Counts(folder / "original").through(batches)
    (folder / "original" / "metadata").write_text('{"id":"7c1d9a35-6f7e-4f0f-9d53-6d0a3a3f4a52"}')
    fork(str(folder / "original"), str(folder / "new"))
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Iterator[Path]:
    """Both where they were made: a fork knows its place, and that of its parent."""
    shutil.copytree(made, tmp_path / "kept")
    yield made
    shutil.rmtree(made)
    shutil.copytree(tmp_path / "kept", made)


def needed_runs(folder: Path) -> list[Path]:
    """The runs that the newest version is made of; others are garbage."""
    reader = StateReader(str(folder / "original"))
    manifests = reader.manifests(reader.choose()).values()
    names = {run.name for one in manifests for table in one.tables.values() for run in table.runs.runs}
    return [folder / "original" / "millpond" / name for name in sorted(names)]


def newer(content: bytes) -> bytes:
    """The same content as a Millpond of the next format would write it."""
    if content[:8] == b"MILLCMIT":
        return content[:8] + (FORMAT + 1).to_bytes(4, "little") + content[12:]
    body = json.dumps(json.loads(content.partition(b"\n")[0]) | {"format": FORMAT + 1}).encode()
    return body + b"\nxxh3:%016x\n" % xxhash.xxh3_64_intdigest(body)


def damage(path: Path, how: str, choice: random.Random) -> None:
    """Alter a file."""
    content = path.read_bytes()
    if how == "removed":
        path.unlink()
    elif how == "newer":
        path.write_bytes(newer(content))
    elif how == "flipped":
        at = choice.randrange(len(content))
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << choice.randrange(8)]) + content[at + 1 :])
    else:
        path.write_bytes(content[: 0 if how == "empty" else choice.randrange(1, len(content))])


# A mark is there or not; a run's format is in its footer, whose checksum is in manifests.
CASES = [(kind, how) for kind in KINDS for how in HOW if how != "newer" or kind not in ("run", "fence")]


@pytest.mark.parametrize(("kind", "how"), CASES)
def test_rows_are_right_or_the_file_is_named(copied: Path, tmp_path: Path, kind: str, how: str) -> None:
    """Both queries go on from what there is, and the garbage of the original is collected in between."""
    named = 0
    for seed in SEEDS:
        choice = random.Random(f"{kind} {how} {seed}")
        victims = needed_runs(copied) if kind == "run" else sorted(copied.glob(KINDS[kind]))
        victim = choice.choice(victims[-2:] if kind in ("claim", "base", "commit") else victims)
        damage(victim, how, choice)
        for query, folder in ((Fork, "new"), (Counts, "original"), (Fork, "new")):
            try:
                query(copied / folder).through(STARTED)
                files = open_state(str(copied / folder))
                newest = claimed_generations(files)[-1]
                for now in (2e9, 3e9):
                    still = partial(float, now)
                    Collector(files, newest, retain=2, grace=0.0, clock=still, elapsed=still).collect(STARTED)
            except (StateDamagedError, StateIncompatibleError) as error:
                assert error.file, error  # noqa: PT017
                named += 1
        shutil.rmtree(copied)
        shutil.copytree(tmp_path / "kept", copied)
    assert named or (kind, how) in HARMLESS or kind == "fence"


IDENTITY = "1f0e"
GENERATION = 7


def asked(folder: Path) -> tuple[RemoteCompaction, list[str]]:
    """A slot that waits for a compaction, as soon as it has looked once; what it did in the end."""
    files = open_state(str(folder))
    did: list[str] = []
    now = [0.0]

    def local() -> object:
        did.append("local")
        done: Future[str] = Future()
        done.set_result("local")
        return done

    def opened(refs: object) -> str:
        did.append("remote")
        return "remote"

    def clock() -> float:
        now[0] += 10.0
        return now[0]

    job = MergeRuns(TableSchema((), ()), (RunRef("files/a.run", 1, 1, 0, 1),), 0, 0, 1, False, 1)
    remote = RemoteCompaction(files, GENERATION, threaded=False, clock=clock)
    remote.submit(lambda: job, local, opened)  # type: ignore[arg-type]
    remote.step()
    return remote, did


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "newer"])
def test_a_damaged_answer_is_not_taken(tmp_path: Path, how: str) -> None:
    for seed in range(20):
        folder = tmp_path / str(seed)
        remote, did = asked(folder)
        (request,) = (folder / "millpond" / "compaction" / f"{GENERATION:015d}").glob("*.request")
        files = open_state(str(folder))
        put_result(files, GENERATION, request.stem, CompactionResult("one", (RunRef("files/b.run", 1, 1, 0, 1),)))
        damage(request.with_suffix(".done"), how, random.Random(seed))
        for _ in range(10):
            remote.step()
        assert did == ["local"]
        assert remote.waiting == 0


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "removed", "newer"])
def test_a_damaged_request_is_not_done(tmp_path: Path, how: str) -> None:
    """The worker leaves it alone, and the slot compacts itself."""
    for seed in range(20):
        folder = tmp_path / str(seed)
        remote, did = asked(folder)
        (request,) = (folder / "millpond" / "compaction" / f"{GENERATION:015d}").glob("*.request")
        damage(request, how, random.Random(seed))
        worker = Worker([open_state(str(folder))], str(tmp_path), renews_lease=False)
        worker.step()
        assert worker.done == 0
        assert not list((folder / "millpond").glob("files/*"))
        for _ in range(20):
            remote.step()
        assert did == ["local"]


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "removed", "newer"])
def test_a_damaged_lease_holds_up_nothing(tmp_path: Path, how: str) -> None:
    """Its name alone counts: after some time another takes the next number."""
    files = open_state(str(tmp_path))
    put_request(files, Request(IDENTITY, GENERATION, b""))
    claim_lease(files, GENERATION, IDENTITY, 1, "gone")
    damage(tmp_path / "millpond" / lease_name(GENERATION, IDENTITY, 1), how, random.Random(1))
    now = [0.0]
    worker = Worker([files], str(tmp_path), clock=lambda: now[0], renews_lease=False)
    worker.step()
    now[0] = 100.0
    worker.step()
    done = read_result(files, GENERATION, IDENTITY)
    assert done is not None
    assert done.error, "an empty job cannot be done"


def test_altered_documents_of_compactions_are_told_apart(tmp_path: Path) -> None:
    files = open_state(str(tmp_path))
    put_request(files, Request(IDENTITY, GENERATION, b"job"))
    put_result(files, GENERATION, IDENTITY, CompactionResult("one"))
    assert read_request(files, GENERATION, IDENTITY) == Request(IDENTITY, GENERATION, b"job")
    for name in (request_name(GENERATION, IDENTITY), result_name(GENERATION, IDENTITY)):
        path = tmp_path / "millpond" / name
        path.write_bytes(newer(path.read_bytes()))
    for read in (read_request, read_result):
        with pytest.raises(StateIncompatibleError, match="has format") as error:
            read(files, GENERATION, IDENTITY)
        assert error.value.file is not None
        assert IDENTITY in error.value.file


def test_parents_of_a_newer_format_are_refused(copied: Path) -> None:
    path = copied / "new" / "millpond" / PARENTS_FILE
    path.write_bytes(newer(path.read_bytes()))
    with pytest.raises(StateIncompatibleError, match=f"has format {FORMAT + 1}") as error:
        open_state(str(copied / "new"))
    assert error.value.file is not None
    assert error.value.file.endswith(PARENTS_FILE)
