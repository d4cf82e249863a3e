"""The highest rate that an engine keeps up with is found by trying."""

from collections.abc import Callable

import pytest
from benchmarks.measuring.result import Result
from benchmarks.measuring.sustained import at_highest_rate
from benchmarks.workloads.config import RunConfig

CONFIG = RunConfig(engine="spark", workload="rmw", work="/tmp/x", rate=7)


def engine(capacity: float, tried: list[int]) -> Callable[[RunConfig], Result]:
    """Return a fake engine: 1,000 rows/s in batches of fixed size, `capacity` rows/s at a rate."""

    def measure(config: RunConfig) -> Result:
        tried.append(config.rate)
        taken = min(config.rate, capacity) if config.rate else 1_000
        return Result(engine="spark", workload="rmw", rate=config.rate, rows_per_second=taken)

    return measure


@pytest.mark.parametrize(
    ("capacity", "highest", "tries"),
    [
        (1_000, 1_000, [0, 1_000, 1_150, 1_075, 1_038]),
        (1_310, 1_338, [0, 1_000, 1_150, 1_300, 1_450, 1_375, 1_338]),
        (800, 812, [0, 1_000, 850, 700, 775, 812]),
    ],
)
def test_the_search_converges_to_the_highest_rate(capacity: float, highest: int, tries: list[int]) -> None:
    tried: list[int] = []
    result = at_highest_rate(CONFIG, engine(capacity, tried))
    assert (result.rate, result.error) == (highest, None)
    assert tried == tries


def test_an_engine_that_keeps_up_with_no_rate_has_an_error() -> None:
    result = at_highest_rate(CONFIG, engine(0.5, []))
    assert result.error == "no rate was kept up with"


def test_a_run_without_figures_ends_the_search() -> None:
    refused = Result(engine="spark", workload="rmw", refused="no DISTINCT")
    assert at_highest_rate(CONFIG, lambda _: refused) is refused
    tried: list[int] = []

    def breaks_at_once(config: RunConfig) -> Result:
        result = engine(1_000, tried)(config)
        return Result(engine="spark", workload="rmw", error="it broke") if config.rate else result

    assert at_highest_rate(CONFIG, breaks_at_once).error == "it broke"

    def breaks_beyond(config: RunConfig) -> Result:
        result = engine(9_999, tried)(config)
        return Result(engine="spark", workload="rmw", error="it broke") if config.rate > 1_200 else result

    assert at_highest_rate(CONFIG, breaks_beyond).rate == 1_150
