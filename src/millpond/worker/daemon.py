"""Spark's worker daemon, which forks Python workers, with a slot stage's modules loaded before the fork.

Spark's own daemon imports nothing, so that it has no threads. Each worker then imports Arrow and pandas itself, which
costs half a second and 100 MB. With settings that keep both from starting threads, one import serves all workers.
"""

from __future__ import annotations

import gc
import os
from importlib import import_module

from millpond.slot.process.identity import NO_THREADS

LOADED = (
    "pandas",
    "pyspark.sql.pandas.serializers",
    "pyspark.worker",
    "millpond.worker.exchange",
    "millpond.worker.slot_stage",
)
"""Modules that Spark's worker imports before it runs a function, and those that Millpond's functions need."""


def load() -> None:
    """Import what workers need without starting a thread; environment variables are restored afterwards."""
    before = {name: os.environ.get(name) for name in NO_THREADS}
    os.environ.update(NO_THREADS)
    for module in LOADED:
        import_module(module)
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    gc.collect()
    # NumPy seeds its generator once, and workers with a copy of it would all draw the same numbers.
    os.register_at_fork(after_in_child=import_module("numpy.random").seed)
    gc.freeze()  # a garbage collection would write to, and so copy, every page that workers share with this process


if __name__ == "__main__":
    load()
    # Imported after `load`: Spark 4.1's daemon imports all that workers need itself, and would start threads.
    from pyspark.daemon import manager

    manager()
