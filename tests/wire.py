"""A wire to a server that is longer than it is: what goes over it arrives later, or not at all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Wire:
    """Carries connections to a server on this host, byte for byte.

    Attributes:
        port: where it listens.
        delay: seconds that what the server says takes; may be changed at any time.
        cut: whether nothing arrives any more that the server says.
        connections: how many were made.
    """

    def __init__(self, server: int, delay: float) -> None:
        self._server = server
        self.port = 0
        self.delay = delay
        self.cut = False
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
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
    """A wire to a port of this host, on a thread of its own."""
    made = Wire(server, delay)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="wire", daemon=True)
    thread.start()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(made.serve, "127.0.0.1", 0)

    async def stop(listening: asyncio.Server) -> None:
        listening.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    listening = asyncio.run_coroutine_threadsafe(start(), loop).result()
    made.port = listening.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        asyncio.run_coroutine_threadsafe(stop(listening), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
