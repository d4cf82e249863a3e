"""In-process batches of a processor: the operator as in a slot, the user's code as in a Spark worker.

Both sides use the protocol between a slot and a Spark worker. The operator runs on a thread of its own. The user's
code runs on the thread that calls `run`, so that a debugger can step into it.
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
from millpond.operators.processors.calls import CallsUserCode
from millpond.operators.protocol import MakeTable, Operator, Times
from millpond.slot.process.calling import ConnectedCaller
from millpond.slot.process.connection import Connection, Kind, PeerGone
from millpond.slot.process.messages import Call
from millpond.spec.kinds.processor import ProcessorSpec
from millpond.spec.types import DataType, parse_type
from millpond.tasks.user_processor import UserProcessor
from millpond.testing.tables import MemoryTables
from millpond.worker.processors.conversation import StateFetcher, answer
from millpond.worker.processors.start import start_processor


class Batches:
    """A processor's state in memory, and the batches that change it. A failed batch changes nothing."""

    def __init__(self) -> None:
        self._tables = MemoryTables()
        self._spec: ProcessorSpec | None = None
        self._operator: Operator | None = None
        self._slot = ThreadPoolExecutor(1, "millpond-testing")
        finalize(self, self._slot.shutdown, wait=False)

    def run(
        self, user: UserProcessor, rows: pa.Table, times: Times, seen_times: tuple[int, int] | None = None
    ) -> pa.Table:
        """Run a batch.

        Args:
            user: the processor.
            rows: the columns of its spec.
            times: times of the batch.
            seen_times: processing time and watermark that the processor sees, if they differ from `times`.

        Returns:
            The processor's output.

        Raises exceptions of the user's functions, with a note that names the key.
        """
        worker_end, slot_end = (Connection(end) for end in socket.socketpair())
        done = self._slot.submit(self._apply, slot_end, user.spec, rows, times)
        try:
            running = start_processor(user, StateFetcher(worker_end))
            while True:
                kind, payload = worker_end.receive()
                if kind is Kind.END:
                    return done.result()
                assert isinstance(payload, Call)
                if seen_times is not None:
                    payload = msgspec.structs.replace(payload, processing=seen_times[0], watermark=seen_times[1])
                answer(worker_end, payload, running, f"a test of {user.title}")
        except PeerGone:
            done.result()  # raises the operator's error
            raise
        finally:
            worker_end.close()
            # A failed batch may have left changes in the operator: the next batch opens it from sealed deltas.
            if done.exception() is not None:
                self._drop()

    def _apply(self, connection: Connection, spec: ProcessorSpec, rows: pa.Table, times: Times) -> pa.Table:
        """Apply a batch as a slot does."""
        try:
            operator = self._opened(spec)
            assert isinstance(operator, CallsUserCode)
            operator.caller = ConnectedCaller(connection)
            operator.begin(self._tables.version, times)
            for batch in rows.to_batches():
                hashes = _hashes(
                    [batch.column(index) for index in spec.keys], [parse_type(f.type) for f in spec.key_fields]
                )
                names = ["__hash", *batch.schema.names]
                operator.process(pa.RecordBatch.from_arrays([hashes, *batch.columns], names=names))
            self._tables.seal(operator.finish())
            schema = pa.schema([(field.name, parse_type(field.type).arrow) for field in spec.outputs])
            output = pa.Table.from_batches(list(operator.output()), schema)
            connection.send_end()
        except MillpondError as error:
            connection.send_error(error)
            raise
        finally:
            connection.close()
        return output

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
    """Hash keys: equal keys, in Spark's sense of grouping, have equal hashes."""
    dtype = DataType("struct", fields=tuple((f"_{index}", type_) for index, type_ in enumerate(types)))
    keyed = pa.StructArray.from_arrays(keys, fields=list(dtype.arrow))
    packed = strings(*pack(keyed, dtype, normal=True), ALL)
    halves = np.empty((len(keyed), 2), np.int32)
    hash_bytes(packed.values, packed.heap, halves)
    return pa.array(halves.view(np.int64)[:, 0])
