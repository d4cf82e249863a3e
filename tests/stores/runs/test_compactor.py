"""Merges in the background: the table's contents never change, whatever happens to a merge."""

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.errors import StateDamagedError, TransientError
from millpond.files.backends import uploads
from millpond.files.formats import blocks
from millpond.files.locations.faults import Faults, FaultyFiles
from millpond.files.locations.opening import open_filesystem
from millpond.files.tiers.local_copies import CachedSource
from millpond.layout import Rows
from millpond.stores.runs.compactor import Compactor
from millpond.stores.runs.merge import piece_rows
from millpond.stores.runs.pace import Pace
from millpond.stores.runs.run import discard_result, memory_run
from millpond.stores.runs.run_set import RunSet
from millpond.stores.runs.run_store import RunStore
from tests.support.rows import FIXED, HASHES, MIXED, decode, encode, entries, in_order, random_rows


class Now:
    """An executor that works when the test calls it."""

    def __init__(self):
        self.waiting = []

    def submit(self, function, *args):
        future = Future()
        self.waiting.append((future, function, args))
        return future

    def run(self):
        for future, function, args in self.waiting:
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)
        self.waiting = []


@pytest.fixture
def store(tmp_path):
    made = RunStore(open_filesystem(f"faults+{tmp_path}/state"), f"{tmp_path}/local", disk=1 << 30, memory=1 << 20)
    yield made
    made.close()


def rows(seed: int) -> Rows:
    """Some that overlap those of every other seed."""
    return blocks.sort_rows(random_rows(20, FIXED, seed), FIXED)


def many(seed: int) -> Rows:
    """Enough for some parts."""
    return blocks.sort_rows(random_rows(400, FIXED, seed), FIXED)


def contents(runs: RunSet) -> list:
    return [e for piece in runs.scan(size=10) for e in decode(piece, runs.layout)]


def shown(runs: RunSet) -> list:
    return sorted(contents(runs), key=repr)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_contents_stay_as_they_were(store, monkeypatch, data):
    monkeypatch.setattr(blocks, "RUN_BLOCK", 200)
    shape = data.draw(st.sampled_from([FIXED, MIXED]))
    one = entries(shape, data.draw(st.sampled_from([HASHES, st.integers(0, 20)])))
    runs = RunSet(shape)
    now = Now()
    compactor = Compactor(runs, store, now, max_layers=data.draw(st.integers(1, 3)), share=1.0)
    for _ in range(data.draw(st.integers(1, 10))):
        if held := in_order(data.draw(st.lists(one, max_size=15))):
            encoded = encode(held, shape)
            runs.add(memory_run(encoded, shape) if data.draw(st.booleans()) else store.write(encoded, shape))
        before = shown(runs)
        if data.draw(st.booleans()):
            now.run()
        compactor.step()
        assert shown(runs) == before


def test_runs_become_few_and_their_local_copies_go(store):
    runs = RunSet(FIXED)
    with ThreadPoolExecutor(1) as background:
        compactor = Compactor(runs, store, background, share=1.0)
        for seed in range(12):
            runs.add(store.write(rows(seed), FIXED))
            compactor.step()
            background.submit(int).result()  # the merge is done
        compactor.step()
        background.submit(int).result()  # the merge is done
        compactor.step()
    assert len(runs.runs) <= 4
    assert len(contents(runs)) == 240
    assert len(store._files.list("files/")) > len(runs.runs)  # older versions may still name them
    copies = store.copies
    assert {run.ref.name.split("/")[1] for run in runs.runs} == set(os.listdir(copies.path))


def test_a_failing_merge_is_tried_again_and_raised_at_last(store, monkeypatch):
    runs = RunSet(FIXED, [store.write(rows(seed), FIXED) for seed in range(5)])
    before = shown(runs)
    now = Now()
    compactor = Compactor(runs, store, now)

    def fail(*_):
        raise TransientError("no")

    with monkeypatch.context() as patch:
        patch.setattr(store, "write", fail)
        for _ in range(5):
            compactor.step()
            now.run()
        with pytest.raises(TransientError):
            compactor.step()
    compactor.step()
    now.run()
    compactor.step()
    assert len(runs.runs) < 5
    assert shown(runs) == before


