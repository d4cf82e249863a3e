"""What a slot asks of a user's processor, and what comes back: tables of columns, many keys at a time.

A call is about some keys, each once, in some order. Its tables, by name:

- `keys`: a row for each key: the key's columns, and `count`, how many rows of `rows`, or of `due`, belong to it.
- `rows` (phases `initial` and `rows`): the columns of the initial state, or the input's; the rows of the first key,
  then those of the second, and so on, each in the order in which they came.
  A key that has many rows has a call of its own, and `rows` only the first **piece** of them.
- `due` (phase `timers`): one column, `time`: the times of the due timers, key after key, each in order.
- for each variable its table's name, and, if there may be timers, `timers`: one column, `value`, with a row for each
  key: what it has there (of type `Variable.stored`, or `array<bigint>`), null for nothing. What has expired may be in
  it. If a key of the call has parts beside that, there is a second column, `head` (of type `HEAD`), null without parts.

While the call runs, parts are asked for by the name of their table: `at`, the position of a key in the call, and
`part`, a number. The answer has a row for each, in the same order: one column, `value`, null for nothing. More rows
of the key are asked for by the name `rows`, and the number of their piece as `part`, from 1 on: `value` has them,
as structs.

The answer to the call has rows of the output's columns, as many batches as there need be, and then tables of what has
changed, by the same names: `at`, the position of a key in the call; `value`, all that it has there now, null for
nothing; `expiry`, when the first part of that expires, or the first timer is due, in milliseconds; and, if keys have
parts now, `head`. Parts that no head speaks of any more are gone. Tables of parts that have changed have a column
`part` after `at`. What is too much for one table comes in several of the same name, of different keys.

The phase `initial` comes before all others, and only in the first batch of a query with an initial state; it has no
answer but changes. In Spark a key's initial state comes right before its rows; here that of all keys comes before all
rows, which nothing but the processor's own attributes could tell.

The phase `end` has no tables, and no answer but rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

import pyarrow as pa

KEYS = "keys"
ROWS = "rows"
DUE = "due"
COUNT = "count"

Ask = Callable[[str, pa.RecordBatch], pa.Array]
"""What gives parts of variables: the name of their table, and of which keys which parts, as above."""

Changed = Sequence[tuple[str, pa.RecordBatch]]
"""Tables of what a call has changed, each with its name."""

Phase = Literal["initial", "rows", "timers", "end"]


class Caller(Protocol):
    """Calls the user's processor, wherever that is."""

    def __call__(
        self,
        phase: Phase,
        times: tuple[int, int],
        tables: Mapping[str, pa.RecordBatch],
        take: Callable[[pa.RecordBatch], None],
        answer: Ask,
    ) -> Changed:
        """Call it for some keys.

        Args:
            phase: with what. times: processing time and watermark, as the processor is told them.
            tables: what it is about. take: is given rows of the output. answer: is asked for parts of variables.

        Returns:
            What has changed.

        Raises:
            OSError: whoever calls the processor is gone.
        """


@runtime_checkable
class Calling(Protocol):
    """An operator that has code of the user called at the end of a batch.

    Attributes:
        caller: calls it; set for each batch.
        lost: for which keys it was called when its caller went; empty if that has not happened.
    """

    caller: Caller | None
    lost: str


@runtime_checkable
class Beginning(Protocol):
    """An operator that may begin with an initial state.

    Attributes:
        initial_rows: of the initial state, their hash first; set for each batch, to none but for the first.
    """

    initial_rows: Iterable[pa.RecordBatch]
