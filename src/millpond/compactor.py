"""`millpond compactor`: a process that compacts the state of queries in their place."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from millpond.checkpoint.forks.parents import open_state
from millpond.checkpoint.generation import numbers
from millpond.errors import TransientError, UsageError
from millpond.files.backends.filesystem import FileSystem, open_filesystem
from millpond.query.ledger.ownership import state_of_last_run
from millpond.slot.compaction.worker import Worker

log = logging.getLogger("millpond.compactor")


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

    def __iter__(self) -> Iterator[FileSystem]:
        """Those that have begun."""
        for location, place in self._places.items():
            if location not in self._found:
                try:
                    files = open_state(state_of_last_run(place) or location)
                    if not numbers(files):
                        continue
                except TransientError as error:
                    log.warning("%s: %s", location, error)
                    continue
                log.info("the state of %s is at %s", location, files.url)
                self._found[location] = files
            yield self._found[location]


def work(locations: Sequence[str], *, poll: float, lease: float, once: bool, idle_exit: float | None) -> None:
    """Work until SIGTERM or Ctrl-C, saying on standard error what is done. Leases are given up at once then.

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
    with ThreadPoolExecutor(1, "millpond-compact") as works:  # a signal is heard at once only by a thread that waits
        works.submit(worker.run, poll, once=once, idle_exit=idle_exit).result()
    log.info("compactor %s ends: %d done", worker.name, worker.done)
