"""Expiry of rows by time, in memory and in runs, without visiting every row each time."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.hot_table.expiry import (
    ACCESS_TIME_END,
    ACCESS_TIME_ZERO,
    list_expiring,
    relist_expiring,
    sample_times,
    take_due,
)
from millpond.kernels.hot_table.state import ACCESS_TIME_SHIFT, EXPIRY, FLAGS, LOST, NOTHING_LOST
from millpond.kernels.hot_table.upsert import TOUCH_NONE
from millpond.kernels.runs.gather import addresses
from millpond.layout import META, NEVER, HashRange, Rows
from millpond.stores.protocol import FoundRows
from millpond.stores.rmw.hot.table import HotTable
from millpond.stores.rmw.memory_manager import MemoryManager
from millpond.stores.runs.merge import merge, piece_rows
from millpond.stores.runs.run import Query, Run
from millpond.stores.runs.run_set import RunSet

_FILED_DIVISOR = 8  # divisor: the share of rows that is filed, or read ahead, so that a pass over all of them pays
_SAMPLE_ROWS = 4096  # rows sampled to choose the horizon, roughly
_MAX_PIECE_ROWS = 16384  # rows in a piece of due rows, and in a piece of a run that is read, at most
_MIN_PIECE_BYTES = 1 << 18  # bytes of such a piece, at least, however small the slot: it is looked up in all newer runs
_MAX_TIME = NEVER - ACCESS_TIME_ZERO  # the last time that has a stamp of its own, if stamps are not bounded
_NO_STAMP_LEFT = NEVER + 1  # later than every stamp: all rows of a run have been read


class Expiry:
    """A coarse order in which rows expire.

    In memory, rows that expire before a horizon are filed in a list. When the horizon has passed, one pass over all
    rows files those before the next horizon. The horizon is chosen so that they are a small share. A filed row's time
    may move forward: it is checked when the row comes due.

    For each run, the lowest stamp of the rows not yet read is known. When it comes due, one pass over the run reads the
    rows that are due, and rows due soon as far as memory allows: predictive batch read (FlowKV §4.2).

    Args:
        hot: the rows in memory. runs: the other rows. memory: makes room for rows that are read.
        range_: the hash range of the table.
        offset: index of the word that holds a row's time of expiry, in milliseconds.
        piece_bytes: bytes of rows that are copied at once, roughly.
    """

    def __init__(
        self, hot: HotTable, runs: RunSet, memory: MemoryManager, range_: HashRange, offset: int, piece_bytes: int
    ) -> None:
        self._hot = hot
        self._runs = runs
        self._memory = memory
        self._range = range_
        self._offset = offset
        self._piece_bytes = max(piece_bytes, _MIN_PIECE_BYTES)
        self._filed = hot.allocate_expiry_list()
        hot.state[EXPIRY] = offset
        self._clear_filed()

    def _clear_filed(self) -> None:
        self._filed_count = 0
        self._horizon = -NEVER
        self._earliest = NEVER  # lower bound of the filed rows' times of expiry
        self._moves = self._hot.moves

    @staticmethod
    def stamps(times: NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert times of expiry in milliseconds to the stamps with which keys are upserted."""
        return np.clip(_unbounded_stamps(times), 1, ACCESS_TIME_END)

    def write(self, rows: NDArray[np.int64], times: NDArray[np.int64]) -> None:
        """Write the times of expiry (milliseconds) of rows that the batch changed; they may move either way."""
        words = self._hot.words
        words[rows, self._offset] = times.view(np.uint64)
        words[rows, META] &= np.uint64(FLAGS)
        words[rows, META] |= self.stamps(times).astype(np.uint64) << np.uint64(ACCESS_TIME_SHIFT)
        self.file(rows)

    def file(self, rows: NDArray[np.int64]) -> None:
        """Register the time of expiry that was written to rows which the batch changed."""
        # `pack_rows` has given rows other ids since, so the filed ids are void.
        if self._moves != self._hot.moves:
            self._clear_filed()
        if self._filed_count + len(rows) > len(self._filed):  # removed and refiled rows use up the list
            self._filed_count = relist_expiring(self._hot.state, self._horizon, self._filed)
        if self._horizon > -NEVER and len(rows):
            self._earliest = min(self._earliest, int(self._hot.words[rows, self._offset].view(np.int64).min()))
        self._filed_count = list_expiring(self._hot.state, rows, self._horizon, self._filed, self._filed_count)

    def due(self, limit: int) -> Generator[NDArray[np.int64]]:
        """Yield the ids of all rows that expire at or before `limit` (milliseconds), in pieces.

        The caller removes each row, or writes its time and files it again, before it requests the next piece. This also
        holds for the last piece. The table must not change otherwise meanwhile.
        """
        yield from self._due_in_memory(limit)
        stamp = min(limit, _MAX_TIME) + ACCESS_TIME_ZERO
        while stamp > 0:
            self._apply_lost()
            older = next((i for i, run in enumerate(reversed(self._runs.runs)) if run.due_stamp <= stamp), -1)
            if older < 0:
                return
            yield from self._sweep(older, limit, stamp)

    def _due_in_memory(self, limit: int) -> Iterator[NDArray[np.int64]]:
        if self._moves != self._hot.moves:
            self._clear_filed()
        if limit > self._horizon:
            state = self._hot.state
            times = np.empty(_SAMPLE_ROWS, np.int64)
            times = np.sort(times[: sample_times(state, max(1, self._hot.used_rows // _SAMPLE_ROWS), times)])
            self._horizon = max(limit, int(times[len(times) // _FILED_DIVISOR]) if len(times) else limit)
            self._filed_count = relist_expiring(state, self._horizon, self._filed)
        elif limit < self._earliest:
            return
        due = self._take_due(limit)
        size = self._piece_rows(self._hot.average_row_bytes)
        start = 0
        try:
            while start < len(due):
                start += size
                yield due[start - size : start]
        finally:  # file the remaining rows again if the caller stops early
            self.file(due[start:])

    def _take_due(self, limit: int) -> NDArray[np.int64]:
        due, figures = np.empty(self._filed_count, np.int64), np.empty(2, np.int64)
        count = take_due(self._hot.state, limit, self._horizon, self._filed[: self._filed_count], due, figures)
        self._filed_count, self._earliest = int(figures[0]), int(figures[1])
        return due[:count]

    def _apply_lost(self) -> None:
        """Lower the due stamps of runs to that of the oldest row that was read and left memory unchanged."""
        lost = int(self._hot.state[LOST])
        self._hot.state[LOST] = NOTHING_LOST
        for run in self._runs.runs if lost != NOTHING_LOST else ():
            run.due_stamp = min(run.due_stamp, lost)

    def _sweep(self, older: int, limit: int, stamp: int) -> Iterator[NDArray[np.int64]]:
        """Read a run's rows up to a stamp, and some beyond; yield the ids of rows due up to `limit`.

        Args:
            older: the number of runs older than the one to read; newer runs may be added during the sweep.
            limit: in milliseconds.
            stamp: the stamp of `limit`, not bounded by `ACCESS_TIME_END`.
        """
        run = self._run(older)
        last: int | None = None
        first_left = _NO_STAMP_LEFT
        layout, range_ = self._hot.layout, self._range
        size = self._piece_rows(run.row_bytes)
        pieces = merge([run.view], layout, drop_tombstones=True, lowest=range_.lo, highest=range_.hi - 1, size=size)
        for rows in pieces:
            # Not the stamps of the META words: those of all times too late for 48 bits are equal.
            stamps = _unbounded_stamps(rows.ints(self._offset))
            if last is None:  # runs are ordered by hash, so any part of a run is a fair sample
                last = self._last_to_read(rows, stamps, run, stamp)
            soon = stamps <= last
            if not soon.all():
                first_left = min(first_left, int(stamps[~soon].min()))
            rows = rows.take(soon)
            if rows.count:
                ids = self._load_newest(rows, older)
                times = self._hot.words[ids, self._offset].view(np.int64)
                self.file(ids[times > limit])
                expired = ids[times <= limit]
                if len(expired):
                    yield expired
        # `_apply_lost` registers rows that left memory again meanwhile, and may bring this stamp forward.
        self._run(older).due_stamp = first_left

    def _last_to_read(self, rows: Rows, stamps: NDArray[np.int64], run: Run, due: int) -> int:
        """Return the last stamp of the rows of a run to read: `due`, or a later one to read rows ahead.

        Args:
            rows, stamps: a sample of the run's rows, and their stamps.
            run: the run.
            due: the last stamp of the rows that are due.
        """
        if due >= ACCESS_TIME_END:
            # `_apply_lost` cannot distinguish later stamps: rows that are evicted again would count as due, and the run
            # would be read again and again.
            return due
        room = max(0, self._memory.capacity_for(rows) // 2 - self._filed_count) // (_FILED_DIVISOR // 2)
        count = int(len(stamps) * min(1.0, room / max(1, run.rows)))
        return max(due, int(np.sort(stamps)[count - 1])) if count else due

    def _piece_rows(self, row_bytes: int) -> int:
        return min(piece_rows(self._piece_bytes, row_bytes), _MAX_PIECE_ROWS)

    def _run(self, older: int) -> Run:
        return self._runs.runs[len(self._runs.runs) - 1 - older]

    def _load_newest(self, rows: Rows, older: int) -> NDArray[np.int64]:
        """Load those rows of a run that are the newest of their keys, and return their ids.

        Rows already in memory, read from the run before and neither changed nor filed since, are included.
        """
        hot = self._hot
        self._memory.make_room(rows.count, hot.long_bytes(rows))  # must come first: it may evict rows
        present = hot.find(rows)
        here = hot.live(present[present >= 0].astype(np.uint32)).astype(np.int64)
        absent = np.flatnonzero(present < 0)
        newer = self._runs.runs[: len(self._runs.runs) - 1 - older]
        if newer and len(absent):
            query = Query.of(rows, absent)
            select = np.arange(len(absent), dtype=np.int32)
            for run in newer:
                select = run.search(query, select)
            absent = np.sort(query.probes.order[select])
        if not len(absent):
            return here
        new = rows.take(absent)
        stamps = (new.words[:, META] >> np.uint64(ACCESS_TIME_SHIFT)).astype(np.int64)
        located, pending = hot.upsert(new, stamps, TOUCH_NONE, True)
        hot.fill_found(located, pending, FoundRows(pending, *addresses(*new), (new,)), TOUCH_NONE)
        return np.concatenate([here, located.rows])


def _unbounded_stamps(times: NDArray[np.int64]) -> NDArray[np.int64]:
    """Convert times of expiry to stamps that may exceed the 48 bits that a META word has for them."""
    return np.clip(times, -ACCESS_TIME_ZERO, _MAX_TIME) + ACCESS_TIME_ZERO
