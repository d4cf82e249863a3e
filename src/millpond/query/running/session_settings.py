"""Session settings for the start of a rewritten query, which then runs in a copy of its session."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from pyspark.sql import SparkSession

from millpond.conf import Settings
from millpond.errors import TransientError
from millpond.plan.catalyst.session import STREAMING_CHECK, change_settings, settings_of
from millpond.spec.kinds.union import OperatorSpec
from millpond.spec.types import leaves, parse_type

_MAX_BYTES_PER_BATCH = "spark.sql.execution.arrow.maxBytesPerBatch"
_UNLIMITED = str((1 << 31) - 1)
"""With a smaller limit, Spark adds up the sizes of all columns after each row, which takes 0.3 µs a row."""

_MAX_VARIABLE_LENGTH_ROWS = 4096
"""Rows of one Arrow batch with strings, or with sketches of combined rows. Without a limit in bytes, they have to fit
a column of at most 2 GB."""

_STORE_PARTITIONS = "spark.sql.streaming.internal.stateStore.partitions"

_NO_DATA_BATCH_SETTINGS = {
    "spark.sql.streaming.statefulOperator.allowMultiple": "false",
    _STORE_PARTITIONS: "1",
    "spark.sql.streaming.stateStore.checkpointFormatVersion": "1",
}
"""Settings for Spark's operator that watches the watermark (see `Catalyst.watermark_batch_source`)."""

PLANNING_SETTINGS = {
    STREAMING_CHECK,
    "spark.sql.adaptive.streaming.stateless.enabled",
    *_NO_DATA_BATCH_SETTINGS,
}
"""Settings that matter only while queries start and batches are planned; they do not change the rows of a batch."""

LONGEST_START_SECONDS = 300.0
"""Seconds after which a start that keeps others waiting counts as stuck.

Spark's `start()` waits until the listeners' `onQueryStarted` have returned, which run in another thread. If one of them
starts a query, each of the two starts waits for the other one.
"""


class _SettingsLock:
    """Readers–writer lock of session settings during starts; readers nest, and a writer may enter again.

    A wait for a writer is bounded by `LONGEST_START_SECONDS`, because a writer calls listeners. A writer's wait for
    readers is not bounded: readers call no listeners, so they end.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers: list[threading.Thread] = []
        self._writer: threading.Thread | None = None
        self._writer_number = 0  # of the last writer

    def wait_for_writer(self) -> None:
        """Wait until no other thread is the writer; raise as `unchanged_settings`."""
        with self._changed:
            self._wait()

    @contextmanager
    def read_lock(self) -> Iterator[None]:
        """Keep other threads from changing settings."""
        with self._changed:
            self._wait()
            self._readers.append(threading.current_thread())
        try:
            yield
        finally:
            with self._changed:
                self._readers.remove(threading.current_thread())
                self._changed.notify_all()

    @contextmanager
    def write_lock(self) -> Iterator[None]:
        """Keep other threads from reading and changing settings."""
        own = threading.current_thread()
        if self._writer is own:
            yield
            return
        with self._changed:
            self._wait()
            while any(reader is not own for reader in self._readers):
                self._changed.wait()
                self._wait()
            self._writer = own
            self._writer_number += 1
        try:
            yield
        finally:
            with self._changed:
                self._writer = None
                self._changed.notify_all()

    def _wait(self) -> None:
        while (writer := self._writer) is not None and writer is not threading.current_thread():
            number = self._writer_number

            def is_over(number: int = number) -> bool:
                return self._writer is None or self._writer_number != number

            # Many writers may come first: only one that goes on all the time is stuck.
            if not self._changed.wait_for(is_over, LONGEST_START_SECONDS):
                raise _stuck_error(writer)


def _stuck_error(writer: threading.Thread) -> TransientError:
    return TransientError(
        f"A query has been starting in the thread {writer.name!r} for {LONGEST_START_SECONDS:.0f} s, and no other one "
        "can start meanwhile.",
        action="Start this one again. If a listener's onQueryStarted does it, start it from another thread after "
        "onQueryStarted has returned: Spark's start() waits for that.",
    )


_SETTINGS_LOCK = _SettingsLock()


def running_settings(settings: Settings, specs: Sequence[OperatorSpec], given: Mapping[str, str]) -> dict[str, str]:
    """Return the session settings with which a rewritten query runs.

    Args:
        settings: Millpond's settings.
        specs: the operators on Millpond.
        given: the settings of the user's session.
    """
    closing = any(spec.needs_no_data_batches for spec in specs)
    fields = [field for spec in specs for field in (*spec.input_fields, *spec.output_fields)]
    of_any_length = any(leaf.machine in (None, "bytes") for f in fields for leaf in leaves(parse_type(f.type)))
    sketches = any(call.function == "approx_count_distinct" for spec in specs for call in spec.calls)
    rows = min(settings.batch_rows, _MAX_VARIABLE_LENGTH_ROWS) if of_any_length or sketches else settings.batch_rows
    return {
        # Spark checked the query that the user wrote; the rewritten one looks stateless and would be judged as such.
        STREAMING_CHECK: "false",
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(rows),
        _MAX_BYTES_PER_BATCH: given.get(_MAX_BYTES_PER_BATCH, _UNLIMITED),
        # As for Spark's own stateful queries: re-planning between stages takes longer than a small batch's stages.
        "spark.sql.adaptive.streaming.stateless.enabled": "false",
        "spark.sql.execution.arrow.useLargeVarTypes": "false",
    } | (_NO_DATA_BATCH_SETTINGS if closing else {})


def first_store_count(settings: Mapping[str, str]) -> int:
    """Return the number of partitions of Spark's state stores for a new query with these session settings."""
    return int(settings.get(_STORE_PARTITIONS) or settings.get("spark.sql.shuffle.partitions") or 200)


