"""Start of a user's processor for one partition and batch."""

from __future__ import annotations

from millpond.operators.processors.calls import FetchState
from millpond.tasks.user_processor import UserGroups, UserProcessor
from millpond.worker.processors.awaiting import AsyncRunningProcessor
from millpond.worker.processors.groups import RunningGroups
from millpond.worker.processors.processor import RunningProcessor


def start_processor(processor: UserProcessor, ask: FetchState) -> RunningProcessor:
    """Load and start a processor. As in Spark, each task has its own instance.

    Args:
        processor: description of the processor.
        ask: fetches parts of variables while a call runs.
    """
    if isinstance(processor, UserGroups):
        return RunningGroups(processor, ask)
    if processor.in_flight is None:
        return RunningProcessor(processor, ask)
    return AsyncRunningProcessor(processor, ask, processor.in_flight)
