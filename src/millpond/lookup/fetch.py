"""Concurrent lookups in an external table, each request on its own connection, with retries."""

from __future__ import annotations

import logging
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.errors import MillpondError, TransientError, UsageError
from millpond.lookup.table import Connection, Found, LookupTable
from millpond.lookup.user_errors import check_connection, check_found, find_bug
from millpond.spec.kinds.enrich import EnrichSpec
from millpond.spec.types import parse_type

_log = logging.getLogger("millpond")

ABSENT, PRESENT, FAILED = 0, 1, 2
"""State of a looked-up key."""

States = NDArray[np.uint8]

_FIRST_PAUSE_SECONDS, _BACKOFF_FACTOR, _MAX_PAUSE_SECONDS = 0.1, 3.0, 10.0
"""Backoff: first pause and longest pause in seconds, and the factor between two pauses."""

_JITTER_FACTORS = 0.75, 1.25
"""Random factors of a pause, lower and upper bound, so that slots do not retry at the same moment."""

_CHECK_SECONDS = 0.1
"""Seconds between two looks at what may end a wait: hanging requests, and the end of the query."""

_GRACE_SECONDS = 30.0
"""Seconds beyond its time-outs after which a request counts as hanging."""


class Failure(Exception):
    """The reason why keys could not be looked up.

    Attributes:
        kind: `timeout`, `unreachable` or `failed`; `unreadable` if it concerns one key.
        message: the table's message.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind
        self.message = message


@dataclass(frozen=True)
class Answer:
    """The result of one request, aligned with its keys.

    Attributes:
        values: the requested columns, one row per key, null where the key is absent or failed.
        states: `ABSENT`, `PRESENT` or `FAILED` for each key.
        failures: the failures of single keys, by position; empty if `failure` is set.
        failure: the failure of the whole request.
        seconds: duration, retries included.
        requested_at: time of the last try, by the monotonic clock, in seconds; the values may be as old as that.
    """

    values: pa.RecordBatch
    states: States
    failures: dict[int, Failure] = field(default_factory=dict)
    failure: Failure | None = None
    seconds: float = 0.0
    requested_at: float = 0.0

    def failure_of(self, position: int) -> Failure | None:
        """Return the failure of a key; None if it did not fail."""
        return self.failure or self.failures.get(position)


def looked_up_schema(spec: EnrichSpec) -> pa.Schema:
    """Return the schema of the columns that are looked up."""
    return pa.schema([(field.name, parse_type(field.type).arrow) for field in spec.found])


def load_table(spec: EnrichSpec) -> LookupTable:
    """Unpickle the table of a lookup join.

    Raises:
        UsageError: the table's class cannot be loaded here.
    """
    try:
        table: LookupTable = pickle.loads(spec.table)
    except Exception as error:
        raise UsageError(
            f"The table '{spec.name}' cannot be loaded where keys are looked up ({type(error).__name__}: {error}).",
            action="Install the module of its class on all hosts, or give it to the application (addPyFile).",
        ) from error
    return table


class Fetcher:
    """A client of one table with up to `spec.concurrency` concurrent requests.

    Args:
        spec: the lookup join.

    Raises:
        UsageError: the table cannot be loaded.
    """

    def __init__(self, spec: EnrichSpec) -> None:
        self._spec = spec
        self._table = load_table(spec)
        self._columns = looked_up_schema(spec)
        self._key_types = [parse_type(field.type).arrow for field in spec.key_fields]
        self._threads = ThreadPoolExecutor(spec.concurrency, "millpond-lookup")
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._warned = False
        self._request_starts: dict[int, float] = {}  # start time of the request that each thread runs

    def fetch(self, keys: pa.RecordBatch) -> Future[Answer]:
        """Submit a lookup. Non-blocking.

        Args:
            keys: distinct keys without nulls; columns have the table's names, in the order of `key_fields`.

        Returns:
            The answer, to be awaited with `wait`.
        """
        # A table would write times in another time zone as other texts.
        columns = self.cast_keys(keys.columns)
        return self._threads.submit(self._fetch, pa.RecordBatch.from_arrays(columns, names=keys.schema.names))

    def cast_keys(self, columns: Iterable[pa.Array]) -> list[pa.Array]:
        """Cast key columns to the spec's types: Spark gives times in the session's time zone, which may change."""
        return [column.cast(dtype) for column, dtype in zip(columns, self._key_types, strict=True)]

    def wait(self, answer: Future[Answer], is_closed: Callable[[], bool] = lambda: False) -> Answer:
        """Wait for an answer.

        Args:
            answer: the answer.
            is_closed: returns whether nothing needs the answer any more.

        Raises:
            UsageError: a retry cannot help.
            TransientError: the table exceeds its time-out without failing, or nothing needs the answer.
        """
        while not answer.done():
            wait([answer], _CHECK_SECONDS)
            if answer.done():  # though another request hangs
                break
            if is_closed():
                raise TransientError(f"The lookup in '{self._spec.name}' was cut short: its query has stopped.")
            if self.hangs:
                raise TransientError(
                    f"The table '{self._spec.name}' hangs: it was given {self._spec.timeout_ms / 1000:g} s to answer, "
                    f"and has not for {self._hang_seconds:g} s.",
                    action="See that its `connect` and `fetch` obey the time-out that they are given.",
                )
        return answer.result()

    @property
    def hangs(self) -> bool:
        """Whether a request exceeds its time-out without failing."""
        now = time.monotonic()
        # A copy, since other threads add and remove entries meanwhile.
        return any(now - begun > self._hang_seconds for begun in self._request_starts.copy().values())

    @property
    def _hang_seconds(self) -> float:
        return 2 * self._spec.timeout_ms / 1000 + _GRACE_SECONDS  # one time-out to connect, and one to fetch

    def _fetch(self, keys: pa.RecordBatch) -> Answer:
        started = time.monotonic()
        pause = _FIRST_PAUSE_SECONDS
        for last in [False] * self._spec.retries + [True]:
            requested_at = time.monotonic()
            try:
                result = self._timed_request(keys)
            except MillpondError as error:
                if not isinstance(error, TransientError):
                    raise
                failure = Failure("failed", str(error))
            except Exception as error:  # clients raise errors of all kinds, and a retry may help
                bug = find_bug(self._table, error)
                if bug is not None:
                    raise bug from error
                failure = Failure(
                    _failure_kind(error), f"{type(error).__name__}: {str(error).strip()}".removesuffix(": ")
                )
            else:
                answer = self._align(keys, result)
                break
            # The pause, which ends early when the fetcher is closed.
            if last or self._closed.wait(pause * random.uniform(*_JITTER_FACTORS)):
                answer = self._failed_answer(keys.num_rows, failure)
                break
            pause = min(_MAX_PAUSE_SECONDS, _BACKOFF_FACTOR * pause)
        self._warn(answer)
        return replace(answer, seconds=time.monotonic() - started, requested_at=requested_at)

    def _failed_answer(self, count: int, failure: Failure) -> Answer:
        columns = [pa.nulls(count, field.type) for field in self._columns]
        nothing = pa.RecordBatch.from_arrays(columns, schema=self._columns)
        return Answer(nothing, np.full(count, FAILED, np.uint8), failure=failure)

    def _warn(self, answer: Answer) -> None:
        """Log once why rows come out with nulls: the rows themselves do not show it."""
        failed = np.flatnonzero(answer.states == FAILED)
        if self._spec.on_error != "null" or not len(failed) or self._closed.is_set():
            return
        with self._lock:
            warned, self._warned = self._warned, True
        why = answer.failure_of(int(failed[0]))
        if why is not None and not warned:
            _log.warning(
                "the table '%s' could not be asked for %d keys (%s: %s): their rows come out with nulls, as "
                "on_error='null' says. This is logged once; the metric failed_keys counts further keys",
                *(self._spec.name, len(failed), why.kind, why.message),
            )

    def _timed_request(self, keys: pa.RecordBatch) -> Found:
        thread = threading.get_ident()
        # A thread has one request at a time, so its identity names the request.
        self._request_starts[thread] = time.monotonic()
        try:
            return self._request(keys)
        finally:
            del self._request_starts[thread]

    def _request(self, keys: pa.RecordBatch) -> Found:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = self._table.connect(self._columns, self._spec.timeout_ms / 1000)
            check_connection(self._table, connection)
        try:
            result = check_found(self._table, connection, connection.fetch(keys), self._columns)
        except BaseException:
            self._close_connections(connection)
            # The error may have broken the idle connections, too: retries open new ones.
            self._close_connections(*self._take_idle())
            raise
        with self._lock:
            # A fetcher that was closed meanwhile has dropped its idle connections: nothing would close this one.
            if not self._closed.is_set():
                self._idle.append(connection)
                return result
        self._close_connections(connection)
        return result

    def _take_idle(self) -> list[Connection]:
        with self._lock:
            idle, self._idle = self._idle, []
            return idle

    @staticmethod
    def _close_connections(*connections: Connection) -> None:
        for connection in connections:
            with suppress(Exception):
                connection.close()

    def _align(self, keys: pa.RecordBatch, found: Found) -> Answer:
        """Align found rows with the keys of the request."""
        count = keys.num_rows
        positions = np.asarray(found.at, np.int64)
        mentioned = np.concatenate([positions, np.fromiter(found.unreadable, np.int64)])
        if len(mentioned) and (mentioned.min() < 0 or mentioned.max() >= count):
            raise UsageError(
                f"The table '{self._spec.name}' gave a row of a key that was not asked for.", action="Mend its `fetch`."
            )
        if len(np.unique(positions)) < len(positions):
            raise UsageError(
                f"The table '{self._spec.name}' has several rows of one key.",
                action="Look up by columns that no two rows share.",
            )
        places = np.full(count, -1)
        places[positions] = np.arange(len(positions))
        indices = pa.array(places, mask=places < 0)
        states = np.where(places < 0, ABSENT, PRESENT).astype(np.uint8)
        failures = {int(position): Failure("unreadable", str(why)) for position, why in found.unreadable.items()}
        states[list(failures)] = FAILED
        return Answer(found.rows.take(indices), states, failures)

    def close(self) -> None:
        """Close all connections, and drop requests under way."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._close_connections(*self._take_idle())


