"""Requests for hints in place of slots, which request them only where keys miss memory."""

import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from millpond.slot.prefetch.switch import HintSwitch


@contextmanager
def requesting_hints(lookaheads: Sequence[str], operators: int = 3, partitions: int = 2) -> Iterator[None]:
    """Request hints for all queries, from one lookahead after the other, on a thread.

    Args:
        lookaheads: their names.
        operators, partitions: of each query, at most.

    Applications are found by their folders below `tempfile.gettempdir()`.
    """
    over = threading.Event()

    def request() -> None:
        turn = 0
        while not over.wait(0.02):
            turn += 1
            for folder in Path(tempfile.gettempdir()).glob("millpond-*/*/exchange/*"):
                key, _, generation = folder.name.rpartition("-")
                for operator in range(operators):
                    task = SimpleNamespace(key=key, generation=generation, operator=operator)
                    for partition in range(partitions):
                        # A new switch withdraws the requests that the partition's slot has made.
                        switch = HintSwitch(folder.parents[1], task, partition)
                        switch.set([lookaheads[(turn + partition) % len(lookaheads)]])

    thread = threading.Thread(target=request)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
