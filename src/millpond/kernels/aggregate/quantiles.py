"""Quantile summaries (Quantile Summaries §2) as blobs that grow and are compressed in place.

They follow Spark's `QuantileSummaries`. A summary is a sorted list of samples, each with the number of values it
represents (`g`) and the uncertainty of its rank (`delta`). Values are collected in a buffer before they become
samples. With up to 1 / (2 · error) values every quantile is exact.

A blob's content (after `collect.HEADER`) is 24 bytes per sample, then 8 bytes per buffered value. Values are integers
in the order of the doubles (`operators.functions.quantiles`). Three words follow the blob column: used bytes, number
of samples, and number of values represented by samples.
"""

# mypy: disable-error-code="untyped-decorator,assignment,return-value,no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from millpond.kernels.aggregate.collect import HEADER
from millpond.kernels.compiled import inlined, kernel
from millpond.kernels.memory import BYTES, BYTES_IN, FLOATS_IN, I64, INTS, INTS_IN, WORDS, WORDS_IN, load64, store64
from millpond.layout import LENGTH

Array = NDArray[Any]

F64 = types.float64
SAMPLE = 24
"""Bytes of a sample."""
VALUE = 8
"""Bytes of a buffered value."""


@inlined
def _read(heap: Array, at: int) -> int:
    return np.int64(load64(heap, at))


@inlined
def _write(heap: Array, at: int, value: int) -> None:
    store64(heap, at, np.uint64(value))


@kernel(types.void(BYTES_IN, I64, I64, INTS, INTS, INTS))
def _samples(heap: Array, at: int, count: int, values: Array, gs: Array, deltas: Array) -> None:
    """Read samples."""
    for i in range(count):
        values[i] = _read(heap, at + SAMPLE * i)
        gs[i] = _read(heap, at + SAMPLE * i + 8)
        deltas[i] = _read(heap, at + SAMPLE * i + 16)


@kernel(types.void(BYTES, I64, I64, I64, INTS_IN, INTS_IN, INTS_IN))
def _put_samples(heap: Array, at: int, first: int, count: int, values: Array, gs: Array, deltas: Array) -> None:
    """Write `count` samples, starting with sample `first`."""
    for i in range(count):
        _write(heap, at + SAMPLE * i, values[first + i])
        _write(heap, at + SAMPLE * i + 8, gs[first + i])
        _write(heap, at + SAMPLE * i + 16, deltas[first + i])


@kernel(I64(INTS, INTS, INTS, I64, F64))
def _compress(values: Array, gs: Array, deltas: Array, count: int, threshold: float) -> int:
    """Merge samples into their successors while the uncertainty stays below a threshold.

    Returns:
        Position of the first remaining sample; they end at `count` as before.
    """
    if count == 0:
        return 0
    write = count
    value, g, delta = values[count - 1], gs[count - 1], deltas[count - 1]
    for i in range(count - 2, 0, -1):
        if np.float64(gs[i] + g + delta) < threshold:
            g += gs[i]
        else:
            write -= 1
            values[write], gs[write], deltas[write] = value, g, delta
            value, g, delta = values[i], gs[i], deltas[i]
    # The first sample, the minimum, is never merged.
    least, least_g, least_delta = values[0], gs[0], deltas[0]
    write -= 1
    values[write], gs[write], deltas[write] = value, g, delta
    if count > 1:
        write -= 1
        values[write], gs[write], deltas[write] = least, least_g, least_delta
    return write


