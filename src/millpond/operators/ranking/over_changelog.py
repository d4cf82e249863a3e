"""Aggregates over each key's last rows of a changelog: every row has its result over the rows that exist.

All rows of a key are kept in order, as by a top-N over a changelog. Once a batch's changes are folded in, the results
that they may affect are computed twice: over the rows before the batch, and over those after it. The differences are
emitted (docs/architecture/11-changelog.md).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels.pointers import address
from millpond.kernels.ranking import frames as kernels
from millpond.kernels.ranking.packed_rows import long_slots, read_slots
from millpond.layout import Bytes, Rows, Words
from millpond.operators.columns.decode import stored_operand
from millpond.operators.columns.encode import NO_HEAP, Operand
from millpond.operators.columns.offsets import bounds_of
from millpond.operators.protocol import MAX_OUTPUT_ROWS, MakeRmwTable
from millpond.operators.ranking.frames import Frames
from millpond.operators.ranking.packed_rows import PackedRows
from millpond.operators.ranking.top_n import BLOCK, TopNOperator
from millpond.spec.kinds.over import OverSpec
from millpond.spec.kinds.rank import RankSpec
from millpond.spec.types import leaves

NO_BLOBS: NDArray[np.int64] = np.empty(0, dtype=np.int64)


class OverChangelogOperator(TopNOperator):
    """An `OverSpec` that `retracts`, on one partition: an unlimited top-N keeps the rows."""

    def __init__(self, spec: OverSpec, make_table: MakeRmwTable) -> None:
        # Without a limit, since any row may enter a frame when the rows between are deleted.
        rows = RankSpec(spec.columns, spec.keys, spec.order, "row_number", 1 << 62, retracts=True, changes=True)
        super().__init__(rows, make_table)
        self._over = spec
        self._shows_deletions = spec.changes
        self._frames = Frames(spec)
        width = len(spec.columns)
        self._results = PackedRows(spec.output_fields[width : width + len(spec.calls)], ())
        # The places of the inputs, which are atomic, in a slot.
        parts = [sum(1 for _ in leaves(dtype)) for dtype in self._slots.types]
        firsts = np.concatenate([[0], np.cumsum(parts)])
        self._inputs = {p: (self._slots.places[firsts[p]], self._slots.types[p]) for p in self._frames.inputs}

    def output(self) -> Iterator[pa.RecordBatch]:
        """Yield the new images of the rows that the batch changed; with `changes`, also the old ones."""
        for rows in self._changed_keys():
            rows = rows.packed()
            stored = rows.words[:, self._slots_offset + 2].astype(np.int64)
            marks = np.empty(int(stored.sum()), dtype=np.uint8)
            counts = np.empty((rows.count, 2), dtype=np.int64)
            rows_args = (rows.words, address(rows.heap), self._slots_offset, self._slots.stride, self._version)
            kernels.mark(*rows_args, self._frames.max_preceding, marks, counts)
            slots, read = bounds_of(stored), bounds_of(counts.sum(axis=1))
            first = 0
            while first < rows.count:  # whole keys at a time
                last = max(first + 1, int(np.searchsorted(read, read[first] + BLOCK, "right")) - 1)
                if read[last] > read[first]:
                    size = counts[first:last].sum(axis=0)
                    yield from self._block(rows, (first, last), marks[slots[first] : slots[last]], size)
                first = last

    def _block(
        self, rows: Rows, keys: tuple[int, int], marks: NDArray[np.uint8], size: NDArray[np.int64]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the changes of whole keys; `size` has the number of their rows read before the batch and after it."""
        olds, news = (int(count) for count in size)
        owners, which, positions, before, runs = (np.empty(olds + news, dtype=np.int64) for _ in range(5))
        table = (rows.words, address(rows.heap), self._slots_offset, self._slots.stride)
        key_args = (self._version, self._slots.descriptor, self._frames.max_preceding, marks, *keys)
        old = kernels.sequence(*table, *key_args, 0, owners[:olds], which[:olds], positions, before, runs, 0)
        new_args = (positions[old:], before[old:], runs[old:])
        new = kernels.sequence(*table, *key_args, 1, owners[olds:], which[olds:], *new_args, olds)
        positions = positions[: old + new]
        words: Words = np.empty((olds + news, self._slots.layout.width), dtype=np.uint64)
        read_slots(*table, NO_BLOBS, owners, which, words, NO_HEAP.copy())
        results = self._frames.results(self._operands(words), positions, before[: old + new])
        packed = self._results.pack(results, old + new)
        kinds = np.empty(old + new, dtype=np.int8)
        kernels.differences(
            *(runs[:old], runs[old : old + new], address(packed.words), self._results.stride),
            *(self._results.descriptor, kinds),
        )
        # Without a changelog as output only new images are emitted: a deletion cannot be expressed.
        emitted = np.flatnonzero(kinds if self._over.changes else kinds > 0)
        owners, which = owners[positions[emitted]], which[positions[emitted]]
        for start in range(0, len(emitted), MAX_OUTPUT_ROWS):
            piece = slice(start, start + MAX_OUTPUT_ROWS)
            yield from self._output_piece(
                table, owners[piece], which[piece], [*_take_columns(results, emitted[piece])], kinds[emitted[piece]]
            )

    def _operands(self, words: Words) -> dict[int, Operand]:
        """Decode the inputs of the calls from rows in the layout of slots."""
        rows = Rows(words, NO_HEAP)
        return {p: stored_operand(rows, place, dtype.machine) for p, (place, dtype) in self._inputs.items()}

    def _output_piece(
        self,
        table: tuple[Words, int, int, int],
        of: NDArray[np.int64],
        which: NDArray[np.int64],
        results: list[pa.Array],
        kinds: NDArray[np.int8],
    ) -> Iterator[pa.RecordBatch]:
        piece = (*table, self._slots.blobs, of, which)
        out: Words = np.empty((len(of), self._slots.layout.width), dtype=np.uint64)
        values: Bytes = np.empty(long_slots(*piece), dtype=np.uint8)
        read_slots(*piece, out, values)
        more = [*results, *([pa.array(kinds)] if self._over.changes else [])]
        yield from self._slots.unpack(Rows(out, values), more, self._over.output_fields)


def _take_columns(columns: list[pa.Array], positions: NDArray[np.int64]) -> Iterator[pa.Array]:
    taken = pa.array(positions)
    for column in columns:
        yield column.take(taken)
