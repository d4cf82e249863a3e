"""Rows of a table as it was, made rows of the table as it is: columns that came, went, moved or became wider.

A column is known by its name, which is never given to another one (see `AggregateCall.field`). Keys stay as they are,
so that a converted row has the hash, and the place among others, that it had.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.layout import HASH, META, NULLS, RowLayout, Rows, TableSchema

_ONE = np.uint64(1)


def convertible(before: TableSchema, now: TableSchema) -> bool:
    """Whether rows of one schema can be made rows of the other."""
    kinds = {column.name: column.kind for column in before.values}
    widened = {("word", "wide")}
    return before.keys == now.keys and all(
        kinds.get(column.name, column.kind) == column.kind or (kinds[column.name], column.kind) in widened
        for column in now.values
    )


class Conversion:
    """Makes rows of a layout rows of another, column by column.

    A column that the old rows do not have is as in a fresh row. A word becomes wide as the number that it is.

    Args:
        before, now: the layouts; the schemas are `convertible`.
    """

    def __init__(self, before: RowLayout, now: RowLayout) -> None:
        self.before = before
        self.now = now
        keys = len(before.schema.keys)
        self._fresh = np.zeros(now.width, np.uint64)
        self._words: list[tuple[int, int]] = []
        self._signs: list[tuple[int, int]] = []
        self._nulls = [(number, number) for number in range(keys)]
        old = {column.name: (keys + number, column) for number, column in enumerate(before.schema.values)}
        for at in range(keys):
            self._copy(at, at, 1 if before.schema.keys[at].kind == "word" else 2)
        for number, column in enumerate(now.schema.values, keys):
            if column.name not in old:
                if column.null:
                    self._fresh[NULLS + number // 64] |= _ONE << np.uint64(number % 64)
                continue
            source, was = old[column.name]
            self._copy(source, number, 1 if was.kind == "word" else 2)
            if was.kind != column.kind:
                self._signs.append((before.offsets[source], now.offsets[number] + 1))
            self._nulls.append((source, number))

    def _copy(self, source: int, target: int, words: int) -> None:
        start, to = self.before.offsets[source], self.now.offsets[target]
        self._words += [(start + word, to + word) for word in range(words)]

    def __call__(self, rows: Rows) -> Rows:
        """The rows in the new layout; their heap is that of the old ones."""
        old = rows.words
        words: NDArray[np.uint64] = np.empty((len(old), self.now.width), np.uint64)
        words[:] = self._fresh
        words[:, [HASH, META]] = old[:, [HASH, META]]
        for source, target in self._words:
            words[:, target] = old[:, source]
        for source, target in self._signs:
            words[:, target] = (np.ascontiguousarray(old[:, source]).view(np.int64) >> 63).view(np.uint64)
        for source, target in self._nulls:
            bits = (old[:, NULLS + source // 64] >> np.uint64(source % 64)) & _ONE
            words[:, NULLS + target // 64] |= bits << np.uint64(target % 64)
        return Rows(words, rows.heap)
