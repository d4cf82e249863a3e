"""A pipe that a slot asks to call the user's processor; the slot is a thread at the other end of a socket."""

from __future__ import annotations

import pickle
import socket
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import Row

from millpond.errors import StateDamagedError
from millpond.slot.process.connection import Connection, Kind, PeerGone
from millpond.slot.process.messages import Call, Called, Done, Fetch, RunBatch
from millpond.tasks.operator_task import OperatorTask
from millpond.worker.slot_stage import SlotStage
from tests.worker.processors.mini_slot import Scripted, user_processor

INPUT = pa.record_batch({"__hash": [1], "k": ["a"], "v": [1]})
SHOWN = pa.record_batch({"k": ["shown"], "n": [1]})


def counting(self: Any, handle: Any) -> None:
    self.count = handle.getValueState("count", "n bigint")


def tables(*keys: str) -> dict[str, pa.RecordBatch]:
    return {
        "keys": pa.record_batch({"k": keys, "count": [1] * len(keys)}),
        "rows": pa.record_batch({"k": keys, "v": range(len(keys))}),
        "variable.count": pa.record_batch([pa.nulls(len(keys), pa.struct([("n", pa.int64())]))], ["value"]),
    }


def call(connection: Connection, phase: Any, sent: dict[str, pa.RecordBatch]) -> tuple[list[Any], dict[str, Any]]:
    """The slot's side: what comes out of a call, and what it changes."""
    connection.send(Call(phase, 0, 0, list(sent)))
    for table in sent.values():
        connection.send_schema(table.schema)
        connection.send_batch(table)
    shown: list[Any] = []
    while True:
        kind, payload = connection.receive()
        if isinstance(payload, Called):
            break
        if kind is Kind.BATCH:
            shown += payload.to_pylist()
    changed = {}
    for name in payload.tables:
        assert connection.receive()[0] is Kind.SCHEMA
        changed[name] = connection.receive()[1].to_pylist()
    return shown, changed


def converse(task: OperatorTask, slot: Callable[[Connection], None], **functions: Any) -> list[Any]:
    """Return the output of a slot stage that talks to this slot."""
    ours, theirs = socket.socketpair()
    connection, other = Connection(ours), Connection(theirs)
    failed: list[BaseException] = []

    def serve() -> None:
        try:
            assert isinstance(other.receive()[1], RunBatch)
            while other.receive()[0] is not Kind.END:
                pass
            slot(other)
            other.send_schema(SHOWN.schema)
            other.send_batch(SHOWN)
            other.send(Done(7, {}))
        except PeerGone:
            pass
        except BaseException as error:
            failed.append(error)
        finally:
            other.close()

    thread = threading.Thread(target=serve)
    user = user_processor(Scripted(**functions))
    thread.start()
    pipe = SlotStage(task).with_processor(pickle.loads(pickle.dumps(user)))
    try:
        batches = list(pipe._converse(connection, RunBatch(task, 2, 7, 0), iter([INPUT])))
        return [row for batch in batches for row in batch.to_pylist()]
    finally:
        connection.close()
        thread.join()
        assert not failed, failed


