"""The file layer on a server that takes its time, or refuses connections for a while."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from millpond.errors import TransientError, UsageError
from millpond.files.backends import objects
from millpond.files.backends.retry import LONG_RETRY
from millpond.files.locations.opening import open_filesystem
from tests.servers.process import free_ports
from tests.servers.s3 import pointed_at

RATE = 6 << 20


@contextmanager
def slow_server() -> Iterator[tuple[str, list[int]]]:
    """The endpoint of a server that reads `RATE` bytes a second, and how many each whole request had."""
    taken: list[int] = []
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        threading.Thread(target=_accept, args=(listener, taken), daemon=True).start()
        yield "http://{}:{}".format(*listener.getsockname()), taken


def _accept(listener: socket.socket, taken: list[int]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # the test is over
        threading.Thread(target=_answer, args=(connection, taken), daemon=True).start()


def _answer(connection: socket.socket, taken: list[int]) -> None:
    with connection, connection.makefile("rb") as request:
        length = 0
        while line := request.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        left = length
        while left:
            data = request.read1(1 << 16)
            if not data:
                return  # the client has given it up
            left -= len(data)
            time.sleep(len(data) / RATE)
        taken.append(length)
        connection.sendall(b'HTTP/1.1 200 OK\r\nETag: "x"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n')


def test_a_large_object_has_the_time_that_it_takes_to_send_it() -> None:
    """A commit is one put; the client's time-out is for all of it."""
    with slow_server() as (endpoint, taken), pointed_at(endpoint, AWS_TIMEOUT="1s"):
        files = open_filesystem("s3://bucket/query")
        files.put("commits/1", [bytes(9 << 20), bytes(2 * RATE)], create=True)
    assert taken == [(9 << 20) + 2 * RATE]


def test_a_put_if_absent_is_given_up_soon() -> None:
    """Whatever is asked for long: its caller has to see each time what has become of it."""
    (port,) = free_ports(1)
    with pointed_at(f"http://127.0.0.1:{port}"):
        files = open_filesystem("s3://bucket/query", retry_config=LONG_RETRY)
        with pytest.raises(TransientError, match="after 10 retries"):
            files.put("commits/1", [b"1"], create=True)


def test_an_object_that_no_store_takes_at_once_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "MAX_PUT_BYTES", 1000)
    files = open_filesystem("memory:large")
    files.put("commits/1", [bytes(500), bytes(500)], create=True)
    with pytest.raises(UsageError, match=r"1,001 bytes .* take 1,000.*commits/2.* more partitions"):
        files.put("commits/2", [bytes(500), bytes(501)], create=True)
