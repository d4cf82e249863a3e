"""Sessions whose rows are kept until they close, through slots that come and go, and damage to what they wrote."""

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from millpond.checkpoint.generation import claim
from millpond.checkpoint.pinned import PinnedOperator, PinnedQuery, pin, plain
from millpond.checkpoint.recovery import Recovery
from millpond.errors import StateDamagedError
from millpond.files.filesystem import join_url, open_filesystem
from millpond.metrics import FIGURES, READ_AHEAD, pack
from millpond.operators.protocol import MAIN, ROWS, Times
from millpond.operators.tables import table_schemas
from millpond.slot.partitions import PartitionServer
from millpond.slot.protocol import Run
from millpond.slot.reader import StateReader
from millpond.slot.task import PipeTask, SlotSettings
from millpond.stores import unaligned, window_log
from tests.operators.test_holistic_sessions import Model, Row, found, record_batch, session_spec
from tests.threads import at_rest

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


def expected() -> tuple[list[list[str]], Model]:
    model = Model(SPEC)
    return [model.batch(rows_of(batch), times_of(batch)) for batch in range(BATCHES)], model


class Application:
    """Slots that run one partition, with everything on disk below `folder`."""

    def __init__(self, folder: Path, scheme: str = "") -> None:
        self.location = f"{scheme}{folder}"
        self.folder = folder
        self.server: PartitionServer | None = None
        self.metrics: dict[str, float] = {}

    def start(self, version: int, generation: int, **settings: float) -> None:
        files = open_filesystem(join_url(self.location, "millpond"))
        if generation == 1:
            tables = {name: plain(schema) for name, (schema, _) in table_schemas(SPEC).items()}
            pin(files, PinnedQuery(1 << 15, (PinnedOperator("sessions", plain(SPEC), tables),)))
        claimed = claim(files, run=f"run-{generation}", partitions=1)
        Recovery(files, claimed, 1).begin([version])
        host = self.folder / "host"
        host.mkdir(exist_ok=True)
        (self.folder / "offsets").mkdir(exist_ok=True)
        self.task = PipeTask(
            application="app",
            query="query",
            run=f"run-{generation}",
            operator=0,
            spec=SPEC,
            partitions=1,
            slots=1,
            location=self.location,
            generation=claimed.number,
            offsets=str(self.folder / "offsets"),
            settings=msgspec.structs.replace(SlotSettings(directory=str(self.folder), open_timeout=0.0), **settings),
        )
        self.server = PartitionServer(host)

    def run(self, batch: int) -> list[str]:
        assert self.server is not None
        planned = {"batchWatermarkMs": times_of(batch).closed, "batchTimestampMs": TIME + batch}
        (self.folder / "offsets" / str(batch)).write_text(f"v1\n{json.dumps(planned)}\n")
        rows = record_batch(SPEC, rows_of(batch), 64)
        marks = pa.array([False] * rows.num_rows)
        rows = pa.RecordBatch.from_arrays(
            [rows.column(0), marks, *rows.columns[1:]], names=["__hash", "__mark", *rows.schema.names[1:]]
        )
        marker = _marker(rows.schema, TIME + batch)
        answer = self.server.run(Run(self.task, 0, batch, 0), iter([marker, rows]))

        def watched() -> Iterator[pa.RecordBatch]:
            self.metrics = (yield from answer).metrics

        return found(SPEC, list(watched()))

    def resume(self, batch: int, generation: int) -> list[str]:
        self.start(batch, generation)
        return self.run(batch)

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
            at_rest()


def _marker(schema: pa.Schema, time: int) -> pa.RecordBatch:
    columns = [pa.nulls(1, field.type) for field in schema]
    columns[:2] = [pa.array([time], pa.int64()), pa.array([True])]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


@pytest.fixture
def _segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch but the first begins with a segment, and little is worth a compaction."""
    monkeypatch.setattr(unaligned, "_MOST_DELTAS", 1)
    monkeypatch.setattr(window_log, "_LEAST_OUTDATED", 1)


def history(folder: Path, scheme: str = "", **settings: float) -> Iterator[int]:
    """Run all batches, with another slot for every second one; yields after each run."""
    wanted, _ = expected()
    for generation, first in enumerate(range(0, BATCHES, 2), 1):
        application = Application(folder, scheme)
        application.start(first, generation, **settings)
        for batch in range(first, min(first + 2, BATCHES)):
            assert application.run(batch) == wanted[batch]
        application.close()
        yield generation


@pytest.mark.usefixtures("_segments")
@pytest.mark.parametrize("scheme", ["", "faults+"], ids=["local", "remote"])
def test_slots_go_on_where_others_ended(tmp_path: Path, scheme: str) -> None:
    assert list(history(tmp_path, scheme, read_batch_ratio=0.5))
    reader = StateReader(f"{scheme}{tmp_path}")
    version = reader.versions()[-1]
    assert version == BATCHES
    model = expected()[1]
    sessions = [row for batch in reader.read(0, 0, version, MAIN) for row in batch.to_pylist()]
    assert sorted((row["k"], row["rows"]) for row in sessions) == sorted((k, count) for k, _, _, count in model.open)
    kept = [row for batch in reader.read(0, 0, version, ROWS) for row in batch.select(["v", "t", "b"]).to_pylist()]
    assert sorted(map(repr, kept)) == model.values
    assert reader.manifest(0, 0, version).tables[ROWS].runs.runs, "nothing was ever written to a segment"


@pytest.mark.usefixtures("_segments")
def test_what_is_read_ahead_is_reported(tmp_path: Path) -> None:
    application = Application(tmp_path)
    application.start(0, 1, read_batch_ratio=1.0)
    totals = dict.fromkeys(READ_AHEAD, 0.0)
    for batch in range(BATCHES):
        application.run(batch)
        assert len(pack(application.metrics)) == len(FIGURES + READ_AHEAD)
        totals = {name: total + application.metrics[name] for name, total in totals.items()}
    application.close()
    assert totals["read_ahead_hits"] > totals["read_ahead_misses"] > 0
    assert totals["fetched_rows"] >= totals["taken_rows"] > 0


@pytest.mark.usefixtures("_segments")
@pytest.mark.parametrize("scheme", ["", "faults+"], ids=["local", "remote"])
def test_damage_to_segments_is_named(tmp_path: Path, scheme: str) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    generation = list(history(whole, scheme))[-1]
    segments = StateReader(f"{scheme}{whole}").manifest(0, 0, BATCHES).tables[ROWS].runs.runs
    assert segments, "nothing was ever written to a segment"
    for seed in range(12):
        choice = random.Random(seed)
        folder = tmp_path / str(seed)
        shutil.copytree(whole, folder)
        victim = folder / "millpond" / choice.choice(segments).name
        content = bytearray(victim.read_bytes())
        if choice.random() < 0.3:
            del content[choice.randrange(len(content)) :]
        else:
            content[choice.randrange(len(content))] ^= 1 << choice.randrange(8)
        victim.write_bytes(content)
        with closing(Application(folder, scheme)) as application, pytest.raises(StateDamagedError) as raised:
            application.resume(BATCHES, generation + 1)
        assert raised.value.file
