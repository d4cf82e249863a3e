"""Chooses, batch by batch, in which form the map side of each exchange runs: combined rows, rows, or files."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from millpond.metrics import observation
from millpond.plan.catalyst.exchange_forms import ExchangeForms, Form
from millpond.slot.batch.task import PipeTask

log = logging.getLogger("millpond")

_LOOK_SECONDS = 0.5
_SMALL = 50_000
"""Rows of a batch up to which Spark's shuffle takes less time for them than a second Python stage."""
_LEAVE, _ENTER = 0.5, 0.25
"""Rows that combining leaves per row that comes: beyond the first it stops, below the second it starts again."""
_MISSED = 0.002
"""Share of the keys that were not in memory beyond which files are better: keys are read ahead, and in passes."""


@dataclass
class FormChoice:
    """The form of one exchange.

    Attributes:
        combines: whether rows can be combined. files: whether they can go through files of the host.
        always: whether they are combined whatever that saves.
        tasks: map tasks of a batch, each of which combines its own rows.
    """

    combines: bool
    files: bool
    always: bool = False
    tasks: int = 1
    form: Form = "rows"

    def __post_init__(self) -> None:
        self.form = "combined" if self.combines else self._plain()

    def _plain(self) -> Form:
        return "blocks" if self.files else "rows"

    def next(self, figures: Mapping[str, float]) -> Form:
        """The form of the next batches.

        Args:
            figures: of the last batch: `input_rows`, `cache_hits`, `cache_misses`; where rows can be combined,
                `exchanged_rows` and `changed_rows`, too.
        """
        rows = figures.get("input_rows") or 0.0
        if not rows:
            return self.form
        if self.combines and (self.always or self._pays(rows, figures)):
            self.form = "combined"
        elif rows <= _SMALL and not self._misses(figures):
            self.form = "rows"
        elif rows > 2 * _SMALL or self.form != "rows" or self._misses(figures):
            self.form = self._plain()
        return self.form

    def _pays(self, rows: float, figures: Mapping[str, float]) -> bool:
        if self.form == "combined":
            return (figures.get("exchanged_rows") or 0.0) <= _LEAVE * rows
        return (figures.get("changed_rows") or 0.0) * self.tasks <= _ENTER * rows

    def _misses(self, figures: Mapping[str, float]) -> bool:
        misses, hits = figures.get("cache_misses") or 0.0, figures.get("cache_hits") or 0.0
        return self.files and misses > _MISSED * (misses + hits)


def exchange_id(task: PipeTask) -> str:
    """How the JVM knows the exchange of an operator in one run of a query."""
    return f"{task.run}-{task.operator}"


def begin_forms(forms: ExchangeForms, tasks: Sequence[PipeTask]) -> None:
    """Choose the forms of a query's first batches."""
    for task in tasks:
        forms.choose(exchange_id(task), _choice(task).form)


def choose_forms(
    query: StreamingQuery, spark: SparkSession, forms: ExchangeForms, tasks: Sequence[PipeTask], *, always: bool
) -> None:
    """Choose the forms of later batches in a thread that ends with the query.

    Args:
        query: the running query. spark: its session. forms: of its exchanges. tasks: its pipe tasks.
        always: whether rows that can be combined are, in all batches.
    """
    parallelism = int(spark.sparkContext.defaultParallelism)
    choices = {task.operator: _choice(task, always=always, parallelism=parallelism) for task in tasks}
    ids = {task.operator: exchange_id(task) for task in tasks}
    arguments = (query, forms, choices, ids)
    threading.Thread(target=_watch, args=arguments, name="millpond-forms", daemon=True).start()


def _choice(task: PipeTask, *, always: bool = False, parallelism: int = 1) -> FormChoice:
    return FormChoice(bool(task.combined), task.exchange == "local", always, parallelism)


def _watch(
    query: StreamingQuery, forms: ExchangeForms, choices: Mapping[int, FormChoice], ids: Mapping[int, str]
) -> None:
    latest = -1
    with suppress(PySparkException, Py4JError):  # what the query ended with is told to who waits for it
        while not query.awaitTermination(_LOOK_SECONDS):
            progress = query.lastProgress
            if progress is None or progress.batchId == latest:
                continue
            latest = progress.batchId
            for operator, choice in choices.items():
                figures = progress.observedMetrics.get(observation(operator))
                if figures is None:
                    continue
                before, form = choice.form, choice.next(figures.asDict())
                if form != before:
                    log.debug("operator %d: the exchange goes from %s to %s", operator, before, form)
                    forms.choose(ids[operator], form)
    with suppress(PySparkException, Py4JError):
        for one in ids.values():
            forms.forget(one)
