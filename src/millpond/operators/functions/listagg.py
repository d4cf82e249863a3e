"""`listagg`: joins the texts of a group by a delimiter, in order of arrival or in a requested order.

This follows Spark's `ListAgg`: nulls are left out, a group without texts has a null result, and sorting keeps texts of
equal rank in order of arrival. If texts are not ordered by themselves, they come as structs, whose first field is the
text and whose other fields are the sort columns.
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
from millpond.operators.functions.whole_groups import GatheredRows
from millpond.spec.operators import AggregateCall
from millpond.spec.types import DataType, parse_type


class ListAgg(Collect):
    """`listagg` of rows as they come."""

    def result(self, rows: Rows) -> pa.Array:
        """Return the joined texts of every row."""
        return join_texts(*self._lists(rows), self.call, self.inputs[0])


class GatheredListAgg(GatheredRows):
    """`listagg` of groups whose rows are all there."""

    def result(self, rows: Rows) -> pa.Array:
        """Return the joined texts of every row."""
        return join_texts(*self._lists(rows), self.call, self.inputs[0])


def join_texts(offsets: NDArray[np.int64], values: pa.Array, call: AggregateCall, dtype: DataType) -> pa.Array:
    """Join the texts of lists, each list's in order.

    Args:
        offsets: the offsets of the lists among the values, with the end of the last.
        values: texts, or structs of a text and its sort columns, never null.
        call: the call; its options are `delimiter` (bytes, as hexadecimal digits) and `order`: for each sort column,
            whether it is descending and whether nulls are last.
        dtype: the type of the values.

    Raises:
        OversizeError: the texts take more than 2 GiB.
    """
    order = call.options.get("order", [])
    texts = values.field(0) if dtype.name == "struct" else values
    if order and len(values):
        sort_columns = [values.field(1 + n) for n in range(len(order))] if dtype.name == "struct" else [values]
        types = [inner for _, inner in dtype.fields[1:]] or [dtype]
        texts = texts.take(pa.array(_sort_lists(offsets, sort_columns, types, order)))
    type_ = parse_type(call.type).arrow
    delimiter = bytes.fromhex(call.options.get("delimiter", ""))
    if texts.nbytes + len(delimiter) * len(texts) > LIMIT:
        raise OversizeError
    lists = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), texts.cast(pa.binary()))
    together = pc.binary_join(lists, pa.scalar(delimiter, pa.binary()))
    empty = pa.array(offsets[1:] == offsets[:-1])
    return pc.if_else(empty, pa.scalar(None, pa.binary()), together).view(type_)


def _sort_lists(
    offsets: NDArray[np.int64], by: Sequence[pa.Array], types: Sequence[DataType], order: Sequence[Sequence[bool]]
) -> NDArray[np.int64]:
    """Sort the values of each list in the requested order, and return their positions."""
    rows = np.arange(int(offsets[-1]))
    ranks: list[NDArray[np.uint64]] = []
    for column, dtype, (descending, nulls_last) in zip(by[::-1], types[::-1], order[::-1], strict=True):
        valid = validity(column)
        for rank in ranks_of(operand(column, dtype), dtype):
            turned = ~rank if descending else rank
            # Nulls share one rank here; the word after it puts them first or last.
            ranks.append(np.where(valid, turned, np.uint64(0)) if valid.size else turned)
        if valid.size:
            ranks.append((valid.astype(np.bool_) != nulls_last).astype(np.uint64))
    ranks.append(np.repeat(np.arange(len(offsets) - 1, dtype=np.uint64), np.diff(offsets)))
    for rank in ranks:  # a stable radix sort, from the least significant rank
        _, places = order_by_hash(rank[rows])
        rows = rows[places]
    return rows
