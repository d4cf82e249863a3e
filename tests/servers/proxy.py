"""A proxy in front of a store's HTTP server that injects the faults of networks and stores, drawn by a seed."""

from __future__ import annotations

import asyncio
import random
import re
import socket
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from tests.servers.asyncio_thread import serving

KINDS = ("slow_down", "conflict", "delay", "hang", "reset", "cut", "lost")
DELAYS = (0.0015, 0.023, 2.0)
"""Seconds: a near store, a remote one, one in trouble; the last is drawn once in ten."""

_REFUSALS = {
    "slow_down": (b"503 Slow Down", b"<Error><Code>SlowDown</Code><Message>Please reduce your rate.</Message></Error>"),
    "conflict": (
        b"409 Conflict",
        b"<Error><Code>ConditionalRequestConflict</Code><Message>Again.</Message></Error>",
    ),
}
_RUN = re.compile(r"[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}|\d{15}|namenoderpcaddress=[^&]*")

_EXPECTING = re.compile(rb"(?i)(?<=\r\n)expect: *100-continue\r\n")
_CONDITION = re.compile(rb"(?i)(?<=\r\n)if-none-match:[^\r]*\r\n")

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Proxy:
    """Forwards requests and answers, one after another on each connection, and draws a fault for each request.

    The draw depends on the seed, the method, the object's name and how often the request came before. Parts of names
    that differ from run to run (ids, generations) are left out.

    - `slow_down`: answer 503 without forwarding;
    - `conflict`: answer 409 to a put-if-absent without forwarding; forward other requests;
    - `delay`: forward later;
    - `hang`: never answer, without forwarding;
    - `reset`: reset the connection without forwarding;
    - `cut`: send half of the answer's body, or of its head if it has no body, then reset;
    - `lost`: forward, and reset instead of the answer;
    - `unconditional`: forward a put-if-absent without its condition. It is not among `KINDS`, because clients cannot
      recover from it.

    Args:
        server, seed, shares, through: as for `faulty`.

    Attributes:
        endpoint: the proxy's own URL.
        shares: of all requests, by kind; may be changed at any time.
        happened: number of faults, by kind.
        asked: number of requests, by method and name as above.
        carried: bytes of the bodies of requests and answers, by method and name.
    """

    def __init__(self, server: str, seed: int, shares: Mapping[str, float], through: Mapping[str, str]) -> None:
        self.endpoint = ""
        self.shares = dict(shares)
        self.happened: Counter[str] = Counter()
        self._server = urlsplit(server)
        self._through = {old.encode(): new.encode() for old, new in through.items()}
        self._seed = seed
        self.asked: Counter[str] = Counter()
        self.carried: Counter[str] = Counter()

    def draw(self, method: str, target: str) -> tuple[str, float]:
        """Return the fault of a request ("" = none), and the seconds of a `delay`."""
        asked = _name(method, target)
        self.asked[asked] += 1
        rng = random.Random(f"{self._seed} {asked} {self.asked[asked]}")
        kind = rng.choices(("", *self.shares), (1 - sum(self.shares.values()), *self.shares.values()))[0]
        return kind, rng.choices(DELAYS, (5, 4, 1))[0]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection of a client, with one connection to the server."""
        server: Stream | None = None
        try:
            while request := await _message(reader, client=writer):
                if server is None:
                    server = await asyncio.open_connection(self._server.hostname, self._server.port)
                if not await self._answer(request, writer, server):
                    break
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # an end has closed, or the proxy is stopped (asyncio's streams would report that)
        finally:
            for end in (writer, server[1] if server else None):
                if end is not None:
                    end.close()

    async def _answer(self, request: tuple[bytes, bytes], client: asyncio.StreamWriter, server: Stream) -> bool:
        """Answer a request; return whether the connection can be used again."""
        method, target, _ = request[0].split(b" ", 2)
        kind, seconds = self.draw(method.decode(), target.decode())
        if kind == "conflict" and b"\r\nif-none-match:" not in request[0].lower():
            kind = ""
        if kind:
            self.happened[kind] += 1
        if kind in _REFUSALS:
            status, body = _REFUSALS[kind]
            head = b"HTTP/1.1 %b\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n"
            client.write(head % (status, len(body)) + (b"" if method == b"HEAD" else body))
            await client.drain()
            return True
        if kind == "hang":
            while not client.transport.is_closing():  # a client that gives up closes
                await asyncio.sleep(0.05)
            return False
        if kind == "reset":
            return _reset(client)
        if kind == "delay":
            await asyncio.sleep(seconds)
        if kind == "unconditional":
            request = _CONDITION.sub(b"", request[0]), request[1]
        server[1].write(b"".join(request))
        await server[1].drain()
        answer = await _message(server[0], bodiless=method == b"HEAD")
        if answer is None or kind == "lost":
            return _reset(client)
        head, body = answer
        self.carried[_name(method.decode(), target.decode())] += len(request[1]) + len(body)
        for server_named, instead in self._through.items():
            head = head.replace(server_named, instead)
        whole = head + body
        client.write(whole[: len(head) + len(body) // 2 if body else len(head) // 2] if kind == "cut" else whole)
        await client.drain()
        if kind == "cut":
            await asyncio.sleep(0.02)  # a reset at once would overtake the bytes that were sent
            return _reset(client)
        return b"connection: close" not in head.lower()


def _name(method: str, target: str) -> str:
    return f"{method} {_RUN.sub('', target)}"


@contextmanager
def faulty(
    server: str, seed: int, shares: Mapping[str, float], through: Mapping[str, str] | None = None
) -> Iterator[Proxy]:
    """Run a proxy in front of a server, on a thread of its own.

    Args:
        server: URL of the server.
        seed: of the draws.
        shares: of all requests, by kind.
        through: replacements in the heads of answers, such as URLs of other servers by those of their proxies.
    """
    proxy = Proxy(server, seed, shares, through or {})
    with serving(proxy.serve, "proxy", limit=1 << 20) as port:
        proxy.endpoint = f"http://127.0.0.1:{port}"
        yield proxy


async def _message(
    reader: asyncio.StreamReader, *, bodiless: bool = False, client: asyncio.StreamWriter | None = None
) -> tuple[bytes, bytes] | None:
    """Read the next request or answer; return its head and body, or None at the end of the connection.

    Args:
        bodiless: whether it answers a HEAD request.
        client: the sender of a request, None for an answer. Some clients send the body only after "100 Continue".
    """
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    if client is not None and (expecting := _EXPECTING.search(head)):
        head = head.replace(expecting[0], b"")
        client.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await client.drain()
    if client is None and head.split(b" ", 2)[1] == b"100":  # the answer is still to come
        return await _message(reader, bodiless=bodiless)
    fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if line)
    if bodiless or head.split(b" ", 2)[1] in (b"204", b"304"):
        return head, b""
    if b"chunked" in fields.get(b"transfer-encoding", b""):
        body = b""
        while True:
            line = await reader.readuntil(b"\r\n")
            chunk = await reader.readexactly(int(line.split(b";")[0], 16) + 2)
            body += line + chunk
            if len(chunk) == 2:
                return head, body
    return head, await reader.readexactly(int(fields.get(b"content-length", b"0")))


def _reset(writer: asyncio.StreamWriter) -> bool:
    """Close a connection by a reset, and return False: it cannot be used again."""
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return False
