"""The examples in docstrings of all public names run, and show what they say (doctest)."""

import doctest
import re
from pathlib import Path
from pydoc import locate

import pytest
from pyspark.sql import SparkSession

import millpond
import millpond.lookup
import millpond.testing

REFERENCE = Path(__file__).parents[2] / "docs" / "reference.md"
NAMES = re.findall(r"^::: (\S+)$", REFERENCE.read_text(), re.M)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def errors(kind: type[Exception] = millpond.errors.MillpondError) -> set[str]:
    """The full names of the class and all classes below it in its module."""
    below = {name for subclass in kind.__subclasses__() for name in errors(subclass)}
    return below | ({f"millpond.errors.{kind.__name__}"} if kind.__module__ == "millpond.errors" else set())


def test_the_reference_has_all_public_names() -> None:
    modules = (millpond, millpond.lookup, millpond.testing)
    exported = {f"{module.__name__}.{name}" for module in modules for name in module.__all__}
    assert set(NAMES) == exported - {"millpond.__version__"} | errors() | {"millpond.query.writer.StreamWriter"}


@pytest.mark.every
@pytest.mark.parametrize("name", NAMES)
def test_examples_show_what_they_say(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """Each in a session of its own, with files of its own below /tmp; classes are pickled as those of a script."""
    names = {"millpond": millpond, "spark": spark.newSession(), "__name__": "__main__"}
    whole, *parts = sorted(doctest.DocTestFinder().find(locate(name), name, globs=names), key=lambda test: test.name)
    assert whole.examples, f"the docstring of {name} has no example"
    for test in (whole, *parts):
        for example in test.examples:
            example.source = example.source.replace("/tmp/", f"{tmp_path}/")
            example.want = example.want.replace("/tmp/", f"{tmp_path}/")
        report: list[str] = []
        doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append)
        assert not report, "".join(report)
