"""Detection of bugs in a user's table class.

A bug is reported as a `UsageError` with the user's source lines, because no retry helps. Every other error is taken
for one of the store, and retried.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa

from millpond.errors import UsageError
from millpond.lookup.table import Connection, Found, LookupTable
from millpond.spec.types import spark_name

_ALWAYS_BUGS = (ImportError, NameError, NotImplementedError)
"""Exceptions that always mean a bug: no client raises them because of its store."""

_BUGS_IN_USER_LINES = (AttributeError, LookupError, TypeError)
"""Exceptions that clients also raise when a connection breaks: a bug only if the user's lines raise them."""

_OWN_PACKAGE = "millpond"
_ARROW_PACKAGE = "pyarrow"
_MAX_FRAMES = 5


def find_bug(table: LookupTable, error: Exception) -> UsageError | None:
    """Find the bug in a table's code that raised an error.

    Args:
        table: the table.
        error: an exception of its `connect` or `fetch`, with its traceback.

    Returns:
        The error to raise; None if the store, not the code, caused the exception.
    """
    if type(error).__module__.partition(".")[0] not in ("builtins", _ARROW_PACKAGE):  # a client's own class
        return None
    frames = [entry for entry in traceback.walk_tb(error.__traceback__) if _package(entry[0]) != _ARROW_PACKAGE]
    start = next(
        (index for index, (frame, _) in enumerate(frames) if frame.f_globals.get("__name__") != _CALLING_MODULE), None
    )
    # empty: the call itself failed, for example with wrong arguments
    called = frames[start:] if start is not None else []
    home = _package(called[0][0]) if called else ""
    if home == _OWN_PACKAGE:
        return None
    # The table's own package counts as the user's, also where it is installed as a library.
    users = [(frame, line) for frame, line in called if _package(frame) == home or not _in_library(frame)]
    at_once = not called or users[-1:] == called[-1:]
    if not isinstance(error, _ALWAYS_BUGS) and not (isinstance(error, _BUGS_IN_USER_LINES) and at_once):
        return None
    lines = [f"{frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name}" for frame, line in users]
    where = "; ".join(lines[-_MAX_FRAMES:]) or f"the call of {type(table).__qualname__}"
    return UsageError(
        f"The table '{table.name}' has a bug: {type(error).__name__}: {str(error).strip()} ({where}).",
        action="Mend its code. Is it the store that fails so, raise an error of another kind there, an OSError say.",
    )


_CALLING_MODULE = "millpond.lookup.fetch"
"""The module that calls tables."""

_LIBRARY_FOLDERS = tuple(path for name, path in sysconfig.get_paths().items() if "lib" in name)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _in_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(("<frozen", *_LIBRARY_FOLDERS)) or "site-packages" in file or "dist-packages" in file


def check_connection(table: LookupTable, connection: object) -> None:
    """Check that `connect` returned a connection.

    Raises:
        UsageError: it returned something else.
    """
    if not callable(getattr(connection, "fetch", None)):
        raise _wrong_result(table, table.connect, _kind(connection), "a connection, which has `fetch` and `close`,")


def check_found(table: LookupTable, connection: Connection, found: object, columns: pa.Schema) -> Found:
    """Check the result of `fetch`, except for the range of its positions.

    Returns:
        The same result, with the requested columns in the requested types.

    Raises:
        UsageError: the result is malformed.
    """
    fetch = connection.fetch
    if not isinstance(found, Found):
        raise _wrong_result(table, fetch, _kind(found), "Found(rows, at)")
    rows, positions, unreadable = found
    if not isinstance(rows, pa.RecordBatch):
        raise _wrong_result(table, fetch, f"{_kind(rows)} as `rows` of Found", "a RecordBatch")
    places = np.asarray(positions)
    if places.ndim != 1 or (len(places) and places.dtype.kind not in "iu"):
        raise _wrong_result(table, fetch, f"{_kind(positions)} as `at` of Found", "a list of positions")
    if len(places) != rows.num_rows:
        raise _wrong_result(
            table, fetch, f"{rows.num_rows} rows and {len(places)} positions in Found", "one for each row"
        )
    if not isinstance(unreadable, Mapping) or not all(
        isinstance(position, int | np.integer) for position in unreadable
    ):
        raise _wrong_result(table, fetch, f"{_kind(unreadable)} as `unreadable` of Found", "a dict by position")
    missing = [name for name in columns.names if rows.schema.names.count(name) != 1]
    if missing:
        returned = f"rows with the columns {', '.join(rows.schema.names) or '(none)'}"
        raise _wrong_result(table, fetch, returned, f"one column {missing[0]} among them")
    converted = []
    for field in columns:
        values = rows.column(field.name)
        try:
            converted.append(values.cast(field.type))
        except pa.ArrowException as error:
            returned = f"the column {field.name} as {spark_name(values.type)}"
            raise _wrong_result(table, fetch, returned, f"{spark_name(field.type)} ({error})") from error
    return found._replace(rows=pa.RecordBatch.from_arrays(converted, schema=columns))


def _wrong_result(table: LookupTable, function: Callable[..., Any], result: str, expected: str) -> UsageError:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    where = f" ({code.co_filename}, line {code.co_firstlineno}, in {code.co_name})" if code is not None else ""
    return UsageError(
        f"The table '{table.name}' gave {result} where {expected} was expected{where}.",
        action="Mend its code: `millpond docs enrichment` has a table to start from.",
    )


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
