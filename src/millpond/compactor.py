"""`millpond compactor`: a process that compacts the state of queries in their place."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from millpond.checkpoint.forks.parents import open_state
from millpond.errors import UsageError
from millpond.files.backends.filesystem import open_filesystem
from millpond.query.ledger.ownership import state_of_last_run
from millpond.slot.compaction.worker import Worker


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
    files = [open_state(state_of_last_run(open_filesystem(location)) or location) for location in locations]
    worker = Worker(files, lease=lease)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stop.set())
    log = logging.getLogger("millpond.compactor")
    log.info("compactor %s for %s", worker.name, ", ".join(one.url for one in files))
    with ThreadPoolExecutor(1, "millpond-compact") as works:  # a signal is heard at once only by a thread that waits
        works.submit(worker.run, poll, once=once, idle_exit=idle_exit).result()
    log.info("compactor %s ends: %d done", worker.name, worker.done)