def test_a_processor_lives_as_long_as_a_batch(task: OperatorTask) -> None:
    said: list[str] = []

    def init(self: Any, handle: Any) -> None:
        counting(self, handle)
        said.append("init")

    def rows(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
        self.count.update((next(rows).v,))
        yield Row(k=key[0], n=1)

    def slot(connection: Connection) -> None:
        said.clear()  # of what was learnt
        assert call(connection, "rows", tables("a", "b")) == (
            [{"k": "a", "n": 1}, {"k": "b", "n": 1}],
            {
                "variable.count": [
                    {"at": 0, "value": {"n": 0}, "expiry": (1 << 63) - 1},
                    {"at": 1, "value": {"n": 1}, "expiry": (1 << 63) - 1},
                ]
            },
        )
        assert call(connection, "rows", tables("c"))[0] == [{"k": "c", "n": 1}]
        assert call(connection, "end", {}) == ([], {})

    shown = converse(task, slot, init=init, rows=rows, close=lambda self: said.append("close"))
    assert shown == SHOWN.to_pylist()  # what the slot has put by
    assert said == ["init", "close"]


def test_signs_of_life_that_nobody_reads(task: OperatorTask) -> None:
    beaten = threading.Event()

    def rows(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
        assert beaten.wait(20)
        for n in range(50_000):
            yield Row(k="x" * 100, n=n)

    def slot(connection: Connection) -> None:
        connection.serving = "q"
        stop = threading.Event()

        def beat() -> None:
            for _ in range(5_000):  # more than a socket takes
                connection.send_heartbeat(lambda query: "patience " * 100)
            beaten.set()
            while not stop.wait(0.001):
                connection.send_heartbeat()

        beating = threading.Timer(0.1, beat)
        beating.start()
        shown, _ = call(connection, "rows", tables("a"))
        stop.set()
        beating.join()
        assert [row["n"] for row in shown] == list(range(50_000))

    assert converse(task, slot, init=counting, rows=rows) == SHOWN.to_pylist()


@pytest.mark.parametrize("raised", [ValueError("mine"), SystemExit(0), OSError("mine"), KeyboardInterrupt()])
def test_what_the_user_raises_says_where(task: OperatorTask, raised: BaseException) -> None:
    def rows(self: Any, key: Any, rows: Any, times: Any) -> Any:
        if key[0] == "b":
            raise raised
        return []

    with pytest.raises(type(raised)) as caught:
        converse(task, lambda connection: call(connection, "rows", tables("a", "b")), init=counting, rows=rows)
    assert caught.value.__notes__ == [
        "This processor was called by Millpond for operator 0 (a title), partition 2, batch 7, key ('b',). "
        "The state is not harmed: mend the processor and restart."
    ]


def test_what_close_raises_has_no_key(task: OperatorTask) -> None:
    def close(self: Any) -> None:
        if self.handle.state.name != "PRE_INIT":
            raise LookupError

    with pytest.raises(LookupError) as caught:
        converse(task, lambda connection: call(connection, "end", {}), close=close)
    assert "batch 7. The state" in caught.value.__notes__[0]


def test_output_goes_on_after_parts_were_asked_for(task: OperatorTask) -> None:
    """A request has another schema than the output before and after it."""

    def rows(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
        for n in range(30_000):
            if n % 7000 == 0:
                self.count._current_key.ask("parts.count", pa.record_batch({"at": [0], "part": [n]}))
            yield Row(k=f"row {n}", n=n)

    def slot(connection: Connection) -> None:
        sent = tables("a")
        connection.send(Call("rows", 0, 0, list(sent)))
        for table in sent.values():
            connection.send_table(table)
        shown: list[Any] = []
        while True:
            kind, payload = connection.receive()
            if isinstance(payload, Fetch):
                connection.receive_table()
                connection.send_table(pa.record_batch({"value": [0]}))
            elif isinstance(payload, Called):
                break
            elif kind is Kind.BATCH:
                shown += payload.to_pylist()
        assert shown == [{"k": f"row {n}", "n": n} for n in range(30_000)]

    assert converse(task, slot, init=counting, rows=rows) == SHOWN.to_pylist()


def test_parts_that_were_not_sent_are_asked_for(task: OperatorTask) -> None:
    got: list[Any] = []

    def rows(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
        yield Row(k="before", n=0)
        asked = pa.record_batch({"at": [0, 0], "part": [7, 8]})
        got.append(self.count._current_key.ask("parts.count", asked).to_pylist())
        yield Row(k="after", n=1)

    def slot(connection: Connection) -> None:
        sent = tables("a")
        connection.send(Call("rows", 0, 0, list(sent)))
        for table in sent.values():
            connection.send_table(table)
        fetch = connection.expect(Fetch)
        assert fetch.table == "parts.count"
        assert connection.receive_table().to_pylist() == [{"at": 0, "part": 7}, {"at": 0, "part": 8}]
        connection.send_heartbeat()
        connection.send_table(pa.record_batch({"value": [70, None]}))
        assert connection.receive()[0] is Kind.SCHEMA
        assert [row["k"] for row in connection.receive()[1].to_pylist()] == ["before", "after"]
        connection.expect(Called)

    assert converse(task, slot, init=counting, rows=rows) == SHOWN.to_pylist()
    assert got == [[70, None]]


@pytest.mark.parametrize("does", ["nothing", "goes on", "asks again", "raises"])
def test_a_slot_that_fails_to_answer_is_not_the_users_fault(task: OperatorTask, does: str) -> None:
    """Whatever the user's code makes of it."""

    def rows(self: Any, key: Any, rows: Any, times: Any) -> Any:
        def ask() -> None:
            self.count._current_key.ask("parts.count", pa.record_batch({"at": [0], "part": [0]}))

        try:
            ask()
        except Exception:
            if does == "nothing":
                raise
            if does == "asks again":
                ask()
            if does == "raises":
                raise LookupError from None
        return []

    def slot(connection: Connection) -> None:
        sent = tables("a")
        connection.send(Call("rows", 0, 0, list(sent)))
        for table in sent.values():
            connection.send_table(table)
        connection.expect(Fetch)
        connection.receive_table()
        connection.send_error(StateDamagedError("A run is damaged.", action="Restore it."))

    with pytest.raises(StateDamagedError) as caught:
        converse(task, slot, init=counting, rows=rows)
    assert not hasattr(caught.value, "__notes__")


def test_an_answer_that_was_not_waited_for_is_no_answer_to_another_question(task: OperatorTask) -> None:
    """As where a signal's handler raises, and the user's code catches that."""

    def rows(self: Any, key: Any, rows: Any, times: Any) -> Any:
        connection = self.count._current_key.ask._connection
        interrupted = unittest.mock.patch.object(connection, "receive", side_effect=TimeoutError)
        with interrupted, pytest.raises(TimeoutError):
            self.count._current_key.ask("parts.count", pa.record_batch({"at": [0], "part": [0]}))
        self.count._current_key.ask("parts.count", pa.record_batch({"at": [0], "part": [1]}))
        return []

    def slot(connection: Connection) -> None:
        sent = tables("a")
        connection.send(Call("rows", 0, 0, list(sent)))
        for table in sent.values():
            connection.send_table(table)
        connection.expect(Fetch)
        connection.receive_table()
        connection.send_table(pa.record_batch({"value": [0]}))
        connection.receive()

    with pytest.raises(TimeoutError):
        converse(task, slot, init=counting, rows=rows)


def test_a_slot_that_goes_away_while_the_user_is_at_work(task: OperatorTask) -> None:
    def rows(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
        for n in range(10_000_000):
            yield Row(k="x", n=n)

    def slot(connection: Connection) -> None:
        sent = tables("a")
        connection.send(Call("rows", 0, 0, list(sent)))
        for table in sent.values():
            connection.send_schema(table.schema)
            connection.send_batch(table)
        time.sleep(0.05)
        raise PeerGone

    with pytest.raises(PeerGone) as caught:
        converse(task, slot, init=counting, rows=rows)
    assert not hasattr(caught.value, "__notes__")
