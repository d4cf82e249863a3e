"""Requests of an engine to its S3 server for state, counted on the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import unquote

import msgspec
from tests.servers.proxy import Proxy, faulty

from benchmarks.measuring.result import Requests
from benchmarks.workloads.config import RunConfig


class Asked(NamedTuple):
    """How often each request came so far, and how many bytes it carried."""

    times: dict[str, int]
    bytes: dict[str, int]


class RequestCounter:
    """Counts the requests that a proxy sees.

    Args:
        folder: what the names of all state hold: Spark's offsets and commits lie on the server as well.
    """

    def __init__(self, proxy: Proxy, folder: str) -> None:
        self._proxy = proxy
        self._folder = folder

    def look(self) -> Asked:
        """Requests so far."""
        return Asked(dict(self._proxy.asked.copy()), dict(self._proxy.carried.copy()))

    def since(self, before: Asked) -> Requests:
        """Requests since an earlier look."""
        now = self.look()
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
    """The run with a proxy before its server, and the count of what goes through it."""
    with faulty(config.s3, 0, {}) as proxy:
        folder = "/state/" if config.engine == "spark" else ""
        yield msgspec.structs.replace(config, s3=proxy.endpoint), RequestCounter(proxy, folder)
