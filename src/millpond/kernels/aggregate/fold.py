"""The loop of kernels that fold rows into state: each kernel adds only the function that folds one row.

All these kernels take the slab of rows, the row ids of the block, the block's first position in the batch, and the
place of the state column. `valid` and the values span the batch; an empty `valid` means that all rows are valid. Rows
are folded in order, so that sums of doubles do not depend on how a batch is split into blocks.
"""

# mypy: disable-error-code="untyped-decorator,no-any-return"

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
from numba import boolean, types

from millpond.kernels.compiled import Kernel, helper, inlined, kernel
from millpond.kernels.memory import BYTES, BYTES_IN, I64, INTS_IN, U64, WORDS
from millpond.kernels.pointers import advance, put_word, word


class StateColumn(NamedTuple):
    """The place of a state column in a row.

    Attributes:
        offset: first word of the column.
        null_word, null_bit: word and bit of the null flag.
    """

    offset: int
    null_word: int
    null_bit: int


class Or(NamedTuple):
    """Numba type of an array of values, and the value of all rows if it is empty."""

    array: Any
    default: int


@helper
def is_null(row: int, column: StateColumn) -> bool:
    """Return whether a state column is null; `row` is the address of the row's words."""
    return word(row, column.null_word) & column.null_bit != np.uint64(0)


@helper
def clear_null(row: int, column: StateColumn) -> None:
    """Clear the null flag of a state column."""
    put_word(row, column.null_word, word(row, column.null_word) & ~column.null_bit)


@helper
def set_null(row: int, column: StateColumn) -> None:
    """Set the null flag of a state column."""
    put_word(row, column.null_word, word(row, column.null_word) | column.null_bit)


@helper
def beats(more: bool, equal: bool, greatest: bool, ties: bool) -> bool:
    """Return whether a value that is more than the extreme, or equal, replaces it; an equal one does with `ties`."""
    return ties if equal else more == greatest


# Functions of a row take numbers and addresses: with arrays, Numba would count references for every row, which made
# products ten times as slow. The arguments of loops are flat since Numba converts no read-only array inside a tuple.
# They are spelled out since it inlines no call with `*`.
_SIGNATURE = "def loop(words, rows, start, offset, null_word, null_bit, valid, {parameters}):"
_BEFORE = """
    column = StateColumn(offset, null_word, null_bit)
    slab = np.uint64(words.ctypes.data)
    stride = 8 * words.shape[1]
    nullable = valid.size != 0
"""
_LOOP = f"""
{_SIGNATURE}{_BEFORE}
    for k in range(rows.size):
        i = start + k
        if nullable and valid[i] == 0:
            continue
        fold_row(advance(slab, rows[k] * stride), column, {{arguments}})
"""
_CHECKING_LOOP = f"""
{_SIGNATURE}{_BEFORE}
    within = True
    for k in range(rows.size):
        i = start + k
        if nullable and valid[i] == 0:
            continue
        within &= fold_row(advance(slab, rows[k] * stride), column, {{arguments}})
    return within
"""
_SELECTING_LOOP = f"""
{_SIGNATURE}{_BEFORE}
    record = won.size != 0
    for k in range(rows.size):
        i = start + k
        wins = False
        if not nullable or valid[i] != 0:
            wins = fold_row(advance(slab, rows[k] * stride), column, {{arguments}})
        if record:
            won[k] = wins
"""
_BLOCK_AND_PLACE = (WORDS, INTS_IN, I64, I64, I64, U64, BYTES_IN)


def fold(*values: Any) -> Callable[[Any], Kernel]:
    """Make a kernel of a function `(row, column, *values)` that folds one row's values into state.

    The kernel is called with `(words, rows, start, offset, null_word, null_bit, valid, *values)`; the function's `row`
    is the address of a row's words.

    Args:
        values: Numba types of the values. The function takes numbers as they are, of a one-dimensional array the row's
            value, and of a two-dimensional one the row's two words, the lower first.
    """
    return lambda function: _kernel(function, _LOOP, types.void, values)


def fold_checked(*values: Any) -> Callable[[Any], Kernel]:
    """As `fold`, for a function that returns whether state is within its range; the kernel returns whether all is."""
    return lambda function: _kernel(function, _CHECKING_LOOP, boolean, values)


def fold_selecting(*values: Any) -> Callable[[Any], Kernel]:
    """As `fold`, for a function that returns whether the row's value wins, and is now the state.

    The kernel takes `won` after the values: set to 1 for every row of the block that won at its turn, else to 0; it
    may be empty.
    """
    return lambda function: _kernel(function, _SELECTING_LOOP, types.void, values, won=BYTES)


def _kernel(function: Any, loop: str, result: Any, values: tuple[Any, ...], **more: Any) -> Kernel:
    """Compile a loop around a function; Numba types `values` and `more` follow the block and the place."""
    names = iter(list(signature(function).parameters)[2:])
    parameters, arguments, kinds = [], [], []
    for value in values:
        name = next(names)
        kind, default = value if isinstance(value, Or) else (value, None)
        parameters.append(name)
        kinds.append(kind)
        if not isinstance(kind, types.Array):
            arguments.append(name)
        elif kind.ndim == 2:
            arguments.append(f"{name}[i, 0], {name}[i, 1]")
            next(names)
        elif default is None:
            arguments.append(f"{name}[i]")
        else:
            arguments.append(f"{name}[i] if {name}.size != 0 else np.{kind.dtype}({default})")
    namespace: dict[str, Any] = {
        "__name__": function.__module__,
        "np": np,
        "advance": advance,
        "StateColumn": StateColumn,
    }
    exec(loop.format(parameters=", ".join([*parameters, *more]), arguments=", ".join(arguments)), namespace)
    # Numba caches by module, name, line, and the file's time: those of the function, so that its changes invalidate
    # the machine code. It is a global of the loop since Numba would hash a closure differently in every process.
    origin = function.__code__
    code = namespace["loop"].__code__.replace(
        co_name=origin.co_name,
        co_qualname=origin.co_qualname,
        co_filename=origin.co_filename,
        co_firstlineno=origin.co_firstlineno,
    )
    around = FunctionType(code, {**namespace, "fold_row": inlined(function)})
    around.__doc__ = function.__doc__
    return kernel(result(*_BLOCK_AND_PLACE, *kinds, *more.values()))(around)
