"""Spark's Python worker, in which pipes run: what its habits cost, and how to spare it that."""

from __future__ import annotations

import gc
from functools import cache


@cache
def settle() -> None:
    """Take what is loaded out of the garbage collector's sight, once in a process.

    Spark's worker collects garbage after every task, and goes through every object of every imported module each time:
    tens of milliseconds a task, more than the pipe itself needs.
    """
    gc.collect()
    gc.freeze()
