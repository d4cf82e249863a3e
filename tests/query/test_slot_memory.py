"""Slots are shared by the queries of an application."""

import logging

import pytest

from millpond.query.starting.tasks import warn_of_other_memory


def test_a_query_that_asks_for_other_slot_memory_is_told_what_it_gets(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="millpond"):
        warn_of_other_memory("app-with-64m", 64 << 20)
        warn_of_other_memory("app-with-64m", 64 << 20)
        warn_of_other_memory("another-app", 1 << 30)
        assert not caplog.records
        warn_of_other_memory("app-with-64m", 1 << 30)
    assert "is 1024m here, but the slots of this application run with 64m" in caplog.text
