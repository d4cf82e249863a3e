"""Waiting for what other threads and processes do."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    """Wait until a condition holds; it is an error if it does not within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)
