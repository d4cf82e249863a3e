"""The hosts of an application's executors, as Spark's scheduler knows them."""

from __future__ import annotations

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import items


class ExecutorHosts:
    """Hosts that run an application's tasks.

    Args:
        catalyst: of a session of the application.
    """

    def __init__(self, catalyst: Catalyst) -> None:
        self._context = catalyst.spark.sparkContext._jsc.sc()
        executors = items(self._context.statusStore().executorList(True))
        self._driver = next((str(entry.hostPort()) for entry in executors if str(entry.id()) == "driver"), "")

    def alive(self) -> list[str]:
        """Return the hosts that take tasks, in order; hosts that are being decommissioned do not."""
        # One call for all executors, since this is asked several times a second.
        addresses = str(self._context.getExecutorMemoryStatus().keySet().mkString(" ")).split()
        hosts = {address.rpartition(":")[0] for address in addresses if address != self._driver}
        scheduler = self._context.taskScheduler()
        return sorted(host for host in hosts if scheduler.hasExecutorsAliveOnHost(host))
