"""What forks Spark's Python workers: Spark's own daemon, with what a pipe needs loaded before it forks.

Spark's daemon imports nothing, so that it has no threads; each worker then imports Arrow and pandas for itself, half a
second and 100 MB. Where those are told to start no threads, one import serves all workers.
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
    "millpond.slot.pipe.exchange",
    "millpond.slot.pipe.pipe",
)
"""What Spark's worker imports before a function, and what Millpond's function is loaded with."""


def load() -> None:
    """Import what workers need, without a thread; the environment stays as it was."""
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
    gc.freeze()  # the collector would touch, and so copy, every page that workers share with this process


if __name__ == "__main__":
    load()
    from pyspark.daemon import manager  # Spark 4.1's imports all that workers need, and would start threads for it

    manager()
