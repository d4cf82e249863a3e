"""Make `docs/metrics.md` from the metrics that slots report: `python -m docs.metrics`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from millpond.metrics import GROUPS, METRICS

PAGE = Path(__file__).with_name("metrics.md")


def page() -> str:
    """The whole page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Metrics"
    yield ""
    yield "What operators on Millpond report with each batch in Spark's `observedMetrics` (see"
    yield "[watching a query](guides/watching-a-query.md#in-spark)). The third column says how the values of the"
    yield "partitions become one."
    yield "Made by `make docs` from the metrics in the code."
    for group, where in GROUPS.items():
        if group == "manifest":
            continue
        yield ""
        yield f"## {where[0].upper()}{where[1:]}"
        yield ""
        yield "| metric | unit | of partitions | meaning |"
        yield "|---|---|---|---|"
        for metric in METRICS:
            if metric.group == group:
                yield f"| `{metric.name}` | {metric.unit} | {metric.reducer.__name__} | {metric.description} |"


if __name__ == "__main__":
    PAGE.write_text(page())
