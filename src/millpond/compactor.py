"""`millpond compactor`: a process that compacts the state of queries in their place."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from millpond.checkpoint.forks.parents import open_state
from millpond.checkpoint.generation import numbers
from millpond.errors import MillpondError, UsageError
from millpond.files.backends.filesystem import FileSystem, open_filesystem
from millpond.query.ledger.ownership import state_of_last_run
from millpond.slot.compaction.worker import Worker

log = logging.getLogger("millpond.compactor")

_HEARD = 0.2
"""Seconds after which a signal is heard at the latest."""
_GRACE = 10.0
"""Seconds after a signal in which work may end at its next piece; then the process ends as if it were killed."""


class Locations:
    """The states of some queries. Where one has not begun yet it is looked for each time: where its state lies, and of
    what it is a fork, is told by its first start.

    Args:
        locations: checkpoints, or folders of state.

    Raises:
        SettingError: one cannot be opened.
    """

    def __init__(self, locations: Sequence[str]) -> None:
        self._places = {location: open_filesystem(location) for location in locations}
        self._found: dict[str, FileSystem] = {}
        self._told: dict[str, str] = {}  # what keeps each from being found

    def __iter__(self) -> Iterator[FileSystem]:
        """Those that have begun."""
        for location, place in self._places.items():
            if location not in self._found:
                try:
                    files = open_state(state_of_last_run(place) or location)
                    if not numbers(files):
                        continue
                except MillpondError as error:  # the others go on
                    if self._told.get(location) != str(error):
                        log.warning("%s: %s", location, error)
                    self._told[location] = str(error)
                    continue
                log.info("the state of %s is at %s", location, files.url)
                self._found[location] = files
            yield self._found[location]


def work(locations: Sequence[str], *, poll: float, lease: float, once: bool, idle_exit: float | None) -> None:
    """Work until SIGTERM or Ctrl-C, saying on standard error what is done. Leases are given up at once then, and the
    process ends within ten seconds.

    Args:
        locations: checkpoints, or folders of state.
        poll, lease, once, idle_exit: see `Worker`.

    Raises:
        UsageError: a location is empty.
        SettingError: one cannot be opened.
    """
    if not all(location.strip() for location in locations):
        raise UsageError("The location of the state is empty.", action="Give the query's checkpointLocation.")
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    worker = Worker(Locations(locations), lease=lease)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stop.set())
    log.info("compactor %s for %s", worker.name, ", ".join(locations))
    works = ThreadPoolExecutor(1, "millpond-compact")
    running = works.submit(worker.run, poll, once=once, idle_exit=idle_exit)
    stopped = None
    # Handlers run in this thread, between two steps of Python: a signal that another thread has got does not wake it.
    while wait([running], timeout=_HEARD).not_done:
        if worker.stop.is_set():
            stopped = stopped or time.monotonic()
            if time.monotonic() - stopped > _GRACE:
                log.warning("compactor %s ends in the middle of a request to the store", worker.name)
                logging.shutdown()
                os._exit(0)  # a thread that waits for the store would be waited for
    running.result()
    works.shutdown()
    log.info("compactor %s ends: %d done", worker.name, worker.done)
