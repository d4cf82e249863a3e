"""State variables with a list per key.

A key's row holds the last elements of its list. When these become many, they are moved to parts, which are never
rewritten. So appending an element costs no more in a long list than in a short one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.streaming.stateful_processor import ListState

from millpond.layout import NEVER
from millpond.spec.kinds.processor import Variable
from millpond.worker.processors.state.columns import from_stored, to_stored
from millpond.worker.processors.state.parts import Head, PartedVariable, Pieces
from millpond.worker.processors.state.refusals import empty_list, no_key, refused
from millpond.worker.processors.state.variables import Changes, CurrentKey

_MAX_SENT_ELEMENTS = 256  # maximum number of elements that travel with every call
_PART_BYTES = 64 << 10  # approximate bytes of a part
_MAX_PART_ELEMENTS = 4096  # maximum number of elements of a part


class _Elements:
    """The cell of a list: its elements outside parts, and their times of expiry if the variable has a time to live.

    Attributes:
        head: description of the parts, whose elements come first.
        before: the elements in parts, once fetched.
    """

    __slots__ = ("before", "expiries", "head", "values")

    def __init__(self, values: list[Any], expiries: list[int], head: Head | None) -> None:
        self.values = values
        self.expiries = expiries
        self.head = head
        self.before: list[Any] | None = None

    def clear(self) -> None:
        """Remove all elements. The numbering of parts continues, as running reads may still need the old parts."""
        self.values, self.expiries, self.before = [], [], None
        self.head = self.head and Head(self.head.stop, self.head.stop, 0, 0, 0)

    @property
    def parted(self) -> bool:
        """Whether there are parts."""
        return self.head is not None and self.head.first < self.head.stop


class ListVariable(PartedVariable, ListState):  # type: ignore[misc]
    """A variable with a list per key."""

    def __init__(self, variable: Variable, current_key: CurrentKey, now: int) -> None:
        self._declare(variable, current_key, now)

    def exists(self) -> bool:
        """Return whether the key has a list."""
        cell = self._cell("checking value state exists")
        return bool(cell.values) or (cell.parted and cell.head.expiry > self._now)

    def get(self) -> Iterator[tuple[Any, ...]]:
        """Yield the key's elements, as they are when the first one is requested."""
        doing = "getting list state"
        if self.deleted:
            return
        cell = self._cell(doing)
        # Copied: the user may append while iterating over the elements.
        values = tuple(cell.values)
        show = None if self._codec.plain else self._codec.to_user
        if cell.parted:
            self._fetch_all_if_small(cell.head)
            for elements in [cell.before] if cell.before is not None else self._streamed(cell, doing):
                yield from elements if show is None else map(show, elements)
        yield from values if show is None else map(show, values)

    def put(self, newState: list[tuple[Any, ...]]) -> None:
        """Replace the key's list."""
        values = self._checked(newState)
        cell = self._cell("updating value state")
        cell.clear()
        self._append(cell, values)

    def appendValue(self, newState: tuple[Any, ...]) -> None:
        """Append an element to the key's list."""
        value = self._from_user(newState, "updating value state")
        self._append(self._cell("updating value state"), [value])

    def appendList(self, newState: list[tuple[Any, ...]]) -> None:
        """Append elements to the key's list."""
        values = self._checked(newState)
        self._append(self._cell("updating value state"), values)

    def clear(self) -> None:
        """Remove the key's list."""
        cell = self._cell("clearing value state")
        if cell.values or cell.parted:
            cell.clear()
            self.changed.add(self._current_key.position)

    def lacks(self, at: int, key: Any | None) -> bool:
        """See `StateVariable`."""
        if self.deleted:
            return False
        cell = self._of(at)
        return cell.parted and cell.before is None and self._is_small(cell.head)

    def _part(self, at: int, key: Any | None) -> None:
        return None

    def fetch(self, wanted: Sequence[tuple[int, Any | None]]) -> None:
        """See `StateVariable`."""
        cells = {at: self._of(at) for at, _ in wanted if self.lacks(at, None)}
        for cell in cells.values():
            cell.before = []
        numbers = [(at, number) for at, cell in cells.items() for number in range(cell.head.first, cell.head.stop)]
        size = max((cell.head.part_bytes for cell in cells.values()), default=0)
        for requested, lists in self._parts(numbers, size):
            for (at, _), columns in zip(requested, self._listed(lists), strict=True):
                cells[at].before += columns[0] if columns else []

    def _streamed(self, cell: _Elements, doing: str) -> Iterator[list[Any]]:
        """Yield the elements in parts, request by request."""
        position, sent, head = self._at(doing), self._sent, cell.head
        assert head is not None
        all_expired = True
        for requested, lists in self._parts(
            [(position, number) for number in range(head.first, head.stop)], head.part_bytes
        ):
            for (_, number), columns in zip(requested, self._listed(lists), strict=True):
                all_expired = all_expired and columns is None
                # Drop leading parts that have expired, so that they are not read again.
                if all_expired and cell.head is not None and cell.head.first == number:
                    cell.head = cell.head._replace(first=number + 1, bytes=cell.head.bytes - cell.head.part_bytes)
                    self.changed.add(position)
                yield columns[0] if columns else []
                if self._sent is not sent:  # the call has ended while the user kept the iterator
                    raise refused(doing, no_key(self.variable.name))

    def _checked(self, values: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        taken = [self._from_user(value, "updating value state") for value in values]
        if not taken:
            raise refused("updating value state", empty_list(self.variable.name))
        return taken

    def _append(self, cell: _Elements, values: list[tuple[Any, ...]]) -> None:
        cell.values += values
        if self._has_ttl:
            cell.expiries += repeat(self._expiry, len(values))
        self.changed.add(self._current_key.position)

    def _columns(self, parts: pa.StructArray) -> list[list[Any]]:
        return [to_stored(column) for column in parts.flatten()] if self._has_ttl else [to_stored(parts)]

    def _made(self, columns: list[list[Any]] | None, head: Head | None) -> _Elements:
        if columns is None:
            return _Elements([], [], None)
        return _Elements(columns[0], columns[-1] if self._has_ttl else [], head)

    def changes(self, at: list[int]) -> Changes:
        """See `StateVariable`."""
        cells = [self._cells[position] for position in at]
        counts = [len(cell.values) for cell in cells]
        expiries = [expiry for cell in cells for expiry in cell.expiries]
        values = from_stored([value for cell in cells for value in cell.values], self._codec.arrow)
        lists, firsts = self._lists(counts, {"value": values}, expiries)
        pieces = []
        if oversized := self._oversized(lists, counts, _MAX_SENT_ELEMENTS):
            for number in oversized:
                pieces.append(self._cut(at[number], cells[number], lists.slice(number, 1).flatten()))
                firsts[number] = NEVER
            is_oversized = pa.array([number in oversized for number in range(len(at))])
            lists = pc.if_else(is_oversized, pa.scalar(None, lists.type), lists)
        heads = [cell.head if cell.parted else None for cell in cells]
        return self._combine(at, lists, firsts, heads, pieces)

    def _cut(self, at: int, cell: _Elements, elements: pa.Array) -> Pieces:
        """Cut the elements of a cell into parts."""
        count, size = len(elements), elements.nbytes
        most = max(1, min(_MAX_PART_ELEMENTS, count * _PART_BYTES // max(1, size)))
        starts = range(0, count, most)
        ends = pa.array([*starts, count], pa.int32())
        kind = pa.list_(pa.field("element", elements.type))
        head = cell.head or Head(0, 0, 0, 0, 0)
        firsts, latest = [NEVER] * len(starts), NEVER
        if self._has_ttl:
            firsts = [min(cell.expiries[start : start + most]) for start in starts]
            latest = max(head.expiry, *cell.expiries)
        cell.head = Head(head.first, head.stop + len(starts), 0, head.bytes + size, latest)
        numbers = list(range(head.stop, cell.head.stop))
        return Pieces([at] * len(starts), numbers, pa.ListArray.from_arrays(ends, elements, type=kind), firsts)
