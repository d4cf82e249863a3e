"""Slots of hosts that join: started once per stay, and a start that fails keeps no host out."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

import millpond.query.running.slot_starts as starting
from millpond.query.running.slot_starts import SlotStarts

TASK: Any = None


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The threads that starts make; they run when the test says so."""
    made: list[Any] = []

    def thread(target: Any, args: Any, **_: object) -> Any:
        made.append(SimpleNamespace(run=lambda: target(*args), start=lambda: None))
        return made[-1]

    monkeypatch.setattr(starting, "threading", SimpleNamespace(Thread=thread, Event=threading.Event))
    return made


def test_a_start_that_fails_keeps_no_host_out(threads: list[Any]) -> None:
    starts = SlotStarts(None)  # type: ignore[arg-type]
    assert not starts.ended("a", TASK)
    assert not starts.ended("a", TASK)
    assert len(threads) == 1
    threads[0].run()  # there is no session
    assert starts.ended("a", TASK)


def test_a_start_that_hangs_keeps_no_host_out(threads: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    starts = SlotStarts(None)  # type: ignore[arg-type]
    assert not starts.ended("a", TASK)
    later = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert starts.ended("a", TASK)


def test_a_host_that_comes_back_is_a_new_one(threads: list[Any]) -> None:
    starts = SlotStarts(None)  # type: ignore[arg-type]
    starts.ended("a", TASK)
    threads[0].run()
    starts.keep([])
    assert not starts.ended("a", TASK)
    assert len(threads) == 2
