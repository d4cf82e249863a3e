"""Distinct keys of rows, and rows joined with the values of their keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millpond.layout import MAX_BATCH_BYTES
from millpond.lookup.fetch import ABSENT, FAILED, PRESENT, Answer, Failure, States, lookup_error
from millpond.spec.kinds.enrich import ERROR, EnrichSpec
from millpond.spec.types import parse_type

_ERROR = parse_type(ERROR.type).arrow


class DistinctKeys(NamedTuple):
    """The distinct keys of a batch.

    Attributes:
        firsts: by key, its first row.
        numbers: by row, its key's index in `firsts`; -1 where a column of the key is null.
    """

    firsts: NDArray[np.int64]
    numbers: NDArray[np.int64]


def distinct_keys(columns: Sequence[pa.Array]) -> DistinctKeys:
    """Number the distinct keys of rows.

    Args:
        columns: the key's columns.
    """
    first = columns[0].dictionary_encode()
    codes, count = first.indices, len(first.dictionary)
    for column in columns[1:]:
        encoded = column.dictionary_encode()
        # Codes are dense after each column, so their products fit in 64 bits.
        both = pc.add(pc.multiply(codes.cast(pa.int64()), len(encoded.dictionary)), encoded.indices.cast(pa.int64()))
        codes, count = (encoded := both.dictionary_encode()).indices, len(encoded.dictionary)
    # A null in any column makes the code null: as in SQL, such a key matches nothing.
    numbers = codes.fill_null(-1).to_numpy().astype(np.int64)
    rows = np.flatnonzero(numbers >= 0)[::-1]
    firsts = np.empty(count, np.int64)
    firsts[numbers[rows]] = rows  # rows are in descending order, and the last assignment wins
    return DistinctKeys(firsts, numbers)


class Values(NamedTuple):
    """Values of a sequence of keys.

    Attributes:
        columns: the looked-up columns, one row per key.
        states: `ABSENT`, `PRESENT` or `FAILED` for each key.
        failures: failures by the position of the key.
    """

    columns: pa.RecordBatch
    states: States
    failures: dict[int, Failure]

    def take(self, places: NDArray[np.int64]) -> Values:
        """Return the values of the keys at some positions."""
        failures = {
            row: self.failures[place]
            for row, place in enumerate(places.tolist() if self.failures else ())
            if place in self.failures
        }
        return Values(self.columns.take(pa.array(places)), self.states[places], failures)


KeyedValues = tuple[NDArray[np.int64], Values]
"""Indices of some of the keys, and their values."""


def no_values(columns: pa.Schema) -> KeyedValues:
    """Return the values of no keys; `columns` is the schema of the looked-up columns."""
    return np.empty(0, np.int64), Values(pa.RecordBatch.from_pylist([], columns), np.empty(0, np.uint8), {})


def all_values(answer: Answer) -> Values:
    """Return the values of all keys of an answer."""
    return Values(answer.values, answer.states, _failures(answer, answer.states, None))


def values_at(answer: Answer, places: NDArray[np.int64]) -> Values:
    """Return the values of the keys at some positions of an answer."""
    if _is_identity(places, len(answer.states)):
        return all_values(answer)
    states = answer.states[places]
    return Values(answer.values.take(pa.array(places)), states, _failures(answer, states, places))


def _failures(answer: Answer, states: States, places: NDArray[np.int64] | None) -> dict[int, Failure]:
    if answer.failure is None and not answer.failures:
        return {}
    failed = np.flatnonzero(states == FAILED)
    why = {int(row): answer.failure_of(int(row if places is None else places[row])) for row in failed}
    return {row: failure for row, failure in why.items() if failure is not None}


def _is_identity(places: NDArray[np.int64], count: int) -> bool:
    return len(places) == count and bool((places == np.arange(count)).all())


def bytes_of(parts: Sequence[KeyedValues]) -> int:
    """Return the bytes of the looked-up columns."""
    return sum(values.columns.nbytes for _, values in parts)


def concat_values(parts: Sequence[KeyedValues], count: int) -> Values:
    """Concatenate the values of disjoint sets of keys, in the order of the keys.

    Args:
        parts: the values of all keys; at most `MAX_BATCH_BYTES`, since offsets in Arrow columns have 32 bits.
        count: number of keys.
    """
    filled = [part for part in parts if len(part[0])] or parts[:1]
    if len(filled) == 1 and _is_identity(filled[0][0], count):
        return filled[0][1]
    order = np.empty(count, np.int64)
    order[np.concatenate([numbers for numbers, _ in filled])] = np.arange(count)
    columns = pa.concat_batches([values.columns for _, values in filled])
    states = np.concatenate([values.states for _, values in filled])[order]
    return Values(columns.take(pa.array(order)), states, _failures_of(filled))


def _failures_of(parts: Sequence[KeyedValues]) -> dict[int, Failure]:
    """Return the failures of the keys in `parts` by the key's index."""
    return {int(numbers[row]): why for numbers, values in parts for row, why in values.failures.items()}


