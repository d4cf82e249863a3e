"""Framed connection between two processes over a Unix-domain socket.

A frame is a kind (4 bytes), a payload length (8 bytes) and the payload. Messages are tagged msgpack. Rows are Arrow IPC
messages, received into aligned buffers and read without a copy. Errors are pickled `MillpondError`s. Heartbeats may
carry a text. Sockets are in a directory of mode 0700, so both ends belong to one user.
"""

from __future__ import annotations

import errno
import logging
import pickle
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import msgspec
import pyarrow as pa

from millpond.errors import MillpondError
from millpond.slot.process.messages import Message

_HEADER = struct.Struct("<IQ")
_SEND_BUFFER_BYTES = 4 << 20
_ACCEPT_PAUSE_SECONDS = 0.1
"""Pause after a connection that was not accepted; the listener stays ready meanwhile."""
_MAX_HEARTBEAT_TEXT = 2000  # bytes: a heartbeat must fit the socket buffer, as it is sent whole or not at all

log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class Kind(IntEnum):
    """Content of a frame."""

    MESSAGE = 1
    SCHEMA = 2
    BATCH = 3
    END = 4
    HEARTBEAT = 5
    ERROR = 6


Frame = tuple[Kind, Any]


class PeerSilent(OSError):
    """The other end sent no frame, not even a heartbeat, for too long."""


class PeerGone(ConnectionError):
    """The other end closed the connection or died."""


def accept(listener: socket.socket) -> socket.socket | None:
    """Accept a connection; None if this process has too many open files for now, or if the other end has gone."""
    try:
        return listener.accept()[0]
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED):
            raise
        log.warning("a connection was not accepted: %s", error)
        time.sleep(_ACCEPT_PAUSE_SECONDS)
        return None


