"""Commands of the papers' rows in processes of their own: those that hang, break off, or write nothing."""

from pathlib import Path

import pytest
from benchmarks.measuring.result import without_paths
from benchmarks.misa.settings import LATE
from benchmarks.papers import run as running
from benchmarks.papers.figures import Figures
from benchmarks.papers.row import Command
from benchmarks.papers.rows import ROWS
from benchmarks.papers.run import OutOfTime, RowFailed, TimeLimit, measure, run
from benchmarks.papers.saved import RECORD, Results

from tests.benchmarks.test_papers import two_rows

WRITES = """
import pathlib, sys, time
pathlib.Path(sys.argv[-1]).write_text('{"engine": "millpond", "rows_per_second": 7}')
if sys.argv[1] == "hang":
    time.sleep(60)
sys.exit(3)
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a command that writes figures, and then hangs or breaks off."""
    (tmp_path / "writes.py").write_text(WRITES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Command(module="benchmarks.studies.enrichment", arguments="")


def test_figures_of_a_stopped_command_are_read(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutOfTime) as over:
        measure(command, ["writes", "hang"], TimeLimit(5))
    assert [figures.values["rows_per_second"] for figures in over.value.figures] == [7]
    monkeypatch.setattr(running, "LONGEST", 5.0)
    first, second = measure(command, ["writes", "hang"], TimeLimit(None))
    assert (first.values["rows_per_second"], first.error) == (7, None)
    assert str(second.error).startswith("stopped, because it had not ended after 5 seconds")


def test_a_failing_command_keeps_its_figures_and_has_an_error(command: Command) -> None:
    first, second = measure(command, ["writes", "break"], TimeLimit(None))
    assert first.values["rows_per_second"] == 7
    assert second.error == "it ended with status 3 before all its runs had ended"


def test_the_time_limit_of_a_command_covers_its_runs() -> None:
    slope = ROWS["misa-lr2-slope"].commands[0].line()
    assert slope is not None
    assert running.longest(slope) > 2 * 1060 * LATE
    assert running.longest(["benchmarks", "rmw"]) == running.LONGEST


def test_a_command_without_figures_shows_the_end_of_its_log() -> None:
    with pytest.raises(RowFailed, match=r"no figures: .*No module named .?benchmarks\.nothing"):
        measure(Command(module="benchmarks", arguments=""), ["benchmarks.nothing"], TimeLimit(60))


def test_results_have_no_local_paths(tmp_path: Path) -> None:
    assert without_paths(f"{Path.home()}/x of {RECORD}") == "…/x of …/benchmarks/papers/results"

    def measured(command: Command, line: list[str], limit: TimeLimit) -> list[Figures]:
        return [Figures(engine="spark", place="rmw", error=f"{RECORD}", refused=f"{Path.home()}/x")]

    (saved,) = run(two_rows()[:1], Results(tmp_path), quick=False, measure=measured, say=lambda _: None)
    (figures,) = saved.figures
    assert (figures.error, figures.refused) == ("…/benchmarks/papers/results", "…/x")
