"""`millpond state`: what it says of whole checkpoints, and of damaged ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from itertools import chain, product
from pathlib import Path

import pyarrow as pa
import pytest

from millpond import cli
from millpond.checkpoint.forks.parents import Parents, open_state
from millpond.checkpoint.formats.commit import commit_prefix
from millpond.checkpoint.formats.documents import write_document_once
from millpond.checkpoint.formats.manifest import PartitionManifest, TableState, seal
from millpond.checkpoint.generation import claim, claimed_generations, deciding_claim
from millpond.checkpoint.recovery import Recovery
from millpond.checkpoint.retention.needs import needs_of
from millpond.checkpoint.state_schema import OperatorSchema, StateSchema, plain
from millpond.errors import StateDamagedError, TransientError, UsageError
from millpond.files.backends.filesystem import FileInfo
from millpond.files.locations.counted import CountedFiles
from millpond.files.locations.opening import join_url, open_filesystem
from millpond.files.refs import RunRef, TableManifest
from millpond.operators.kinds.registry import state_tables
from millpond.query.checkpoints.ownership import Ownership
from millpond.query.progress.reader import ProgressReader
from millpond.query.schema.comparison import write_or_check_schema
from millpond.spec.kinds.enrich import EnrichSpec
from millpond.spec.kinds.group_state import STATE, GroupStateSpec
from millpond.spec.kinds.processor import ProcessorSpec, Variable
from millpond.spec.operators import Field
from millpond.state_reader import reader as reader_module
from millpond.state_reader.reader import StateOperator, StateReader
from millpond.state_reader.tables import piece_rows
from millpond.stores import delta_backlog
from millpond.stores.rmw.eviction_buffer import EvictionBuffer
from tests.checkpoint.rig import Slot, litter
from tests.servers.s3 import s3

from .conftest import GROUPED
from .test_damage import PARTITIONS, Counts

BATCHES = 3


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: the second builds on the last version of the first, and adds one."""
    folder = tmp_path_factory.mktemp("history")
    for batches in (BATCHES - 1, BATCHES):
        Counts(folder).through(batches)
    return folder


@pytest.fixture
def checkpoint(history: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(history, tmp_path / "checkpoint"))


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple]]:
    """Runs the command: exit code and lines of the output, unwrapped."""

    def run(*arguments: object) -> tuple[int, list[str]]:
        monkeypatch.setattr("sys.argv", ["millpond", "state", *map(str, arguments)])
        monkeypatch.setattr(cli._out, "width", 200)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), capsys.readouterr().out.splitlines()

    return run


def test_state_on_an_object_store(tmp_path: Path, state: Callable[..., tuple]) -> None:
    with s3() as bucket:
        for batches in (BATCHES - 1, BATCHES):
            Counts(tmp_path, bucket).through(batches)
        assert not (tmp_path / "millpond").exists()
        location = f"{bucket}{tmp_path}"
        code, (told,) = state("verify", location)
        assert code == 0
        assert told.startswith(f"version {BATCHES}: {PARTITIONS} partitions, ")
        assert told.endswith(", 0 damaged")
        code, (head, *_) = state("ls", location)
        assert code == 0
        assert f"versions 1 to {BATCHES}" in head


