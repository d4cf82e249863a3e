"""Figures of a row in one form for all benchmarks: the metrics, and the readers of each benchmark's results."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from benchmarks.measuring.percentiles import percentile
from benchmarks.measuring.result import Result
from benchmarks.misa.result import Result as MisaResult
from benchmarks.papers.row import Command
from benchmarks.papers.rows.misa import HIGHEST
from benchmarks.prefetch.figures import place_of
from benchmarks.prefetch.run import Measured
from benchmarks.studies.append_stores import SEED, Measurement
from benchmarks.studies.disaggregated import cores_in_use

CHECKPOINTS = "checkpoints"
"""The command whose series are durations of checkpoints, not of batches."""
_SHORTEST_COMMIT_MS = 1.0
"""A commit counts as at least this long, because Spark counts commits in whole milliseconds."""
_STARTS_DIFFER = 0.1
"""A recovery counts as at least this number of seconds, by which two starts differ by chance."""


class Metric(msgspec.Struct, frozen=True):
    """A metric's name for people, its unit, the digits shown after the point, and whether more is better."""

    name: str
    unit: str
    digits: int = 0
    more: bool = False


METRICS = {
    "rows_per_second": Metric("rows a second", "rows/s", more=True),
    "batch_rows_per_second": Metric("rows by batch time", "rows/s", more=True),
    "batch_mean_ms": Metric("batch time, average", "ms"),
    "batch_p50_ms": Metric("batch time, median", "ms"),
    "batch_p95_ms": Metric("batch time, p95", "ms"),
    "batch_p99_ms": Metric("batch time, p99", "ms"),
    "commit_p99_ms": Metric("wait for a commit, p99", "ms"),
    "growth": Metric("growth of batch times, of their median", "%", 1),
    "checkpoint_p99_ms": Metric("checkpoint, p99", "ms"),
    "checkpoint_max_ms": Metric("longest checkpoint", "ms"),
    "recovery_s": Metric("what state adds to a restart", "s", 1),
    "compute_unit_s": Metric("compute-unit seconds for a million rows", "CU·s", 2),
    "cpu_s": Metric("CPU seconds for a million rows", "s", 2),
    "memory_gb_s": Metric("GB-seconds for a million rows", "GB·s", 2),
    "memory_mb": Metric("memory of all processes at most", "MB"),
    "cores": Metric("cores in use", "cores", 2),
    "cores_deviation": Metric("deviation of the cores in use, of their mean", "", 2),
    "row_p50_ms": Metric("row latency, median", "ms"),
    "row_p99_ms": Metric("row latency, p99", "ms"),
    "row_p999_ms": Metric("row latency, p99.9", "ms"),
    "hint_share": Metric("bytes of hints, of the rows' bytes", "%", 1),
    "hit_ratio": Metric("windows found read ahead", "", 3, more=True),
}
_GB_OF_A_CORE = 4.0
"""Memory of a compute unit with one core (Flink 2.0 §6.1)."""
_BEHIND = "it did not keep up, and no batch ended after those that are left out"
"""Reason for a run of `benchmarks.misa` without figures."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one run.

    Attributes:
        engine: the engine, or the variant of Millpond.
        place: the query, size or step of the run.
        values: by metric.
        series: batch times or checkpoint durations, in milliseconds, in order.
        version: of the engine.
        seed: of the generated rows.
        error: why there are no figures.
        refused: why the engine does not run this query, in its own words.
        missing: why there is no figure, although the engine ran.
    """

    engine: str
    place: str
    values: dict[str, float] = {}
    series: list[float] = []
    version: str = ""
    seed: int = 1
    error: str | None = None
    refused: str | None = None
    missing: str | None = None


def of_results(command: Command, data: bytes) -> Iterator[Figures]:
    """Read results of `benchmarks` and `benchmarks.studies.disaggregated`."""
    for result in msgspec.json.decode(data, type=list[Result]):
        variant = str(result.extra.get("variant", ""))
        engine, place = result.engine, result.query or result.workload
        if variant:  # a size of the state if engines are compared, else a variant of Millpond
            engine, place = (engine, variant) if command.engines else (variant, place)
        yield Figures(
            engine=command.engine or engine,
            place=command.place or place,
            values={} if result.error or result.refused else dict(_values(result)),
            series=[round(ms, 1) for ms in _series(command, result)],
            version=result.version,
            seed=result.seed,
            error=result.error,
            refused=result.refused,
        )


def _series(command: Command, result: Result) -> list[float]:
    if command.arguments.startswith(CHECKPOINTS):
        return [batch.checkpoint_ms for batch in result.batches if batch.checkpoint_ms is not None]
    return [batch.ms for batch in result.batches]


def _values(result: Result) -> Iterator[tuple[str, float]]:
    yield "rows_per_second", result.rows_per_second
    if result.batch_ms is not None:
        yield "batch_p50_ms", result.batch_ms.p50
        yield "batch_p95_ms", result.batch_ms.p95
        yield "batch_p99_ms", result.batch_ms.p99
    durations = [batch.checkpoint_ms for batch in result.batches if batch.checkpoint_ms is not None]
    if durations:
        yield "checkpoint_p99_ms", percentile(durations, 99)
        yield "checkpoint_max_ms", max(durations)
    elif result.engine.startswith("flink") and result.commit_ms is not None:
        yield "checkpoint_p99_ms", result.commit_ms.p99
        yield "checkpoint_max_ms", result.commit_ms.max
    if result.restart is not None:
        yield "recovery_s", max(_STARTS_DIFFER, result.restart.ready_s - result.restart.empty_s)
    if result.cpu_seconds_per_million_rows is not None and result.rows:
        memory = result.memory_mean_bytes / 1e9 * result.seconds / result.rows * 1e6
        yield "cpu_s", result.cpu_seconds_per_million_rows
        yield "memory_gb_s", memory
        yield "compute_unit_s", max(result.cpu_seconds_per_million_rows, memory / _GB_OF_A_CORE)
    if len(result.cpu) > 1 and result.batches:
        _, used = cores_in_use(result)
        if len(used) and used.mean() > 0:
            yield "cores_deviation", float(used.std() / used.mean())


