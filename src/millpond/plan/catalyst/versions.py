"""What differs between the versions of Spark that Millpond runs on: the one place that knows them.

Java signatures differ: each form is tried until one exists. What the versions' Python workers can call differs, too:
private names of PySpark that only some versions have are imported where they are used, behind `calls_user_code`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import pyspark
from py4j.protocol import Py4JError

from millpond.errors import UsageError

TESTED = ("4.1", "4.2", "4.3")
"""The versions of Spark that Millpond is tested with."""

CALLS_USER_CODE = "4.3"
"""The first version in which Millpond calls the user's functions over groups, and processors."""

_JOIN_HELPERS = (
    "org.apache.spark.sql.execution.streaming.operators.stateful.join.StreamingSymmetricHashJoinHelper",
    "org.apache.spark.sql.execution.streaming.StreamingSymmetricHashJoinHelper",
)
"""The full names of Spark's class that derives the state watermarks of a join."""

_Made = TypeVar("_Made")


def is_tested(version: str) -> bool:
    """Whether Millpond is tested with a version of Spark (`4.3.0`)."""
    return ".".join(version.split(".")[:2]) in TESTED


def calls_user_code() -> bool:
    """Whether this PySpark has the code by which Millpond calls the user's functions over groups, and processors."""
    return _since(CALLS_USER_CODE)


def semi_join_has_right_first() -> bool:
    """Whether the right rows of a left semi join come first in a batch. Spark 4.2 changed that."""
    return _since("4.2")


def semi_join_is_one_sided() -> bool:
    """Whether the watermark of a left semi join follows the left side alone. Spark 4.3 changed that."""
    return _since("4.3")


def weights_percentiles() -> bool:
    """Whether a percentile between two values is the sum of both, weighted, not the lower one plus a part of the gap.

    Spark 4.3 changed that: next to an infinity, and in the last digit, the results differ.
    """
    return not _since("4.3")


def merges_empty_moments() -> bool:
    """Whether Spark merges the central moments of no rows like any others, and `corr` divides by a variance of zero.

    Spark 4.3 changed both. Before, a power of a value that is beyond a double makes its sum NaN in the merge, and
    `corr` of a column that does not vary is an error in ANSI mode.
    """
    return not _since("4.3")


def _since(first: str) -> bool:
    here, there = (tuple(int(part) for part in version.split(".")[:2]) for version in (pyspark.__version__, first))
    return here >= there


def inline_cte(rule: Any, plan: Any) -> Any:
    """A JVM plan after Spark's rule `InlineCTE`, whose flags (false by default) differ in number."""
    return _first([partial(rule, *[False] * flags) for flags in (3, 2, 1)]).apply(plan)


def copied(java: Any, *fields: Any) -> Any:
    """A copy of a JVM plan node, whose last field is a hint in some versions."""
    return _first([lambda: java.copy(*fields, java.hint()), lambda: java.copy(*fields)])


def join_state_watermarks(class_of: Callable[[str], Any], *arguments: Any) -> Any:
    """Spark's `getStateWatermark` of a join: the class moved, and gained a flag for several columns of event time."""

    def call(name: str, *flags: bool) -> Any:
        return class_of(name).getStateWatermark(*arguments, *flags)

    return _first([partial(call, name, *flags) for name in _JOIN_HELPERS for flags in ([False], [])])


def scan_of_rdd(relation: Callable[..., Any], *fields: Any) -> Any:
    """A `LogicalRDD` with these fields. Spark 4.3 has a flag more, false by default."""
    return _first([partial(relation, *fields, *flags) for flags in ([], [False])])


def _first(forms: Sequence[Callable[[], _Made]]) -> _Made:
    """The result of the first form of a call that this version of Spark has.

    Raises:
        UsageError: it has none of them.
    """
    for form in forms:
        try:
            return form()
        except Py4JError as error:
            if "does not exist" not in str(error):
                raise
    raise UsageError(
        f"Spark {pyspark.__version__} lacks a method that Millpond calls.",
        action=f"Use one of the tested versions: {', '.join(f'{version}.x' for version in TESTED)}.",
    )
