"""Mistakes in a table of one's own: no other try mends them, so they are told by name, with the lines they come from.

Everything else that a table raises is its store's: that may answer the next time.
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

_ALWAYS = (ImportError, NameError, NotImplementedError)
"""What no store makes a client raise."""

_IN_USERS = (AttributeError, LookupError, TypeError)
"""What clients also raise of a connection that broke: they are mistakes where lines of the user's raise them."""

_OURS = "millpond"
_ARROW = "pyarrow"
_MOST_FRAMES = 5


def mistake_in(table: LookupTable, error: Exception) -> UsageError | None:
    """The mistake in a table's code that an error tells of; None if it is the store's.

    Args:
        table: the table. error: what its `connect` or `fetch` has raised, as it was caught.
    """
    if type(error).__module__.partition(".")[0] not in ("builtins", _ARROW):  # a client's own, whatever it derives from
        return None
    frames = [one for one in traceback.walk_tb(error.__traceback__) if _package(one[0]) != _ARROW]
    below = next((at for at, (frame, _) in enumerate(frames) if frame.f_globals.get("__name__") != _CALLER), None)
    called = frames[below:] if below is not None else []  # none: it cannot be called as it has to be
    home = _package(called[0][0]) if called else ""
    if home == _OURS:
        return None
    users = [(frame, line) for frame, line in called if _package(frame) == home or not _in_library(frame)]
    at_once = not called or users[-1:] == called[-1:]
    if not isinstance(error, _ALWAYS) and not (isinstance(error, _IN_USERS) and at_once):
        return None
    lines = [f"{frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name}" for frame, line in users]
    said = "; ".join(lines[-_MOST_FRAMES:]) or f"the call of {type(table).__qualname__}"
    return UsageError(
        f"The table '{table.name}' has a bug: {type(error).__name__}: {str(error).strip()} ({said}).",
        action="Mend its code. Is it the store that fails so, raise an error of another kind there, an OSError say.",
    )


_CALLER = "millpond.lookup.fetch"
"""Where tables are called."""

_LIBRARIES = tuple(path for name, path in sysconfig.get_paths().items() if "lib" in name)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _in_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(("<frozen", *_LIBRARIES)) or "site-packages" in file or "dist-packages" in file


def check_connection(table: LookupTable, connection: object) -> None:
    """See that a table has connected.

    Raises:
        UsageError: it gave something else.
    """
    if not callable(getattr(connection, "fetch", None)):
        raise _gave(table, table.connect, _kind(connection), "a connection, which has `fetch` and `close`,")


def check_found(table: LookupTable, connection: Connection, found: object, columns: pa.Schema) -> Found:
    """See that what a table gave is what it has to be, but for the keys that it names.

    Returns:
        The same, its rows with the columns that were asked for, in their types.

    Raises:
        UsageError: it is not.
    """
    fetch = connection.fetch
    if not isinstance(found, Found):
        raise _gave(table, fetch, _kind(found), "Found(rows, at)")
    rows, at, unreadable = found
    if not isinstance(rows, pa.RecordBatch):
        raise _gave(table, fetch, f"{_kind(rows)} as `rows` of Found", "a RecordBatch")
    places = np.asarray(at)
    if places.ndim != 1 or (len(places) and places.dtype.kind not in "iu"):
        raise _gave(table, fetch, f"{_kind(at)} as `at` of Found", "a list of positions")
    if len(places) != rows.num_rows:
        raise _gave(table, fetch, f"{rows.num_rows} rows and {len(places)} positions in Found", "one for each row")
    if not isinstance(unreadable, Mapping) or not all(isinstance(one, int | np.integer) for one in unreadable):
        raise _gave(table, fetch, f"{_kind(unreadable)} as `unreadable` of Found", "a dict by position")
    missing = [name for name in columns.names if rows.schema.names.count(name) != 1]
    if missing:
        said = f"rows with the columns {', '.join(rows.schema.names) or '(none)'}"
        raise _gave(table, fetch, said, f"one column {missing[0]} among them")
    converted = []
    for wanted in columns:
        here = rows.column(wanted.name)
        try:
            converted.append(here.cast(wanted.type))
        except pa.ArrowException as error:
            said = f"the column {wanted.name} as {spark_name(here.type)}"
            raise _gave(table, fetch, said, f"{spark_name(wanted.type)} ({error})") from error
    return found._replace(rows=pa.RecordBatch.from_arrays(converted, schema=columns))


def _gave(table: LookupTable, function: Callable[..., Any], said: str, expected: str) -> UsageError:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    where = f" ({code.co_filename}, line {code.co_firstlineno}, in {code.co_name})" if code is not None else ""
    return UsageError(
        f"The table '{table.name}' gave {said} where {expected} was expected{where}.",
        action="Mend its code: `millpond docs enrichment` has a table to start from.",
    )


def _kind(given: object) -> str:
    return "None" if given is None else f"a {type(given).__name__}"
