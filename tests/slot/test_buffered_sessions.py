"""Sessions whose rows are kept until they close, through slots that come and go, and damage to what they wrote."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from millpond.errors import StateDamagedError
from millpond.metrics import LIST_METRICS, OPERATOR_METRICS, pack
from millpond.operators.protocol import MAIN, ROWS, Times
from millpond.slot.process.messages import RunBatch
from millpond.state_reader.reader import StateReader
from millpond.stores import delta_backlog
from millpond.stores.unaligned import log as window_log
from millpond.tasks.operator_task import SlotSettings
from tests.operators.test_buffered_sessions import Model, Row, found, record_batch, session_spec
from tests.support.application import Application

from .conftest import TIME

SPEC = session_spec()
BATCHES = 9
STEP = 10
"""Milliseconds by which the watermark moves with each batch."""


def rows_of(batch: int) -> list[Row]:
    choice = random.Random(batch)
    made = []
    for number in range(30):
        start = batch * STEP + choice.randrange(0, 40)
        made.append((f"key {choice.randrange(12)}", start, start + choice.randint(1, 9), 100 * batch + number))
    return made


def times_of(batch: int) -> Times:
    return Times(max(0, batch - 1) * STEP, batch * STEP)


def expected(batches: int) -> tuple[list[list[str]], Model]:
    model = Model(SPEC)
    return [model.batch(rows_of(batch), times_of(batch)) for batch in range(batches)], model


class Sessions(Application):
    """Sessions in one partition."""

    def __init__(self, folder: Path, scheme: str = "", **settings: float) -> None:
        given = msgspec.structs.replace(SlotSettings(directory=str(folder), open_timeout=0.0), **settings)
        super().__init__(folder, SPEC, 1, scheme, given)
        self.expected, _ = expected(BATCHES + 1)
        self.metrics: dict[str, float] = {}

    def planned(self, batch: int) -> bytes:
        times = {"batchWatermarkMs": times_of(batch).closed, "batchTimestampMs": TIME + batch}
        return f"v1\n{json.dumps(times)}\n".encode()

    def run(self, batch: int) -> None:
        assert self.server is not None
        rows = record_batch(SPEC, rows_of(batch), 64)
        marks = pa.array([False] * rows.num_rows)
        rows = pa.RecordBatch.from_arrays(
            [rows.column(0), marks, *rows.columns[1:]], names=["__hash", "__mark", *rows.schema.names[1:]]
        )
        marker = _marker(rows.schema, TIME + batch)
        answer = self.server.run(RunBatch(self.task, 0, batch, 0), iter([marker, rows]))

        def watched() -> Iterator[pa.RecordBatch]:
            self.metrics = (yield from answer).metrics

        assert found(SPEC, list(watched())) == self.expected[batch]


def _marker(schema: pa.Schema, time: int) -> pa.RecordBatch:
    columns = [pa.nulls(1, field.type) for field in schema]
    columns[:2] = [pa.array([time], pa.int64()), pa.array([True])]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


@pytest.fixture
def _segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch but the first begins with a segment, and little is worth a compaction."""
    monkeypatch.setattr(delta_backlog, "_MAX_DELTAS", 1)
    monkeypatch.setattr(window_log, "_MIN_OUTDATED_BYTES", 1)


def history(folder: Path, scheme: str = "", **settings: float) -> None:
    """Run all batches, with another slot for every second one."""
    for batches in range(2, BATCHES + 2, 2):
        Sessions(folder, scheme, **settings).through(min(batches, BATCHES))


@pytest.mark.usefixtures("_segments")
@pytest.mark.parametrize("scheme", ["", "faults+"], ids=["local", "remote"])
def test_slots_go_on_where_others_ended(tmp_path: Path, scheme: str) -> None:
    history(tmp_path, scheme, read_batch_ratio=0.5)
    reader = StateReader(f"{scheme}{tmp_path}")
    version = reader.versions()[-1]
    assert version == BATCHES
    model = expected(BATCHES)[1]
    sessions = [row for batch in reader.read(0, 0, version, MAIN) for row in batch.to_pylist()]
    assert sorted((row["k"], row["rows"]) for row in sessions) == sorted((k, count) for k, _, _, count in model.open)
    kept = [row for batch in reader.read(0, 0, version, ROWS) for row in batch.select(["v", "t", "b"]).to_pylist()]
    assert sorted(map(repr, kept)) == model.values
    assert reader.manifest(0, 0, version).tables[ROWS].runs.runs, "nothing was ever written to a segment"


@pytest.mark.usefixtures("_segments")
def test_what_is_read_ahead_is_reported(tmp_path: Path) -> None:
    application = Sessions(tmp_path, read_batch_ratio=1.0)
    application.start()
    totals = dict.fromkeys(LIST_METRICS, 0.0)
    for batches in range(1, BATCHES + 1):
        application.go(batches)
        reported = {name: application.metrics[name] for name in OPERATOR_METRICS + LIST_METRICS}
        assert len(pack(reported)) == len(reported)
        totals = {name: total + application.metrics[name] for name, total in totals.items()}
    application.close()
    assert totals["read_ahead_hits"] > totals["read_ahead_misses"] > 0
    assert totals["fetched_rows"] >= totals["taken_rows"] > 0


@pytest.mark.usefixtures("_segments")
@pytest.mark.parametrize("scheme", ["", "faults+"], ids=["local", "remote"])
def test_damage_to_segments_is_named(tmp_path: Path, scheme: str) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    history(whole, scheme)
    segments = StateReader(f"{scheme}{whole}").manifest(0, 0, BATCHES).tables[ROWS].runs.runs
    assert segments, "nothing was ever written to a segment"
    for seed in range(12):
        choice = random.Random(seed)
        folder = tmp_path / str(seed)
        shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("copies"))  # they would serve in its place
        victim = folder / "millpond" / choice.choice(segments).name
        content = bytearray(victim.read_bytes())
        if choice.random() < 0.3:
            del content[choice.randrange(len(content)) :]
        else:
            content[choice.randrange(len(content))] ^= 1 << choice.randrange(8)
        victim.write_bytes(content)
        with pytest.raises(StateDamagedError) as raised:
            Sessions(folder, scheme).through(BATCHES + 1)
        assert raised.value.file
