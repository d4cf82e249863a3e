"""Values compare in the order of Spark's ORDER BY."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa

from millpond.kernels.columns.compare import compare_bytes
from millpond.kernels.compiled import kernel
from millpond.operators.columns.encode import operand
from millpond.spec.types import DataType

SIZES = (0, 1, 3, 4, 5, 8, 11, 12, 13, 16, 19, 20, 21, 40)
"""Around the borders of what a row holds inline and of what is compared at a time."""


@kernel("void(uint64[:, ::1], uint64, int64[:, ::1])")
def compare_all(values, heap, out):  # type: ignore[no-untyped-def]
    for i in range(len(values)):
        for j in range(len(values)):
            out[i, j] = compare_bytes(values[i, 0], values[i, 1], heap, values[j, 0], values[j, 1], heap)


def test_byte_strings_compare_as_unsigned_bytes() -> None:
    rng = np.random.default_rng(0)
    values = [bytes(rng.choice([0, 1, 255], size).tolist()) for size in SIZES for _ in range(6)]
    base = bytes(rng.integers(0, 256, 40).tolist())
    values += [base[:size] for size in SIZES]  # each a prefix of the next
    values += [base[:size] + last for size in SIZES for last in (b"\0", b"\xff")]
    column = operand(pa.array(values, pa.binary()), DataType("binary"))
    found = np.empty((len(values), len(values)), np.int64)
    compare_all(column.values, column.heap.ctypes.data, found)
    expected = [[(left > right) - (left < right) for right in values] for left in values]
    assert np.sign(found).tolist() == expected
    assert {-1, 0, 1} == set(itertools.chain(*expected))
