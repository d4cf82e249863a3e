"""Changes to Spark's Python worker."""

import gc
import os
import socket
import sys
import time
from collections.abc import Iterator
from types import ModuleType

import pyarrow as pa
import pytest

from millpond.worker.spark_task import freeze_modules, without_delayed_acks

BATCH = pa.record_batch({"x": [1, 2]})


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection: as the worker has it, and as the JVM does."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as worker:
        jvm, _ = server.accept()
        with jvm:
            yield worker, jvm


@pytest.mark.skipif(sys.platform != "linux", reason="other systems acknowledge otherwise")
def test_all_batches_come_and_the_connection_is_only_borrowed(connection: tuple[socket.socket, socket.socket]) -> None:
    worker, jvm = connection
    before = len(os.listdir("/proc/self/fd"))
    several = [without_delayed_acks(iter([BATCH, BATCH])) for _ in range(3)]
    assert [next(each) for each in several] == [BATCH] * 3
    assert len(os.listdir("/proc/self/fd")) == before
    assert [list(each) for each in several] == [[BATCH]] * 3
    del several
    gc.collect()
    jvm.sendall(b"more")
    assert worker.recv(4) == b"more"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems acknowledge otherwise")
def test_a_default_timeout_of_the_users_code_does_not_reach_the_connection(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    worker, _ = connection
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(10)
    try:
        assert list(without_delayed_acks(iter([BATCH]))) == [BATCH]
    finally:
        socket.setdefaulttimeout(before)
    assert os.get_blocking(worker.fileno())


@pytest.mark.skipif(sys.platform != "linux", reason="other systems acknowledge otherwise")
def test_what_follows_a_command_is_not_held_back(connection: tuple[socket.socket, socket.socket]) -> None:
    worker, jvm = connection
    assert not worker.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    def exchange() -> float:
        """Seconds until the batch after a command has come, as in a worker that was used before."""
        for _ in range(20):  # a conversation: acknowledgements travel with answers from now on
            jvm.sendall(b"x")
            worker.recv(1)
            worker.sendall(b"x")
            jvm.recv(1)
        jvm.sendall(b"command")
        worker.recv(7)
        jvm.sendall(b"batch")

        def batches() -> Iterator[pa.RecordBatch]:
            worker.recv(5)
            yield BATCH

        started = time.perf_counter()
        assert list(without_delayed_acks(batches())) == [BATCH]
        return time.perf_counter() - started

    assert min(exchange() for _ in range(5)) < 0.02, "acknowledgements are put off by 40 ms"
    assert worker.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.fixture
def thawed() -> Iterator[None]:
    """Nothing stays frozen after the test."""
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
def test_what_a_task_imports_is_frozen_at_the_next_and_what_it_leaves_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    freeze_modules()
    before = gc.get_freeze_count()
    left = [[number] for number in range(10_000)]
    freeze_modules()
    assert gc.get_freeze_count() <= before, "nothing was imported"
    monkeypatch.setitem(sys.modules, "millpond_imported_late", ModuleType("millpond_imported_late"))
    freeze_modules()
    assert gc.get_freeze_count() > before + len(left) // 2
