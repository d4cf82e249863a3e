"""Start of a user's processor for one partition and batch."""

from __future__ import annotations

from millpond.operators.processors.calls import FetchState
from millpond.tasks.user_processor import UserGroups, UserProcessor
from millpond.worker.processors.awaiting import AwaitingRunning
from millpond.worker.processors.groups import RunningGroups
from millpond.worker.processors.processor import Running


def start_processor(processor: UserProcessor, ask: FetchState) -> Running:
    """Load and start a processor. As in Spark, each task has its own instance.

    Args:
        processor: description of the processor.
        ask: fetches parts of variables while a call runs.
    """
    if isinstance(processor, UserGroups):
        return RunningGroups(processor, ask)
    if processor.in_flight is None:
        return Running(processor, ask)
    return AwaitingRunning(processor, ask, processor.in_flight)
