"""Check that an executor's container has room for the slots, which take memory outside of the JVM's heap."""

from __future__ import annotations

from collections.abc import Callable

from pyspark import SparkContext

from millpond.errors import SettingError

_MIB = 1 << 20
_WORKER_MIB = 100
"""Memory of one Python worker. Spark runs one for each running task and each slot stage in it."""


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
    if not in_containers(context):
        return
    conf = context._jsc.sc().conf()
    cores = int(conf.get("spark.executor.cores", "1"))
    needed = slots * slot_memory // _MIB + cores * operators * _WORKER_MIB
    own, room = _room(
        lambda name, default: int(conf.getSizeAsMb(name, default)),
        lambda name: conf.get(name, ""),
        kubernetes=context.master.startswith("k8s"),
    )
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


def in_containers(context: SparkContext) -> bool:
    """Return whether each executor runs in a container."""
    return str(context.master).startswith(("yarn", "k8s"))


def _room(size_mb: Callable[[str, str], int], text: Callable[[str], str], *, kubernetes: bool) -> tuple[int, int]:
    """Return the megabytes outside of the heap that Spark itself needs, and those that a container has.

    Args:
        size_mb: reads a setting of Spark as megabytes, with a default.
        text: reads a setting of Spark; empty if it is not set.
        kubernetes: whether the containers are those of Kubernetes.
    """
    heap = size_mb("spark.executor.memory", "1g")
    least = size_mb("spark.executor.minMemoryOverhead", "384m")
    # On Kubernetes, Spark gives programs in Python four times as much as others.
    factor = float(
        text("spark.executor.memoryOverheadFactor")
        or text("spark.kubernetes.memoryOverheadFactor")
        or (0.4 if kubernetes else 0.1)
    )
    own = max(int(heap * 0.1), least)
    given = size_mb("spark.executor.memoryOverhead", "0") or max(int(heap * factor), least)
    return own, given + size_mb("spark.executor.pyspark.memory", "0")
