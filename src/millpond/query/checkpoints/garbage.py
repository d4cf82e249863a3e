"""Background garbage collection of a running query: removes files that no retained version needs."""

from __future__ import annotations

import logging

from pyspark.sql.streaming.query import StreamingQuery

from millpond.checkpoint.retention.collector import Collector
from millpond.errors import FencedError, MillpondError
from millpond.files.backends.filesystem import FileSystem
from millpond.query.logs.query_logs import QueryLogs
from millpond.query.running.companion import beside

log = logging.getLogger("millpond")

INTERVAL_SECONDS = 60.0


def collect_garbage(
    query: StreamingQuery, files: FileSystem, generation: int, query_logs: QueryLogs, retain: int
) -> None:
    """Collect garbage once a minute, in a thread that ends with the query.

    Args:
        query: the running query.
        files: the location's `millpond/` folder.
        generation: the number of the run's generation.
        query_logs: Spark's logs, which show the running batch.
        retain: Spark's `minBatchesToRetain`.
    """
    collector = Collector(files, generation, retain=retain)
    beside(query, "millpond-garbage", lambda: _collect(collector, query_logs), INTERVAL_SECONDS).start()


def _collect(collector: Collector, query_logs: QueryLogs) -> None:
    """Collect once, and log failures.

    Raises:
        FencedError: a newer run of the query has taken over, so this one collects no more.
    """
    try:
        # Spark may go back to any of these batches, so their versions have to stay.
        planned = query_logs.retained()
        removed = collector.collect(planned.stop - 1, planned.start)
    except FencedError:
        raise
    except MillpondError as error:
        log.warning("state files that are not needed any more could not be removed: %s", error)
    except Exception:  # a defect here must not let the state grow until the query ends
        log.warning("state files that are not needed any more could not be removed", exc_info=True)
    else:
        log.debug("removed %d objects, %d bytes", removed.objects, removed.bytes)