def test_values_and_names_are_shown_as_they_are(
    checkpoint: Path, state: Callable[..., tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = ["[true, null]", "[info] x", ":warning:", "[/api]"]
    batch = pa.RecordBatch.from_arrays([pa.array(odd)], names=["[bold]k"])
    monkeypatch.setattr(StateReader, "read", lambda *_, **__: iter([batch]))
    code, lines = state("show", checkpoint)
    assert code == 0
    assert all(any(value in line for line in lines) for value in ["[bold]k", *odd])


def test_times_beyond_pythons_years_are_shown(
    checkpoint: Path, state: Callable[..., tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    micros = pa.array([253_402_300_800_000_000, -62_135_596_800_000_001, (1 << 63) - 1, 0], pa.int64())
    times = micros.cast(pa.timestamp("us", tz="UTC"))
    dates = pa.array([2_932_897, -719_163, -(1 << 31), 0], pa.int32()).cast(pa.date32())
    offsets = pa.array([0, 1, 2, 3, 4], pa.int32())
    inside = pa.StructArray.from_arrays(
        [pa.ListArray.from_arrays(offsets, dates), pa.MapArray.from_arrays(offsets, pa.array(list("abcd")), times)],
        ["d", "m"],
    )
    columns = [times, times.cast(pa.timestamp("us")), dates, inside]
    batch = pa.RecordBatch.from_arrays(columns, names=["t", "n", "d", "s"])
    monkeypatch.setattr(StateReader, "read", lambda *_, **__: iter([batch]))
    code, lines = state("show", checkpoint, "--partition", 0)
    assert code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [row[0] for row in rows] == [
        "+10000-01-01 00:00:00+00:00",
        "+0000-12-31 23:59:59.999999+00:00",
        "+294247-01-10 04:00:54.775807+00:00",
        "1970-01-01 00:00:00+00:00",
    ]
    assert [row[1] for row in rows] == [row[0].removesuffix("+00:00") for row in rows]
    assert [row[2] for row in rows] == ["+10000-01-01", "+0000-12-31", "-5877641-06-23", "1970-01-01"]
    assert [row[3] for row in rows] == [
        f'{{"d": ["{row[2]}"], "m": [["{letter}", "{row[0]}"]]}}' for letter, row in zip("abcd", rows, strict=True)
    ]


def alter(file: Path) -> str:
    """Change a byte in the header of a commit; its name."""
    content = bytearray(file.read_bytes())
    content[40] ^= 1
    file.write_bytes(content)
    return file.name


def commits(checkpoint: Path, version: int) -> list[Path]:
    """The commits of a version by the newest run, and those that it builds on."""
    return sorted((checkpoint / "millpond" / "commits").glob(f"{version:012d}-*"))


@pytest.mark.parametrize("document", ["", ".base"])
def test_a_run_that_died_while_it_began_is_passed_over(
    checkpoint: Path, state: Callable[..., tuple], document: str
) -> None:
    """Its claim or its base was cut off when it was written; a damaged one of a run that has committed is named."""
    number = claim(StateReader(str(checkpoint)).files, run="dead", partitions=PARTITIONS).number
    folder = checkpoint / "millpond" / "generations"
    before = sorted(folder.glob(f"???????????????{document}.json"))[-2 if not document else -1]
    (folder / f"{number:015d}{document}.json").write_bytes(before.read_bytes()[:20])
    code, (told,) = state("verify", checkpoint)
    assert code == 0
    assert told.startswith(f"version {BATCHES}: ")
    before.write_bytes(before.read_bytes()[:20])
    with pytest.raises(StateDamagedError, match="cut short or altered") as error:
        StateReader(str(checkpoint))
    assert error.value.file is not None
    assert error.value.file.endswith(before.name)


@pytest.mark.parametrize(("document", "error"), [("", "A state file is missing"), (".base", r"The file .* is gone")])
def test_a_missing_file_of_the_newest_run_is_named(
    checkpoint: Path, state: Callable[..., tuple], document: str, error: str
) -> None:
    """Without it, the state of the run before must not be shown as the newest."""
    missing = max((checkpoint / "millpond" / "generations").glob(f"???????????????{document}.json"))
    missing.unlink()
    with pytest.raises(StateDamagedError, match=error) as raised:
        StateReader(str(checkpoint))
    assert raised.value.file is not None
    assert raised.value.file.endswith(missing.name)
    for command in ("ls", "show", "verify"):
        code, (line,) = state(command, checkpoint)
        assert code == 1
        assert missing.name in line


def test_files_of_an_old_run_may_be_collected_while_it_is_read(checkpoint: Path) -> None:
    """Garbage collection removes claim and base; commits of that run may stay."""
    reader = StateReader(str(checkpoint))
    folder = checkpoint / "millpond" / "generations"
    for document in ("", ".base"):
        min(folder.glob(f"???????????????{document}.json")).unlink()
    for opened in (reader, StateReader(str(checkpoint))):
        assert opened.versions() == [BATCHES - 1, BATCHES]
        assert opened.newest() == BATCHES


@pytest.mark.parametrize("listing", [1, 2])
def test_a_run_may_begin_while_a_reader_lists(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, listing: int) -> None:
    class Overtaken(CountedFiles):
        """After one of the listings, another run begins and commits."""

        def list(self, prefix: str, *, after: str = "") -> list[FileInfo]:
            infos = super().list(prefix, after=after)
            if self.counts()["lists"] == listing:
                Counts(checkpoint).through(BATCHES + 1)
            return infos

    monkeypatch.setattr(reader_module, "open_state", lambda location: Overtaken(open_state(location)))
    assert StateReader(str(checkpoint)).newest() == BATCHES
    assert StateReader(str(checkpoint)).newest() == BATCHES + 1


def test_a_whole_checkpoint_verifies(checkpoint: Path, state: Callable[..., tuple]) -> None:
    code, lines = state("verify", checkpoint)
    assert (code, len(lines)) == (0, 1)
    assert lines[0].startswith(f"version {BATCHES}: {PARTITIONS} partitions, ")
    assert lines[0].endswith(", 0 damaged")


def test_foreign_files_beside_the_commits_are_passed_over(checkpoint: Path, state: Callable[..., tuple]) -> None:
    litter(open_filesystem(join_url(str(checkpoint), "millpond")))
    code, lines = state("verify", checkpoint)
    assert (code, len(lines)) == (0, 1)
    assert lines[0].endswith(", 0 damaged")
    assert StateReader(str(checkpoint)).versions() == [*range(1, BATCHES + 1)]
    Counts(checkpoint).through(BATCHES + 1)
    assert StateReader(str(checkpoint)).newest() == BATCHES + 1


def test_damaged_commits_of_the_newest_version_are_named(checkpoint: Path, state: Callable[..., tuple]) -> None:
    name = alter(commits(checkpoint, BATCHES)[0])
    code, (told, summary) = state("verify", checkpoint)
    assert code == 1
    assert name in told
    assert f"version {BATCHES}, " in told
    assert "Restore it" in told
    assert summary.startswith(f"version {BATCHES - 1}: ")
    assert summary.endswith(", 1 damaged")
    code, (told, summary) = state("verify", checkpoint, "--version", BATCHES)
    assert code == 1
    assert name in told
    assert summary == f"version {BATCHES} is not whole, 1 damaged"
    code, lines = state("verify", checkpoint, "--version", BATCHES - 1)
    assert code == 0
    assert lines[-1].endswith(", 0 damaged")
    code, (told,) = state("show", checkpoint, "--version", BATCHES)
    assert code == 1
    assert name in told
    code, (head, *_) = state("ls", checkpoint)
    assert code == 0
    assert f", versions 1 to {BATCHES - 1}, damaged commits: 1 " in head


def test_a_checkpoint_without_a_whole_version_is_damaged_not_new(checkpoint: Path, state: Callable[..., tuple]) -> None:
    names = [alter(file) for file in (checkpoint / "millpond" / "commits").iterdir()]
    reader = StateReader(str(checkpoint))
    mine = [name for name in names if any(name in str(error) for error in reader.damage())]
    assert len(mine) >= 2
    code, (*told, summary) = state("verify", checkpoint)
    assert code == 1
    assert [sum(name in line for line in told) for name in mine] == [1] * len(mine)
    assert summary == f"no version is whole, {len(mine)} damaged"
    with pytest.raises(StateDamagedError):
        reader.choose()


def test_missing_commits_are_named_where_no_version_is_whole(tmp_path: Path, state: Callable[..., tuple]) -> None:
    files = open_filesystem(join_url(str(tmp_path), "millpond"))
    write_or_check_schema(files, StateSchema(1 << 15, (OperatorSchema("counts", plain(GROUPED), {"main": {}}),)))
    generation = claim(files, run="test", partitions=4)
    Recovery(files, generation, 1).write_base([0])
    slot = Slot(files, generation.number, tmp_path / "host")
    held = {"main": (TableManifest(), [b"d"])}
    sealed = seal(PartitionManifest(0, 2, 0), held, input_checksum=1, input_rows=1)
    slot.committer.submit(slot.sealed.write(sealed, generation.number))
    slot.settle()
    slot.committer.close()
    for options in ((), ("--version", 1), ("--version", 7)):
        code, (line,) = state("verify", tmp_path, *options)
        assert code == 1
        assert "the commits of version 1 lack partitions 0 to 1, 3 of operator 0 (version 1, " in line
        assert files.locate(f"{commit_prefix(1, generation.number)}*") in line
    files.delete(files.list("commits/")[0].name)
    code, (line,) = state("verify", tmp_path)
    assert code == 1
    assert line.startswith(f"[USAGE] There is no durable version yet ({files.locate('commits/')}). ")


def test_damage_of_an_earlier_run_is_named_where_no_version_is_whole(
    checkpoint: Path, state: Callable[..., tuple]
) -> None:
    files = open_filesystem(join_url(str(checkpoint), "millpond"))
    Recovery(files, claim(files, run="test", partitions=PARTITIONS), 1).write_base([0])
    *_, damaged, _ = sorted((checkpoint / "millpond" / "generations").glob("*.base.json"))
    damaged.write_bytes(damaged.read_bytes()[:20])
    code, (line, summary) = state("verify", checkpoint)
    assert code == 1
    assert damaged.name in line
    assert summary == "no version is whole, 1 damaged"


def test_what_the_newest_run_builds_on_may_be_gone_only_when_it_has_gone_on(
    checkpoint: Path, state: Callable[..., tuple]
) -> None:
    base = commits(checkpoint, BATCHES - 1)
    for file in base:
        file.unlink()
    code, lines = state("verify", checkpoint)
    missing = "A state file is missing"
    assert not any(missing in line and f"version {BATCHES - 1}, " in line for line in lines)
    for file in commits(checkpoint, BATCHES):
        file.unlink()
    code, (*told, summary) = state("verify", checkpoint)
    assert code == 1
    assert all(missing in line for line in told)
    assert any(file.name in line for file in base for line in told)
    assert summary.startswith("no version is whole, ")


def test_a_version_that_the_query_removes_while_it_is_read_is_not_damaged(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_backlog, "_MAX_DELTAS", 1)
    reader = StateReader(str(checkpoint))
    version = reader.choose()
    own = needs_of(reader.manifests(version).values())
    Counts(checkpoint).through(BATCHES + 3)
    now = StateReader(str(checkpoint))
    removed = own - needs_of(now.manifests(now.newest()).values())
    assert removed
    for name in removed:
        reader.files.delete(name)
    with pytest.raises(TransientError, match=r"was removed while it was read.*spark\.millpond\.state\.retain"):
        list(chain.from_iterable(reader.read(0, partition, version) for partition in range(PARTITIONS)))


@pytest.mark.parametrize("command", ["verify", "show"])
def test_a_version_that_does_not_exist_is_one_usage_error(
    command: str, checkpoint: Path, state: Callable[..., tuple]
) -> None:
    code, (told,) = state(command, checkpoint, "--version", 17)
    assert code == 1
    assert told.startswith("[USAGE] ")
    assert "version 17" in told
    assert f"versions 1 to {BATCHES}." in told


def test_state_that_lies_elsewhere_is_found_from_the_checkpoint(
    checkpoint: Path, tmp_path: Path, state: Callable[..., tuple]
) -> None:
    query_logs = open_filesystem(str(tmp_path / "ledger"))
    files = open_filesystem(str(checkpoint / "millpond"))
    Ownership(query_logs.url, query_logs, str(checkpoint), files).note(max(claimed_generations(files)))
    for command, *options in (["ls"], ["show"], ["verify"], ["rescale", "--partitions", 5, "--dry-run"]):
        assert state(command, tmp_path / "ledger", *options) == state(command, checkpoint, *options)
    code, (told,) = state("export", tmp_path / "ledger", tmp_path / "exported")
    assert code == 0
    assert f"version {BATCHES}, " in told


def test_what_was_interrupted_is_not_shown_as_if_it_were_whole(checkpoint: Path, state: Callable[..., tuple]) -> None:
    files = open_filesystem(str(checkpoint / "millpond"))
    write_document_once(files, "parents.json", Parents(files.url, ()))
    code, (told,) = state("ls", checkpoint)
    assert code == 1
    assert "its making was interrupted" in told


def test_an_empty_location_is_a_usage_error(state: Callable[..., tuple]) -> None:
    code, (told,) = state("ls", "")
    assert code == 1
    assert told.startswith("[USAGE] The location of the state is empty. Give ")


def test_sizes_are_those_of_all_slices(tmp_path: Path, state: Callable[..., tuple]) -> None:
    files = open_filesystem(join_url(str(tmp_path), "millpond"))
    tables = {"main": {}, "distinct0": {}}
    write_or_check_schema(files, StateSchema(1 << 15, (OperatorSchema("counts", plain(GROUPED), tables),)))
    generation = claim(files, run="test", partitions=2)
    Recovery(files, generation, 1).write_base([0])
    slot = Slot(files, generation.number, tmp_path / "host")
    for partition in range(2):
        run, other = (RunRef(f"files/{partition}{at}.run", 1000, 5000, 0, 1) for at in "ab")
        held = {
            "main@0:9": (TableManifest((run,)), [b"abc"]),
            "main@10:19": (TableManifest((other, RunRef("files/made.run", 7, 7, 0, 1, pending=True))), [b"de"]),
            "distinct0": (TableManifest(), [b"fghi"]),
        }
        sealed = seal(PartitionManifest(0, partition, 0), held, input_checksum=1, input_rows=1)
        slot.committer.submit(slot.sealed.write(sealed, generation.number))
    slot.settle()
    slot.committer.close()
    code, lines = state("ls", tmp_path)
    assert code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert rows == [
        ["0: counts", "main (2 slices)", "4", "4,000", "20,000", "4", "10"],
        ["0: counts", "distinct0", "0", "0", "0", "2", "8"],
    ]


@pytest.fixture
def enriched(tmp_path: Path) -> Path:
    """A lookup join, which has no state, below counts; there are two partitions."""
    files = open_filesystem(join_url(str(tmp_path), "millpond"))
    lookup = EnrichSpec((Field("k", "bigint"),), (0,))
    tables = {name: plain(table.schema) for name, table in state_tables(GROUPED).items()}
    operators = (OperatorSchema("enrich by k", plain(lookup), {}), OperatorSchema("counts", plain(GROUPED), tables))
    write_or_check_schema(files, StateSchema(1 << 15, operators))
    generation = claim(files, run="test", partitions=2)
    Recovery(files, generation, 2).write_base([0])
    slot = Slot(files, generation.number, tmp_path / "host")
    for operator, partition in product(range(2), range(2)):
        held = {"main": (TableManifest(), [])} if operator else {}
        sealed = seal(PartitionManifest(operator, partition, 0), held, input_checksum=1, input_rows=1)
        slot.committer.submit(slot.sealed.write(sealed, generation.number))
    slot.settle()
    slot.committer.close()
    return tmp_path


def test_the_first_operator_with_state_is_shown(enriched: Path, state: Callable[..., tuple]) -> None:
    assert state("show", enriched) == state("show", enriched, "--operator", 1) == (0, ["no rows"])
    exported = "version 1, 2 files, 0 rows"
    for number, options in enumerate([(), ("--operator", 1)]):
        assert state("export", enriched, enriched / f"out{number}", *options)[1][0].endswith(exported)
    for command in (["show", enriched], ["export", enriched, enriched / "none"]):
        code, (told,) = state(*command, "--operator", 0)
        assert code == 1
        assert "Operator 0 (enrich by k) has no state (" in told
        assert told.endswith(" Those that have state: 1 (counts).")
        code, (told,) = state(*command, "--operator", 2)
        assert code == 1
        assert "has no operator 2 (" in told
        assert told.endswith(" Those that have state: 1 (counts).")


def test_partitions_are_told_apart_from_operators(enriched: Path, state: Callable[..., tuple]) -> None:
    assert state("verify", enriched) == (0, ["version 1: 2 partitions of 2 operators, 0 rows, 0 damaged"])


def test_a_rescale_is_explained_and_made(checkpoint: Path, state: Callable[..., tuple]) -> None:
    before = StateReader(str(checkpoint))
    code, lines = state("rescale", checkpoint, "--partitions", PARTITIONS + 1, "--dry-run")
    assert code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [row[1:3] for row in rows] == [["0", "0"], ["1", "0, 1"], ["2", "1"]]
    keys = sum(one.runs.keys for at in range(PARTITIONS) for one in _tables(before, at))
    assert abs(sum(int(row[3].replace(",", "")) for row in rows) - keys) <= PARTITIONS
    assert claimed_generations(before.files)[-1] == before.claim.number
    deltas = [delta for at in range(PARTITIONS) for one in _tables(before, at) for delta in one.deltas]
    assert lines[-1].startswith(f"{len(deltas)} deltas of {sum(delta.length for delta in deltas):,} bytes in all; ")
    assert [row[6:8] for row in rows] == [["3", "3"], ["6", "6"], ["3", "3"]]

    code, lines = state("rescale", checkpoint, "--partitions", PARTITIONS + 1)
    assert code == 0
    assert lines[-1].startswith("The query's next start takes them")
    claimed = deciding_claim(before.files)
    assert claimed is not None
    assert (claimed.partitions, claimed.key_groups) == (PARTITIONS + 1, 1 << 15)
    assert f", 2 partitions ({PARTITIONS + 1} from the next start on), " in state("ls", checkpoint)[1][0]
    assert state("verify", checkpoint)[0] == 0


def test_what_partitions_share_is_counted_once(checkpoint: Path, state: Callable[..., tuple]) -> None:
    def rows(*arguments: object) -> list[list[str]]:
        lines = state(*arguments)[1]
        return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]

    def file_bytes() -> int:
        return ProgressReader(str(checkpoint)).read().batches[-1].operators[0].file_bytes

    before, size = rows("ls", checkpoint), file_bytes()
    files = open_filesystem(join_url(str(checkpoint), "millpond"))
    generation = claim(files, run="test", partitions=PARTITIONS + 1)
    Recovery(files, generation, 1).write_base([BATCHES])
    assert rows("ls", checkpoint) == before
    assert file_bytes() == size > 0
    rescaled = rows("rescale", checkpoint, "--partitions", PARTITIONS, "--dry-run")
    assert [row[2] for row in rescaled] == ["0, 1", "1, 2"]
    assert [row[6:8] for row in rescaled] == [["3", "3"], ["3", "3"]]
    assert sum(int(row[8].replace(",", "")) for row in rescaled) == sum(int(row[6].replace(",", "")) for row in before)


def _tables(reader: StateReader, partition: int) -> Iterator[TableState]:
    yield from reader.manifest(0, partition, reader.choose()).tables.values()


@pytest.mark.parametrize("partitions", [2, 3])
def test_attempts_at_a_batch_are_not_mixed(tmp_path: Path, partitions: int) -> None:
    """A run's first state, and the one that one of its partitions has made again of other input, are two states."""
    files = open_filesystem(join_url(str(tmp_path), "millpond"))
    write_or_check_schema(files, StateSchema(1 << 15, (OperatorSchema("counts", plain(GROUPED), {"main": {}}),)))

    def make(slot: Slot, partition: int, seen: int) -> None:
        parent = slot.open(partition, 1)
        sealed = seal(parent, {"main": (TableManifest(), [b"d"])}, input_checksum=seen, input_rows=1)
        slot.committer.submit(slot.sealed.write(sealed, slot.generation))

    def run(versions: list[int], partitions: int) -> Slot:
        generation = claim(files, run="test", partitions=partitions)
        Recovery(files, generation, 1).write_base(versions)
        return Slot(files, generation.number, tmp_path / f"host{generation.number}")

    first = run([0], 2)
    for partition in range(2):
        sealed = seal(
            PartitionManifest(0, partition, 0), {"main": (TableManifest(), [b"c"])}, input_checksum=1, input_rows=1
        )
        first.committer.submit(first.sealed.write(sealed, first.generation))
    first.settle()
    for partition in range(2):
        make(first, partition, seen=2)
    first.settle()
    second = run([1, 2], partitions)
    make(second, 0, seen=3)
    second.settle()
    reader = StateReader(str(tmp_path))
    seen = {manifest.input_checksum for manifest in reader.manifests(2).values()}
    if partitions == 2:
        assert not reader.is_complete(2)
    else:
        assert reader.is_complete(2)
        assert 3 not in seen
    first.committer.close()
    second.committer.close()


def test_operators_are_listed_before_there_is_a_version(tmp_path: Path, state: Callable[..., tuple]) -> None:
    files = open_filesystem(join_url(str(tmp_path), "millpond"))
    write_or_check_schema(
        files, StateSchema(1 << 15, (OperatorSchema("counts", plain(GROUPED), {"main": {}, "distinct0": {}}),))
    )
    Recovery(files, claim(files, run="test", partitions=1), 1).write_base([0])
    code, (head, *lines) = state("ls", tmp_path)
    assert code == 0
    assert head.endswith(": generation 1, 1 partition, no durable version yet")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert rows == [["0: counts", "main, distinct0", *"–––––"]]


LONG = 8
"""Batches of a history that is long enough for garbage."""


def adopt_all(buffer: EvictionBuffer, adopt: Callable[[EvictionBuffer], None] = EvictionBuffer.adopt) -> None:
    """Adopt the files of what was evicted when they are written, not when they happen to be."""
    wait([evicted.file for evicted in buffer.waiting])
    adopt(buffer)


@pytest.fixture(scope="module")
def long_history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, with files; all of it two days old."""
    folder = tmp_path_factory.mktemp("long")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_backlog, "_MAX_DELTAS", 2)
        patch.setattr(EvictionBuffer, "adopt", adopt_all)
        for batches in (LONG - 3, LONG):
            Counts(folder).through(batches)
    (folder / "metadata").write_text('{"id":"7c1d9a35-6f7e-4f0f-9d53-6d0a3a3f4a52"}')
    for path in folder.rglob("*"):
        age(path)
    return folder


def age(path: Path, seconds: float = 2 * 86400.0) -> None:
    """Make a file older."""
    at = path.stat().st_mtime - seconds
    os.utime(path, (at, at))


@pytest.fixture
def aged(long_history: Path, tmp_path: Path) -> Path:
    """A copy of it, with an unneeded file of each kind but commits."""
    folder = Path(shutil.copytree(long_history, tmp_path / "aged"))
    for name in ("files/0rphan.run", "staging/half"):
        path = folder / "millpond" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"12345")
        age(path, 3 * 86400.0)
    return folder


def contents(folder: Path) -> set[str]:
    """All files of the state."""
    return {str(path.relative_to(folder / "millpond")) for path in folder.glob("millpond/**/*") if path.is_file()}


def collected(lines: list[str]) -> list[tuple[str, str]]:
    """Objects and bytes by kind, as the table has them."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    return [(objects, size) for _, objects, size in rows]


def test_gc_removes_what_nobody_needs(aged: Path, state: Callable[..., tuple]) -> None:
    before = contents(aged)
    code, lines = state("gc", aged, "--dry-run")
    assert (code, collected(lines), lines[-1]) == (
        0,
        [("1", "5"), ("0", "0"), ("0", "0"), ("0", "0"), ("1", "5"), ("0", "0")],
        "2 objects would be removed",
    )
    assert contents(aged) == before
    code, lines = state("gc", aged)
    assert (code, lines[-1]) == (0, "2 objects removed")
    assert before - contents(aged) == {"files/0rphan.run", "staging/half"}
    assert state("verify", aged)[0] == 0


def test_gc_removes_commits_that_are_not_retained(aged: Path, state: Callable[..., tuple]) -> None:
    for log in ("offsets", "commits"):
        for batch in range(LONG - 3):
            (aged / log / str(batch)).unlink()
    before = contents(aged)
    assert state("gc", aged)[0] == 0
    assert any(name.startswith("commits/") for name in before - contents(aged))
    assert state("verify", aged)[0] == 0
    Counts(aged).through(LONG + 4)
    assert state("gc", aged)[0] == 0
    assert state("verify", aged)[0] == 0


def test_gc_names_what_is_missing_and_removes_nothing(aged: Path, state: Callable[..., tuple]) -> None:
    reader = StateReader(str(aged))
    held = reader.manifest(0, 0, reader.choose()).tables["main"].runs.runs
    (aged / "millpond" / held[0].name).unlink()
    before = contents(aged)
    code, lines = state("gc", aged)
    assert code == 1
    assert any(line.startswith("[STATE_FILE_MISSING] ") and held[0].name in line for line in lines)
    assert lines[-1] == "1 file missing, nothing was removed"
    assert contents(aged) == before


def test_gc_wants_the_ledger(aged: Path, state: Callable[..., tuple]) -> None:
    (aged / "metadata").unlink()
    code, (told,) = state("gc", aged)
    assert code == 1
    assert told.startswith("[USAGE] There are no offset log and commit log of Spark here")


def test_gc_removes_nothing_where_the_state_is_not_that_of_the_ledger(aged: Path, state: Callable[..., tuple]) -> None:
    for log in ("offsets", "commits"):
        (aged / log / "500").write_bytes(b"")
        age(aged / log / "500")
    before = contents(aged)
    code, (told,) = state("gc", aged)
    assert code == 1
    assert "no version from 500 on is whole" in told
    assert contents(aged) == before


@pytest.mark.parametrize(
    ("kind", "variable", "told"),
    [
        (ProcessorSpec, None, "has state variables .* Name one: timers, n"),
        (ProcessorSpec, "x", "has no state variable 'x' .* Name one: timers, n"),
        (GroupStateSpec, STATE, f"has no state variable '{STATE}' .* Name no variable: its state is read as one"),
    ],
)
def test_variables_are_named_where_there_are_any(kind: type[ProcessorSpec], variable: str | None, told: str) -> None:
    spec = kind((Field("k", "int"),), (0,), (), (Variable("n", "value", "struct<n:int>"),), "event", "update")
    with pytest.raises(UsageError, match=told):
        StateOperator(0, "counting", spec, ()).part(variable)


LOADED = """
import sys
from millpond import cli
sys.argv[0] = "millpond"
try:
    cli.main()
except SystemExit as ended:
    assert not ended.code
print("loaded:", *sorted({"numba", "pandas", "pyspark"} & sys.modules.keys()))
"""


@pytest.mark.parametrize(
    ("command", "allowed"),
    [
        ("--help", set()),
        ("state ls {}", set()),
        ("state rescale --partitions 3 --dry-run {}", set()),
        ("state show {}", {"numba"}),
        ("state verify {}", {"numba"}),
    ],
)
def test_commands_load_only_what_they_need(history: Path, command: str, allowed: set[str]) -> None:
    """Numba takes half a second to import on a quiet machine, pandas and PySpark as long; rows need kernels."""
    words = [word.format(history) for word in command.split()]
    done = subprocess.run([sys.executable, "-c", LOADED, *words], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(done.stdout.splitlines()[-1].split()[1:]) <= allowed


def test_pieces_of_large_rows_are_small() -> None:
    def run(rows: int, size: int) -> TableState:
        return TableState(TableManifest((RunRef("r", rows, size, 0, 0),)))

    assert piece_rows(run(1_000_000, 20_000_000)) == 65_536
    assert piece_rows(run(1000, 50_000_000)) < 100
    assert piece_rows(run(2, 1 << 30)) == 1
    assert piece_rows(TableState(TableManifest(()))) == 65_536
