"""What pipes, slots and the template say to each other over Unix-domain sockets.

Everything travels in frames: kind (4 bytes), payload length (8 bytes), payload. Messages are tagged msgpack; rows are
Arrow IPC messages, received into aligned buffers and read without a copy; errors are pickled `MillpondError`s.
Sockets live in a directory of mode 0700, so both ends belong to one user.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Literal

import msgspec
import pyarrow as pa

from millpond.errors import MillpondError
from millpond.slot.batch.task import Lookahead, PipeTask
from millpond.slot.process.identity import Process

_HEADER = struct.Struct("<IQ")
_BUFFER = 4 << 20
_LONGEST_SAID = 2000  # bytes: what a heartbeat says goes out whole or not at all


class Kind(IntEnum):
    """What a frame holds."""

    MESSAGE = 1
    SCHEMA = 2
    BATCH = 3
    END = 4
    BEAT = 5
    ERROR = 6


class Ask(msgspec.Struct, tag=True):
    """To the template: a slot is needed; the process `replace`, if it holds that slot, is to be killed first."""

    slot: int
    replace: Process | None = None


class Granted(msgspec.Struct, tag=True):
    """From the template: the slot's process; its socket listens."""

    process: Process


class Hello(msgspec.Struct, tag=True):
    """To a slot, first on every connection: are you there?"""


class Welcome(msgspec.Struct, tag=True):
    """From a slot: yes, and this is my process."""

    process: Process


class Run(msgspec.Struct, tag=True):
    """To a slot: here comes a partition's input for one batch.

    Attributes:
        task: the operator.
        partition: which partition.
        batch: the batch id, or None where Spark does not tell; then the offset log and the marker's time decide.
        attempt: Spark's task attempt id, unique in an application.
        unsure: whether the id may be another batch's: a thread of the user's keeps what it once inherited.
        paths: where modules that the application was given (`addPyFile`) lie on this host.
    """

    task: PipeTask
    partition: int
    batch: int | None
    attempt: int
    unsure: bool = False
    paths: list[str] = []


class Done(msgspec.Struct, tag=True):
    """From a slot, after the last output row: what the batch did to the partition."""

    batch: int
    metrics: dict[str, float]


class Call(msgspec.Struct, tag=True):
    """From a slot, after all input is in: the user's processor is to be called for some keys; tables of columns follow.

    Each of them is a schema and one record batch (see `operators.processors.calls`).

    Attributes:
        phase: what it is to be called with: rows of the `initial` state, `rows` of the batch, `timers` that are due;
            `end`: it is to be closed.
        processing, watermark: the times of the batch, as the processor is told them.
        tables: names of the tables that follow.
    """

    phase: Literal["initial", "rows", "timers", "end"]
    processing: int
    watermark: int
    tables: list[str]


class Fetch(msgspec.Struct, tag=True):
    """To a slot, while a call runs: parts of a variable are wanted; which ones, the table says that follows.

    It is answered by one table.

    Attributes:
        table: the name of the table that has the parts.
    """

    table: str


class Called(msgspec.Struct, tag=True):
    """To a slot, after the rows that the processor gave out: what it changed.

    Attributes:
        tables: names of the tables that follow, each a schema and one record batch.
    """

    tables: list[str]


class Hints(msgspec.Struct, tag=True):
    """To a slot, which does not answer: keys of which rows are on their way; a schema and one record batch follow, with
    their hashes, and behind these what the operator asks for (`Spec.announced`).

    Attributes:
        task: the operator.
        partition: which partition the keys are of.
        batch: the batch that will ask for them.
        lookahead: who has seen them. Without rows it says when it would have sent hints, were it asked to.
    """

    task: PipeTask
    partition: int
    batch: int
    lookahead: Lookahead


class Open(msgspec.Struct, tag=True):
    """To a slot: these partitions will be asked for, at this version.

    Attributes:
        tasks: the operators of one query.
        partitions: which partitions of each.
        version: the state that their first batch reads.
    """

    tasks: list[PipeTask]
    partitions: list[int]
    version: int


class Opened(msgspec.Struct, tag=True):
    """From a slot: they are open, or will be opened by whoever asks for them, who then learns what is wrong."""


class Drain(msgspec.Struct, tag=True):
    """To a slot: finish a query's pending commits and let go of its partitions; `query` is its `PipeTask.key`."""

    query: str
    timeout: float


class Drained(msgspec.Struct, tag=True):
    """From a slot: per partition of the query (operator, partition, version), all durable now."""

    versions: list[tuple[int, int, int]]


class Status(msgspec.Struct, tag=True):
    """To a slot: how far are you with this query (its `PipeTask.key`)?"""

    query: str


