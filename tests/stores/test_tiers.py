"""Whole tables in an object store, with a hundredth of their state in caches, or nothing: the rows are right."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from millpond.files.formats.segment import decode_rows
from millpond.files.locations.counted import CountedFiles
from millpond.files.locations.hedged import HedgedFiles
from millpond.files.locations.opening import open_filesystem
from millpond.files.refs import TableManifest
from millpond.layout import RowLayout
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.rmw.table import RmwTable
from millpond.stores.runs.run_store import RunStore
from millpond.stores.table_resources import TableResources
from tests.stores.test_rmw_memory import NUMBERS, TEXTS, count_up, counts, fresh

pytestmark = pytest.mark.costly

BUDGET = 1 << 20


@pytest.fixture
def pools() -> Iterator[tuple[ThreadPoolExecutor, ThreadPoolExecutor]]:
    with ThreadPoolExecutor(1) as merges, ThreadPoolExecutor(1) as writers:
        yield merges, writers


@pytest.mark.parametrize("shape", [NUMBERS, TEXTS], ids=["numbers", "texts"])
@pytest.mark.parametrize(
    ("disk", "memory"),
    [(0, 0), (0, 100_000), (100_000, 0), (1_000_000, 100_000)],
    ids=["nothing", "blocks", "disk too small for a file", "disk for some files"],
)
def test_a_table_of_which_next_to_nothing_is_cached(
    pools: tuple[ThreadPoolExecutor, ThreadPoolExecutor], tmp_path: Path, shape: RowLayout, disk: int, memory: int
) -> None:
    size = 240_000 if shape is NUMBERS else 180_000  # rows of 48 bytes, or 72 and their heap
    files = HedgedFiles(CountedFiles(open_filesystem(f"faults+file:{tmp_path}/state?fail=0.01&seed=5")))
    stores = []

    def open_table(manifest: TableManifest) -> RmwTable:
        stores.append(RunStore(files, str(tmp_path / "local"), disk=disk, memory=memory, admission=0.5))
        return RmwTable.open(
            shape.schema,
            fresh(shape),
            manifest,
            stores[-1],
            TableResources(MemoryBudget(BUDGET), pools[0], writers=pools[1]),
        )

    table = open_table(TableManifest())
    rng = np.random.default_rng(7)
    truth = np.zeros(size, np.int64)
    log: list[tuple[int, bytes]] = []
    parts = np.array_split(rng.permutation(size), 6) + [rng.integers(0, size, 8_000) for _ in range(4)]
    for version, numbers in enumerate(parts):
        if version == 8:  # a restart
            manifest = table.manifest()
            table.close()
            stores[-1].close()
            table = open_table(manifest)
            for number, data in log:
                if number > manifest.flushed:
                    for rows in decode_rows(data, shape, "delta"):
                        table.load(rows)
        table.begin(version)
        count_up(table, shape, numbers, version)
        np.add.at(truth, numbers, 1)
        delta = table.seal()
        log.append((version + 1, b"".join(bytes(piece) for piece in delta.pieces)))
        assert stores[-1].copies.bytes <= disk
        assert stores[-1].cache.bytes <= memory
    stats = stores[-1].stats()
    assert stats["remote_blocks"] > 0
    assert bool(stats["memory_blocks"]) <= bool(memory)
    assert bool(stats["disk_blocks"]) <= bool(disk)
    assert size * shape.width * 8 > (10 if disk > 100_000 else 100) * (disk + memory)
    assert table.stats()["keys"] == size
    assert (counts(shape, table.scan(), size) == truth).all()
    table.close()
    for store in stores:
        store.close()
    files.close()
