"""Runs the batches of a processor in this process: the operator as a slot has it, the user's code as workers call it.

The two talk as they do between a slot and a worker of Spark's. The operator is in a thread of its own, so that the
user's code is called by whoever runs the batch, and can be looked at with a debugger.
"""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import cast
from weakref import finalize

import msgspec
import numpy as np
import pyarrow as pa

from millpond.errors import MillpondError
from millpond.kernels.aggregate.count_min import hash_bytes
from millpond.operators.columns.encode import ALL, strings
from millpond.operators.columns.nested import pack
from millpond.operators.kinds.registry import open_operator
from millpond.operators.processors.calls import Calling
from millpond.operators.protocol import MakeTable, Operator, Times
from millpond.slot.pipe.processors.conversation import Asking, answer
from millpond.slot.pipe.processors.processor import UserProcessor
from millpond.slot.process.calling import ConnectedCaller
from millpond.slot.process.connection import Connection, Kind, PeerGone
from millpond.slot.process.messages import Call
from millpond.spec.kinds.processor import ProcessorSpec
from millpond.spec.types import DataType, parse_type
from millpond.testing.tables import MemoryTables


class Batches:
    """A processor's state, in memory, and the batches that change it. A batch that fails changes nothing."""

    def __init__(self) -> None:
        self._tables = MemoryTables()
        self._spec: ProcessorSpec | None = None
        self._operator: Operator | None = None
        self._slot = ThreadPoolExecutor(1, "millpond-testing")
        finalize(self, self._slot.shutdown, wait=False)

    def run(self, user: UserProcessor, rows: pa.Table, times: Times, told: tuple[int, int] | None = None) -> pa.Table:
        """Run a batch.

        Args:
            user: the processor. rows: the columns of its spec.
            times: of the batch. told: the processing time and the watermark that the processor is told, if others.

        Returns:
            What the processor gave out.

        Raises whatever the user's functions raise, with a note that names the key.
        """
        here, there = (Connection(end) for end in socket.socketpair())
        done = self._slot.submit(self._apply, there, user.spec, rows, times)
        running = user.start(Asking(here))
        try:
            while True:
                kind, payload = here.receive()
                if kind is Kind.END:
                    return done.result()
                assert isinstance(payload, Call)
                if told is not None:
                    payload = msgspec.structs.replace(payload, processing=told[0], watermark=told[1])
                answer(here, payload, running, f"a test of {user.title}")
        except PeerGone:
            done.result()  # tells why the operator has ended
            raise
        finally:
            here.close()
            if done.exception() is not None:
                self._drop()

    def _apply(self, connection: Connection, spec: ProcessorSpec, rows: pa.Table, times: Times) -> pa.Table:
        """What a slot does for a batch."""
        try:
            operator = self._opened(spec)
            assert isinstance(operator, Calling)
            operator.caller = ConnectedCaller(connection)
            operator.begin(self._tables.version, times)
            for batch in rows.to_batches():
                hashes = _hashes([batch.column(at) for at in spec.keys], [parse_type(f.type) for f in spec.key_fields])
                names = ["__hash", *batch.schema.names]
                operator.process(pa.RecordBatch.from_arrays([hashes, *batch.columns], names=names))
            self._tables.seal(operator.finish())
            schema = pa.schema([(one.name, parse_type(one.type).arrow) for one in spec.outputs])
            shown = pa.Table.from_batches(list(operator.output()), schema)
            connection.send_end()
        except MillpondError as error:
            connection.send_error(error)
            raise
        finally:
            connection.close()
        return shown

    def _opened(self, spec: ProcessorSpec) -> Operator:
        if self._spec is not spec:
            self._drop()
            self._spec = spec
        if self._operator is None:
            self._operator = open_operator(spec, cast(MakeTable, self._tables.open), self._tables.names)
        return self._operator

    def _drop(self) -> None:
        if self._operator is not None:
            self._operator.close()
            self._operator = None


def _hashes(keys: list[pa.Array], types: list[DataType]) -> pa.Array:
    """Hashes of keys: the same for those that group together."""
    dtype = DataType("struct", fields=tuple((f"_{at}", one) for at, one in enumerate(types)))
    whole = pa.StructArray.from_arrays(keys, fields=list(dtype.arrow))
    packed = strings(*pack(whole, dtype, normal=True), ALL)
    halves = np.empty((len(whole), 2), np.int32)
    hash_bytes(packed.values, packed.heap, halves)
    return pa.array(halves.view(np.int64)[:, 0])