def _failure_kind(error: BaseException) -> str:
    name = type(error).__name__.lower()
    if isinstance(error, TimeoutError) or "timeout" in name or "timeout" in str(error).lower():
        return "timeout"
    unreachable = isinstance(error, ConnectionError) or "connection" in name or "operational" in name
    return "unreachable" if unreachable else "failed"


_ADVICE = {
    "timeout": "See that it is up and near, or raise `timeout` or `retries`",
    "unreachable": "See that it is up and can be reached from all hosts of the application",
    "failed": "See what it says",
    "unreadable": "Mend what the table has there, or the type in `columns`",
}


def _format_key_value(part: pa.Array) -> str:
    """Format one column of one key."""
    try:
        return repr(part[0].as_py())
    except ValueError:  # a string that is not UTF-8, or a time that Python cannot represent
        return (
            repr(part.cast(pa.binary())[0].as_py()) if pa.types.is_string(part.type) else str(part.cast(pa.string())[0])
        )


def lookup_error(spec: EnrichSpec, failure: Failure, key: pa.RecordBatch, count: int) -> MillpondError:
    """Make the error of a batch in which `count` keys could not be looked up; `key` is the first of them."""
    shown = ", ".join(
        f"{name} = {_format_key_value(part)}" for name, part in zip(key.schema.names, key.columns, strict=True)
    )
    advice = (
        f"{_ADVICE[failure.kind]}. Nothing is lost: the batch is run again. To go on without what cannot be looked up, "
        "give enrich on_error='null' or 'side'."
    )
    more = f" and {count - 1} other{'s' * (count > 2)}" if count > 1 else ""
    if failure.kind == "unreadable":
        message = f"The table '{spec.name}' has for {shown}{more} what cannot be read: {failure.message}."
        return UsageError(message, action=advice)
    tries = f" in {spec.retries + 1} tries" if spec.retries else ""
    return TransientError(
        f"The table '{spec.name}' could not be asked for {shown}{more}{tries} ({failure.kind}: {failure.message}).",
        action=advice,
    )
