"""The thread that collects a running query's garbage."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from millpond.checkpoint.retention.collector import Collected, Collector
from millpond.errors import FencedError, TransientError
from millpond.query.logs.garbage import _collect


def test_an_error_does_not_end_the_collection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = [ValueError("a defect"), TransientError("The store failed."), Collected(1, 2), FencedError("Overtaken.")]
    ranges = []

    def collect(self: Collector, running: int, first: int) -> Collected:
        ranges.append((running, first))
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(Collector, "collect", collect)
    query: Any = SimpleNamespace(awaitTermination=lambda seconds: False)
    logs: Any = SimpleNamespace(retained=lambda: range(3, 9))
    files: Any = None
    with caplog.at_level(logging.WARNING, "millpond"):
        _collect(query, files, 1, logs, 100)
    assert ranges == [(8, 3)] * 4
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "a defect" in caplog.text
    assert "The store failed." in caplog.text
