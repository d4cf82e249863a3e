"""Columns of state between Arrow and Python, a column at a time.

What stands between the two is what Spark keeps: whole numbers for dates and times, tuples for structs, lists of pairs
for maps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from millpond.errors import UsageError

T = TypeVar("T")

_MOST = (1 << 31) - 1  # parts that all values of a column have together
_LARGEST = (1 << 31) - 1  # bytes of a column, as most kinds of them can have


class TooLarge(Exception):
    """Values do not fit into one column."""


def in_pieces(make: Callable[[list[int]], T], keys: list[int], whose: str) -> Iterator[T]:
    """What is made of all keys, or of fewer at a time where that is too large.

    Args:
        make: makes it of some; raises `TooLarge`, after which it may be asked again. keys: their positions.
        whose: the keys have it, in the words of an error.

    Raises:
        UsageError: what one key has is too large.
    """
    left = [keys] if keys else []
    while left:
        some = left.pop()
        try:
            made = make(some)
        except TooLarge:
            if len(some) == 1:
                raise UsageError(
                    f"{whose} has become so large that a key has more than 2 GB there.",
                    action="Keep less in it for each key, or share it out among several variables.",
                ) from None
            middle = len(some) // 2
            left += [some[middle:], some[:middle]]
        else:
            yield made


def listed(array: pa.Array) -> list[Any]:
    """The values of a column that is not nested, as `to_pylist` gives them, with NumPy where it has them."""
    kind = array.type
    if array.null_count == 0 and (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        return list(array.to_numpy(zero_copy_only=False).tolist())
    if pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_decimal(kind):
        return list(array.to_numpy(zero_copy_only=False).tolist())
    return list(array.to_pylist())


def stored(array: pa.Array) -> list[Any]:
    """The values of a column as Spark keeps them."""
    kind = array.type
    if pa.types.is_struct(kind):
        values: list[Any] = list(zip(*map(stored, array.flatten()), strict=True)) or [()] * len(array)
    elif pa.types.is_map(kind):
        values = _parts(array, lambda start, stop: list(_pairs(array, start, stop)))
    elif pa.types.is_list(kind):
        values = _parts(array, lambda start, stop: stored(array.values.slice(start, stop - start)))
    elif pa.types.is_date(kind):
        return listed(array.view(pa.int32()))
    elif pa.types.is_timestamp(kind):
        return listed(array.view(pa.int64()))
    else:
        return listed(array)
    for at in nulls(array):
        values[at] = None
    return values


def nulls(array: pa.Array) -> list[int]:
    """Positions of nulls."""
    if not array.null_count:
        return []
    return list(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist())


def bounds(array: pa.ListArray | pa.MapArray) -> list[int]:
    """Where the parts of each list lie in all parts, and where the last one ends."""
    return list(array.offsets.to_numpy().tolist())


def _parts(array: pa.Array, read: Any) -> list[Any]:
    places = bounds(array)
    first = places[0]
    parts = read(first, places[-1])
    return [parts[start - first : stop - first] for start, stop in pairwise(places)]


def _pairs(array: pa.MapArray, start: int, stop: int) -> Any:
    keys, items = (stored(part.slice(start, stop - start)) for part in (array.keys, array.items))
    return zip(keys, items, strict=True)


def built(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """A column of values as Spark keeps them.

    Raises:
        TooLarge: there are too many of them, or they are too long.
    """
    if pa.types.is_struct(kind):
        lost = [value is None for value in values] if None in values else None
        count = kind.num_fields
        nothing = (None,) * count
        flat = list(chain.from_iterable([value or nothing for value in values] if lost else values))
        arrays = [built(flat[at::count], one.type) for at, one in enumerate(kind)]
        if not arrays:
            return pa.array([None if value is None else {} for value in values], kind)
        return pa.StructArray.from_arrays(arrays, fields=list(kind), mask=None if lost is None else pa.array(lost))
    if pa.types.is_map(kind) or pa.types.is_list(kind):
        lost = [value is None for value in values] if None in values else None
        whole = [value or () for value in values] if lost else values
        places = offsets(map(len, whole))
        parts = list(chain.from_iterable(whole))
        mask = None if lost is None else pa.array(lost)
        if pa.types.is_map(kind):
            flat = list(chain.from_iterable(parts))
            arrays = [built(flat[0::2], kind.key_type), built(flat[1::2], kind.item_type)]
            return pa.MapArray.from_arrays(places, *arrays, type=kind, mask=mask)
        return pa.ListArray.from_arrays(places, built(parts, kind.value_type), type=kind, mask=mask)
    if pa.types.is_date(kind):
        return pa.array(values, pa.int32()).view(kind)
    if pa.types.is_timestamp(kind):
        return pa.array(values, pa.int64()).view(kind)
    array = pa.array(values, kind)
    if isinstance(array, pa.ChunkedArray) or array.nbytes > _LARGEST:
        raise TooLarge
    return array


def offsets(counts: Iterable[int]) -> pa.Array:
    """Where the parts of each list lie in all parts, from how many each has."""
    ends = list(accumulate(counts, initial=0))
    if ends[-1] > _MOST:
        raise TooLarge
    return pa.array(ends, pa.int32())
