"""The bit mixer of hash values."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import numpy as np

from millpond.kernels.compiled import helper

_FIRST = np.uint64(0xFF51AFD7ED558CCD)
_SECOND = np.uint64(0xC4CEB9FE1A85EC53)
_33 = np.uint64(33)


@helper
def mix64(value: np.uint64) -> np.uint64:
    """Mix the bits of a word: the finalizer of MurmurHash3 (`fmix64`), a bijection.

    Its results are stored with the state, so the formula is part of the state's format.
    """
    value = (value ^ (value >> _33)) * _FIRST
    value = (value ^ (value >> _33)) * _SECOND
    return value ^ (value >> _33)
