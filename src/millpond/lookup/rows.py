"""Rows by their keys, and rows with what was found of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millpond.lookup.fetch import ABSENT, FAILED, THERE, Answer, Failure, States, error_of
from millpond.spec.kinds.enrich import ERROR, EnrichSpec
from millpond.spec.types import parse_type

_ERROR = parse_type(ERROR.type).arrow


class Distinct(NamedTuple):
    """The different keys of some rows.

    Attributes:
        firsts: for each key the first row that has it.
        numbers: for each row the number of its key; -1 where a part of the key is null.
    """

    firsts: NDArray[np.int64]
    numbers: NDArray[np.int64]


def distinct(columns: Sequence[pa.Array]) -> Distinct:
    """The different keys of rows, of which the key's columns are given."""
    first = columns[0].dictionary_encode()
    codes, count = first.indices, len(first.dictionary)
    for column in columns[1:]:
        encoded = column.dictionary_encode()
        both = pc.add(pc.multiply(codes.cast(pa.int64()), len(encoded.dictionary)), encoded.indices.cast(pa.int64()))
        codes, count = (encoded := both.dictionary_encode()).indices, len(encoded.dictionary)
    numbers = codes.fill_null(-1).to_numpy().astype(np.int64)
    rows = np.flatnonzero(numbers >= 0)[::-1]
    firsts = np.empty(count, np.int64)
    firsts[numbers[rows]] = rows  # the last one counts
    return Distinct(firsts, numbers)


class Values(NamedTuple):
    """What was found of some keys.

    Attributes:
        columns: the columns that were looked up, a row for each key.
        states: what became of each. failures: why those failed that did, by position.
    """

    columns: pa.RecordBatch
    states: States
    failures: dict[int, Failure]


def whole(answer: Answer) -> Values:
    """All of an answer."""
    return Values(answer.values, answer.states, _failures(answer, answer.states, None))


def part_of(answer: Answer, places: NDArray[np.int64]) -> Values:
    """A part of an answer, by places in it."""
    if _in_order(places, len(answer.states)):
        return whole(answer)
    states = answer.states[places]
    return Values(answer.values.take(pa.array(places)), states, _failures(answer, states, places))


def _failures(answer: Answer, states: States, places: NDArray[np.int64] | None) -> dict[int, Failure]:
    if answer.failure is None and not answer.failures:
        return {}
    failed = np.flatnonzero(states == FAILED)
    why = {int(at): answer.why(int(at if places is None else places[at])) for at in failed}
    return {at: one for at, one in why.items() if one is not None}


def _in_order(places: NDArray[np.int64], count: int) -> bool:
    return len(places) == count and bool((places == np.arange(count)).all())


def put_together(parts: Sequence[tuple[NDArray[np.int64], Values]], count: int) -> Values:
    """What was found of `count` keys in several parts, each with the numbers of its keys."""
    some = [part for part in parts if len(part[0])] or parts[:1]
    if len(some) == 1 and _in_order(some[0][0], count):
        return some[0][1]
    order = np.empty(count, np.int64)
    order[np.concatenate([numbers for numbers, _ in some])] = np.arange(count)
    everything = pa.concat_batches([values.columns for _, values in some])
    failures = {int(numbers[at]): why for numbers, values in some for at, why in values.failures.items()}
    states = np.concatenate([values.states for _, values in some])[order]
    return Values(everything.take(pa.array(order)), states, failures)


def check(spec: EnrichSpec, found: Values, keys: pa.RecordBatch) -> None:
    """See that keys could be looked up, where rows are not to come out otherwise.

    Raises:
        MillpondError: some could not be.
    """
    if found.failures and spec.on_error == "fail":
        position = min(found.failures)
        raise error_of(spec, found.failures[position], keys.slice(position, 1), len(found.failures))


def enriched(
    spec: EnrichSpec, columns: Sequence[pa.Array], numbers: NDArray[np.int64], found: Values
) -> pa.RecordBatch:
    """Rows with what was found of their keys.

    Args:
        spec: says what comes out. columns: of the rows. numbers: of each row's key, -1 for none. found: of the keys.
    """
    keyed = numbers >= 0
    states = np.full(len(numbers), ABSENT, np.uint8)
    states[keyed] = found.states[numbers[keyed]]
    at = pa.array(numbers, mask=states != THERE)
    results = [*columns, *(column.take(at) for column in found.columns.columns)]
    if spec.on_error == "side":
        results.append(_errors(numbers, states, found))
    names = [field.name for field in spec.output_fields]
    batch = pa.RecordBatch.from_arrays(results, names=names)
    if spec.how == "inner" and (states == ABSENT).any():
        batch = batch.filter(pa.array(states != ABSENT))
    return batch


def _errors(numbers: NDArray[np.int64], states: States, found: Values) -> pa.Array:
    if not found.failures:
        return pa.nulls(len(numbers), _ERROR)
    places = np.full(len(found.states), -1)
    places[list(found.failures)] = np.arange(len(found.failures))
    said = pa.array([{"kind": one.kind, "message": one.said} for one in found.failures.values()], _ERROR)
    failed = states == FAILED
    return said.take(pa.array(np.where(failed, places[numbers], 0), mask=~failed))
