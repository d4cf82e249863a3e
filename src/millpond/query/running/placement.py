"""Placement of a query's partitions: which host each one's tasks should run on, as executors come and go."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from millpond.plan.catalyst.cluster.hosts import ExecutorHosts, host_of
from millpond.plan.catalyst.exchange.located import LocatedPartitions, keeps_partitions
from millpond.plan.catalyst.jvm import Catalyst
from millpond.query.running.slot_starts import SlotStarts
from millpond.tasks.operator_task import OperatorTask

log = logging.getLogger("millpond")


def spread(partitions: int, slots: int, hosts: Sequence[str], before: Mapping[int, str]) -> dict[int, str]:
    """Return a host for each partition: evenly, with as few moves as possible.

    On a host, slot `p % slots` serves partition `p`. So partitions of one slot number go to different hosts.

    Args:
        partitions: the number of partitions.
        slots: the number of slots per host.
        hosts: the hosts, at least one.
        before: the hosts until now; empty at first.

    Returns:
        The hosts by partition. Their numbers of partitions differ by at most one.
    """
    placed: dict[str, list[int]] = {host: [] for host in hosts}
    free: list[int] = []
    for partition in range(partitions):
        placed.get(before.get(partition, ""), free).append(partition)
    # Hosts that have most may keep one more than the others, so that fewer partitions move.
    most_first = sorted(hosts, key=lambda host: -len(placed[host]))
    capacity = {host: partitions // len(hosts) + (n < partitions % len(hosts)) for n, host in enumerate(most_first)}
    for host, own in placed.items():
        while len(own) > capacity[host]:
            per_slot = Counter(partition % slots for partition in own)
            leaving = max(own, key=lambda partition: per_slot[partition % slots])
            own.remove(leaving)
            free.append(leaving)
    for partition in sorted(free):
        not_full = [host for host in hosts if len(placed[host]) < capacity[host]]
        same_slot = {host: sum(other % slots == partition % slots for other in placed[host]) for host in not_full}
        chosen = min(not_full, key=lambda host: (same_slot[host], len(placed[host])))
        placed[chosen].append(partition)
    return {partition: host for host, own in placed.items() for partition in own}


class Placement:
    """Placement of the partitions of one query, shared by all of its operators.

    Args:
        spark: the query's session.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._catalyst = Catalyst(spark)
        self._executors = ExecutorHosts(self._catalyst)
        self._slot_starts = SlotStarts(self._catalyst)
        self._task: OperatorTask | None = None
        self._located: LocatedPartitions | None = None
        self._placed: dict[int, str] = {}
        self._addresses: frozenset[str] = frozenset()
        self._held: dict[str, set[int]] = {}  # by host with executors: the partitions that have been placed there
        self._hosts: list[str] = []
        self._lost_hosts: set[str] = set()  # since the last update, with the partitions that were placed there
        self._lost_partitions: set[int] = set()

    @classmethod
    def of(cls, spark: SparkSession) -> Placement | None:
        """Return a placement; None if this Spark does not keep partitions, and log a warning."""
        if not keeps_partitions(Catalyst(spark)):
            log.warning(
                "partitions may move between hosts from batch to batch, which reads their state again: Spark, or an "
                "extension of it, does not keep the partitioning of a union (spark.sql.unionOutputPartitioning)"
            )
            return None
        return cls(spark)

    def located(self, task: OperatorTask) -> LocatedPartitions:
        """Return the query's partitions with their preferred hosts.

        Args:
            task: any operator of the run that starts.
        """
        self._task = task
        if self._located is None or len(self._located.keys) != task.partitions:
            self._located = LocatedPartitions(self._catalyst, task.partitions)
            self._hosts, self._placed = [], {}
        self._look()  # what it finds lost concerns the run that starts: the next update reports it
        return self._located

    def update(self) -> tuple[frozenset[str], frozenset[int]]:
        """Spread the partitions again if the hosts have changed.

        Returns:
            The hosts that have lost an executor since the last call, and the partitions that were placed there.
        """
        self._look()
        lost = frozenset(self._lost_hosts), frozenset(self._lost_partitions)
        self._lost_hosts.clear()
        self._lost_partitions.clear()
        return lost

    def _look(self) -> None:
        assert self._located is not None
        assert self._task is not None
        try:
            addresses = self._executors.addresses()
            hosts = self._with_slots(self._executors.take_tasks(addresses), self._task)
            # Without executors, as before the first of them starts, Spark may choose.
            if hosts and hosts != self._hosts:
                self._spread(self._located, hosts, self._task.slots)
        except Py4JError as error:  # asked again soon
            log.debug("the hosts are not known: %s", error)
            return
        for host in set(map(host_of, self._addresses - addresses)):
            self._lost_hosts.add(host)
            self._lost_partitions |= self._held.pop(host, set())
        self._addresses = addresses
        # A host that is being decommissioned keeps what it had, until its executor is gone.
        for host in self._hosts:
            self._held[host] = {partition for partition, other in self._placed.items() if other == host}

    def _with_slots(self, hosts: list[str], task: OperatorTask) -> list[str]:
        """Leave out hosts that have joined until the slots of all of them run, unless there are no others.

        Hosts that join one after the other get partitions together, so that each partition moves once.
        """
        known = [host for host in hosts if host in self._hosts]
        joined = [host for host in hosts if host not in self._hosts]
        self._slot_starts.keep(joined)
        if not known:
            return hosts
        ended = [self._slot_starts.ended(host, task) for host in joined]
        return hosts if all(ended) else known

    def _spread(self, located: LocatedPartitions, hosts: list[str], slots: int) -> None:
        placed = spread(len(located.keys), slots, hosts, self._placed)
        moved = {partition: host for partition, host in placed.items() if self._placed.get(partition) != host}
        located.prefer(self._catalyst, moved)
        if self._hosts:
            log.info("hosts are now %s; %d of %d partitions move", ", ".join(hosts), len(moved), len(placed))
        self._hosts, self._placed = hosts, placed
