"""Speculation beside output that may differ between attempts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from millpond.errors import SettingError
from millpond.query.starting.checks import check_speculation


def context(local: bool, speculation: str) -> Any:
    return SimpleNamespace(
        _jsc=SimpleNamespace(sc=lambda: SimpleNamespace(isLocal=lambda: local)),
        getConf=lambda: {"spark.speculation": speculation},
    )


def test_speculation_is_refused_on_a_cluster() -> None:
    check_speculation(context(True, "true"))  # Spark does not speculate there
    check_speculation(context(False, "false"))
    with pytest.raises(SettingError, match="two attempts of a task at once"):
        check_speculation(context(False, "true"))
