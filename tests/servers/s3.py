"""An S3 server in this process (moto), and the requests that it has answered."""

from __future__ import annotations

import logging
import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from moto.moto_server.werkzeug_app import MotoRequestHandler
from moto.server import ThreadedMotoServer

from tests.servers.seaweedfs import BUCKET, client_environment


@contextmanager
def s3() -> Iterator[str]:
    """Run a server with an empty bucket; the environment of this process and of its children names the server.

    Yields:
        URL of the bucket.
    """
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    try:
        with pointed_at(endpoint):
            urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")).close()
            yield f"s3://{BUCKET}"
    finally:
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST")).close()
        server.stop()


@contextmanager
def pointed_at(endpoint: str, **more: str) -> Iterator[None]:
    """Replace all variables of AWS in the environment by those for a server, and by `more`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in {**client_environment(endpoint), **more}.items():
            patch.setenv(name, value)
        yield


@contextmanager
def asked() -> Iterator[list[tuple[str, str]]]:
    """Record the requests that servers of this process answer.

    Yields:
        A list that grows: the kind of each request, as S3 charges for it, and its path.
    """
    seen: list[tuple[str, str]] = []

    def log_request(handler: MotoRequestHandler, *_: object) -> None:
        path, _, query = handler.path.partition("?")
        if handler.command == "GET" and "list-type" in query:
            kind = "lists"
        elif handler.command == "DELETE" or "delete" in query:
            kind = "deletes"
        else:
            kind = {"GET": "gets", "HEAD": "heads", "PUT": "puts", "POST": "puts"}[handler.command]
        seen.append((kind, path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MotoRequestHandler, "log_request", log_request)
        yield seen
