"""An asyncio server on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextmanager
def serving(handler: Handler, name: str, *, limit: int = 1 << 16) -> Iterator[int]:
    """Serve connections to a free port of this host; at the end, cancel those that are still open.

    Args:
        handler: serves one connection.
        name: of the thread.
        limit: of a stream reader's buffer, in bytes.

    Yields:
        The port.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name=name, daemon=True)
    thread.start()
    starting = asyncio.start_server(handler, "127.0.0.1", 0, limit=limit)
    server = asyncio.run_coroutine_threadsafe(starting, loop).result()
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        asyncio.run_coroutine_threadsafe(_stop(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _stop(server: asyncio.Server) -> None:
    server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