class Answered(msgspec.Struct, tag=True):
    """From a slot: (operator, partition, batch) of each partition that it holds and has answered a batch of.

    A batch is answered once what its output waits for is durable. `trouble` says why commits fail, if they do;
    `failed_commits` counts the tries that failed in this run of the query; `lost_call` says for which keys code of the
    user was called when its process went.
    """

    batches: list[tuple[int, int, int]]
    trouble: str = ""
    failed_commits: int = 0
    lost_call: str = ""


Message = (
    Ask
    | Granted
    | Hello
    | Welcome
    | Run
    | Call
    | Fetch
    | Called
    | Done
    | Hints
    | Open
    | Opened
    | Drain
    | Drained
    | Status
    | Answered
)
Frame = tuple[Kind, Any]

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class PeerSilent(OSError):
    """The other end gave no sign of life for too long."""


class PeerGone(OSError):
    """The other end closed the connection, or died."""


class Connection:
    """One end of a framed conversation.

    Receiving belongs to one thread; sending is locked, since heartbeats come from another thread.

    Args:
        sock: a connected Unix-domain socket.
        silence: seconds without progress after which the other end counts as hung; None to wait for ever.
        heard: is called with what a heartbeat of the other end says.

    Attributes:
        serving: the query that this end works for, while it does: then it gives signs of life.
    """

    def __init__(
        self, sock: socket.socket, silence: float | None = None, heard: Callable[[str], None] = lambda said: None
    ) -> None:
        self.sock = sock
        self.silence = silence
        self.heard = heard
        self.serving: str | None = None
        self._sending = threading.Lock()
        self._schema: pa.Schema | None = None
        self._early: list[Frame] = []
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)

    def close(self) -> None:
        """End the conversation."""
        self.sock.close()

    def abort(self) -> None:
        """End the conversation from another thread: both ends see it closed at once."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    # sending ------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send a message."""
        self._send(Kind.MESSAGE, _encoder.encode(message))

    def send_schema(self, schema: pa.Schema) -> None:
        """Say what the record batches that follow look like."""
        self._send(Kind.SCHEMA, schema.serialize())

    def send_batch(self, batch: pa.RecordBatch) -> None:
        """Send a record batch of the announced schema."""
        self._send(Kind.BATCH, batch.serialize())

    def send_end(self) -> None:
        """Say that no more record batches come."""
        self._send(Kind.END, b"")

    def send_error(self, error: MillpondError) -> None:
        """Send an error, and let the other end's further sending fail at once instead of filling buffers."""
        self._send(Kind.ERROR, pickle.dumps(error))
        try:
            self.sock.shutdown(socket.SHUT_RD)
        except OSError:
            return

    def beat(self, saying: Callable[[str], str] = lambda query: "") -> None:
        """Give a sign of life, with what there is to say of the query served, unless something is being sent anyway."""
        query = self.serving
        if query is not None and self._sending.acquire(blocking=False):
            try:
                said = saying(query).encode()[:_LONGEST_SAID]
                self.sock.send(_HEADER.pack(Kind.BEAT, len(said)) + said)
            except OSError:
                return  # full (it has not read the earlier ones yet) or gone (the owner of the connection will see)
            finally:
                self._sending.release()

    def _send(self, kind: Kind, payload: Any) -> None:
        view = memoryview(payload).cast("B")
        with self._sending:
            header = _HEADER.pack(kind, len(view))
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
                self._read_last_words()
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
                    # The other end speaks while we send: a sign of life, or an error that makes sending pointless.
                    frame = self._take_frame()
                    deadline = None
                    if frame[0] is not Kind.BEAT:
                        self._early.append(frame)
                        if frame[0] is Kind.ERROR:
                            raise frame[1]

    def _read_last_words(self) -> None:
        """Raise the error that the other end sent before it hung up, if it did."""
        try:
            while True:
                kind, payload = self._take_frame()
                if kind is Kind.ERROR:
                    raise payload
        except OSError:
            return

    # receiving ----------------------------------------------------------------------------------------------

    def receive(self) -> Frame:
        """The next frame that is not a heartbeat: `(kind, message | schema | record batch | None)`.

        Raises:
            MillpondError: the other end sent an error.
            PeerSilent: nothing, not even a heartbeat, came for `silence` seconds.
            PeerGone: the other end closed the connection.
        """
        if self._early:
            return self._early.pop(0)
        while True:
            frame = self._take_frame()
            if frame[0] is Kind.ERROR:
                raise frame[1]
            if frame[0] is not Kind.BEAT:
                return frame

    def expect(self, kind: type[Any]) -> Any:
        """The next frame, which has to be a message of this type."""
        _, message = self.receive()
        if not isinstance(message, kind):
            raise PeerGone(f"expected {kind.__name__}, got {type(message).__name__}")
        return message

    def _take_frame(self) -> Frame:
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
            self.heard(payload.decode(errors="replace"))
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
