"""The threads that slots leave behind in a test's process."""

import threading


def at_rest() -> None:
    """Wait for what closed slots still write: their processes would have ended with it, a test copies their files."""
    for thread in threading.enumerate():
        if thread.name.startswith(("millpond-merge", "millpond-write")):
            thread.join(30)
            assert not thread.is_alive(), f"{thread.name} was not closed"
