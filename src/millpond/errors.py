"""The errors that Millpond raises, one class for each reaction of the caller.

An error carries a stable code, the place that it comes from (query, operator, partition, version, file) and the next
step. Errors pickle, so that they cross from a slot through Spark's Python worker to the driver unchanged.
"""

from __future__ import annotations

from typing import ClassVar

_PLACES = ("query", "operator", "variable", "partition", "version", "file")


class MillpondError(Exception):
    """Base class of all errors: what happened, where, and what to do next.

    Args:
        message: what happened, in one sentence.
        action: what the reader should do next, in one sentence.
        query: the id of the query. This and the following are None where they are not known.
        operator: the number of the operator in `explain`.
        variable: the state variable of a processor, or `timers`.
        partition: the partition of the state.
        version: the version of the state, which batch `version - 1` made and batch `version` reads.
        file: the file, as a full URL or path.

    Examples:
        >>> from millpond.errors import MillpondError
        >>> try:
        ...     millpond.read_state(spark, "/tmp/nothing")
        ... except MillpondError as error:
        ...     print(error.code, error.action)
        USAGE Give the query's checkpointLocation, or its folder in spark.millpond.state.location.
    """

    code: ClassVar[str] = "MILLPOND"

    def __init__(
        self,
        message: str,
        *,
        action: str = "",
        query: str | None = None,
        operator: str | None = None,
        variable: str | None = None,
        partition: int | None = None,
        version: int | None = None,
        file: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.action = action
        self.query = query
        self.operator = operator
        self.variable = variable
        self.partition = partition
        self.version = version
        self.file = file

    def __str__(self) -> str:
        known = {name: str(getattr(self, name)) for name in _PLACES if getattr(self, name) is not None}
        # The URL of a local file begins with the word that would stand before it.
        place = ", ".join(
            value if name == "file" and value.startswith("file:") else f"{name} {value}"
            for name, value in known.items()
        )
        summary, newline, details = self.message.partition("\n")
        if place:
            end = ":" if summary.endswith(":") else "."
            summary = f"{summary.removesuffix(end)} ({place}){end}"
        text = f"[{self.code}] {summary}{newline}{details}"
        if not self.action:
            return text
        return text + self.action if text.endswith("\n") else f"{text} {self.action}"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, {n: getattr(self, n) for n in ("action", *_PLACES)})

    def at(self, **place: str | int | None) -> MillpondError:
        """Fill in the parts of the place that are not known yet.

        Args:
            place: values by name: `query`, `operator`, `variable`, `partition`, `version`, `file`.

        Returns:
            This error.

        Examples:
            >>> from millpond.errors import TransientError
            >>> str(TransientError("The store does not answer.").at(operator="0", partition=3))
            '[TRANSIENT] The store does not answer (operator 0, partition 3).'
        """
        for name, value in place.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        return self


def _rebuild(kind: type[MillpondError], message: str, fields: dict[str, object]) -> MillpondError:
    return kind(message, **fields)  # type: ignore[arg-type]


class TransientError(MillpondError):
    """A failure that may not happen again: a slow store, a slot that died. Retry the call or the query.

    Examples:
        >>> from millpond.errors import TransientError
        >>> str(TransientError("The store does not answer.", action="Start the query again."))
        '[TRANSIENT] The store does not answer. Start the query again.'
    """

    code = "TRANSIENT"


class UsageError(MillpondError):
    """A mistake in a call or a query, which has to change.

    Examples:
        >>> millpond.explain(spark.readStream.format("rate").load(), "upsert")
        Traceback (most recent call last):
        millpond.errors.UsageError: [USAGE] There is no output mode 'upsert'. Give append, update or complete.
    """

    code = "USAGE"


class SettingError(MillpondError):
    """A `spark.millpond.*` setting that is unknown, malformed or contradicts another one.

    Examples:
        >>> spark.conf.set("spark.millpond.slots", "many")
        >>> millpond.explain(spark.readStream.format("rate").load())
        Traceback (most recent call last):
        millpond.errors.SettingError: [SETTING] spark.millpond.slots is 'many', but has to be a whole number, ...
    """

    code = "SETTING"


