"""`listagg`: the texts of a group joined by a delimiter, in the order in which they came or in that which is asked for.

Follows Spark's `ListAgg`: nulls are left out, a group without texts has none, and sorting keeps texts of equal rank as
they came. What texts are ordered by, unless it is the text itself, stands beside them in a struct whose first field is
the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millpond.kernels.runs.sort import order_by_hash
from millpond.layout import Rows
from millpond.operators.columns.decode import LIMIT, OversizeError
from millpond.operators.columns.encode import operand, validity
from millpond.operators.functions.collect import Collect
from millpond.operators.functions.order_statistics import ranks_of
from millpond.operators.functions.whole_groups import Gathered
from millpond.spec.operators import AggregateCall
from millpond.spec.types import DataType, parse_type


class ListAgg(Collect):
    """`listagg` of rows as they come."""

    def result(self, rows: Rows) -> pa.Array:
        """The joined texts of every row."""
        return joined(*self._lists(rows), self.call, self.inputs[0])


class GatheredListAgg(Gathered):
    """`listagg` of groups whose rows are all there."""

    def result(self, rows: Rows) -> pa.Array:
        """The joined texts of every row."""
        return joined(*self._lists(rows), self.call, self.inputs[0])


def joined(offsets: NDArray[np.int64], values: pa.Array, call: AggregateCall, dtype: DataType) -> pa.Array:
    """The texts of lists, each list's in order and joined.

    Args:
        offsets: where each list begins among the values, and the last one ends.
        values: texts, or structs of a text and what it is ordered by, never null.
        call: its options are `delimiter` (bytes, as hexadecimal digits) and `order`: for each rank, whether it is
            descending and whether nulls are last.
        dtype: the type of the values.

    Raises:
        OversizeError: the texts take more than 2 GiB.
    """
    order = call.options.get("order", [])
    texts = values.field(0) if dtype.name == "struct" else values
    if order and len(values):
        by = [values.field(1 + n) for n in range(len(order))] if dtype.name == "struct" else [values]
        types = [inner for _, inner in dtype.fields[1:]] or [dtype]
        texts = texts.take(pa.array(_sorted(offsets, by, types, order)))
    type_ = parse_type(call.type).arrow
    delimiter = bytes.fromhex(call.options.get("delimiter", ""))
    if texts.nbytes + len(delimiter) * len(texts) > LIMIT:
        raise OversizeError
    lists = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), texts.cast(pa.binary()))
    together = pc.binary_join(lists, pa.scalar(delimiter, pa.binary()))
    empty = pa.array(offsets[1:] == offsets[:-1])
    return pc.if_else(empty, pa.scalar(None, pa.binary()), together).cast(type_)


def _sorted(
    offsets: NDArray[np.int64], by: Sequence[pa.Array], types: Sequence[DataType], order: Sequence[Sequence[bool]]
) -> NDArray[np.int64]:
    """The positions of the values of lists, in the order that is asked for."""
    rows = np.arange(int(offsets[-1]))
    ranks: list[NDArray[np.uint64]] = []
    for column, dtype, (descending, nulls_last) in zip(by[::-1], types[::-1], order[::-1], strict=True):
        valid = validity(column)
        for rank in ranks_of(operand(column, dtype), dtype):
            turned = ~rank if descending else rank
            ranks.append(np.where(valid, turned, np.uint64(0)) if valid.size else turned)
        if valid.size:
            ranks.append((valid.astype(np.bool_) != nulls_last).astype(np.uint64))
    ranks.append(np.repeat(np.arange(len(offsets) - 1, dtype=np.uint64), np.diff(offsets)))
    for rank in ranks:  # the least significant first; equal ones stay as they are
        _, places = order_by_hash(rank[rows])
        rows = rows[places]
    return rows