@kernel(I64(BYTES_IN, I64, I64, I64, I64, F64, INTS, INTS, INTS))
def _summarise(
    heap: Array,
    at: int,
    samples: int,
    buffered: int,
    counted: int,
    error: float,
    values: Array,
    gs: Array,
    deltas: Array,
) -> int:
    """Turn a blob's buffered values into samples, and compress.

    Args:
        heap, at: the heap, and the start of the content in it.
        samples, buffered, counted: number of samples, of buffered values, and of values represented by samples.
        error: relative error of ranks.
        values, gs, deltas: `samples + buffered` entries each; filled up to their end.

    Returns:
        Position of the first sample.
    """
    fresh = np.empty(buffered, np.int64)
    start = at + SAMPLE * samples
    for j in range(buffered):
        fresh[j] = _read(heap, start + VALUE * j)
    fresh.sort()
    count = 0
    next_sample = 0
    for j in range(buffered):
        while next_sample < samples and _read(heap, at + SAMPLE * next_sample) <= fresh[j]:
            _samples(heap, at + SAMPLE * next_sample, 1, values[count:], gs[count:], deltas[count:])
            next_sample += 1
            count += 1
        counted += 1
        last = next_sample == samples and j == buffered - 1
        values[count], gs[count] = fresh[j], 1
        deltas[count] = 0 if count == 0 or last else np.int64(np.floor(2.0 * error * np.float64(counted)))
        count += 1
    _samples(heap, at + SAMPLE * next_sample, samples - next_sample, values[count:], gs[count:], deltas[count:])
    return _compress(values, gs, deltas, count + samples - next_sample, 2.0 * error * np.float64(counted))


@kernel(I64(WORDS, BYTES, INTS_IN, I64, I64, F64, I64, INTS, INTS))
def settle(
    words: Array,
    heap: Array,
    rows: Array,
    offset: int,
    counts: int,
    error: float,
    most: int,
    out_rows: Array,
    out_sizes: Array,
) -> int:
    """Turn buffers of more than `most` values into samples.

    Args:
        words, heap, rows: the table's rows, its heap, and the ids of the rows to process.
        offset: first word of the blob column.
        counts: first of the two words with the numbers of samples and of represented values.
        error: relative error of ranks.
        most: values that may stay buffered.
        out_rows: filled with rows whose blobs are too short for their samples, with repetitions. They stay unchanged.
        out_sizes: filled with the required lengths of those blobs.

    Returns:
        Number of filled entries of `out_rows` and `out_sizes`.
    """
    short = 0
    for i in range(rows.size):
        row = rows[i]
        samples, counted = np.int64(words[row, counts]), np.int64(words[row, counts + 1])
        buffered = (np.int64(words[row, offset + 2]) - SAMPLE * samples) // VALUE
        if buffered <= most:
            continue
        content = np.int64(words[row, offset + 1]) + HEADER
        total = samples + buffered
        values, gs, deltas = np.empty(total, np.int64), np.empty(total, np.int64), np.empty(total, np.int64)
        first = _summarise(heap, content, samples, buffered, counted, error, values, gs, deltas)
        kept = total - first
        if SAMPLE * kept + HEADER > np.int64(words[row, offset] & LENGTH):
            out_rows[short] = row
            out_sizes[short] = SAMPLE * kept + HEADER
            short += 1
            continue
        _put_samples(heap, content, first, kept, values, gs, deltas)
        words[row, offset + 2] = np.uint64(SAMPLE * kept)
        words[row, counts] = np.uint64(kept)
        words[row, counts + 1] = np.uint64(counted + buffered)
    return short


