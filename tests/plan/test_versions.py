"""Differences between versions of Spark: forms of a call, and imports when a query starts."""

from __future__ import annotations

import subprocess
import sys

import pyspark
import pytest
from py4j.protocol import Py4JError

from millpond.errors import UsageError
from millpond.plan.catalyst.versions import (
    copied,
    inline_cte,
    is_tested,
    join_state_watermarks,
    merges_empty_moments,
    semi_join_has_right_first,
    semi_join_is_one_sided,
    weights_percentiles,
)


class Lacking:
    """A JVM object, or class, that has only the methods it is given; py4j says so of the others."""

    def __init__(self, **methods: object) -> None:
        self.methods = methods

    def __getattr__(self, name: str) -> object:
        return self.methods.get(name, absent)

    def __call__(self, *flags: bool) -> object:
        return self.methods["made"](*flags)


def absent(*arguments: object) -> None:
    raise Py4JError("Method x([]) does not exist")


class Nowhere:
    """A class that the JVM does not have."""

    def __getattr__(self, name: str) -> object:
        raise Py4JError(f"org.apache.spark.Nowhere.{name} does not exist in the JVM")


def failing(*arguments: object) -> None:
    raise Py4JError("An error occurred while calling o1.x")


def test_a_copy_has_a_hint_where_there_is_one() -> None:
    assert copied(Lacking(copy=lambda *fields: fields, hint=lambda: "hint"), 1, 2) == (1, 2, "hint")
    assert copied(Lacking(copy=lambda *fields: fields), 1, 2) == (1, 2)


@pytest.mark.parametrize("flags", [1, 2, 3])
def test_a_rule_has_so_many_flags(flags: int) -> None:
    def made(*given: bool) -> Lacking:
        return absent() if len(given) != flags else Lacking(apply=lambda plan: (plan, given))

    assert inline_cte(Lacking(made=made), "plan") == ("plan", (False,) * flags)


@pytest.mark.parametrize("place", [".operators.stateful.join.", ".streaming.Streaming"])
@pytest.mark.parametrize("flags", [0, 1])
def test_state_watermarks_of_joins(place: str, flags: int) -> None:
    def method(*given: object) -> object:
        return absent() if len(given) != 2 + flags else given

    def class_of(name: str) -> object:
        return Lacking(getStateWatermark=method) if place in name else Nowhere()

    assert join_state_watermarks(class_of, 1, 2) == (1, 2, False)[: 2 + flags]


def test_other_errors_are_not_taken_for_another_version() -> None:
    with pytest.raises(Py4JError, match="An error occurred"):
        copied(Lacking(copy=failing, hint=lambda: "hint"))


def test_no_form_is_there() -> None:
    with pytest.raises(UsageError, match=r"lacks a method .* Use one of the tested versions: 4\.1\.x"):
        copied(Lacking())


def test_tested_versions() -> None:
    assert is_tested("4.1.4")
    assert is_tested("4.3.0-SNAPSHOT")
    assert not is_tested("4.0.1")
    assert not is_tested("4.30.0")


@pytest.mark.parametrize(
    ("version", "semi_joins", "before_4_3"),
    [("4.1.4", (False, False), True), ("4.2.0", (True, False), True), ("4.3.0", (True, True), False)],
)
def test_what_versions_of_spark_compute(
    monkeypatch: pytest.MonkeyPatch, version: str, semi_joins: tuple[bool, bool], before_4_3: bool
) -> None:
    monkeypatch.setattr(pyspark, "__version__", version)
    assert (semi_join_has_right_first(), semi_join_is_one_sided()) == semi_joins
    assert (merges_empty_moments(), weights_percentiles()) == (before_4_3, before_4_3)


def test_a_start_imports_nothing_that_it_may_not_need() -> None:
    """The modules that call the user's code use names of PySpark that not all versions have."""
    code = "import sys, millpond.query.writer, millpond.query.install; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    private = ("millpond.worker.processors", "millpond.testing", "pyspark.sql.conversion", "pyspark.worker")
    assert [name for name in done.stdout.split() if name.startswith(private)] == []
