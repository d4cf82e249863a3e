"""Texts of errors."""

from __future__ import annotations

import pytest

from millpond.errors import MillpondError, StateIncompatibleError, TransientError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TransientError("The store failed."), "[TRANSIENT] The store failed."),
        (
            TransientError("The store failed.", query="q", partition=3),
            "[TRANSIENT] The store failed (query q, partition 3).",
        ),
        (
            TransientError("It failed.", action="Try again.", file="file:/a"),
            "[TRANSIENT] It failed (file:/a). Try again.",
        ),
        (
            StateIncompatibleError("The query differs:\n  count(1)\n", action="Change it back.", file="s3://b/q.json"),
            "[STATE_INCOMPATIBLE] The query differs (file s3://b/q.json):\n  count(1)\nChange it back.",
        ),
    ],
)
def test_what_happened_where_and_what_to_do(error: MillpondError, text: str) -> None:
    assert str(error) == text