def of_latencies(command: Command, data: bytes) -> Iterator[Figures]:
    """Read results of `benchmarks.prefetch`: its variants by the steps of its figure."""
    figure = command.arguments.split()[0]
    for measured in msgspec.json.decode(data, type=list[Measured]):
        config = measured.config
        figures = Figures(
            engine=command.engine or config.variant,
            place=command.place or place_of(figure, measured),
            values={
                "rows_per_second": measured.events_per_second,
                "row_p50_ms": measured.rows.p50,
                "row_p99_ms": measured.rows.p99,
                "row_p999_ms": measured.rows.p999,
                "batch_p99_ms": measured.batches.p99,
                "cores": measured.cpu,
                "hint_share": 100 * measured.hint_share,
            },
            series=[ms for _, ms, _ in measured.trace],
            seed=config.stream.seed,
        )
        if figure == "highest" and not measured.kept_up:
            reason = f"it kept up with no rate down to {config.rate:,} rows/s"
            figures = msgspec.structs.replace(figures, values={}, series=[], missing=reason)
        yield figures


def of_lookups(command: Command, data: bytes) -> Iterator[Figures]:
    """Read the result of one engine of `benchmarks.studies.enrichment`."""
    lookup = msgspec.json.decode(data, type=dict[str, str | float])
    names = ("rows_per_second", "row_p50_ms", "row_p99_ms", "row_p999_ms")
    values = {name: float(lookup[name]) for name in names if name in lookup}
    yield Figures(engine=command.engine or str(lookup["engine"]), place=command.place, values=values)


def of_sweeps(command: Command, data: bytes) -> Iterator[Figures]:
    """Read results of `benchmarks.studies.append_stores`, with a place for each value of the setting."""
    for points in msgspec.json.decode(data, type=dict[str, list[tuple[float, Measurement]]]).values():
        for value, run in points:
            values = {"rows_per_second": run.rows_per_second, "hit_ratio": run.stats["prefetch_hit_ratio"]}
            yield Figures(engine="millpond", place=f"{value:g}", values=values, seed=SEED)


def of_misa(command: Command, data: bytes) -> Iterator[Figures]:
    """Read results of `benchmarks.misa` by rate, and again at the highest rate that Spark as shipped keeps up with."""
    results = msgspec.json.decode(data, type=list[MisaResult])
    several = len({result.settings.query for result in results}) > 1
    shipped = [result for result in results if result.settings.engine == "spark-shipped"]
    kept = [result.settings.rate for result in shipped if result.kept_up]
    for result in results:
        settings = result.settings
        step = command.place or f"{settings.rate:,}/s"
        figures = Figures(
            engine=settings.engine,
            place=f"{settings.query}, {step}" if several else step,
            values=dict(_misa_values(result)) if result.batch_ms is not None else {},
            series=[batch.ms for batch in result.batches],
            version=result.version,
            seed=settings.seed,
            error=result.error,
            refused=result.refused,
            missing=_BEHIND if result.kept_up is False and result.batch_ms is None else None,
        )
        yield figures
        if not command.place and not several and kept and settings.rate == max(kept):
            yield msgspec.structs.replace(figures, place=HIGHEST, series=[])
    behind = [result.settings.rate for result in shipped if result.kept_up is False]
    if not command.place and not several and behind and not kept:
        reason = f"Spark as shipped kept up with no rate: {'; '.join(f'{rate:,}' for rate in behind)} rows/s"
        for engine in dict.fromkeys(result.settings.engine for result in results):
            yield Figures(engine=engine, place=HIGHEST, missing=reason)


def _misa_values(result: MisaResult) -> Iterator[tuple[str, float]]:
    assert result.batch_ms is not None
    yield "rows_per_second", result.rows_per_second
    yield "batch_rows_per_second", result.batch_rows_per_second
    yield "batch_mean_ms", sum(batch.ms for batch in result.batches) / len(result.batches)
    yield "batch_p50_ms", result.batch_ms.p50
    yield "batch_p99_ms", result.batch_ms.p99
    yield "growth", 100 * result.slope_ms * len(result.batches) / result.batch_ms.p50
    yield "cores", result.cores
    yield "memory_mb", result.memory_peak_bytes / 1e6
    commits = [batch.commit_ms for batch in result.batches if batch.commit_ms is not None]
    if commits:
        yield "commit_p99_ms", max(_SHORTEST_COMMIT_MS, percentile(commits, 99))


READERS: dict[str, Callable[[Command, bytes], Iterator[Figures]]] = {
    "benchmarks": of_results,
    "benchmarks.studies.disaggregated": of_results,
    "benchmarks.prefetch": of_latencies,
    "benchmarks.studies.enrichment": of_lookups,
    "benchmarks.studies.append_stores": of_sweeps,
    "benchmarks.misa": of_misa,
}
"""Readers of results, by the benchmark's module."""
