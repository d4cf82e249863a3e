"""State on an object store: counts of requests, and figures drawn from results."""

import http.client
import os
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from benchmarks.measuring.report import print_table
from benchmarks.measuring.requests import RequestCounter
from benchmarks.measuring.result import Batch, Requests, Restart, Result, Spread, write
from benchmarks.studies import disaggregated

from tests.servers.proxy import Proxy, faulty
from tests.servers.s3 import s3
from tests.servers.seaweedfs import BUCKET


def test_requests_are_counted_by_kind() -> None:
    proxy = Proxy("http://localhost:1", 0, {}, {})
    spark = RequestCounter(proxy, "/state/")
    proxy.draw("PUT", "/bucket/state/0/1/1.changelog")
    before = spark.traffic()
    for method, target in (
        ("PUT", "/bucket/state/0/1/1.changelog"),
        ("PUT", "/bucket/offsets/3"),
        ("HEAD", "/bucket/state/0/1/1.changelog"),
        ("GET", "/bucket/state/0/1/1.zip"),
        ("GET", "/bucket?list-type=2&prefix=run%2Fstate%2F0"),
        ("DELETE", "/bucket/state/0/1/0.changelog"),
        ("POST", "/bucket?delete"),
        ("POST", "/bucket/state/0/1/2.zip?uploads"),
    ):
        proxy.draw(method, target)
    assert spark.since(before) == Requests(puts=2, gets=1, lists=1, heads=1, deletes=2, bytes=0)
    assert RequestCounter(proxy, "").since(before).puts == 3


def test_the_proxy_counts_bytes() -> None:
    with s3(), faulty(os.environ["AWS_ENDPOINT_URL"], 0, {}) as proxy:
        counter = RequestCounter(proxy, "")
        before = counter.traffic()
        connection = http.client.HTTPConnection(urlsplit(proxy.endpoint).netloc)
        connection.request("PUT", f"/{BUCKET}/name", b"x" * 1000)
        assert connection.getresponse().read() is not None
        connection.close()
        assert counter.since(before).puts == 1
        assert counter.since(before).bytes >= 1000


def test_the_table_has_the_requests_of_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    asked = Requests(puts=4, gets=0, lists=0, heads=8, deletes=1, bytes=3_000_000)
    batches = [Batch(0.0, 100.0, 10), Batch(1.0, 100.0, 10)]
    print_table([Result(engine="millpond", workload="rmw", batches=batches, requests=asked)])
    printed = capsys.readouterr().out
    assert "millpond: asked of the store for state in a batch: 2.0 puts, 0.0 gets, 0.0 lists, 4.0 heads" in printed
    assert "1.50 MB; 11.60 dollars for a million batches" in printed


def measured(figure: str) -> list[Result]:
    """Return results as a figure takes them."""
    results = []
    for variant in ("one", "other"):
        for engine in ("millpond", "spark"):
            batches = [Batch(float(n), 100.0, 10, 1.0, 20.0 * n + 1) for n in range(5)]
            results.append(
                Result(
                    engine=engine,
                    workload="nexmark" if figure == "caches" else "rmw",
                    query="q4",
                    rows_per_second=1000.0,
                    batches=batches,
                    batch_ms=Spread.of([100.0]),
                    cpu=[(float(n), 2.0 * n) for n in range(20)],
                    compactors_cpu=[(n + 0.5, 0.5 * n) for n in range(20)],
                    restart=Restart(1.0, 1.0, 0.0, 9.0, 7.0),
                    extra={"variant": variant},
                )
            )
    return results


@pytest.mark.parametrize("figure", disaggregated.FIGURES)
def test_a_figure_is_drawn_from_its_results(figure: str, tmp_path: Path) -> None:
    write(tmp_path / "r.json", measured(figure))
    plot = tmp_path / "deep" / "figure.png"
    arguments = [figure, "--work", str(tmp_path), "--json", str(tmp_path / "r.json"), "--plot", str(plot)]
    assert disaggregated.main(arguments) == 0
    assert plot.stat().st_size > 1_000


def test_partitions_are_parsed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert disaggregated.pairs("2:2,4:2") == [(2, 2), (4, 2)]
    with pytest.raises(SystemExit):
        disaggregated.main(["recoveries", "--partitions", "2-4", "--work", str(tmp_path)])
    assert "'2-4' is not of the form 2:2,2:4" in capsys.readouterr().err


def test_each_figure_runs_all_engines_and_variants(tmp_path: Path) -> None:
    """List the runs of each figure, with a measure that runs nothing."""
    options = type("Options", (), {"keys": [10, 20], "engines": ["millpond", "spark"], "query": ["q4"]})()
    options.slot_memory = "32m"
    options.partitions = disaggregated.pairs("2:2,2:4")
    for figure, (runs, _) in disaggregated.FIGURES.items():
        seen: Counter[str] = Counter()

        def measure(engine: str, variant: str, workload: str, seen: Counter[str] = seen, **changes: object) -> Result:
            seen[variant] += 1
            return Result(engine=engine, workload=workload, state_store_bytes=1 << 30)

        assert len(list(runs(options, measure))) == seen.total() > 0
        engines = 1 if figure in ("caches", "cpu") else 2
        assert set(seen.values()) == {engines}
