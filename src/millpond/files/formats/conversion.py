"""Conversion of rows to a table's current schema, after columns were added, removed, moved or widened.

A column is identified by its name, which is never reused (see `AggregateCall.field`). Keys do not change, so a
converted row keeps its hash and its position.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.layout import HASH, META, NULLS, RowLayout, Rows, TableSchema

_ONE = np.uint64(1)


def convertible(before: TableSchema, now: TableSchema) -> bool:
    """Return whether rows of schema `before` can be converted to schema `now`."""
    kinds = {column.name: column.kind for column in before.values}
    widened = {("word", "wide")}
    return before.keys == now.keys and all(
        kinds.get(column.name, column.kind) == column.kind or (kinds[column.name], column.kind) in widened
        for column in now.values
    )


class Conversion:
    """A conversion of rows from one layout to another, column by column.

    A new column has its initial value. A `word` column that becomes `wide` keeps its number: it is sign-extended.

    Args:
        before, now: the layouts; their schemas must be `convertible`.
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
        for key in range(keys):
            self._copy(key, key, 1 if before.schema.keys[key].kind == "word" else 2)
        for number, column in enumerate(now.schema.values, keys):
            if column.name not in old:
                if column.null:
                    self._fresh[NULLS + number // 64] |= _ONE << np.uint64(number % 64)
                continue
            source, old_column = old[column.name]
            self._copy(source, number, 1 if old_column.kind == "word" else 2)
            if old_column.kind != column.kind:
                self._signs.append((before.offsets[source], now.offsets[number] + 1))
            self._nulls.append((source, number))

    def _copy(self, source: int, target: int, words: int) -> None:
        start, to = self.before.offsets[source], self.now.offsets[target]
        self._words += [(start + word, to + word) for word in range(words)]

    def __call__(self, rows: Rows) -> Rows:
        """Convert rows to the new layout; they share the heap of the old rows."""
        old = rows.words
        words: NDArray[np.uint64] = np.empty((len(old), self.now.width), np.uint64)
        words[:] = self._fresh
        words[:, [HASH, META]] = old[:, [HASH, META]]
        for source, target in self._words:
            words[:, target] = old[:, source]
        for source, target in self._signs:
            words[:, target] = (old[:, source].view(np.int64) >> 63).view(np.uint64)
        for source, target in self._nulls:
            bits = (old[:, NULLS + source // 64] >> np.uint64(source % 64)) & _ONE
            words[:, NULLS + target // 64] |= bits << np.uint64(target % 64)
        return Rows(words, rows.heap)
