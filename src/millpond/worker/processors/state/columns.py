"""Conversion of state columns between Arrow and Python, a column at a time.

The Python form is what Spark stores: integers for dates and times, tuples for structs, lists of pairs for maps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from millpond.errors import UsageError

T = TypeVar("T")

_MAX_ITEMS = (1 << 31) - 1  # total number of items of a column's lists: Arrow has 32-bit offsets
_MAX_COLUMN_BYTES = (1 << 31) - 1  # bytes of a column: most Arrow types have 32-bit offsets


class TooLarge(Exception):
    """Values do not fit into one Arrow column."""


def in_pieces(make: Callable[[list[int]], T], keys: list[int], whose: str) -> Iterator[T]:
    """Build an object for all keys, or several objects for fewer keys each where one is too large.

    Args:
        make: builds the object for some keys; if it raises `TooLarge`, it is called again with fewer.
        keys: positions of the keys.
        whose: name of the state that the keys have, for errors.

    Yields:
        The objects.

    Raises:
        UsageError: the state of one key is too large.
    """
    remaining = [keys] if keys else []
    while remaining:
        part = remaining.pop()
        try:
            piece = make(part)
        except TooLarge:
            if len(part) == 1:
                raise UsageError(
                    f"{whose} has become so large that a key has more than 2 GB there.",
                    action="Keep less in it for each key, or share it out among several variables.",
                ) from None
            middle = len(part) // 2
            remaining += [part[middle:], part[:middle]]
        else:
            yield piece


def to_list(array: pa.Array) -> list[Any]:
    """Convert a column of a non-nested type like `to_pylist`, but faster through NumPy where possible."""
    kind = array.type
    if array.null_count == 0 and (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        return list(array.to_numpy(zero_copy_only=False).tolist())
    if pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_decimal(kind):
        return list(array.to_numpy(zero_copy_only=False).tolist())
    return list(array.to_pylist())


def to_stored(array: pa.Array) -> list[Any]:
    """Convert a column to the values that Spark stores."""
    kind = array.type
    if pa.types.is_struct(kind):
        values: list[Any] = list(zip(*map(to_stored, array.flatten()), strict=True)) or [()] * len(array)
    elif pa.types.is_map(kind):
        values = _parts(array, lambda start, stop: list(_pairs(array, start, stop)))
    elif pa.types.is_list(kind):
        values = _parts(array, lambda start, stop: to_stored(array.values.slice(start, stop - start)))
    elif pa.types.is_date(kind):
        return to_list(array.view(pa.int32()))
    elif pa.types.is_timestamp(kind):
        return to_list(array.view(pa.int64()))
    else:
        return to_list(array)
    for position in nulls(array):
        values[position] = None
    return values


def nulls(array: pa.Array) -> list[int]:
    """Return the positions of nulls."""
    if not array.null_count:
        return []
    return list(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist())


def bounds(array: pa.ListArray | pa.MapArray) -> list[int]:
    """Return the offset of each list's first item, and the end of the last list."""
    return list(array.offsets.to_numpy().tolist())


def _parts(array: pa.Array, read: Any) -> list[Any]:
    places = bounds(array)
    first = places[0]
    parts = read(first, places[-1])
    return [parts[start - first : stop - first] for start, stop in pairwise(places)]


def _pairs(array: pa.MapArray, start: int, stop: int) -> Any:
    keys, items = (to_stored(part.slice(start, stop - start)) for part in (array.keys, array.items))
    return zip(keys, items, strict=True)


def from_stored(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Build a column from values that Spark stores.

    Raises:
        TooLarge: there are too many values, or they are too long.
    """
    if pa.types.is_struct(kind):
        is_null = [value is None for value in values] if None in values else None
        count = kind.num_fields
        nothing = (None,) * count
        flat = list(chain.from_iterable([value or nothing for value in values] if is_null else values))
        arrays = [from_stored(flat[position::count], field.type) for position, field in enumerate(kind)]
        if not arrays:
            return pa.array([None if value is None else {} for value in values], kind)
        return pa.StructArray.from_arrays(
            arrays, fields=list(kind), mask=None if is_null is None else pa.array(is_null)
        )
    if pa.types.is_map(kind) or pa.types.is_list(kind):
        is_null = [value is None for value in values] if None in values else None
        whole = [value or () for value in values] if is_null else values
        places = offsets(map(len, whole))
        parts = list(chain.from_iterable(whole))
        mask = None if is_null is None else pa.array(is_null)
        if pa.types.is_map(kind):
            flat = list(chain.from_iterable(parts))
            arrays = [from_stored(flat[0::2], kind.key_type), from_stored(flat[1::2], kind.item_type)]
            return pa.MapArray.from_arrays(places, *arrays, type=kind, mask=mask)
        return pa.ListArray.from_arrays(places, from_stored(parts, kind.value_type), type=kind, mask=mask)
    if pa.types.is_date(kind):
        return pa.array(values, pa.int32()).view(kind)
    if pa.types.is_timestamp(kind):
        return pa.array(values, pa.int64()).view(kind)
    array = pa.array(values, kind)
    if isinstance(array, pa.ChunkedArray) or array.nbytes > _MAX_COLUMN_BYTES:
        raise TooLarge
    return array


def offsets(counts: Iterable[int]) -> pa.Array:
    """Compute list offsets from the number of items of each list.

    Raises:
        TooLarge: there are too many items.
    """
    ends = list(accumulate(counts, initial=0))
    if ends[-1] > _MAX_ITEMS:
        raise TooLarge
    return pa.array(ends, pa.int32())
