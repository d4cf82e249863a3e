"""Lazy iteration over the claims or bases of generations, newest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from millpond.errors import StateDamagedError

Item = TypeVar("Item")


class NewestFirst(Generic[Item]):
    """Items that are read from the claims or bases of generations, newest first; lazily, and each once.

    An item is skipped if its claim or base is missing, cut short or altered. A run that dies while it begins leaves a
    torn put, and no slot opens a generation without a base, so the run has no commits. `is_damage` finds the errors
    for which this cannot be the reason. They are raised: skipping a damaged base would silently go back to the state of
    an earlier run. Later iterations raise them again.

    Args:
        numbers: the generations, ascending.
        read: reads the item of a generation.
        is_damage: returns whether the error for a generation is damage of its files; by default, none is.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        read: Callable[[int], Item],
        is_damage: Callable[[int, StateDamagedError], bool] = lambda number, error: False,
    ) -> None:
        self._unread = list(numbers)
        self._read = read
        self._is_damage = is_damage
        self._items: list[Item] = []

    def __iter__(self) -> Iterator[Item]:
        index = 0
        while index < len(self._items) or self._read_next():
            yield self._items[index]
            index += 1

    def _read_next(self) -> bool:
        """Read the next readable item; return False if there is none."""
        while self._unread:
            try:
                self._items.append(self._read(self._unread[-1]))
            except StateDamagedError as error:
                if self._is_damage(self._unread[-1], error):
                    raise
                self._unread.pop()
            else:
                self._unread.pop()
                return True
        return False
