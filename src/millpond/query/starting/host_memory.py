"""Check that an executor's container has room for the slots, which take memory outside of the JVM's heap."""

from __future__ import annotations

from collections.abc import Callable

from pyspark import SparkContext

from millpond.errors import SettingError

_MIB = 1 << 20
_WORKER_MIB = 100
"""Memory of one Python worker. Spark runs one for each running task and each slot stage in it."""
_CONTAINERS = ("yarn", "k8s")
"""Masters that run each executor in a container, and kill it when it takes more than its memory."""


def check_memory(context: SparkContext, slots: int, slot_memory: int, operators: int) -> None:
    """Refuse slots that the executors' containers have no room for.

    Args:
        context: of the application.
        slots: slots per executor.
        slot_memory: bytes of one slot.
        operators: the query's operators on Millpond.

    Raises:
        SettingError: the containers are too small; the error names the settings that would do.
    """
    if not context.master.startswith(_CONTAINERS):
        return
    conf = context._jsc.sc().conf()
    cores = int(conf.get("spark.executor.cores", "1"))
    needed = slots * slot_memory // _MIB + cores * operators * _WORKER_MIB
    own, room = _room(lambda name, default: int(conf.getSizeAsMb(name, default)), lambda name: conf.get(name, ""))
    if room - own >= needed:
        return
    fitting = (room - own - cores * operators * _WORKER_MIB) // slots
    raise SettingError(
        f"An executor's container has {room} MB outside of the JVM's heap, and needs {own + needed} MB: {own} for "
        f"Spark itself, {slots} slots of {slot_memory // _MIB} MB, and {cores * operators} Python workers of "
        f"{_WORKER_MIB} MB.",
        action=f"Set spark.executor.memoryOverhead={own + needed}m"
        + (f", or spark.millpond.slot.memory={fitting}m." if fitting >= 16 else "."),
    )


def _room(size_mb: Callable[[str, str], int], text: Callable[[str], str]) -> tuple[int, int]:
    """Return the megabytes outside of the heap that Spark itself needs, and those that a container has.

    Args:
        size_mb: reads a setting of Spark as megabytes, with a default.
        text: reads a setting of Spark; empty if it is not set.
    """
    heap = size_mb("spark.executor.memory", "1g")
    least = size_mb("spark.executor.minMemoryOverhead", "384m")
    factor = float(text("spark.executor.memoryOverheadFactor") or 0.1)
    own = max(int(heap * 0.1), least)
    given = size_mb("spark.executor.memoryOverhead", "0") or max(int(heap * factor), least)
    return own, given + size_mb("spark.executor.pyspark.memory", "0")
