"""An S3 server in this process, for state on an object store, and what it is asked."""

from __future__ import annotations

import logging
import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from moto.moto_server.werkzeug_app import MotoRequestHandler
from moto.server import ThreadedMotoServer

BUCKET = "millpond-tests"


@contextmanager
def s3() -> Iterator[str]:
    """The URL of an empty bucket; the environment names its server, for processes that are started meanwhile too."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
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
    """The environment names this server, nothing else of Amazon's but `more`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_ALLOW_HTTP", "true")
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        for name, value in more.items():
            patch.setenv(name, value)
        yield


@contextmanager
def asked() -> Iterator[list[tuple[str, str]]]:
    """Kind (as S3 charges for it) and path of each request that servers of this process have answered meanwhile."""
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
