"""Starts of slots on hosts that join a cluster, before partitions move there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

from millpond.plan.catalyst.exchange.located import LocatedPartitions
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.exchange.workers import map_in_arrow, named_function
from millpond.tasks.operator_task import OperatorTask
from millpond.worker.slots import StartSlots

log = logging.getLogger("millpond")

_LONGEST_SECONDS = 60.0
"""Seconds after which a host gets partitions whether its slots run or not: the first batch there reports an error."""


class SlotStarts:
    """Starts of slots on hosts that have joined.

    The first task on a host starts Python and its slots: seconds, for which the batch would wait. So a job of one task
    does that while batches run on the other hosts.

    Args:
        catalyst: of the query's session.
    """

    def __init__(self, catalyst: Catalyst) -> None:
        self._catalyst = catalyst
        self._starts: dict[str, tuple[threading.Event, float]] = {}  # by host: the end, and the latest time for it

    def ended(self, host: str, task: OperatorTask) -> bool:
        """Return whether the slots of a host have been started; the first call for a host begins to.

        Args:
            host: a host with an executor that takes tasks.
            task: any operator of the query.
        """
        if host not in self._starts:
            self._starts[host] = threading.Event(), time.monotonic() + _LONGEST_SECONDS
            arguments = (host, task, self._starts[host][0])
            # Without the job group and the tags of the caller's thread: to cancel those must not end this job.
            threading.Thread(target=self._start, args=arguments, name="millpond-slot-start", daemon=True).start()
        end, latest = self._starts[host]
        return end.is_set() or time.monotonic() > latest

    def keep(self, hosts: Iterable[str]) -> None:
        """Forget all other hosts: their slots are started again when they come back."""
        self._starts = {host: self._starts[host] for host in hosts if host in self._starts}

    def _start(self, host: str, task: OperatorTask, end: threading.Event) -> None:
        try:
            context = self._catalyst.spark.sparkContext
            context.setJobDescription(f"millpond: slots start on {host}")
            located = LocatedPartitions(self._catalyst, 1)
            located.prefer(self._catalyst, {0: host})
            marker = located.markers(self._catalyst, [0], "low", streaming=False)
            frame = map_in_arrow(marker, named_function(StartSlots(task), "slots start", 1), "low bigint")
            frame._jdf.queryExecution().toRdd().count()  # no query for the listeners of the session
        except Exception as error:
            # The first batch there starts them, and reports the error. The application may also have ended.
            log.info("slots were not started on %s before its first batch: %s", host, str(error).partition("\n")[0])
        finally:
            end.set()
