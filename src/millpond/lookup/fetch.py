"""Looks keys up in a table: several requests at a time, each on its own connection, and tried again if it fails."""

from __future__ import annotations

import logging
import pickle
import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.errors import MillpondError, TransientError, UsageError
from millpond.lookup.mistakes import check_connection, check_found, mistake_in
from millpond.lookup.table import Connection, Found, LookupTable
from millpond.spec.kinds.enrich import EnrichSpec
from millpond.spec.types import parse_type

_log = logging.getLogger("millpond")

ABSENT, THERE, FAILED = 0, 1, 2
"""What became of a key."""

States = NDArray[np.uint8]

_FIRST_WAIT, _LONGER, _LONGEST_WAIT = 0.1, 3.0, 10.0
"""Seconds between the first two tries, how many times as long each next pause is, and the longest."""

_JITTER = 0.75, 1.25
"""What pauses are multiplied with, at random: not all slots come back to a server at once."""

_LOOK = 0.5
"""Seconds between two looks at whether a request that is waited for hangs."""

_GRACE = 30.0
"""Seconds beyond its time-outs after which it does."""


class Failure(Exception):
    """Why keys could not be looked up.

    Attributes:
        kind: `timeout`, `unreachable`, `failed`, or of one key `unreadable`.
        said: what the table has said.
    """

    def __init__(self, kind: str, said: str) -> None:
        super().__init__(kind, said)
        self.kind = kind
        self.said = said


@dataclass(frozen=True)
class Answer:
    """What a table has of some keys.

    Attributes:
        values: the columns that were asked for, a row for each key, null where it is not there.
        states: `ABSENT`, `THERE` or `FAILED` for each key.
        failures: why, of each key that failed, by position; none for all of them if `failure` says it.
        failure: why all of them did.
        seconds: how long it took.
        asked: when, by the monotonic clock in seconds: what was found may be as old as that.
    """

    values: pa.RecordBatch
    states: States
    failures: dict[int, Failure] = field(default_factory=dict)
    failure: Failure | None = None
    seconds: float = 0.0
    asked: float = 0.0

    def why(self, position: int) -> Failure | None:
        """Why a key failed; None if it did not."""
        return self.failure or self.failures.get(position)


def wanted(spec: EnrichSpec) -> pa.Schema:
    """The columns that are looked up."""
    return pa.schema([(one.name, parse_type(one.type).arrow) for one in spec.found])


