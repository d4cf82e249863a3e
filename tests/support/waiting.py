"""Waiting for other threads and processes."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: it does not hold within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not hold within {timeout:g} s"
        time.sleep(0.01)
