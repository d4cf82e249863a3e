"""Differences between the supported versions of Spark; no other module depends on them.

Java signatures differ: each form is tried until one exists. The Python worker code differs, too. Private names of
PySpark that only some versions have are imported where they are used, behind `calls_user_code`.
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
"""The first version in which Millpond calls user functions over groups, and processors."""

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
    """Whether this PySpark has the code for calling user functions over groups, and processors."""
    return _since(CALLS_USER_CODE)


def semi_join_has_right_first() -> bool:
    """Whether right rows of a left semi join are processed first in a batch, as since Spark 4.2."""
    return _since("4.2")


def semi_join_is_one_sided() -> bool:
    """Whether the watermark of a left semi join follows the left side alone, as since Spark 4.3."""
    return _since("4.3")


def weights_percentiles() -> bool:
    """Whether a percentile between two values is their weighted sum, as before Spark 4.3.

    Since then it is the lower value plus a part of the gap: next to an infinity, and in the last digit, the results
    differ.
    """
    return not _since("4.3")


def merges_empty_moments() -> bool:
    """Whether central moments of no rows are merged as any others, and `corr` divides by a zero variance.

    This holds before Spark 4.3. There, the merge gives NaN if a power of a value exceeds a double. `corr` of a constant
    column is an error in ANSI mode.
    """
    return not _since("4.3")


def _since(first: str) -> bool:
    installed, required = (
        tuple(int(part) for part in version.split(".")[:2]) for version in (pyspark.__version__, first)
    )
    return installed >= required


def inline_cte(rule: Any, plan: Any) -> Any:
    """Apply Spark's rule `InlineCTE`; its flags (false by default) differ in number."""
    return _first([partial(rule, *[False] * flags) for flags in (3, 2, 1)]).apply(plan)


def copied(java: Any, *fields: Any) -> Any:
    """Copy a JVM plan node, whose last field is a hint in some versions."""
    return _first([lambda: java.copy(*fields, java.hint()), lambda: java.copy(*fields)])


def join_state_watermarks(class_of: Callable[[str], Any], *arguments: Any) -> Any:
    """Call Spark's `getStateWatermark` of a join; the class moved, and gained a flag for several event-time columns."""

    def call(name: str, *flags: bool) -> Any:
        return class_of(name).getStateWatermark(*arguments, *flags)

    return _first([partial(call, name, *flags) for name in _JOIN_HELPERS for flags in ([False], [])])


def scan_of_rdd(relation: Callable[..., Any], *fields: Any) -> Any:
    """Make a `LogicalRDD` with these fields; Spark 4.3 has one more flag, false by default."""
    return _first([partial(relation, *fields, *flags) for flags in ([], [False])])


def _first(forms: Sequence[Callable[[], _Made]]) -> _Made:
    """Return the result of the first form of a call that this version of Spark has.

    Raises:
        UsageError: it has no such form.
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