def table_of(spec: EnrichSpec) -> LookupTable:
    """The table that keys are looked up in.

    Raises:
        UsageError: its class cannot be loaded here.
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
    """Looks keys up in one table, `spec.concurrency` requests at a time.

    Args:
        spec: of the lookup join.

    Raises:
        UsageError: the table cannot be loaded.
    """

    def __init__(self, spec: EnrichSpec) -> None:
        self._spec = spec
        self._table = table_of(spec)
        self._columns = wanted(spec)
        self._threads = ThreadPoolExecutor(spec.concurrency, "millpond-lookup")
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._told = False
        self._begun: dict[int, float] = {}  # when each thread that asks the table began to

    def fetch(self, keys: pa.RecordBatch) -> Future[Answer]:
        """Look keys up, different ones without nulls, called as in the table.

        Returns:
            Their answer, once it is there; to be waited for by `wait`.
        """
        return self._threads.submit(self._fetch, keys)

    def wait(self, answer: Future[Answer]) -> Answer:
        """Wait for an answer.

        Raises:
            UsageError: no other try can help.
            TransientError: the table does not obey its time-out.
        """
        while not answer.done():
            wait([answer], _LOOK)
            limit = 2 * self._spec.timeout_ms / 1000 + _GRACE  # to connect, and to ask
            now = time.monotonic()
            if any(now - begun > limit for begun in self._begun.copy().values()):
                raise TransientError(
                    f"The table '{self._spec.name}' hangs: it was given {self._spec.timeout_ms / 1000:g} s to answer, "
                    f"and has not for {limit:g} s.",
                    action="See that its `connect` and `fetch` obey the time-out that they are given.",
                )
        return answer.result()

    def _fetch(self, keys: pa.RecordBatch) -> Answer:
        started = time.monotonic()
        pause = _FIRST_WAIT
        for last in [False] * self._spec.retries + [True]:
            asked = time.monotonic()
            try:
                found = self._once(keys)
            except MillpondError as error:
                if not isinstance(error, TransientError):
                    raise
                failure = Failure("failed", str(error))
            except Exception as error:  # whatever a client raises: another try may help
                mistake = mistake_in(self._table, error)
                if mistake is not None:
                    raise mistake from error
                failure = Failure(_kind_of(error), f"{type(error).__name__}: {str(error).strip()}".removesuffix(": "))
            else:
                answer = self._aligned(keys, found)
                break
            if last or self._closed.wait(pause * random.uniform(*_JITTER)):
                answer = self._failed(keys.num_rows, failure)
                break
            pause = min(_LONGEST_WAIT, _LONGER * pause)
        self._warn(answer)
        return replace(answer, seconds=time.monotonic() - started, asked=asked)

    def _failed(self, count: int, failure: Failure) -> Answer:
        columns = [pa.nulls(count, one.type) for one in self._columns]
        nothing = pa.RecordBatch.from_arrays(columns, schema=self._columns)
        return Answer(nothing, np.full(count, FAILED, np.uint8), failure=failure)

    def _warn(self, answer: Answer) -> None:
        """Say once why rows come out with nulls: nothing else in them tells."""
        failed = np.flatnonzero(answer.states == FAILED)
        if self._spec.on_error != "null" or not len(failed) or self._closed.is_set():
            return
        with self._lock:
            told, self._told = self._told, True
        why = answer.why(int(failed[0]))
        if why is not None and not told:
            _log.warning(
                "the table '%s' could not be asked for %d keys (%s: %s): their rows come out with nulls, as "
                "on_error='null' says. This is said once; the figure failed_keys tells of others",
                *(self._spec.name, len(failed), why.kind, why.said),
            )

    def _once(self, keys: pa.RecordBatch) -> Found:
        thread = threading.get_ident()
        self._begun[thread] = time.monotonic()
        try:
            return self._ask(keys)
        finally:
            del self._begun[thread]

    def _ask(self, keys: pa.RecordBatch) -> Found:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = self._table.connect(self._columns, self._spec.timeout_ms / 1000)
            check_connection(self._table, connection)
        try:
            found = check_found(self._table, connection, connection.fetch(keys), self._columns)
        except BaseException:
            self._hang_up(connection)
            self._hang_up(*self._take_idle())  # what has ended one may have ended all: other tries begin anew
            raise
        with self._lock:
            if not self._closed.is_set():
                self._idle.append(connection)
                return found
        self._hang_up(connection)
        return found

    def _take_idle(self) -> list[Connection]:
        with self._lock:
            idle, self._idle = self._idle, []
            return idle

    @staticmethod
    def _hang_up(*connections: Connection) -> None:
        for connection in connections:
            with suppress(Exception):
                connection.close()

    def _aligned(self, keys: pa.RecordBatch, found: Found) -> Answer:
        """What was found, a row for each key in the order of the keys."""
        count = keys.num_rows
        at = np.asarray(found.at, np.int64)
        named = np.concatenate([at, np.fromiter(found.unreadable, np.int64)])
        if len(named) and (named.min() < 0 or named.max() >= count):
            raise UsageError(
                f"The table '{self._spec.name}' gave a row of a key that was not asked for.", action="Mend its `fetch`."
            )
        if len(np.unique(at)) < len(at):
            raise UsageError(
                f"The table '{self._spec.name}' has several rows of one key.",
                action="Look up by columns that no two rows share.",
            )
        places = np.full(count, -1)
        places[at] = np.arange(len(at))
        indices = pa.array(places, mask=places < 0)
        states = np.where(places < 0, ABSENT, THERE).astype(np.uint8)
        failures = {int(position): Failure("unreadable", str(why)) for position, why in found.unreadable.items()}
        states[list(failures)] = FAILED
        return Answer(found.rows.take(indices), states, failures)

    def close(self) -> None:
        """End all connections; what is on its way is given up."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._hang_up(*self._take_idle())


def _kind_of(error: BaseException) -> str:
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


def _shown(part: pa.Array) -> str:
    """One part of one key."""
    try:
        return repr(part[0].as_py())
    except ValueError:  # a text that is not in UTF-8, a time beyond those of Python's
        return (
            repr(part.cast(pa.binary())[0].as_py()) if pa.types.is_string(part.type) else str(part.cast(pa.string())[0])
        )


def error_of(spec: EnrichSpec, failure: Failure, key: pa.RecordBatch, count: int) -> MillpondError:
    """The error of a batch that fails because `count` keys could not be looked up; `key` is the first of them."""
    one = ", ".join(f"{name} = {_shown(part)}" for name, part in zip(key.schema.names, key.columns, strict=True))
    advice = (
        f"{_ADVICE[failure.kind]}. Nothing is lost: the batch is run again. To go on without what cannot be looked up, "
        "give enrich on_error='null' or 'side'."
    )
    others = f" and {count - 1} other{'s' * (count > 2)}" if count > 1 else ""
    if failure.kind == "unreadable":
        said = f"The table '{spec.name}' has for {one}{others} what cannot be read: {failure.said}."
        return UsageError(said, action=advice)
    tries = f" in {spec.retries + 1} tries" if spec.retries else ""
    return TransientError(
        f"The table '{spec.name}' could not be asked for {one}{others}{tries} ({failure.kind}: {failure.said}).",
        action=advice,
    )
