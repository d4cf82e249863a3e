"""Containers of executors have room for the slots, or the start says which settings would do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from millpond.errors import SettingError
from millpond.query.starting.host_memory import check_memory


def context(master: str, **settings: str) -> Any:
    """A context with settings of executors; underscores stand for dots."""
    conf = {f"spark.executor.{name.replace('_', '.')}": value for name, value in settings.items()}

    def megabytes(name: str, default: str) -> int:
        text = conf.get(name, default)
        return int(text[:-1]) * {"g": 1024, "m": 1}[text[-1]] if text[-1].isalpha() else int(text)

    scala = SimpleNamespace(get=lambda name, default: conf.get(name, default), getSizeAsMb=megabytes)
    return SimpleNamespace(master=master, _jsc=SimpleNamespace(sc=lambda: SimpleNamespace(conf=lambda: scala)))


def test_the_error_names_the_settings_that_do() -> None:
    master = "yarn"
    settings = {"memory": "4g", "cores": "4"}
    with pytest.raises(SettingError) as raised:
        check_memory(context(master, **settings), 4, 1 << 30, 1)
    needed = 409 + 4 * 1024 + 4 * 100
    assert f"has 409 MB outside of the JVM's heap, and needs {needed} MB" in str(raised.value)
    assert str(raised.value).endswith(f"Set spark.executor.memoryOverhead={needed}m.")
    check_memory(context(master, **settings, memoryOverhead=f"{needed}m"), 4, 1 << 30, 1)
    with pytest.raises(SettingError, match=r"or spark\.millpond\.slot\.memory=922m\."):
        check_memory(context(master, **settings, memoryOverhead="4500"), 4, 1 << 30, 1)
    check_memory(context(master, **settings, memoryOverhead="4500"), 4, 922 << 20, 1)


def test_a_factor_and_memory_of_python_count() -> None:
    check_memory(context("yarn", memory="4g", cores="1", memoryOverheadFactor="0.5"), 1, 1 << 30, 2)
    check_memory(context("yarn", memory="1g", cores="1", pyspark_memory="2g"), 1, 1 << 30, 2)


def test_kubernetes_gives_programs_in_python_more() -> None:
    settings = {"memory": "4g", "cores": "1"}
    check_memory(context("k8s://https://127.0.0.1:6443", **settings), 1, 1 << 30, 1)
    with pytest.raises(SettingError):
        check_memory(context("yarn", **settings), 1, 1 << 30, 1)


def test_without_containers_nothing_is_refused() -> None:
    check_memory(context("spark://127.0.0.1:7077", memory="1g"), 64, 1 << 40, 1)
    check_memory(context("local[2]"), 64, 1 << 40, 1)
