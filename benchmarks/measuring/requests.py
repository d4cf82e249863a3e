"""Count an engine's requests to its S3 server for state, by a proxy before the server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import unquote

import msgspec
from tests.servers.proxy import Proxy, faulty

from benchmarks.measuring.result import Requests
from benchmarks.workloads.config import RunConfig


class Traffic(NamedTuple):
    """Number and bytes of all requests so far, by method and name."""

    times: dict[str, int]
    bytes: dict[str, int]


class RequestCounter:
    """Counts the requests for state that pass a proxy.

    Args:
        folder: part of the name of each object with state; Spark's offset log and commit log lie on the server as well.
    """

    def __init__(self, proxy: Proxy, folder: str) -> None:
        self._proxy = proxy
        self._folder = folder

    def traffic(self) -> Traffic:
        """Return the traffic so far."""
        return Traffic(dict(self._proxy.asked.copy()), dict(self._proxy.carried.copy()))

    def since(self, before: Traffic) -> Requests:
        """Return the requests for state since `before`, which `traffic` returned earlier."""
        now = self.traffic()
        counts = dict.fromkeys(("puts", "gets", "lists", "heads", "deletes"), 0)
        carried = 0
        for request, times in now.times.items():
            method, target = request.split(" ", 1)
            if self._folder in unquote(target) or (method == "POST" and "?delete" in target):
                counts[_kind(method, target)] += times - before.times.get(request, 0)
                carried += now.bytes.get(request, 0) - before.bytes.get(request, 0)
        return Requests(**counts, bytes=carried)


def _kind(method: str, target: str) -> str:
    if method == "GET" and "?" in target and ("list-type" in target or "prefix=" in target):
        return "lists"
    if method == "POST" and "?delete" in target:
        return "deletes"
    return {"GET": "gets", "HEAD": "heads", "DELETE": "deletes"}.get(method, "puts")


@contextmanager
def counted(config: RunConfig) -> Iterator[tuple[RunConfig, RequestCounter]]:
    """Yield the run with a proxy before its server, and a counter of the requests that pass the proxy."""
    with faulty(config.s3, 0, {}) as proxy:
        folder = "/state/" if config.engine == "spark" else ""
        yield msgspec.structs.replace(config, s3=proxy.endpoint), RequestCounter(proxy, folder)
