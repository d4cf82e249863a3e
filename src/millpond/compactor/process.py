"""`millpond compactor`: a process that compacts the state of queries remotely."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from millpond.checkpoint.forks.parents import open_state
from millpond.checkpoint.generation import claimed_generations
from millpond.compactor.worker import Worker
from millpond.errors import MillpondError, UsageError
from millpond.files.backends.filesystem import FileSystem
from millpond.files.locations.opening import open_filesystem
from millpond.query.checkpoints.ownership import state_of_last_run

log = logging.getLogger("millpond.compactor")

_SIGNAL_POLL_SECONDS = 0.2
"""Longest time in seconds until a signal is handled."""
_STOP_SECONDS = 10.0
"""Seconds after a signal in which work may stop at its next piece. After that, the process exits at once."""


class Locations:
    """The states of queries.

    A query's first start determines the location of its state and the parents of a fork. So a state that has not begun
    is looked up again at each iteration.

    Args:
        locations: paths or URLs of checkpoints, or of folders of state.

    Raises:
        SettingError: a location cannot be opened.
    """

    def __init__(self, locations: Sequence[str]) -> None:
        self._locations = {location: open_filesystem(location) for location in locations}
        self._begun_states: dict[str, FileSystem] = {}
        self._last_error: dict[str, str] = {}  # the last logged error of each location

    def __iter__(self) -> Iterator[FileSystem]:
        """Iterate over the states that have begun."""
        for location, place in self._locations.items():
            if location not in self._begun_states:
                try:
                    files = open_state(state_of_last_run(place) or location)
                    if not claimed_generations(files):
                        continue
                except MillpondError as error:  # other locations go on
                    if self._last_error.get(location) != str(error):
                        log.warning("%s: %s", location, error)
                    self._last_error[location] = str(error)
                    continue
                log.info("the state of %s is at %s", location, files.url)
                self._begun_states[location] = files
            yield self._begun_states[location]


def work(locations: Sequence[str], *, poll: float, lease: float, once: bool, idle_exit: float | None) -> None:
    """Compact until SIGTERM or Ctrl-C, with logs on standard error.

    After a signal, leases are released at once, and the process ends within ten seconds.

    Args:
        locations: paths or URLs of checkpoints, or of folders of state.
        poll, once, idle_exit: see `Worker.run`.
        lease: see `Worker`.

    Raises:
        UsageError: a location is empty.
        SettingError: a location cannot be opened.
    """
    if not all(location.strip() for location in locations):
        raise UsageError("The location of the state is empty.", action="Give the query's checkpointLocation.")
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    worker = Worker(Locations(locations), lease=lease)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stop.set())
    log.info("compactor %s for %s", worker.name, ", ".join(locations))
    executor = ThreadPoolExecutor(1, "millpond-compact")
    running = executor.submit(worker.run, poll, once=once, idle_exit=idle_exit)
    stopped = None
    # Signal handlers run in this thread, between bytecodes. A signal received by another thread does not wake it: poll.
    while wait([running], timeout=_SIGNAL_POLL_SECONDS).not_done:
        if worker.stop.is_set():
            stopped = stopped or time.monotonic()
            if time.monotonic() - stopped > _STOP_SECONDS:
                log.warning("compactor %s ends in the middle of a request to the store", worker.name)
                logging.shutdown()
                os._exit(0)  # a normal exit would wait for the thread that waits for the store
    running.result()
    executor.shutdown()
    log.info("compactor %s ends: %d done", worker.name, worker.done)
