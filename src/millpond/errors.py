"""Every error that Millpond raises, split by what the caller should do.

Errors carry a stable code and the place they come from (query, operator, partition, version, file), say the next step,
and pickle, so that they cross from a slot through Spark's worker to the driver unchanged.
"""

from __future__ import annotations

from typing import ClassVar

_PLACES = ("query", "operator", "variable", "partition", "version", "file")


class MillpondError(Exception):
    """What happened, where, and what to do about it.

    Args:
        message: what happened, one sentence.
        action: what the reader should do next, one sentence.
        query: where it happened, as far as known: the id of the query;
        operator: the number of the operator, as `explain` gives it;
        variable: of a processor's state, or `timers`;
        partition: of the state;
        version: of the state, which batch `version` reads and batch `version - 1` made;
        file: as a full URL or path.
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
        # A URL of a file begins with the word that would stand before it.
        known = {name: getattr(self, name) for name in _PLACES if getattr(self, name) is not None}
        place = ", ".join(
            str(value) if str(value).startswith(f"{name}:") else f"{name} {value}" for name, value in known.items()
        )
        said = f"[{self.code}] " + (f"{self.message.removesuffix('.')} ({place})." if place else self.message)
        return f"{said} {self.action}" if self.action else said

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, {n: getattr(self, n) for n in ("action", *_PLACES)})

    def at(self, **place: str | int | None) -> MillpondError:
        """Fill in places that are not known yet, and return the same error."""
        for name, value in place.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        return self


def _rebuild(kind: type[MillpondError], message: str, fields: dict[str, object]) -> MillpondError:
    return kind(message, **fields)  # type: ignore[arg-type]


class TransientError(MillpondError):
    """Something failed that may work when tried again: a slow store, a slot that died."""

    code = "TRANSIENT"


class UsageError(MillpondError):
    """The call or the query has to change."""

    code = "USAGE"


class SettingError(MillpondError):
    """A `spark.millpond.*` setting is unknown, malformed or contradicts another."""

    code = "SETTING"


class UnsupportedError(UsageError):
    """The query holds an operator that Millpond does not run, and `onUnsupported` is `error`."""

    code = "UNSUPPORTED"


class WrongInSparkError(UsageError):
    """The query has a shape for which Spark gives wrong rows, and Millpond the same ones."""

    code = "WRONG_IN_SPARK"


class StateIncompatibleError(UsageError):
    """The query differs from the one that wrote the checkpoint."""

    code = "STATE_INCOMPATIBLE"


class StateDamagedError(MillpondError):
    """A state file is missing, cut short or altered."""

    code = "STATE_DAMAGED"


class FencedError(MillpondError):
    """A newer run of the same query has taken over the checkpoint."""

    code = "FENCED"


class ArithmeticOverflowError(UsageError):
    """A value left the range of its type in ANSI mode; the code is Spark's error class for it."""

    code = "ARITHMETIC_OVERFLOW"


class NumericRangeError(ArithmeticOverflowError):
    """A decimal result does not fit its type in ANSI mode."""

    code = "NUMERIC_VALUE_OUT_OF_RANGE.WITH_SUGGESTION"


class DivideByZeroError(UsageError):
    """A result is divided by zero in ANSI mode."""

    code = "DIVIDE_BY_ZERO"