def raise_if_failed(spec: EnrichSpec, parts: Sequence[KeyedValues], keys: pa.RecordBatch) -> None:
    """Raise if a key failed and the join's `on_error` is `fail`.

    Args:
        spec: the lookup join.
        parts: values of the keys.
        keys: the keys.

    Raises:
        MillpondError: a key could not be looked up.
    """
    if spec.on_error == "fail" and (failures := _failures_of(parts)):
        position = min(failures)
        raise lookup_error(spec, failures[position], keys.slice(position, 1), len(failures))


def join_in_parts(
    spec: EnrichSpec,
    columns: Sequence[pa.Array],
    numbers: NDArray[np.int64],
    parts: Sequence[KeyedValues],
    key_count: int,
) -> Iterator[pa.RecordBatch]:
    """Join rows with the values of their keys (see `join_values`).

    Rows are divided into halves while the distinct values of their keys, or their looked-up columns, may exceed
    `MAX_BATCH_BYTES`; a single row stays whole.

    Args:
        spec: the lookup join.
        columns: the rows' columns.
        numbers: by row, the index of its key; -1 if the key is null.
        parts: the values of all keys.
        key_count: number of keys.
    """
    if len(numbers) > 1 and bytes_of(parts) > MAX_BATCH_BYTES:
        for half in _halves(len(numbers)):
            used_parts, used_numbers, used_count = _restrict(parts, numbers[half], key_count)
            yield from join_in_parts(spec, [column[half] for column in columns], used_numbers, used_parts, used_count)
        return
    yield from _join_in_halves(spec, columns, numbers, concat_values(parts, key_count))


def _restrict(
    parts: Sequence[KeyedValues], numbers: NDArray[np.int64], key_count: int
) -> tuple[list[KeyedValues], NDArray[np.int64], int]:
    """Return the values of the keys of some rows, the rows' indices of these keys, and the number of the keys."""
    used = np.unique(numbers[numbers >= 0])
    places = np.full(key_count + 1, -1)  # the last one is found by the index -1 of a null key
    places[used] = np.arange(len(used))
    kept = [np.flatnonzero(places[positions] >= 0) for positions, _ in parts]
    used_parts = [(places[own[which]], values.take(which)) for which, (own, values) in zip(kept, parts, strict=True)]
    return used_parts, places[numbers], len(used)


def _halves(count: int) -> tuple[slice, slice]:
    return slice(0, count // 2), slice(count // 2, count)


def _join_in_halves(
    spec: EnrichSpec, columns: Sequence[pa.Array], numbers: NDArray[np.int64], values: Values
) -> Iterator[pa.RecordBatch]:
    if len(numbers) > 1 and _max_joined_bytes(numbers, values) > MAX_BATCH_BYTES:
        for half in _halves(len(numbers)):
            yield from _join_in_halves(spec, [column[half] for column in columns], numbers[half], values)
        return
    yield join_values(spec, columns, numbers, values)


def _max_joined_bytes(numbers: NDArray[np.int64], values: Values) -> int:
    """Return an upper bound of the bytes that the looked-up values of some rows take."""
    counts = np.bincount(numbers[numbers >= 0], minlength=1)
    bounds = counts * values.columns.nbytes  # by key, as if it alone had all bytes of `values`
    # Only keys with large bounds are measured, because measuring all keys would take longer than the join. The
    # unmeasured keys share the bytes of `values`, so together they take no more than the largest of their bounds.
    large = np.flatnonzero(bounds > MAX_BATCH_BYTES // 2)
    measured: int = sum(int(counts[key]) * values.columns.slice(key, 1).nbytes for key in large.tolist())
    return measured + int(np.delete(bounds, large).max(initial=0))


def join_values(
    spec: EnrichSpec, columns: Sequence[pa.Array], numbers: NDArray[np.int64], values: Values
) -> pa.RecordBatch:
    """Join rows with the values of their keys.

    Args:
        spec: the lookup join.
        columns: the rows' columns.
        numbers: by row, the index of its key in `values`; -1 if the key is null.
        values: values of the keys.
    """
    keyed = numbers >= 0
    states = np.full(len(numbers), ABSENT, np.uint8)
    states[keyed] = values.states[numbers[keyed]]
    indices = pa.array(numbers, mask=states != PRESENT)
    results = [*columns, *(column.take(indices) for column in values.columns.columns)]
    if spec.on_error == "side":
        results.append(_errors(numbers, states, values))
    names = [field.name for field in spec.output_fields]
    batch = pa.RecordBatch.from_arrays(results, names=names)
    # Keys that failed are not absent: their rows stay, with nulls or the error.
    if spec.how == "inner" and (states == ABSENT).any():
        batch = batch.filter(pa.array(states != ABSENT))
    return batch


def _errors(numbers: NDArray[np.int64], states: States, values: Values) -> pa.Array:
    if not values.failures:
        return pa.nulls(len(numbers), _ERROR)
    places = np.full(len(values.states), -1)
    places[list(values.failures)] = np.arange(len(values.failures))
    errors = pa.array(
        [{"kind": failure.kind, "message": failure.message} for failure in values.failures.values()], _ERROR
    )
    failed = states == FAILED
    return errors.take(pa.array(np.where(failed, places[numbers], 0), mask=~failed))
