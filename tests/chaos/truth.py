"""Input of the kill tests, what must come out of it, and what did."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FILES = 8
DELAY = 15_000_000
WINDOW = 20_000_000
NEAR = 3_000_000
"""In microseconds, as in `job.py`; a file's rows are of ten seconds, so that none is late."""


def write_input(folder: Path, seed: int) -> pa.Table:
    """Parquet files with an order in time; returns all rows with the number of the file that they stand in."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    tables = []
    for number in range(FILES):
        rows = int(rng.integers(1, 4_000))
        key = rng.integers(0, 300, rows)
        table = pa.table(
            {
                "key": pa.array(key, mask=key == 7),
                "name": pa.array([None if k % 11 == 0 else f"name of key {k % 40}" for k in key.tolist()]),
                "amount": pa.array(rng.integers(-50, 50, rows)),
                "at": pa.array((number * 10_000 + rng.integers(0, 10_000, rows)) * 1000, pa.timestamp("us", "UTC")),
            }
        )
        path = folder / _name(number)
        pq.write_table(table, path)
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
        tables.append(table.append_column("file", pa.array(np.full(rows, number))))
    return pa.concat_tables(tables)


def _name(number: int) -> str:
    return f"part-{number:03d}.parquet"


def batches_of_files(checkpoint: Path) -> list[int]:
    """The batch in which Spark has read each input file, by its own record.

    It reads one file a batch, but for a crash between its note of the file and its plan of the batch: the next run
    notes another file for the same batch.
    """
    planned = {int(plan.name): plan for plan in (checkpoint / "offsets").iterdir() if plan.name.isdigit()}
    ends = {batch: json.loads(plan.read_text().splitlines()[-1])["logOffset"] for batch, plan in planned.items()}
    noted = {
        Path(entry["path"]).name: entry["batchId"]
        for log in (checkpoint / "sources" / "0").iterdir()
        if log.name.removesuffix(".compact").isdigit()
        for entry in map(json.loads, log.read_text().splitlines()[1:])
    }
    return [min(batch for batch, end in ends.items() if end >= noted[_name(number)]) for number in range(FILES)]


def expected_updates(rows: pa.Table, checkpoint: Path) -> list[tuple[object, ...]]:
    """Rows that each batch must emit in update mode: every key it touches, with all its rows so far."""
    batches = batches_of_files(checkpoint)
    groups: dict[tuple[object, object], list[int]] = {}
    emitted: list[tuple[object, ...]] = []
    columns = (rows[name].to_pylist() for name in ("file", "key", "name", "amount"))
    by_batch: dict[int, list[tuple[tuple[object, object], int]]] = {}
    for file, key, name, amount in zip(*columns, strict=True):
        by_batch.setdefault(batches[file], []).append(((key, name), amount))
    for batch, added in sorted(by_batch.items()):
        for group, amount in added:
            groups.setdefault(group, []).append(amount)
        for group in {group for group, _ in added}:
            amounts = groups[group]
            emitted.append((batch, *group, len(amounts), sum(amounts), len(set(amounts))))
    return sorted(emitted, key=repr)


def expected_windows(rows: pa.Table) -> list[tuple[object, ...]]:
    """The windows that the last watermark closes, with their sums."""
    times = rows["at"].cast(pa.int64()).to_pylist()
    groups: dict[tuple[int, object], list[int]] = {}
    for at, name, amount in zip(times, rows["name"].to_pylist(), rows["amount"].to_pylist(), strict=True):
        groups.setdefault((at // WINDOW * WINDOW, name), []).append(amount)
    found = [
        (start // 1_000_000, name, len(amounts), sum(amounts))
        for (start, name), amounts in groups.items()
        if start + WINDOW <= max(times) - DELAY
    ]
    return sorted(found, key=repr)


def expected_pairs(rows: pa.Table) -> list[tuple[object, ...]]:
    """Large rows with the small ones of their key that follow at once."""
    columns = [rows["key"].to_pylist(), rows["amount"].to_pylist(), rows["at"].cast(pa.int64()).to_pylist()]
    small: dict[object, list[tuple[int, int]]] = {}
    for key, amount, at in zip(*columns, strict=True):
        if amount < -35 and key is not None:
            small.setdefault(key, []).append((amount, at))
    found = [
        (key, amount, other, at)
        for key, amount, at in zip(*columns, strict=True)
        if amount > 35
        for other, then in small.get(key, ())
        if at <= then <= at + NEAR
    ]
    return sorted(found, key=repr)


def distinct_keys(rows: pa.Table) -> list[tuple[object, ...]]:
    """Rows that the deduplication must emit."""
    keys = {(k, n) for k, n in zip(rows["key"].to_pylist(), rows["name"].to_pylist(), strict=True)}
    return sorted(keys, key=repr)


EXPECTED = {
    "deduplicate": distinct_keys,
    "windows": expected_windows,
    "processor": expected_windows,
    "join": expected_pairs,
}
"""What the queries that append must emit, by the names in `job.py`."""


def read_updates(folder: Path) -> list[tuple[object, ...]]:
    """Rows that the job's batches have written."""
    written = [
        (int(batch.name.removeprefix("batch=")), *row.values())
        for batch in folder.iterdir()
        for row in pq.read_table(batch, partitioning=None).to_pylist()
    ]
    return sorted(written, key=repr)


def read_file_sink(folder: Path) -> list[tuple[object, ...]]:
    """The rows of a Parquet file sink: of the files that its log names, nothing else."""
    return sorted((tuple(row.values()) for path in _logged(folder) for row in _rows(path)), key=repr)


def _rows(path: str) -> list[dict[str, object]]:
    return pq.read_table(path, partitioning=None).to_pylist()


def _logged(folder: Path) -> Iterator[str]:
    seen = set()
    for entry in (folder / "_spark_metadata").iterdir():
        if entry.name.isdigit() or entry.name.endswith(".compact"):
            for line in entry.read_text().splitlines()[1:]:
                path = line.split('"path":"')[1].split('"')[0].removeprefix("file://")
                if path not in seen:
                    seen.add(path)
                    yield path
