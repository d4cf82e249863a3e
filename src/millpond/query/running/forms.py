"""Choice of the map side's form for each exchange and batch: combined rows, rows, or files."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from millpond.metrics import observation_name
from millpond.plan.catalyst.exchange.forms import ExchangeForms, Form
from millpond.query.running.companion import after, beside
from millpond.tasks.operator_task import OperatorTask

log = logging.getLogger("millpond")

_POLL_SECONDS = 0.5
_SMALL_BATCH_ROWS, _LARGE_BATCH_ROWS = 50_000, 100_000
"""Rows of a batch up to which Spark's shuffle is faster than a second Python stage, and from which it is slower.
Batches in between keep their form."""
_STOP_COMBINING_RATIO, _START_COMBINING_RATIO = 0.5, 0.25
"""Combined rows per input row: combining stops above the first value, and starts again below the second."""
_RETRY_AFTER_BATCHES = 32
"""Batches until combining is tried again after it left many rows although few groups changed: with distinct values, few
groups may have many values."""
_COLD_MISS_RATIO = 0.002
"""Share of keys missing from memory above which files are better than rows: they allow prefetching and multi-pass
reads."""
_COMBINING_MISSES = 0.2
"""Keys missing from memory per row that combining saves, above which files are better than combined rows: combining
saves time for every row, files for every missing key. A new key is missing, too."""


@dataclass
class FormChoice:
    """The form of one exchange.

    Attributes:
        combines: whether rows can be combined.
        files: whether rows can go through files on the host.
        always: whether rows are combined in every batch.
        tasks: the number of map tasks of a batch; each one combines its own rows.
        form: the form of batches that are planned from now on.
        retry_in: batches until combining is tried again after few groups had many values.
    """

    combines: bool
    files: bool
    always: bool = False
    tasks: int = 1
    form: Form = field(init=False)
    retry_in: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.form = "combined" if self.combines else self._large_batches

    @property
    def _large_batches(self) -> Form:
        return "files" if self.files else "rows"

    @property
    def fixed(self) -> bool:
        """Whether only one form is possible."""
        return not self.files and (not self.combines or self.always)

    def choose(self, metrics: Mapping[str, float]) -> Form:
        """Choose the form of the next batches.

        Args:
            metrics: the metrics of a finished batch, which may not have run in the form chosen last: `input_rows`,
                `cache_hits`, `cache_misses`; if rows can be combined, `millpond.metrics.COMBINED_METRICS`, too.
        """
        rows = metrics.get("input_rows") or 0.0
        # An empty batch says nothing about the next one.
        if not rows:
            return self.form
        if self.combines and (self.always or self._pays(rows, metrics)):
            self.form = "combined"
        elif rows > _LARGE_BATCH_ROWS or self._is_cold(metrics):
            self.form = self._large_batches
        elif rows <= _SMALL_BATCH_ROWS or self.form != "files":
            self.form = "rows"
        return self.form

    def _pays(self, rows: float, metrics: Mapping[str, float]) -> bool:
        """Return whether combining saves enough rows, and enough for the keys that are missing.

        Measured for a combined batch, else estimated from its groups.
        """
        exchanged = metrics.get("exchanged_rows") or 0.0
        misses = metrics.get("cache_misses") or 0.0 if self.files else 0.0
        groups = (metrics.get("changed_rows") or 0.0) * self.tasks
        few = groups <= _START_COMBINING_RATIO * rows
        if not metrics.get("combined_rows"):
            self.retry_in = max(0, self.retry_in - 1)
            return few and misses <= _COMBINING_MISSES * (rows - groups) and not self.retry_in
        pays = exchanged <= _STOP_COMBINING_RATIO * rows
        if few and not pays:
            self.retry_in = _RETRY_AFTER_BATCHES
        return pays and misses <= _COMBINING_MISSES * (rows - exchanged)

    def _is_cold(self, metrics: Mapping[str, float]) -> bool:
        misses, hits = metrics.get("cache_misses") or 0.0, metrics.get("cache_hits") or 0.0
        return self.files and misses > _COLD_MISS_RATIO * (misses + hits)


def exchange_id(task: OperatorTask) -> str:
    """Return the JVM's name for the exchange of an operator in one run of a query."""
    return f"{task.run}-{task.operator}"


def choose_first_forms(forms: ExchangeForms, tasks: Sequence[OperatorTask]) -> None:
    """Choose the forms of a query's first batches."""
    for task in tasks:
        forms.choose(exchange_id(task), _choice(task).form)


def remove_forms(forms: ExchangeForms, tasks: Sequence[OperatorTask]) -> None:
    """Drop the forms of a query that has ended, or did not start."""
    for task in tasks:
        forms.remove(exchange_id(task))


def watch_forms(
    query: StreamingQuery, spark: SparkSession, forms: ExchangeForms, tasks: Sequence[OperatorTask], *, always: bool
) -> None:
    """Choose the forms of later batches in a thread that ends with the query.

    Args:
        query: the running query.
        spark: its session.
        forms: the forms of its exchanges.
        tasks: its operators.
        always: whether rows are combined in every batch, where they can be.
    """
    parallelism = int(spark.sparkContext.defaultParallelism)
    choices = [(task, _choice(task, always=always, parallelism=parallelism)) for task in tasks]
    latest = -1

    def choose_next() -> None:
        nonlocal latest
        java = query._jsq.lastProgress()  # cheap check first: PySpark's own copy takes dozens of calls
        if java is None or java.batchId() == latest:
            return
        latest = java.batchId()
        progress = query.lastProgress
        for task, choice in choices:
            metrics = None if progress is None else progress.observedMetrics.get(observation_name(task.operator))
            before = choice.form
            if metrics is not None and choice.choose(metrics.asDict()) != before:
                log.debug("operator %d: the exchange goes from %s to %s", task.operator, before, choice.form)
                forms.choose(exchange_id(task), choice.form)

    def remove(error: Exception | None) -> None:
        try:
            remove_forms(forms, [task for task, _ in choices])
        except Exception as failure:
            log.debug("the JVM is gone: %s", failure)

    if all(choice.fixed for _, choice in choices):
        after(query, "millpond-forms", remove).start()
    else:
        beside(query, "millpond-forms", choose_next, _POLL_SECONDS, remove).start()


def _choice(task: OperatorTask, *, always: bool = False, parallelism: int = 1) -> FormChoice:
    return FormChoice(bool(task.combined), task.exchange == "local", always, parallelism)
