"""The papers measured again: rows from their commands to their headlines, resumed and failed rows, and the page."""

import importlib
import re
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from benchmarks.measuring import harness
from benchmarks.measuring.result import Batch, Machine, Restart, Result, Spread
from benchmarks.misa import __main__ as misa
from benchmarks.misa.result import Batch as MisaBatch
from benchmarks.misa.result import Result as MisaResult
from benchmarks.misa.result import summarize
from benchmarks.misa.settings import Settings as MisaSettings
from benchmarks.papers import cli as papers
from benchmarks.papers import run as running
from benchmarks.papers.figures import METRICS, READERS, Figures
from benchmarks.papers.html import html
from benchmarks.papers.outcome import NOT_JUDGED, outcomes
from benchmarks.papers.page import page
from benchmarks.papers.row import PAPERS, Command, Headline, Row
from benchmarks.papers.rows import ROWS
from benchmarks.papers.run import OutOfTime, RowFailed, TimeLimit, measure, run
from benchmarks.papers.saved import RECORD, Results, Saved, same_run
from benchmarks.prefetch import __main__ as prefetch
from benchmarks.prefetch.latency import Latency
from benchmarks.prefetch.run import Config, Measured
from benchmarks.studies import disaggregated, enrichment
from benchmarks.workloads.config import RunConfig

MACHINE = Machine("a processor", 2, 8_000_000_000, "3.11")
TOY = ["--keys", "100", "--active", "10", "--gap", "10"]


def fake_run(config: RunConfig, *, keep: bool) -> Result:
    """Return the figures of an engine that takes no time, Millpond twice as fast."""
    faster = 2.0 if config.engine == "millpond" else 1.0
    batches = [Batch(10.0 + n, 100.0 / faster, 10, 1.0, (5.0 + n) / faster) for n in range(4)]
    return Result(
        engine=config.engine,
        workload=config.workload,
        query=config.query,
        rate=config.rate,
        rows=40,
        seconds=4.0,
        rows_per_second=min(config.rate or 1e9, 1_000.0 * faster),
        batch_ms=Spread.of([batch.ms for batch in batches]),
        batches=batches,
        cpu_seconds_per_million_rows=1.0 / faster,
        memory_mean_bytes=1_000_000_000,
        cpu=[(10.0 + n, 2.0 * n + n % 3 / faster) for n in range(12)],
        restart=Restart(1.0, 1.0, 0.0, 9.0, 7.0) if config.restart else None,
        state_store_bytes=1 << 30,
    )


def fake_latencies(folder: Path, variant: str, options: Any, changes: dict[str, Any]) -> Measured:
    """Return the figures of a run of `benchmarks.prefetch` that was not made."""
    known = {"query": options.query[0], "rate": options.rate, "latency_ms": options.latency[0]}
    fixed = {"work": "", "events": "", "loaded": 1, "interval": options.interval, "warmup": 1.0, "seconds": 1.0}
    base = {"stream": options.stream, "slot_memory": options.slot_memory, **fixed, **known, **changes}
    latency = Latency(1.0, 2.0, 3.0, 4.0)
    return Measured(
        config=Config(variant=variant, **base),
        rows=latency,
        batches=latency,
        events_per_second=1_000.0,
        kept_up=True,
        cpu=1.0,
        figures={},
        hint_share=0.01,
        trace=[(1.0, 5.0, 10), (2.0, 6.0, 10)],
    )


def fake_misa(settings: MisaSettings) -> MisaResult:
    """Return the figures of a run that was not made; Spark keeps up with 15,000 records a second."""
    ms = 100.0 if settings.on_millpond else 500.0
    batches = [
        MisaBatch(number=n, start=n * 3.0, ms=ms + n % 2, rows=1_000, row_max_ms=ms, commit_ms=1.0) for n in range(5)
    ]
    result = MisaResult(settings=settings, machine=MACHINE)
    summarize(result, batches, 5.0, 1_000_000_000)
    result.kept_up = settings.rate <= 15_000
    return result


