"""Settings of a session while queries start in several threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from millpond.errors import TransientError
from millpond.query.running import session_settings
from millpond.query.running.session_settings import _StartLock, unchanged_settings


def enter_and_leave() -> None:
    with unchanged_settings():
        pass


def test_a_start_that_is_stuck_is_named_by_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_settings, "LONGEST_START_SECONDS", 0.05)
    with ThreadPoolExecutor(1) as pool:
        with unchanged_settings():
            enter_and_leave()  # the thread that holds the lock may take it again
            with pytest.raises(TransientError, match=f"{threading.current_thread().name}.*onQueryStarted"):
                pool.submit(enter_and_leave).result(60)
        pool.submit(enter_and_leave).result(60)


def test_many_starts_may_come_before() -> None:
    lock = _StartLock()
    answers = [True, False, False, False]

    def acquire(timeout: float) -> bool:
        lock._turn += 1  # another start has had the lock meanwhile
        return answers.pop()

    rlock: Any = SimpleNamespace(acquire=acquire, release=lambda: None)
    lock._lock = rlock
    with lock:
        assert not answers