@kernel(types.void(WORDS, BYTES, INTS_IN, I64, I64, F64, WORDS_IN, BYTES_IN))
def combine(
    words: Array, heap: Array, rows: Array, offset: int, counts: int, error: float, other: Array, other_heap: Array
) -> None:
    """Merge other summaries' samples into those of rows, and append their buffers; the blobs must have room."""
    for i in range(rows.size):
        row = rows[i]
        used, other_used = np.int64(words[row, offset + 2]), np.int64(other[i, offset + 2])
        if other_used == 0:
            continue
        content, other_content = np.int64(words[row, offset + 1]) + HEADER, np.int64(other[i, offset + 1]) + HEADER
        samples, other_samples = np.int64(words[row, counts]), np.int64(other[i, counts])
        counted, other_counted = np.int64(words[row, counts + 1]), np.int64(other[i, counts + 1])
        if other_samples:
            buffered = (used - SAMPLE * samples) // VALUE
            fresh = np.empty(buffered, np.int64)
            for j in range(buffered):
                fresh[j] = _read(heap, content + SAMPLE * samples + VALUE * j)
            total = samples + other_samples
            values, gs, deltas = np.empty(total, np.int64), np.empty(total, np.int64), np.empty(total, np.int64)
            own_more = np.int64(np.floor(2.0 * error * np.float64(other_counted)))
            other_more = np.int64(np.floor(2.0 * error * np.float64(counted)))
            own, others = 0, 0
            for j in range(total):
                ours = others == other_samples
                if own < samples and not ours:
                    ours = _read(heap, content + SAMPLE * own) < _read(other_heap, other_content + SAMPLE * others)
                if ours:
                    _samples(heap, content + SAMPLE * own, 1, values[j:], gs[j:], deltas[j:])
                    own += 1
                    if 0 < others < other_samples:
                        deltas[j] += own_more
                else:
                    _samples(other_heap, other_content + SAMPLE * others, 1, values[j:], gs[j:], deltas[j:])
                    others += 1
                    if 0 < own < samples:
                        deltas[j] += other_more
            first = 0
            if samples:
                first = _compress(values, gs, deltas, total, 2.0 * error * np.float64(counted + other_counted))
            kept = total - first
            _put_samples(heap, content, first, kept, values, gs, deltas)
            for j in range(buffered):
                _write(heap, content + SAMPLE * kept + VALUE * j, fresh[j])
            used = SAMPLE * kept + VALUE * buffered
            words[row, counts] = np.uint64(kept)
            words[row, counts + 1] = np.uint64(counted + other_counted)
        for j in range(other_samples * SAMPLE, other_used, VALUE):
            _write(heap, content + used, _read(other_heap, other_content + j))
            used += VALUE
        words[row, offset + 2] = np.uint64(used)


@kernel(types.void(WORDS_IN, BYTES_IN, I64, I64, F64, FLOATS_IN, types.Array(types.int64, 2, "C"), BYTES))
def query(
    words: Array, heap: Array, offset: int, counts: int, error: float, shares: Array, out: Array, there: Array
) -> None:
    """Compute the quantiles of every row.

    Args:
        words, heap, offset, counts, error: as for `settle`.
        shares: fractions of values that are at most the quantile, ascending.
        out: filled with a value for each row and share.
        there: filled with whether the row has any value.
    """
    for row in range(words.shape[0]):
        samples, counted = np.int64(words[row, counts]), np.int64(words[row, counts + 1])
        buffered = (np.int64(words[row, offset + 2]) - SAMPLE * samples) // VALUE
        total = samples + buffered
        there[row] = total > 0
        out[row, :] = 0
        if total == 0:
            continue
        content = np.int64(words[row, offset + 1]) + HEADER
        values, gs, deltas = np.empty(total, np.int64), np.empty(total, np.int64), np.empty(total, np.int64)
        first = _summarise(heap, content, samples, buffered, counted, error, values, gs, deltas)
        counted += buffered
        uncertain = np.int64(0)
        for i in range(first, total):
            uncertain = max(uncertain, gs[i] + deltas[i])
        allowed = np.float64(uncertain // 2)
        i = first
        rank = gs[first]
        for index in range(shares.size):
            share = shares[index]
            if share <= error:
                out[row, index] = values[first]
                continue
            if share >= 1.0 - error:
                out[row, index] = values[total - 1]
                continue
            target = np.float64(np.int64(np.ceil(share * np.float64(counted))))
            while i < total - 1 and not (
                np.float64(rank + deltas[i]) - allowed <= target and target <= np.float64(rank) + allowed
            ):
                i += 1
                rank += gs[i]
            out[row, index] = values[i]
