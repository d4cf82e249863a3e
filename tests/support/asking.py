"""Requests for hints in the name of slots, as if keys were always missing."""

import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from millpond.slot.prefetch.switch import _FOLDER


@contextmanager
def asking(names: Sequence[str], operators: int = 3, partitions: int = 2) -> Iterator[None]:
    """Request hints for all queries, from one lookahead after the other, on a thread.

    Args:
        names: names of the lookaheads.
        operators, partitions: of each query, at most.

    Applications are found by their folders below `tempfile.gettempdir()`.
    """
    over = threading.Event()

    def ask() -> None:
        turn = 0
        while not over.wait(0.02):
            turn += 1
            for folder in Path(tempfile.gettempdir()).glob("millpond-*/*/exchange/*"):
                for operator in range(operators):
                    asked = folder.parents[1] / _FOLDER / f"{folder.name}-{operator}"
                    with suppress(OSError):  # an application that ends removes its folder
                        asked.mkdir(parents=True, exist_ok=True)
                        for partition in range(partitions):
                            name = quote(names[(turn + partition) % len(names)], safe="")
                            for other in asked.glob(f"{partition},*"):
                                other.unlink(missing_ok=True)
                            (asked / f"{partition},{name}").touch()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