class UnsupportedError(UsageError):
    """An operator that Millpond does not run, while `spark.millpond.onUnsupported` is `error`.

    Examples:
        >>> from pyspark.sql import functions as F
        >>> spark.conf.set("spark.millpond.onUnsupported", "error")
        >>> values = spark.readStream.format("rate").load().agg(F.median("value"))
        >>> millpond.writeStream(values).outputMode("update").start(format="noop")
        Traceback (most recent call last):
        millpond.errors.UnsupportedError: [UNSUPPORTED] The operator 'aggregate' is not supported: MP-WHOLE: ...
    """

    code = "UNSUPPORTED"


class WrongInSparkError(UsageError):
    """A query shape for which Spark gives wrong rows, and Millpond the same ones.

    Examples:
        >>> left, right = (spark.readStream.format("rate").load() for _ in range(2))
        >>> joined = left.withWatermark("timestamp", "1 minute").join(right, ["value", "timestamp"], "left")
        >>> millpond.writeStream(joined).start(format="noop")
        Traceback (most recent call last):
        millpond.errors.WrongInSparkError: [WRONG_IN_SPARK] The operator 'left outer join' would give wrong rows, ...
    """

    code = "WRONG_IN_SPARK"


class StateIncompatibleError(UsageError):
    """A query that differs from the one that wrote the checkpoint.

    Examples:
        >>> from pyspark.sql import functions as F
        >>> keys = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 6).load().groupBy("value")
        >>> for results in (keys.count(), keys.agg(F.max("timestamp"))):
        ...     writer = millpond.writeStream(results).outputMode("update").trigger(availableNow=True)
        ...     writer.start(format="noop", checkpointLocation="/tmp/counts").awaitTermination()
        Traceback (most recent call last):
        millpond.errors.StateIncompatibleError: [STATE_INCOMPATIBLE] The query differs from the one that wrote this ...
    """

    code = "STATE_INCOMPATIBLE"


class StateDamagedError(MillpondError):
    """A state file that is missing, truncated or altered.

    Examples:
        >>> from millpond.errors import StateDamagedError
        >>> str(StateDamagedError("A commit is truncated.", version=7, file="file:///tmp/counts/state/7"))
        '[STATE_DAMAGED] A commit is truncated (version 7, file:///tmp/counts/state/7).'
    """

    code = "STATE_DAMAGED"


class FencedError(MillpondError):
    """A write that was refused because a newer run of the same query has taken over the checkpoint.

    Examples:
        >>> from millpond.errors import FencedError
        >>> str(FencedError("A newer run has taken over.", query="0f3c", version=7))
        '[FENCED] A newer run has taken over (query 0f3c, version 7).'
    """

    code = "FENCED"


class ArithmeticOverflowError(UsageError):
    """A value out of the range of its type in ANSI mode; the code is Spark's error class.

    Examples:
        >>> from millpond.errors import ArithmeticOverflowError
        >>> ArithmeticOverflowError.code
        'ARITHMETIC_OVERFLOW'
    """

    code = "ARITHMETIC_OVERFLOW"


class NumericRangeError(ArithmeticOverflowError):
    """A decimal result that does not fit its type in ANSI mode; the code is Spark's error class.

    Examples:
        >>> from millpond.errors import ArithmeticOverflowError, NumericRangeError
        >>> issubclass(NumericRangeError, ArithmeticOverflowError)
        True
    """

    code = "NUMERIC_VALUE_OUT_OF_RANGE.WITH_SUGGESTION"


class DivideByZeroError(UsageError):
    """A division by zero in ANSI mode; the code is Spark's error class.

    Examples:
        >>> from millpond.errors import DivideByZeroError
        >>> DivideByZeroError.code
        'DIVIDE_BY_ZERO'
    """

    code = "DIVIDE_BY_ZERO"
