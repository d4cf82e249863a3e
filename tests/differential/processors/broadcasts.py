"""Processors and functions over groups with broadcast variables, or too large for anything else.

Spark's workers import this module: it needs no pytest and no session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pyspark.core.broadcast import Broadcast

from tests.differential.processors.processors import Count, shown

MUCH = 2 << 20
"""More bytes than Spark sends with a function: a larger one becomes a broadcast variable."""


class Weighted(Count):
    """Count the rows of each key by its weight, which a broadcast variable has."""

    def __init__(self, weights: Broadcast[dict[str, int]]) -> None:
        self.weights = weights

    def answer(self, key: Any, rows: Iterable[Any], times: Any) -> Iterator[tuple[Any, ...]]:
        now = sum(self.weights.value[key[0]] for _ in rows)
        before = self.total.get()
        total = now + (before[0] if before else 0)
        self.total.update((total,))
        yield shown(key), total, now


class Large(Count):
    """Count the rows of each key, with much data that has no part in it."""

    def __init__(self) -> None:
        self.data = bytes(MUCH)


def weighted(weights: Broadcast[dict[str, int]]) -> Callable[..., Iterator[Any]]:
    """A function over groups that counts as `Weighted` does."""

    def count(key: Any, frames: Any, state: Any) -> Iterator[Any]:
        import pandas as pd

        now = sum(map(len, frames)) * weights.value[key[0]]
        total = now + (state.getOption[0] if state.exists else 0)
        state.update((total,))
        yield pd.DataFrame({"said": [shown(key)], "total": [total], "now": [now]})

    return count


def large() -> Callable[..., Iterator[Any]]:
    """A function over groups that counts as `Large` does."""
    data = bytes(MUCH)

    def count(key: Any, frames: Any, state: Any) -> Iterator[Any]:
        import pandas as pd

        now = sum(map(len, frames)) * (len(data) > 0)
        total = now + (state.getOption[0] if state.exists else 0)
        state.update((total,))
        yield pd.DataFrame({"said": [shown(key)], "total": [total], "now": [now]})

    return count