@pytest.fixture
def no_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Replace everything that starts engines and servers; the commands' arguments, loops and files stay."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(harness, "run", fake_run)
    for module in (disaggregated, misa):
        monkeypatch.setattr(module, "s3_server", lambda: nullcontext("http://localhost:1"))
    monkeypatch.setattr(prefetch, "_measured", fake_latencies)
    monkeypatch.setattr("tests.servers.redis.running", lambda _: nullcontext(SimpleNamespace(port=1, url="")))
    monkeypatch.setattr("tests.servers.wire.wire", lambda *_: nullcontext(SimpleNamespace(port=2)))
    monkeypatch.setattr(enrichment, "fill", lambda *_: None)
    monkeypatch.setattr(enrichment, "session", lambda _: SimpleNamespace(stop=lambda: None))
    latencies = {"row_p50_ms": 1, "row_p99_ms": 2, "row_p999_ms": 3, "hints": "on"}
    monkeypatch.setattr(
        enrichment, "measure", lambda engine, *_: {"engine": engine, "rows_per_second": 1_000, **latencies}
    )


def in_process(command: Command, line: list[str], limit: TimeLimit) -> list[Figures]:
    """Run a command as `measure` does, in this process."""
    module, *arguments = line
    name = {"benchmarks": "benchmarks.cli", "benchmarks.prefetch": "benchmarks.prefetch.__main__"}.get(module, module)
    written = Path("figures.json")
    written.unlink(missing_ok=True)
    toy = TOY if module.endswith("append_stores") else []
    fakes = {"run": fake_misa} if module.endswith("misa") else {}
    importlib.import_module(name + (".__main__" if fakes else "")).main(
        [*arguments, *toy, "--json", str(written)], **fakes
    )
    return list(READERS[module](command, written.read_bytes()))


def saved_of(row: Row, figures: list[Figures], **changes: Any) -> Saved:
    base = Saved(
        row=row.name, commit="c", quick=False, settings=row.settings(quick=False), machine=MACHINE, versions={}
    )
    return msgspec.structs.replace(base, figures=figures, absent=row.absent(), **changes)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.usefixtures("no_engines")
def test_each_headline_of_a_row_finds_its_figures(name: str, quick: bool, tmp_path: Path) -> None:
    row = ROWS[name]
    results = Results(tmp_path / "results")
    saved_rows = run([row], results, quick=quick, measure=in_process, say=lambda _: None)
    if not row.settings(quick=quick):
        assert quick
        assert saved_rows == []
        return
    (saved,) = saved_rows
    assert saved.error is None
    assert results.get(row) == saved
    for headline, reached in zip(row.headlines, outcomes(row, saved), strict=True):
        assert headline.where.startswith(PAPERS[row.paper])
        assert headline.metric in METRICS
        assert headline.ratio or headline.most or headline.least
        if quick:
            assert reached.passed is None
            assert reached.verdict in (NOT_JUDGED, "not measured: not in a quick run"), reached.verdict
        else:
            assert reached.passed is not None, reached.verdict
        for engine in (*headline.peers, *headline.beside):
            assert engine in saved.absent or quick or any(run.engine == engine for run in saved.figures), engine
    assert any(reached.verdict == NOT_JUDGED or reached.passed is not None for reached in outcomes(row, saved))
    drawn = html([row], {name: saved})
    assert drawn.count("<svg") == 1
    assert not re.search(r"<(?:link|script|img)[^>]+(?:src|href)=", drawn)


@pytest.mark.parametrize(
    ("name", "number", "toy"),
    [
        ("flowkv-read-batch", 0, " ".join(TOY)),
        (
            *("apsys-read-write", 0),
            "--engines millpond --keys 2k --rows-per-batch 2k --max-batches 3 --warmup-batches 2 --slot-memory 64m",
        ),
        ("misa-lr2", 0, "--no-s3 --batches 2 --warmup 1 --rates 200 --engines millpond"),
        (
            *("prefetch-q18", 0),
            "--in-flight 1000 --people 1000 --variants prefetching --seconds 4 --warmup 2 --rate 3000 --stage 20",
        ),
    ],
)
@pytest.mark.slow
def test_a_row_of_each_kind_runs_at_toy_size(name: str, number: int, toy: str) -> None:
    command = ROWS[name].commands[number]
    line = command.line(quick=True, more=toy.split())
    assert line is not None
    runs = measure(command, line, TimeLimit(240))
    assert runs
    for figures in runs:
        assert figures.error is None
        assert figures.values["rows_per_second"] > 0