def settings_of_user(session_settings: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str | None]:
    """Return the settings to restore in a `foreachBatch` function, which may start other queries.

    Args:
        session_settings: the running settings.
        given: the settings of the user's session.

    Returns:
        The user's values; None: not set.
    """
    return {name: given.get(name) for name in session_settings if name in PLANNING_SETTINGS}


def unchanged_settings() -> AbstractContextManager[None]:
    """Return a context within which no other thread's start changes a session's settings.

    Raises:
        TransientError: another start takes too long.
    """
    return _SETTINGS_LOCK.read_lock()


def wait_for_other_starts() -> None:
    """Wait until no other thread's start has changed a session's settings; raise as `unchanged_settings`.

    For starts on Spark: these call listeners, which may start queries, so they must not keep other starts waiting.
    Spark copies the session's settings at once.
    """
    _SETTINGS_LOCK.wait_for_writer()


def changes_back_to(spark: SparkSession, earlier: Mapping[str, str]) -> dict[str, str | None]:
    """Return the changes after which a session has the settings `earlier` and no others.

    Args:
        spark: the session.
        earlier: the settings that it had earlier.

    Returns:
        The earlier values of the settings that differ; None: not set.
    """
    present = settings_of(spark)
    return {name: earlier.get(name) for name in present.keys() | earlier if earlier.get(name) != present.get(name)}


@contextmanager
def starting_settings(
    spark: SparkSession, wanted: Mapping[str, str], earlier: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Change a session's settings while a query starts, and restore the old ones; raise as `unchanged_settings`.

    Args:
        spark: the session.
        wanted: the settings to change.
        earlier: the values of all others, for a query that is started again; by default they stay as they are.
    """
    with _SETTINGS_LOCK.write_lock():
        changes: dict[str, str | None] = {} if earlier is None else changes_back_to(spark, earlier)
        before = settings_of(spark)
        changes |= wanted
        try:
            change_settings(spark, changes)
            yield
        finally:
            present = settings_of(spark)
            # What another thread has set meanwhile stays.
            still_ours = {name for name, value in changes.items() if present.get(name) == value}
            change_settings(spark, {name: before.get(name) for name in still_ours})


@contextmanager
def changed_settings(
    spark: SparkSession, wanted: Mapping[str, str | None], before: Mapping[str, str | None]
) -> Iterator[None]:
    """Change a session's settings within this context, then restore `before`; None: not set.

    Restores `before` even if another thread changed it meanwhile, unlike `starting_settings`.
    """
    try:
        change_settings(spark, wanted)
        yield
    finally:
        change_settings(spark, before)
