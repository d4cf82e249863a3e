"""Spark's offset log and commit log as Millpond reads and mends them."""

from pathlib import Path

import pytest

from millpond.checkpoint.formats.documents import digits, write_document
from millpond.checkpoint.generation import claim
from millpond.errors import FencedError, StateDamagedError
from millpond.files.locations.faults import Faults, FaultyFiles
from millpond.files.locations.opening import open_filesystem
from millpond.query.logs.query_logs import LOGS, QueryLogs, RollBack, _RollBack, is_rolled_back

UNFINISHED = [
    ".0.1b671a64-40d5-491e-99b0-da01ff1f3341.tmp",
    "..0.1b671a64-40d5-491e-99b0-da01ff1f3341.tmp.crc",
]
OTHERS = ["0.tmp", ".0.tmp", "notes.txt", ".x.1b671a64-40d5-491e-99b0-da01ff1f3341.tmp"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for log in ("offsets", "commits"):
        (tmp_path / log).mkdir()
        for name in UNFINISHED + OTHERS:
            (tmp_path / log / name).touch()
    return tmp_path


def left(checkpoint: Path) -> set[str]:
    return {f"{path.parent.name}/{path.name}" for path in checkpoint.glob("*/*")}


@pytest.mark.parametrize("seed", range(8))
def test_a_query_has_one_id_though_the_store_fails_now_and_then(seed: int, tmp_path: Path) -> None:
    files = open_filesystem(str(tmp_path))
    flaky = QueryLogs(FaultyFiles(files, Faults(fail=0.4, retries=30, seed=seed)))
    flaky.identify()
    identity = QueryLogs(files).query_id()
    assert identity is not None
    flaky.identify()
    assert QueryLogs(files).query_id() == identity


def test_the_number_of_sparks_state_stores_is_that_of_the_newest_batch(tmp_path: Path) -> None:
    query_logs = QueryLogs(open_filesystem(str(tmp_path)))
    assert query_logs.store_partitions() is None
    (tmp_path / "offsets").mkdir()
    for batch, stores in enumerate(("7", "5")):
        conf = f'{{"batchWatermarkMs":0,"conf":{{"spark.sql.shuffle.partitions":"{stores}"}}}}'
        (tmp_path / "offsets" / str(batch)).write_text(f"v1\n{conf}\n{{}}\n")
    assert query_logs.store_partitions() == 5
    for damaged in ("", "v1", "v1\n{}", "v1\n{", 'v1\n{"conf": 3}'):
        (tmp_path / "offsets" / "2").write_text(damaged)
        with pytest.raises(StateDamagedError, match="offsets/2"):
            query_logs.store_partitions()


def test_unfinished_first_entries_are_forgotten(checkpoint: Path) -> None:
    QueryLogs(open_filesystem(str(checkpoint))).delete_unfinished_entries()
    assert left(checkpoint) == {f"{log}/{name}" for log in ("offsets", "commits") for name in OTHERS}


def test_nothing_is_touched_once_a_batch_was_planned(checkpoint: Path) -> None:
    (checkpoint / "offsets/0").touch()
    before = left(checkpoint)
    QueryLogs(open_filesystem(str(checkpoint))).delete_unfinished_entries()
    assert left(checkpoint) == before


def test_a_new_checkpoint_has_no_logs(tmp_path: Path) -> None:
    QueryLogs(open_filesystem(str(tmp_path))).delete_unfinished_entries()
    assert not list(tmp_path.iterdir())


class Run:
    """A run that has claimed the next generation of a checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        files, state = open_filesystem(str(checkpoint)), open_filesystem(str(checkpoint / "millpond"))
        self.query_logs = QueryLogs(files)
        self.roll_back = RollBack(files, self.query_logs, state, claim(state, run="run", partitions=1).number)


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    """Batch 0 is committed, batch 1 planned."""
    query_logs = QueryLogs(open_filesystem(str(tmp_path)))
    for batch in range(2):
        query_logs.put("offsets", batch, b"plan %d" % batch)
    query_logs.put("commits", 0, b"commit 0")
    return tmp_path


@pytest.mark.parametrize(
    ("planned", "retained"), [([], range(0)), ([0], range(1)), ([4, 5, 6], range(4, 7)), ([0, 1, 4, 5], range(4, 6))]
)
def test_spark_can_go_back_to_what_is_planned_without_a_gap(
    tmp_path: Path, planned: list[int], retained: range
) -> None:
    query_logs = QueryLogs(open_filesystem(str(tmp_path)))
    for batch in planned:
        query_logs.put("offsets", batch, b"plan")
    assert query_logs.retained() == retained


def entries(checkpoint: Path) -> dict[str, str]:
    return {f"{path.parent.name}/{path.name}": path.read_text() for path in checkpoint.glob("[co]*/*")}


def test_a_roll_back_that_fails_is_undone_by_the_next_start(planned: Path) -> None:
    before = entries(planned)
    run = Run(planned)

    def repetition() -> None:
        with run.roll_back.replaying(0):
            assert set(entries(planned)) == {"offsets/0"}
            run.query_logs.put("commits", 0, b"made by the repetition")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        repetition()
    assert set(entries(planned)) == {"offsets/0", "commits/0"}
    Run(planned).roll_back.undo_interrupted()
    assert entries(planned) == before  # the repetition's commit may have a lower watermark


@pytest.mark.parametrize("batch", [0, 1])
def test_entries_that_the_user_removed_are_not_restored(planned: Path, batch: int) -> None:
    """The start was interrupted in the replay of `batch`; the user removes the entries from that batch on."""
    run = Run(planned)

    def repetition() -> None:
        with run.roll_back.replaying(batch):
            run.query_logs.put("commits", batch, b"made by the repetition")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        repetition()
    for log in LOGS:
        for later in range(batch, 2):
            run.query_logs.remove(log, later)
    before = entries(planned)
    assert set(before) == ({"offsets/0", "commits/0"} if batch else set())
    Run(planned).roll_back.undo_interrupted()
    assert entries(planned) == before
    assert not is_rolled_back(open_filesystem(str(planned)))
    assert (planned / f"millpond/rolled-back/batch-{batch}.json").exists()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("goes_back", [False, True])
def test_the_plan_of_an_interrupted_replay_may_be_in_another_journal(
    planned: Path, order: tuple[int, int], goes_back: bool
) -> None:
    """Starts that overtake each other may each leave a journal."""
    before = entries(planned)
    files, query_logs = open_filesystem(str(planned)), QueryLogs(open_filesystem(str(planned)))
    records = [_RollBack(0, "commit 0", "plan 1"), _RollBack(1, None, None)]
    for generation, batch in enumerate(order, 1):
        Run(planned)
        write_document(files, f"millpond/rolled-back/pending-{digits(generation)}.json", records[batch])
    query_logs.remove("offsets", 1)
    query_logs.remove("commits", 0)
    query_logs.put("commits", 1, b"made by the repetition")
    if goes_back:
        query_logs.remove("offsets", 0)
        query_logs.remove("commits", 1)
    Run(planned).roll_back.undo_interrupted()
    assert entries(planned) == ({} if goes_back else before)
    assert not is_rolled_back(files)


@pytest.mark.parametrize("batch", [0, 1])
def test_a_ledger_belongs_to_the_newest_run(planned: Path, batch: int) -> None:
    before = entries(planned)
    older = Run(planned)

    def overtaken() -> None:
        with older.roll_back.replaying(batch):
            Run(planned).roll_back.undo_interrupted()
            assert entries(planned) == before

    with pytest.raises(FencedError):
        overtaken()
    with pytest.raises(FencedError), older.roll_back.replaying(batch):
        pytest.fail("an older run took entries away")
    assert entries(planned) == before


def test_an_overtaken_start_leaves_the_roll_back_of_the_newer_one(planned: Path) -> None:
    older, newer = Run(planned), Run(planned)
    with newer.roll_back.replaying(0):
        older.roll_back.undo_interrupted()
        assert set(entries(planned)) == {"offsets/0"}
        newer.query_logs.put("commits", 0, b"made by the repetition")


def test_entries_in_folders_below_a_log_are_no_batches(planned: Path) -> None:
    for log in ("offsets", "commits"):
        (planned / log / "old").mkdir()
        (planned / log / "old" / "7").write_text("plan 7")
    query_logs = QueryLogs(open_filesystem(str(planned)))
    assert (query_logs.last_planned, query_logs.last_committed) == (1, 0)
    assert query_logs.retained() == range(2)


def test_what_an_older_run_has_committed_meanwhile_stays(planned: Path) -> None:
    run = Run(planned)
    with run.roll_back.replaying(1):
        run.query_logs.put("commits", 1, b"commit 1")  # by a driver that is still alive, as is the next
        run.query_logs.put("offsets", 2, b"plan 2")
    assert set(entries(planned)) == {f"offsets/{batch}" for batch in range(3)} | {"commits/0", "commits/1"}
