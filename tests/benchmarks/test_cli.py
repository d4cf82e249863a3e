"""Arguments that the command line accepts, and those that it refuses."""

import argparse

import pytest
from benchmarks.measuring import harness
from benchmarks.measuring.arguments import count, queries, size
from benchmarks.measuring.result import Result
from benchmarks.nexmark.queries import QUERIES
from benchmarks.workloads.config import RunConfig
from typer.testing import CliRunner

import millpond.demo.jobs
from benchmarks import cli
from millpond.cli import app
from millpond.errors import UsageError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rmv"], "invalid choice: 'rmv'"),
        (["nexmark"], "nexmark needs --query"),
        (["nexmark", "--query", "q24"], "no query 'q24'; there are q0, q1, "),
        (["nexmark", "--query", ","], "name at least one query"),
        (["nexmark", "--query", "all", "--plot", "p.png"], "--plot draws one query"),
        (["rmw", "--query", "q17"], "--query belongs to nexmark"),
        (["rmw", "--engines", "spork"], "no engine 'spork'; there are millpond, spark, flink-rocksdb, flink-forst"),
        (["rmw", "--engines", ","], "name at least one engine"),
        (["rmw", "--keys", "0"], "'0' is not a positive number"),
        (["rmw", "--rows-per-batch", "many"], "'many' is not a positive number"),
        (["rmw", "--memory-limit", "lots"], "'lots' is not a size"),
        (["rmw", "--seconds", "0"], "--seconds must be positive"),
        (["rmw", "--zipf", "-1"], "--zipf must not be negative"),
        (["read_write", "--key-type", "string"], "--key-type string belongs to rmw"),
        (["rmw", "--set", "spark.x"], "'spark.x' is not KEY=VALUE"),
        (["rmw", "--rate", "5", "--highest-rate-of", "spark"], "--highest-rate-of finds the rate; leave --rate out"),
        (["rmw", "--engines", "millpond", "--highest-rate-of", "spark"], "spark is not among --engines"),
        (["rmw", "--engines", "flink-forst", "--rate", "5"], "for the engines on Spark"),
        (["rmw", "--compactors", "2"], "--compactors work with --compaction remote"),
        (["rmw", "--warmup-batches", "-1"], "--warmup-batches must not be negative"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_missing_flink_is_reported_with_its_make_target(
    monkeypatch: pytest.MonkeyPatch, tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "FLINK_PYTHON", tmp_path / "python")
    with pytest.raises(SystemExit):
        cli.main(["rmw", "--engines", "flink-forst"])
    assert "make engines" in capsys.readouterr().err


def test_numbers_and_sizes() -> None:
    assert [count(text) for text in ("200k", "5m", "1_000", "1.5k")] == [200_000, 5_000_000, 1_000, 1_500]
    assert [size(text) for text in ("512m", "2g", "10", "1KB")] == [512 << 20, 2 << 30, 10, 1_024]
    with pytest.raises(argparse.ArgumentTypeError):
        size("x")


def test_one_run_per_engine_with_the_same_work(tmp_path) -> None:
    arguments = cli.parser().parse_args(
        ["read_write", "--engines", "spark,millpond,spark", "--work", str(tmp_path), "--set", "a=b=c", "--seed", "7"]
    )
    runs = cli.configs(arguments)
    assert [run.engine for run in runs] == ["spark", "millpond"]
    assert {(run.keys, run.seed, run.settings["a"]) for run in runs} == {(10_000_000, 7, "b=c")}
    assert [run.work for run in runs] == [str(tmp_path / "spark"), str(tmp_path / "millpond")]


def test_preloading_batches_are_left_out(tmp_path) -> None:
    arguments = ["rmw", "--preload", "--keys", "3m", "--rows-per-batch", "200k", "--work", str(tmp_path)]
    run = cli.configs(cli.parser().parse_args(arguments))[0]
    assert (run.preload_batches, run.left_out) == (15, 15)


def test_one_run_per_query_and_engine(tmp_path) -> None:
    arguments = [
        "nexmark",
        "--query",
        "q5-append, q17,q5-append",
        "--engines",
        "spark,millpond",
        "--work",
        str(tmp_path),
    ]
    runs = cli.configs(cli.parser().parse_args(arguments))
    assert [(run.query, run.engine) for run in runs] == [
        *(("q5-append", "spark"), ("q5-append", "millpond"), ("q17", "spark"), ("q17", "millpond")),
    ]
    assert len({run.work for run in runs}) == 4
    assert queries("all") == list(QUERIES)


def test_millpond_bench_runs_this_command_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    result = CliRunner().invoke(app, ["bench", "rmw", "--engines", "spork"])
    assert result.exit_code == 2
    assert "no engine 'spork'" in result.output + capfd.readouterr().err
    monkeypatch.setattr(millpond.demo.jobs, "__file__", "/nowhere/site-packages/millpond/demo/jobs.py")
    with pytest.raises(UsageError, match="source tree"):
        CliRunner().invoke(app, ["bench", "rmw"], catch_exceptions=False)


def test_an_interrupted_run_prints_its_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = iter([Result(engine="millpond", workload="nexmark", query="q7", rows_per_second=123_456.0)])

    def run(config: RunConfig, *, keep: bool) -> Result:
        try:
            return next(measured)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(harness, "run", run)
    assert cli.main(["nexmark", "--query", "q7,q8", "--engines", "millpond,spark"]) == 0
    shown = capsys.readouterr()
    assert "123,456" in shown.out
    assert "Interrupted" in shown.err
    with pytest.raises(KeyboardInterrupt):
        cli.main(["nexmark", "--query", "q7"])


def test_all_engines_run_at_the_highest_rate_of_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capacity = {"spark": 1_000.0, "millpond": 9_000.0}
    rates: list[tuple[str, int]] = []

    def run(config: RunConfig, *, keep: bool) -> Result:
        rates.append((config.engine, config.rate))
        taken = min(capacity[config.engine], config.rate or 1_000_000)
        return Result(engine=config.engine, workload="rmw", rate=config.rate, rows_per_second=taken)

    monkeypatch.setattr(harness, "run", run)
    assert cli.main(["rmw", "--engines", "millpond,spark", "--highest-rate-of", "spark"]) == 0
    assert rates[-1] == ("millpond", 1_000)
    assert [engine for engine, _ in rates].count("millpond") == 1
    shown = capsys.readouterr().out
    assert "1,000 rows a second" in shown
    assert shown.index("│ millpond") < shown.index("│ spark"), "in the order asked for"
