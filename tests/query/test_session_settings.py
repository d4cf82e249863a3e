"""Settings of a session while queries start in several threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from millpond.errors import TransientError
from millpond.query.running import session_settings
from millpond.query.running.session_settings import _SettingsLock


def enter_and_leave(settings: _SettingsLock) -> None:
    with settings.read_lock(), settings.write_lock():
        pass


def test_a_start_that_is_stuck_is_named_by_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_settings, "LONGEST_START_SECONDS", 0.05)
    settings = _SettingsLock()
    with ThreadPoolExecutor(1) as pool:
        with settings.write_lock():
            enter_and_leave(settings)  # the thread that changes settings may start further queries
            for action in (settings.wait_for_writer, lambda: enter_and_leave(settings)):
                with pytest.raises(TransientError, match=f"{threading.current_thread().name}.*onQueryStarted"):
                    pool.submit(action).result(60)
        pool.submit(enter_and_leave, settings).result(60)


def test_settings_change_only_while_no_other_thread_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_settings, "LONGEST_START_SECONDS", 0.05)
    settings, changed = _SettingsLock(), threading.Event()

    def change() -> None:
        with settings.write_lock():
            changed.set()

    with ThreadPoolExecutor(2) as pool:
        with settings.read_lock():
            changing = pool.submit(change)
            assert not changed.wait(0.2)  # longer than a start may take: readers are waited for
            pool.submit(settings.wait_for_writer).result(60)  # starts on Spark go on meanwhile
        changing.result(60)
    assert changed.is_set()


def test_many_starts_may_come_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes less than the limit, all of them longer."""
    monkeypatch.setattr(session_settings, "LONGEST_START_SECONDS", 3.0)
    settings, first = _SettingsLock(), threading.Event()

    def start() -> None:
        with settings.write_lock():
            first.set()
            time.sleep(0.7)

    with ThreadPoolExecutor(8) as pool:
        several = [pool.submit(start) for _ in range(6)]
        assert first.wait(60)
        pool.submit(settings.wait_for_writer).result(60)
        for begun in several:
            begun.result(60)
