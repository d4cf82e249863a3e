"""A slow wire to a server: its answers arrive later, or are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.servers.asyncio_thread import serving


class Wire:
    """Carries connections to a server on this host, byte for byte.

    Args:
        server: port of the server.
        delay: initial value of the attribute.

    Attributes:
        port: of the wire's own end.
        delay: seconds from when the server sends bytes to when they arrive; may be changed at any time.
        cut: whether bytes from the server are dropped; may be changed at any time.
        connections: number of connections made so far.
    """

    def __init__(self, server: int, delay: float) -> None:
        self._server = server
        self.port = 0
        self.delay = delay
        self.cut = False
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection until either end closes it."""
        self.connections += 1
        try:
            there, to = await asyncio.open_connection("127.0.0.1", self._server)
        except OSError:
            writer.close()
            return
        with suppress(OSError, asyncio.CancelledError):
            await asyncio.wait(
                [asyncio.ensure_future(self._carry(reader, to)), asyncio.ensure_future(self._bring(there, writer))],
                return_when=asyncio.FIRST_COMPLETED,
            )
        for end in (writer, to):
            end.close()

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()

    async def _bring(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        """Forward bytes in order, each piece `delay` after it was sent."""
        loop = asyncio.get_running_loop()
        coming: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def arrive() -> None:
            while True:
                when, data = await coming.get()
                await asyncio.sleep(max(0.0, when - loop.time()))
                if not data:
                    return
                if not self.cut:
                    target.write(data)
                    await target.drain()

        arriving = asyncio.ensure_future(arrive())
        with suppress(OSError):
            while data := await source.read(1 << 16):
                coming.put_nowait((loop.time() + self.delay, data))
        coming.put_nowait((loop.time() + self.delay, b""))
        with suppress(OSError):
            await arriving


@contextmanager
def wire(server: int, delay: float = 0.0) -> Iterator[Wire]:
    """Run a wire to a port of this host, on a thread of its own."""
    made = Wire(server, delay)
    with serving(made.serve, "wire") as made.port:
        yield made
