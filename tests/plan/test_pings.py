"""Executors that do not answer pings are removed, once; others stay."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JError

import millpond.plan.catalyst.cluster.pings as pings
from millpond.plan.catalyst.cluster.pings import ExecutorPings


class Cluster:
    """Executors as Spark shows them; `silent` ones do not complete their replies."""

    def __init__(self, *executors: str) -> None:
        self.executors = list(executors)
        self.silent: set[str] = set()
        self.unknown: set[str] = set()
        self.sent: list[str] = []
        self.removed: list[str] = []
        self.killed: list[str] = []
        self.was_killed = threading.Event()
        self.now = 0.0

    def pings(self, timeout: float) -> ExecutorPings:
        found = ExecutorPings(self.catalyst())
        found.timeout = timeout
        return found

    def catalyst(self) -> Any:
        def new(name: str, *arguments: Any) -> Any:
            if name.endswith("RemoveExecutor"):
                return arguments[0]
            return SimpleNamespace(getExecutorEndpointRef=self.endpoint)

        environment = SimpleNamespace(address=lambda: None, setupEndpointRef=lambda address, name: None)
        backend = SimpleNamespace(
            rpcEnv=lambda: environment,
            getExecutorIds=lambda: SimpleNamespace(size=lambda: len(self.executors), apply=self.executors.__getitem__),
            driverEndpoint=lambda: SimpleNamespace(send=self.removed.append),
        )
        context = SimpleNamespace(
            schedulerBackend=lambda: backend,
            conf=lambda: None,
            statusStore=lambda: SimpleNamespace(executorSummary=self.summary),
            killAndReplaceExecutor=self.kill,
        )
        spark = SimpleNamespace(sparkContext=SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: context)))
        static = SimpleNamespace(
            apply=lambda name: None, Any=lambda: None, fromNanos=lambda n: None, empty=lambda: None
        )
        return SimpleNamespace(spark=spark, new=new, object=lambda name: static)

    def endpoint(self, executor: str) -> Any:
        def ask(message: Any, timeout: Any, tag: Any) -> Any:
            self.sent.append(executor)
            return SimpleNamespace(isCompleted=lambda: executor not in self.silent)

        return SimpleNamespace(isDefined=lambda: True, get=lambda: SimpleNamespace(ask=ask))

    def kill(self, executor: str) -> None:
        self.killed.append(executor)
        self.was_killed.set()

    def summary(self, executor: str) -> Any:
        if executor in self.unknown:
            raise Py4JError(f"no executor {executor}")
        return SimpleNamespace(hostPort=lambda: f"host{executor}:7")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster("1", "2", "3")
    monkeypatch.setattr(pings, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def poll(cluster: Cluster, watch: ExecutorPings, seconds: float, step: float = 0.5) -> None:
    until = cluster.now + seconds
    while cluster.now < until:
        cluster.now += step
        watch.remove_silent()


def test_a_silent_executor_is_removed_once(cluster: Cluster) -> None:
    watch = cluster.pings(6.0)
    poll(cluster, watch, 30)
    assert cluster.removed == []
    assert len(cluster.sent) == 3 * 30  # one a second
    cluster.silent = {"2"}
    poll(cluster, watch, 5)
    assert cluster.removed == []
    poll(cluster, watch, 30)
    assert cluster.removed == ["2"]
    assert cluster.was_killed.wait(30)
    assert cluster.killed == ["2"]
    assert watch.removed_hosts() == {"host2"}
    poll(cluster, watch, 60)
    assert watch.removed_hosts() == frozenset()


def test_an_answer_that_comes_late_counts(cluster: Cluster) -> None:
    watch = cluster.pings(6.0)
    for _ in range(5):
        cluster.silent = {"1"}
        poll(cluster, watch, 5)
        cluster.silent = set()
        poll(cluster, watch, 2)
    assert cluster.removed == []


def test_a_pause_of_the_driver_counts_little(cluster: Cluster) -> None:
    watch = cluster.pings(6.0)
    poll(cluster, watch, 2)
    cluster.silent = {"1", "2", "3"}
    poll(cluster, watch, 60, step=30)
    assert cluster.removed == []


def test_a_failure_keeps_what_was_removed_before(cluster: Cluster) -> None:
    watch = cluster.pings(6.0)
    cluster.silent = {"1", "2"}
    cluster.unknown = {"2"}
    with pytest.raises(Py4JError):
        poll(cluster, watch, 30)
    assert cluster.removed == ["1"]
    assert watch.removed_hosts() == {"host1"}
    cluster.unknown = set()
    poll(cluster, watch, 1)
    assert cluster.removed == ["1", "2"]
