"""Formatting of counts, lengths of time and errors for people."""

from __future__ import annotations

_LENGTHS = (
    ("day", 86_400_000_000),
    ("hour", 3_600_000_000),
    ("minute", 60_000_000),
    ("second", 1_000_000),
    ("millisecond", 1_000),
    ("microsecond", 1),
)


def counted(number: int, noun: str, plural: str = "") -> str:
    """Format a count, e.g. `1 batch` or `2,000 batches`; without `plural`, the plural is the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def duration(microseconds: int) -> str:
    """Format a length of time in microseconds, e.g. `1 minute 30 seconds`."""
    sign, rest = ("−" if microseconds < 0 else ""), abs(microseconds)
    parts = []
    for name, unit in _LENGTHS:
        number, rest = divmod(rest, unit)
        if number:
            parts.append(counted(number, name))
    return sign + " ".join(parts or ["0 seconds"])


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without its final period.

    The answer of a store and the stack trace of the JVM follow in later lines.
    """
    return str(error).partition("\n")[0].rstrip(".")