def two_rows() -> list[Row]:
    command = Command(module="benchmarks", arguments="rmw", quick="--seconds 1", engines=("millpond", "spark"))
    headline = Headline(
        where="APSys '18 §3.3, Fig. 2",
        measured="m",
        theirs="2 ×",
        metric="rows_per_second",
        peers=("spark", "flink-rocksdb"),
        ratio=2.0,
        missed="It is slow.",
    )
    return [
        Row(name=name, paper="apsys", title=name, commands=(command,), headlines=(headline,)) for name in ("one", "two")
    ]


def rates(**values: float) -> list[Figures]:
    return [Figures(engine=name, place="rmw", values={"rows_per_second": value}) for name, value in values.items()]


class Asked:
    """A measure that counts, and fails at given calls."""

    def __init__(self, *failing: int) -> None:
        self.lines: list[list[str]] = []
        self._failing = failing

    def __call__(self, command: Command, line: list[str], limit: TimeLimit) -> list[Figures]:
        self.lines.append(line)
        if len(self.lines) in self._failing:
            raise RowFailed("no figures: out of memory\nits log")
        return rates(millpond=300.0, spark=100.0)


def test_saved_rows_of_the_same_commit_and_settings_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, results, commit = two_rows(), Results(tmp_path), "abc"
    monkeypatch.setattr(running, "current_commit", lambda: commit)

    def lines(**options: Any) -> int:
        asked = Asked()
        run(rows, results, quick=options.pop("quick", False), measure=asked, say=lambda _: None, **options)
        return len(asked.lines)

    assert (lines(), lines(), lines(again=True)) == (2, 0, 2)
    assert (lines(quick=True), lines(quick=True), lines()) == (2, 0, 2)
    commit = "abd"
    assert lines() == 2
    rows[0] = msgspec.structs.replace(rows[0], commands=(Command(module="benchmarks", arguments="session"),))
    assert lines() == 1
    commit = "abd+"
    assert (lines(), lines()) == (2, 2)
    assert not list(tmp_path.glob("*.staged"))


def test_a_row_that_fails_is_reported_and_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "current_commit", lambda: "abc")
    rows, results = two_rows(), Results(tmp_path)
    first, second = run(rows, results, quick=False, measure=Asked(1), say=lambda _: None)
    assert "out of memory" in str(first.error)
    assert second.error is None
    written = page(rows, {row.name: results.get(row) for row in rows})
    assert "failed: benchmarks: no figures: out of memory |" in written
    assert "pass: 3.00 ≥ 2" in written
    assert "Of 2 headlines, 1 are reached, 0 are missed, and 1 have no figures." in written
    asked = Asked()
    assert [saved.row for saved in run(rows, results, quick=False, measure=asked, say=lambda _: None)] == ["one"]


def test_a_failed_engine_fails_its_row(tmp_path: Path) -> None:
    def measured(command: Command, line: list[str], limit: TimeLimit) -> list[Figures]:
        return [*rates(millpond=300.0), Figures(engine="spark", place="rmw", error="it broke")]

    row = two_rows()[0]
    (saved,) = run([row], Results(tmp_path), quick=False, measure=measured, say=lambda _: None)
    assert saved.error == "spark: it broke"
    assert outcomes(row, saved)[0].peers.startswith("Spark failed")


def test_a_quick_run_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "QUICK_SECONDS", 0.0)
    lines: list[str] = []
    assert run(two_rows(), Results(tmp_path), quick=True, measure=Asked(), say=lines.append) == []
    assert [line.partition(",")[0] for line in lines] == ["one: not measured", "two: not measured"]


