"""The protocol of calls from a slot to a user's processor: tables of columns, many keys at a time.

A call is about some keys, each once, in some order. Its tables, by name:

- `keys`: a row for each key: the key's columns, and last `count`, the number of its rows in `rows` or `due`.
- `rows` (phases `initial` and `rows`): the columns of the initial state, or the input's. The rows of the first key come
  first, then those of the second, and so on, each in order of arrival. A key with many rows has a call of its own, and
  `rows` has only the first **piece** of them.
- `due` (phase `timers`): one column, `time`: the times of the due timers, key after key, each in order.
- one table per variable, by its table's name, and, if there may be timers, `timers`: one column, `value`, with a
  row for each key: its state (of type `Variable.stored`, or `array<bigint>`), null for none. It may include expired
  entries. If a key of the call has parts beside it, there is a second column, `head` (of type `HEAD`), null without
  parts.

While the call runs, the caller may request parts by the name of their table: `at`, the position of a key in the call,
and `part`, a number. The answer has a row for each, in the same order: one column, `value`, null for none. More rows of
the key are requested by the name `rows`, with the number of their piece as `part`, from 1 on: `value` has them, as
structs.

The answer to the call has rows of the output's columns, in any number of batches. Then come tables of changes, by the
same names. Their columns are `at`, the position of a key in the call; `value`, its whole new state, null for none;
`expiry`, the earliest expiry in the state, or the first timer, in milliseconds; and, if keys have parts now, `head`.
Parts that no head covers any longer are removed. Tables of changed parts have a column `part` after `at`. Changes that
exceed one table come in several of the same name, of different keys.

The phase `initial` comes before all others, and only in the first batch of a query with an initial state; its answer
has only changes. In Spark a key's initial state comes right before its rows; here that of all keys comes before all
rows. Only the processor's own attributes could show the difference.

The phase `end` has no tables, and its answer has only rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

import pyarrow as pa

KEYS = "keys"
ROWS = "rows"
DUE = "due"
COUNT = "count"

FetchState = Callable[[str, pa.RecordBatch], pa.Array]
"""Returns parts of variables, or more rows, given a table's name and the requested keys and parts, as above."""

Changes = Sequence[tuple[str, pa.RecordBatch]]
"""The tables of changes of a call, each with its name."""

Phase = Literal["initial", "rows", "timers", "end"]


class Caller(Protocol):
    """Calls the user's processor, in Spark's Python worker or in a test's own process."""

    def __call__(
        self,
        phase: Phase,
        times: tuple[int, int],
        tables: Mapping[str, pa.RecordBatch],
        take: Callable[[pa.RecordBatch], None],
        answer: FetchState,
    ) -> Changes:
        """Call the processor for keys.

        Args:
            phase: the phase of the call.
            times: processing time and watermark, as the processor gets them; −1 without timers.
            tables: the tables of the call.
            take: takes rows of the output.
            answer: answers requests for parts of variables.

        Returns:
            The changes.

        Raises:
            ConnectionError: the caller is gone.
            OSError: `take` or `answer` raised it.
        """


@runtime_checkable
class CallsUserCode(Protocol):
    """An operator that calls code of the user at the end of a batch.

    Attributes:
        caller: makes the calls; set for each batch.
        lost: describes the keys of the call during which the caller went away; empty if this has not happened.
    """

    caller: Caller | None
    lost: str


@runtime_checkable
class HasInitialState(Protocol):
    """An operator that may begin with an initial state.

    Attributes:
        initial_rows: the rows of the initial state, their hash first; set for each batch, and empty for all but the
            first.
    """

    initial_rows: Iterable[pa.RecordBatch]