class Connection:
    """One end of a framed connection.

    Only one thread may receive. Sending is locked, since another thread sends heartbeats.

    Args:
        sock: a connected Unix-domain socket.
        silence: seconds without progress after which the other end counts as hung; None to wait without limit.
        on_heartbeat: called with the text of each heartbeat of the other end.

    Attributes:
        serving: the query that this end works for, if any; heartbeats are sent only then.
    """

    def __init__(
        self, sock: socket.socket, silence: float | None = None, on_heartbeat: Callable[[str], None] = lambda text: None
    ) -> None:
        self.sock = sock
        self.silence = silence
        self.on_heartbeat = on_heartbeat
        self.serving: str | None = None
        self._sending = threading.Lock()
        self._schema: pa.Schema | None = None
        self._unread_frames: list[Frame] = []
        # Non-blocking, so that each wait is a `poll` with a deadline.
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)

    def close(self) -> None:
        """Close the connection."""
        self.sock.close()

    def abort(self) -> None:
        """Shut the connection down from another thread: both ends see it closed at once."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    # sending ------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send a message."""
        self._send(Kind.MESSAGE, _encoder.encode(message))

    def send_schema(self, schema: pa.Schema) -> None:
        """Send the schema of the record batches that follow."""
        self._send(Kind.SCHEMA, schema.serialize())

    def send_batch(self, batch: pa.RecordBatch) -> None:
        """Send a record batch of the schema sent before."""
        self._send(Kind.BATCH, batch.serialize())

    def send_table(self, table: pa.RecordBatch) -> None:
        """Send a table that a message has named: a schema and one record batch."""
        self.send_schema(table.schema)
        self.send_batch(table)

    def send_end(self) -> None:
        """Mark the end of the record batches."""
        self._send(Kind.END, b"")

    def send_error(self, error: MillpondError) -> None:
        """Send an error, and make the other end's next send fail at once instead of filling buffers."""
        self._send(Kind.ERROR, pickle.dumps(error))
        try:
            self.sock.shutdown(socket.SHUT_RD)
        except OSError:
            return

    def send_heartbeat(self, describe: Callable[[str], str] = lambda query: "") -> None:
        """Send a heartbeat, with a text about the query served, unless another frame is being sent."""
        query = self.serving
        # A frame that is being sent is a sign of life as well.
        if query is not None and self._sending.acquire(blocking=False):
            try:
                text = describe(query).encode()[:_MAX_HEARTBEAT_TEXT]
                self.sock.send(_HEADER.pack(Kind.HEARTBEAT, len(text)) + text)
            except OSError:
                return  # full: earlier heartbeats are unread; or closed: the connection's owner will notice
            finally:
                self._sending.release()

    def _send(self, kind: Kind, payload: Any) -> None:
        view = memoryview(payload).cast("B")
        with self._sending:
            header = _HEADER.pack(kind, len(view))
            # Small frames take one system call; large payloads are not copied.
            if len(view) < 4096:
                self._push(memoryview(header + bytes(view)))
            else:
                self._push(memoryview(header))
                self._push(view)

    def _push(self, view: memoryview) -> None:
        poller: select.poll | None = None
        deadline = None
        while view:
            try:
                sent = self.sock.send(view)
            except BlockingIOError:
                sent = 0
            except (BrokenPipeError, ConnectionResetError) as error:
                self._raise_sent_error()
                raise PeerGone(str(error)) from error
            if sent:
                view = view[sent:]
                deadline = None
                continue
            if poller is None:
                poller = select.poll()
                poller.register(self.sock, select.POLLOUT | select.POLLIN)
            if deadline is None and self.silence is not None:
                deadline = time.monotonic() + self.silence
            for _, events in self._wait(poller, deadline):
                if events & select.POLLIN:
                    # The other end sends meanwhile: a heartbeat, or an error that makes sending pointless.
                    frame = self._read_frame()
                    deadline = None
                    if frame[0] is not Kind.HEARTBEAT:
                        self._unread_frames.append(frame)
                        if frame[0] is Kind.ERROR:
                            raise frame[1]

    def _raise_sent_error(self) -> None:
        """Raise the error that the other end sent before it closed, if there is one."""
        try:
            while True:
                kind, payload = self._read_frame()
                if kind is Kind.ERROR:
                    raise payload
        except OSError:
            return

    # receiving ----------------------------------------------------------------------------------------------

    def receive(self) -> Frame:
        """Return the next frame that is not a heartbeat: `(kind, message | schema | record batch | None)`.

        Raises:
            MillpondError: the other end sent an error.
            PeerSilent: nothing, not even a heartbeat, arrived for `silence` seconds.
            PeerGone: the other end closed the connection.
        """
        if self._unread_frames:
            return self._unread_frames.pop(0)
        while True:
            frame = self._read_frame()
            if frame[0] is Kind.ERROR:
                raise frame[1]
            if frame[0] is not Kind.HEARTBEAT:
                return frame

    def expect(self, kind: type[Any]) -> Any:
        """Receive the next frame, which must be a message of type `kind`."""
        _, message = self.receive()
        if not isinstance(message, kind):
            raise PeerGone(f"expected {kind.__name__}, got {type(message).__name__}")
        return message

    def receive_table(self) -> pa.RecordBatch:
        """Receive the next table, which a message has named."""
        while True:
            kind, payload = self.receive()
            if kind is Kind.BATCH:
                return payload
            if kind is not Kind.SCHEMA:
                raise PeerGone(f"expected a table, got {kind.name}")

    def _read_frame(self) -> Frame:
        header = bytearray(_HEADER.size)
        self._fill(memoryview(header))
        number, length = _HEADER.unpack(header)
        kind = Kind(number)
        if kind is Kind.BATCH:
            buffer = pa.allocate_buffer(length)
            self._fill(memoryview(buffer).cast("B"))
            return kind, pa.ipc.read_record_batch(buffer, self._schema)
        payload = bytearray(length)
        self._fill(memoryview(payload))
        if kind is Kind.MESSAGE:
            return kind, _decoder.decode(payload)
        if kind is Kind.SCHEMA:
            self._schema = pa.ipc.read_schema(pa.py_buffer(bytes(payload)))
            return kind, self._schema
        if kind is Kind.ERROR:
            return kind, pickle.loads(payload)
        if payload:
            self.on_heartbeat(payload.decode(errors="replace"))
        return kind, None

    def _fill(self, view: memoryview) -> None:
        poller: select.poll | None = None
        while view:
            try:
                count = self.sock.recv_into(view)
            except BlockingIOError:
                if poller is None:
                    poller = select.poll()
                    poller.register(self.sock, select.POLLIN)
                self._wait(poller, None if self.silence is None else time.monotonic() + self.silence)
                continue
            except ConnectionResetError as error:
                raise PeerGone(str(error)) from error
            if count == 0:
                raise PeerGone("the connection was closed")
            view = view[count:]

    def _wait(self, poller: select.poll, deadline: float | None) -> list[tuple[int, int]]:
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        events = poller.poll(remaining)
        if not events:
            raise PeerSilent(f"no sign of life for {self.silence:g} s")
        return events