def test_a_quick_run_takes_the_papers_in_turn(tmp_path: Path) -> None:
    first, second = two_rows()
    other = msgspec.structs.replace(second, name="other", paper=next(name for name in PAPERS if name != first.paper))
    asked: list[str] = []
    run([first, second, other], Results(tmp_path), quick=True, measure=Asked(), say=asked.append)
    assert [line.split()[0] for line in asked if line.endswith("…")] == ["one", "other", "two"]


def test_a_command_that_a_quick_run_cuts_off_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()

    def measured(command: Command, line: list[str], limit: TimeLimit) -> list[Figures]:
        figures = asked(command, line, limit)
        monkeypatch.setattr(TimeLimit, "left", lambda _: 0.0)
        raise OutOfTime(figures[1:])

    first, second = two_rows()
    row = msgspec.structs.replace(first, commands=(*first.commands, *second.commands))
    results = Results(tmp_path)
    (saved,) = run([row, second], results, quick=True, measure=measured, say=lambda _: None)
    assert len(asked.lines) == 1
    assert (saved.error, saved.unfinished) == (None, True)
    assert [figures.engine for figures in saved.figures] == ["spark"]
    (read,) = outcomes(row, saved)
    assert (read.ours, read.verdict, read.passed) == ("not measured", "not measured: no time left", None)
    assert not same_run(saved, row, saved.commit.rstrip("+"), quick=True)


def test_the_page_is_made_from_the_results_of_record() -> None:
    assert papers.PAGE.read_text() == page(list(ROWS.values()), papers.saved_rows(RECORD)), (
        "run `python -m benchmarks papers --report`"
    )


def test_results_of_record_belong_to_rows() -> None:
    assert {path.stem for path in RECORD.glob("*.json")} <= ROWS.keys()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return a list to which the names of all measured rows are added; the second row fails."""
    names: list[str] = []

    def fake(rows: list[Row], results: Results, **options: Any) -> list[Saved]:
        names.extend(row.name for row in rows)
        saved_rows = [saved_of(row, rates(millpond=3.0, spark=1.0), quick=options["quick"]) for row in rows]
        saved_rows[1:2] = [msgspec.structs.replace(saved, error="it broke") for saved in saved_rows[1:2]]
        for saved in saved_rows:
            results.put(saved)
        return saved_rows

    monkeypatch.setattr(papers, "run", fake)
    return names


def test_the_command_line_writes_page_and_report(tmp_path: Path, measured: list[str]) -> None:
    out = ["--out", str(tmp_path)]
    handler = signal.getsignal(signal.SIGTERM)
    assert papers.main(["--row", "apsys-read-write", "--quick", *out]) == 0
    assert measured == ["apsys-read-write"]
    assert signal.getsignal(signal.SIGTERM) == handler
    written = (tmp_path / "papers.md").read_text()
    assert "1 have figures of a quick run alone, with less state and fewer batches, and are not judged." in written
    assert "python -m benchmarks papers --row apsys-read-write --quick" in written
    assert "a processor, 2 cores, 8 GB" in (tmp_path / "papers.html").read_text()
    (tmp_path / "papers.md").unlink()
    assert papers.main(["--report", *out]) == 0
    assert (tmp_path / "papers.md").read_text() == written
    assert len(measured) == 1
    assert papers.main(["--only", "flink", *out]) == 1
    assert measured[1:] == [name for name, row in ROWS.items() if row.paper == "flink"]
    with pytest.raises(SystemExit):
        papers.main(["--row", "nothing"])


def test_a_row_of_another_paper_is_refused(capsys: pytest.CaptureFixture[str], measured: list[str]) -> None:
    with pytest.raises(SystemExit):
        papers.main(["--only", "flink", "--row", "misa-lr2", "--report"])
    assert "--row misa-lr2 belongs to --only misa, not to --only flink" in capsys.readouterr().err
    assert measured == []
