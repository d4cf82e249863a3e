"""The hosts of an application's executors, as Spark's scheduler knows them."""

from __future__ import annotations

from collections.abc import Iterable

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

    def addresses(self) -> frozenset[str]:
        """Return the addresses of all executors: host and port. An executor that is started again has a new port."""
        addresses = str(self._context.getExecutorMemoryStatus().keySet().mkString(" ")).split()
        return frozenset(address for address in addresses if address != self._driver)

    def take_tasks(self, addresses: Iterable[str]) -> list[str]:
        """Return the hosts of executors that take tasks, in order; executors that are being decommissioned do not."""
        scheduler = self._context.taskScheduler()
        return sorted(host for host in set(map(host_of, addresses)) if scheduler.hasExecutorsAliveOnHost(host))


def host_of(address: str) -> str:
    """Return the host of an executor's address."""
    return address.rpartition(":")[0]