def test_a_merge_whose_upload_fails_halfway_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(uploads, "PART_BYTES", 2000)
    plain = open_filesystem(f"memory:{tmp_path}")
    files = FaultyFiles(plain, Faults(fail=0.4, retries=1, seed=1))
    sound, made = (RunStore(each, f"{tmp_path}/local", disk=0, memory=1 << 20) for each in (plain, files))
    runs = RunSet(FIXED, [sound.write(many(seed), FIXED) for seed in range(5)])
    before = shown(runs)
    now = Now()
    compactor = Compactor(runs, made, now)
    tries = 0
    while len(runs.runs) == 5:
        compactor.step()
        now.run()
        tries += 1
        assert shown(runs) == before
    assert tries > 2
    (merged,) = [run.ref for run in runs.runs if run.rows > 400]
    assert merged.bytes > 3 * 2000, "it was sent in parts"


def test_damage_is_raised_at_once(store, tmp_path):
    runs = RunSet(FIXED, [store.write(rows(seed), FIXED) for seed in range(5)])
    broken = runs.runs[2]
    with open(tmp_path / "state" / broken.ref.name, "r+b") as file:
        file.seek(40)
        file.write(b"damage")
    store.copies.drop(broken.ref.name)
    assert isinstance(broken.source, CachedSource)
    broken.source._on_evicted()
    now = Now()
    compactor = Compactor(runs, store, now)
    compactor.step()
    now.run()
    with pytest.raises(StateDamagedError) as caught:
        compactor.step()
    assert broken.ref.name in caught.value.file


def test_closing_ends_a_merge(store):
    runs = RunSet(FIXED, [store.write(rows(seed), FIXED) for seed in range(5)])
    with ThreadPoolExecutor(1) as background:
        compactor = Compactor(runs, store, background, share=1e-9)
        compactor.step()
        compactor.close()
    assert len(runs.runs) == 5
    assert not compactor.running


def test_a_merge_that_is_done_when_the_table_closes_is_closed(store):
    runs = RunSet(FIXED, [store.write(rows(seed), FIXED) for seed in range(5)])
    with ThreadPoolExecutor(1) as background:
        compactor = Compactor(runs, store, background)
        compactor.step()
        merged = compactor._merge._result.result()
        assert not merged.source.closed
        compactor.close()
    assert merged.source.closed


def test_runs_that_are_not_used_are_closed(store):
    done, running, failed, waiting = Future(), Future(), Future(), Future()
    written = [store.write(rows(seed), FIXED) for seed in range(3)]
    done.set_result(written[0])
    discard_result(done)
    running.set_running_or_notify_cancel()
    discard_result(running)
    assert not written[1].source.closed
    running.set_result(written[1:])
    assert all(run.source.closed for run in written)
    failed.set_exception(TransientError("the store is away"))
    discard_result(failed)
    discard_result(waiting)
    assert waiting.cancelled()


def test_the_pace_pauses_hurries_and_stops():
    pace = Pace(0.01)
    pace.set_full_speed(True)
    assert list(pace.throttle(range(1000))) == list(range(1000))
    pace.set_full_speed(False)
    pieces = pace.throttle(range(3))
    next(pieces)
    threading.Timer(0.05, pace.stop).start()
    pace.share = 1e-9
    with pytest.raises(TransientError):
        next(pieces)


def test_tombstones_go_only_with_the_oldest_run(store):
    gone = random_rows(5, FIXED, 1)
    gone.words[:, 1] |= np.uint64(1)
    gone = blocks.sort_rows(gone, FIXED)
    alive = blocks.sort_rows(random_rows(5, FIXED, 1), FIXED)
    runs = RunSet(FIXED, [store.write(gone, FIXED), store.write(alive, FIXED)])
    assert contents(runs) == []
    now = Now()
    compactor = Compactor(runs, store, now, max_layers=1)
    compactor.step()
    now.run()
    compactor.step()
    assert runs.runs == ()


def test_pieces_are_bounded_in_bytes_however_large_rows_are():
    assert piece_rows(8 << 20, 256 << 10) == 64  # twice the bytes, at most, so that there are more rows
    assert piece_rows(64 << 10, 100) == 1024
    assert piece_rows(8 << 20, 1 << 30) == 1
    assert piece_rows(8 << 20, 48) == 65536
