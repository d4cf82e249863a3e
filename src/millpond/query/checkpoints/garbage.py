"""Background garbage collection of a running query: removes files that no retained version needs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql.streaming.query import StreamingQuery

from millpond.checkpoint.generation import base_times
from millpond.checkpoint.retention.collector import Collector
from millpond.checkpoint.retention.orphans import find_orphans
from millpond.errors import FencedError, MillpondError
from millpond.files.backends.filesystem import FileSystem
from millpond.query.logs.query_logs import QueryLogs
from millpond.query.running.companion import beside

log = logging.getLogger("millpond")

INTERVAL_SECONDS = 60.0

LEFTOVERS_SECONDS = 3600.0
"""Length of a stretch of time in which one run looks for leftovers, since that reads all retained commits."""


def collect_garbage(
    query: StreamingQuery, files: FileSystem, first_claim: int, generation: int, query_logs: QueryLogs, retain: int
) -> None:
    """Collect what earlier runs have left, then garbage once a minute, in a thread that ends with the query.

    Args:
        query: the running query.
        files: the location's `millpond/` folder.
        first_claim: the first generation that the start of the run has claimed.
        generation: the number of the run's generation.
        query_logs: Spark's logs, which show the running batch.
        retain: Spark's `minBatchesToRetain`.
    """
    collector = Collector(files, generation, retain=retain)
    beside(
        query,
        "millpond-garbage",
        lambda: _collect(collector, query_logs),
        INTERVAL_SECONDS,
        first=lambda: _remove_leftovers(files, first_claim, generation, query_logs),
    ).start()


def _remove_leftovers(files: FileSystem, first_claim: int, generation: int, query_logs: QueryLogs) -> None:
    """Remove what earlier runs have left, if this run is the first one to begin in its hour; log failures.

    The collector removes an object only after a grace period in one run. A job of many short runs would never reach it.
    So this pass judges by file times, as `millpond state gc` does.
    """
    with _failures_logged():
        begun = base_times(files)
        # By the store's clock, as all times that it is compared with.
        now = begun.get(generation)
        last = max((time for number, time in begun.items() if number < first_claim), default=None)
        if now is None or last is None or now // LEFTOVERS_SECONDS == last // LEFTOVERS_SECONDS:
            return
        planned = query_logs.entry_times("offsets")  # before the state is listed, see `find_orphans`
        leftovers = find_orphans(files, planned, now=now)
        if leftovers.missing:
            log.warning(
                "unneeded files of earlier runs were not removed: %d files that retained versions need are missing, "
                "such as %s; `millpond state gc CHECKPOINT --dry-run` lists them",
                len(leftovers.missing),
                files.locate(next(iter(leftovers.missing))),
            )
            return
        leftovers.remove(files)
        log.debug("removed %d objects of earlier runs", sum(map(len, leftovers.unneeded.values())))


def _collect(collector: Collector, query_logs: QueryLogs) -> None:
    """Collect once, and log failures.

    Raises:
        FencedError: a newer run of the query has taken over, so this one collects no more.
    """
    with _failures_logged():
        # Spark may go back to any of these batches, so their versions have to stay.
        planned = query_logs.retained()
        removed = collector.collect(planned.stop - 1, planned.start)
        log.debug("removed %d objects, %d bytes", removed.objects, removed.bytes)


@contextmanager
def _failures_logged() -> Iterator[None]:
    try:
        yield
    except FencedError:
        raise
    except MillpondError as error:
        log.warning("state files that are not needed any more could not be removed: %s", error)
    except Exception:  # a defect here must not let the state grow until the query ends
        log.warning("state files that are not needed any more could not be removed", exc_info=True)
