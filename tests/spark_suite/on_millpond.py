"""Test classes of PySpark's own package, run on Millpond in the shared session."""

from __future__ import annotations

import importlib
import tempfile
import unittest
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyspark
import pyspark.sql
import pytest
from pyspark import SparkConf
from pyspark.sql import DataFrame, Row, SparkSession

import millpond
from millpond.plan.rewriter import rewrite_plan

ZIP = Path(pyspark.__file__).parent / "python" / "lib" / "pyspark.zip"
"""What Spark's Python workers import. Unlike the installed package, it has PySpark's tests."""

_TESTS = "pyspark/sql/tests/"


class Suite(NamedTuple):
    """A test class of Spark's.

    Attributes:
        module: its module below `pyspark.sql.tests`. name: its name there.
        stateful: whether a test starts an operator that Millpond runs, by the test's name.
        left_out: tests that are skipped, and why.
    """

    module: str
    name: str
    stateful: Callable[[str], bool]
    left_out: Mapping[str, str] = {}


class OnMillpond(unittest.TestCase):
    """Mixin before a test class of Spark's: it installs Millpond, and counts operators.

    Attributes:
        application: a session of the application that the tests share; set before the first class runs.
        folder: for files of the tests; set before the first class runs.
        stateful: see `Suite`.
        operators: how many operators the test has started on Millpond.
    """

    application: SparkSession
    folder: Path
    stateful: Callable[[str], bool]
    operators: int

    @classmethod
    def setUpClass(cls) -> None:
        """Set what Spark's class sets, but in a new session of the shared application, with tables of its own."""
        given: Any = cls
        given.spark = cls.application.newSession()
        given.sc = given.spark.sparkContext
        for name, value in set(given.conf().getAll()) - set(SparkConf().getAll()):
            given.spark.conf.set(name, value)
        given.spark.conf.set("spark.millpond.onUnsupported", "error")
        millpond.install(given.spark)
        given.spark.sql(f"CREATE DATABASE {cls.__name__} LOCATION '{cls.folder / cls.__name__}'")
        given.spark.sql(f"USE {cls.__name__}")
        given.df = given.spark.createDataFrame([Row(key=number, value=str(number)) for number in range(100)])

    @classmethod
    def tearDownClass(cls) -> None:
        """Drop what is left of the class's tables; the application stays."""
        given: Any = cls
        given.spark.sql("USE default")
        given.spark.sql(f"DROP DATABASE {cls.__name__} CASCADE")

    def setUp(self) -> None:
        """Count the operators that Millpond puts into plans from now on."""
        super().setUp()
        self.operators = 0
        mkdtemp = tempfile.mkdtemp

        def counted(df: DataFrame, decision: Any, *more: Any) -> DataFrame:
            self.operators += len(decision.on_millpond)
            return rewrite_plan(df, decision, *more)

        def kept(suffix: Any = None, prefix: Any = None, dir: Any = None) -> str:
            return mkdtemp(suffix, prefix, dir or self.folder)

        patch = pytest.MonkeyPatch()
        patch.setattr("millpond.query.launch.rewrite_plan", counted)
        patch.setattr(tempfile, "mkdtemp", kept)
        self.addCleanup(patch.undo)

    def tearDown(self) -> None:
        """Stop what the test has left running, and see that it was no test of Spark's own operators."""
        given: Any = self
        for query in given.spark.streams.active:
            query.stop()
        super().tearDown()
        assert bool(self.operators) == self.stateful(self._testMethodName), f"{self.operators} operators on Millpond"


def on_millpond(suite: Suite) -> type[unittest.TestCase]:
    """The test class, to be run on Millpond."""
    path = f"{ZIP}/pyspark/sql"
    if path not in pyspark.sql.__path__:
        pyspark.sql.__path__.append(path)
    theirs = getattr(importlib.import_module(f"pyspark.sql.tests.{suite.module}"), suite.name)
    body: dict[str, Any] = {"__module__": __name__, "stateful": staticmethod(suite.stateful)}
    body |= {name: unittest.skip(why)(getattr(theirs, name)) for name, why in suite.left_out.items()}
    return type(suite.name, (OnMillpond, theirs), body)


def modules() -> set[str]:
    """Spark's test modules that are about streams or state, below `pyspark.sql.tests`."""
    with zipfile.ZipFile(ZIP) as packed:
        names = [Path(name.removeprefix(_TESTS)) for name in packed.namelist() if name.startswith(_TESTS)]
    about = (name for name in names if name.suffix == ".py" and name.name.startswith("test_"))
    return {".".join(name.with_suffix("").parts) for name in about if "stream" in str(name) or "state" in str(name)}
