"""The collection of a running query's garbage."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from millpond.checkpoint.retention.collector import Collected, Collector
from millpond.errors import FencedError, TransientError
from millpond.query.checkpoints.garbage import _collect


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
    logs: Any = SimpleNamespace(retained=lambda: range(3, 9))
    files: Any = None
    collector = Collector(files, 1)
    with caplog.at_level(logging.WARNING, "millpond"):
        for _ in range(3):
            _collect(collector, logs)
        with pytest.raises(FencedError):
            _collect(collector, logs)
    assert ranges == [(8, 3)] * 4
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "a defect" in caplog.text
    assert "The store failed." in caplog.text
