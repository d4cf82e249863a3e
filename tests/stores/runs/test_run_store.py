"""Runs written to a location and opened again: local, remote, restricted, damaged."""

import os
import shutil
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.errors import MillpondError, StateDamagedError, StateIncompatibleError, TransientError
from millpond.files.backends import uploads
from millpond.files.formats import blocks, run
from millpond.files.formats.blocks import sort_rows
from millpond.files.locations.counted import CountedFiles
from millpond.files.locations.faults import Faults, FaultyFiles
from millpond.files.locations.opening import open_filesystem
from millpond.files.tiers import local_copies, mapped, read_budget
from millpond.files.tiers.local_copies import CachedSource
from millpond.files.tiers.mapped import MappedSource
from millpond.layout import HashRange, Rows
from millpond.stores.runs import run_store
from millpond.stores.runs.run import Run
from millpond.stores.runs.run_set import RunSet
from millpond.stores.runs.run_store import RunStore
from tests.stores.shelf import found_rows
from tests.support.rows import FIXED, HASHES, LAYOUTS, MIXED, Entry, decode, encode, entries, in_order, random_rows

EVERYTHING = HashRange()


def store(tmp_path, name="", *, disk=1 << 30, memory=1 << 20, far=True) -> RunStore:
    """A store of runs in a directory, which counts as far away (though no faults are asked for) or as a local disk."""
    files = open_filesystem(f"{'faults+' if far else ''}{tmp_path}/state")
    return RunStore(files, f"{tmp_path}/local{name}", disk=disk, memory=memory)


def cached(run: Run) -> CachedSource:
    """The source of a run whose files are far away."""
    assert isinstance(run.source, CachedSource)
    return run.source


def small(monkeypatch):
    monkeypatch.setattr(blocks, "RUN_BLOCK", 200)
    monkeypatch.setattr(run, "FILTER_GROUP", 3)
    monkeypatch.setattr(read_budget, "_MIN_BYTES", 1)  # as many parts as there can be
    for tier in (mapped, local_copies):
        monkeypatch.setattr(tier, "PART_BLOCKS", 2)


@pytest.fixture(params=["in place", "in place again", "mapped", "reopened", "remote", "hydrated", "nothing cached"])
def reopen(request, tmp_path):
    """Writes pieces and gives the run in one of the states that it can be in."""
    kind = request.param
    near = kind.startswith("in place")
    stores = [store(tmp_path, disk=0 if kind in ("remote", "nothing cached") else 1 << 30, far=not near)]

    def make(pieces, layout, range_=EVERYTHING):
        written = stores[0].write(pieces, layout)
        if kind in ("mapped", "in place"):
            return written
        if near:
            again = store(tmp_path, "2", far=False)
        elif kind == "reopened":
            again = store(tmp_path)
        elif kind == "hydrated":
            again = store(tmp_path, "2")
        else:
            again = store(tmp_path, "2", disk=0, memory=1 << 20 if kind == "remote" else 0)
        stores.append(again)
        opened = again.open(written.ref, layout, range_)
        if kind == "hydrated":
            again.hydrate(opened.source)
        assert isinstance(opened.source, MappedSource) == near
        assert near or cached(opened).mapped == (kind in ("reopened", "hydrated"))
        return opened

    yield make
    for one in stores:
        one.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_run_file_answers_as_its_rows_do(reopen, monkeypatch, data):
    small(monkeypatch)
    shape = data.draw(st.sampled_from(LAYOUTS))
    one = entries(shape, HASHES)
    held = in_order(data.draw(st.lists(one, max_size=40)))
    at = sorted(data.draw(st.lists(st.integers(0, len(held)), max_size=2)))
    parts = [held[i:j] for i, j in zip([0, *at], [*at, len(held)], strict=True)]
    opened = reopen([encode(part, shape) for part in parts if part], shape)
    assert opened.ref.rows == len(held)
    if held:
        assert (opened.ref.first, opened.ref.last) == (held[0].hash, held[-1].hash)
        newest = max(entry.stamp for entry in held)
        oldest = min((entry.stamp for entry in held if not entry.dead), default=newest)
        assert (opened.ref.oldest, opened.ref.newest) == (oldest, newest)
    runs = RunSet(shape, [opened])
    asked = held + data.draw(st.lists(one, max_size=10))
    found, rows = found_rows(runs, encode(asked, shape), np.arange(len(asked)))
    model = {(e.hash, e.key): e for e in held if not e.dead}
    wanted = {i: model[e.hash, e.key] for i, e in enumerate(asked) if (e.hash, e.key) in model}
    assert dict(zip(found.tolist(), decode(rows, shape), strict=True)) == wanted
    assert [e for piece in runs.scan(size=7) for e in decode(piece, shape)] == [e for e in held if not e.dead]


@pytest.mark.parametrize("shape", [FIXED, MIXED])
def test_many_rows(reopen, shape):
    rows = sort_rows(random_rows(200_000, shape, 1), shape)
    pieces = [Rows(rows.words[i : i + 65536], rows.heap) for i in range(0, 200_000, 65536)]
    opened = reopen(pieces, shape)
    runs = RunSet(shape, [opened])
    pending = np.arange(0, 200_000, 7)[::-1].copy()
    found, got = found_rows(runs, rows, pending)
    assert sorted(found.tolist()) == sorted(pending.tolist())
    assert decode(Rows(got.words[::500], got.heap), shape) == decode(Rows(rows.words[found[::500]], rows.heap), shape)
    assert len(runs.lookup(random_rows(1000, shape, 5), np.arange(1000)).positions) == 0
    assert sum(piece.count for piece in runs.scan()) == 200_000


def test_a_narrowed_run_shows_its_range_only(reopen):
    rows = sort_rows(random_rows(50_000, FIXED, 1), FIXED)
    range_ = HashRange(1 << 62, 3 << 62)
    opened = reopen([rows], FIXED, range_)
    runs = RunSet(FIXED, [opened], range_)
    hashes = np.concatenate([piece.words[:, 0] for piece in runs.scan()])
    inside = (rows.words[:, 0] >= range_.lo) & (rows.words[:, 0] < range_.hi)
    assert (hashes == rows.words[inside, 0]).all()


def test_opening_reads_the_footer_only_and_a_lookup_few_blocks(tmp_path):
    first = store(tmp_path, disk=0)
    rows = sort_rows(random_rows(300_000, FIXED, 1), FIXED)
    ref = first.write(rows, FIXED).ref
    again = store(tmp_path, "2", disk=0)
    read = []
    ranges = again._files.get_ranges

    def spy(name, wanted):
        read.extend(wanted)
        return ranges(name, wanted)

    again._files.get_ranges = spy
    again._files.get_range = lambda name, offset, length: spy(name, [(offset, length)])[0]
    opened = again.open(ref, FIXED)
    assert len(read) == 1
    assert read[0][1] < ref.bytes / 20
    RunSet(FIXED, [opened]).lookup(rows, np.array([5, 100_000]))
    assert sum(length for _, length in read) < ref.bytes / 5
    first.close()
    again.close()


def test_the_block_cache_keeps_to_its_limit(tmp_path):
    first = store(tmp_path, disk=0, memory=500_000)
    rows = sort_rows(random_rows(100_000, FIXED, 1), FIXED)
    opened = first.write(rows, FIXED)
    for _ in range(3):
        assert len(RunSet(FIXED, [opened]).lookup(rows, np.arange(0, 100_000, 50)).positions) == 2000
        assert 0 < first.cache.bytes <= 500_000
    first.cache.limit = 100_000
    assert first.cache.bytes <= 100_000
    first.close()


def test_local_copies_keep_to_their_limit_and_are_replaced_by_reading_remotely(tmp_path):
    first = store(tmp_path, disk=3_000_000)
    rows = sort_rows(random_rows(30_000, FIXED, 1), FIXED)
    made = [first.write(rows, FIXED) for _ in range(4)]
    assert first.copies.bytes <= 3_000_000
    assert [cached(one).mapped for one in made] == [False, False, True, True]
    for one in made:
        assert len(RunSet(FIXED, [one]).lookup(rows, np.arange(0, 30_000, 50)).positions) == 600
    first.drop(made[3])
    assert len(os.listdir(tmp_path / "local")) == 1
    first.close()


def test_a_failed_put_leaves_nothing_behind(tmp_path):
    first = store(tmp_path)

    def fail(*_, **__):
        raise OSError("no")

    first._files.put = fail
    with pytest.raises(OSError, match="no"):
        first.write(random_rows(1, FIXED, 1), FIXED)
    assert os.listdir(tmp_path / "local") == []
    first.close()


def test_rows_out_of_order_and_of_other_columns_are_refused(tmp_path):
    first = store(tmp_path)
    with pytest.raises(ValueError, match="hash order"):
        first.write([encode([e], FIXED) for e in reversed(in_order(decode(random_rows(2, FIXED, 1), FIXED)))], FIXED)
    ref = first.write(random_rows(1, FIXED, 1), FIXED).ref
    with pytest.raises(StateIncompatibleError):
        first.open(ref, MIXED)
    first.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_named_or_harmless(tmp_path, monkeypatch, data):
    small(monkeypatch)
    shape = data.draw(st.sampled_from(LAYOUTS))
    held = in_order(data.draw(st.lists(entries(shape, HASHES), min_size=1, max_size=20)))
    local = data.draw(st.booleans())
    far = local or data.draw(st.booleans())
    first = store(tmp_path, disk=1 << 30 if local else 0, far=far)
    written = first.write(encode(held, shape), shape)
    path = first.copies.path_of(written.ref.name) if local else f"{tmp_path}/state/{written.ref.name}"
    with open(path, "rb") as file:
        content = bytearray(file.read())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        for bit in data.draw(st.lists(st.integers(0, len(content) * 8 - 1), min_size=1, max_size=3, unique=True)):
            content[bit // 8] ^= 1 << bit % 8
    with open(path, "wb") as file:
        file.write(content)
    again = store(tmp_path, disk=1 << 30 if local else 0, far=far)
    keys = encode(held, shape)
    try:
        runs = RunSet(shape, [again.open(written.ref, shape)])
        found, rows = found_rows(runs, keys, np.arange(len(held)))
        scanned = [e for piece in runs.scan() for e in decode(piece, shape)]
    except StateDamagedError as error:
        named = error.file
        assert not local
        assert written.ref.name in named
    else:
        live = {i: e for i, e in enumerate(held) if not e.dead}
        assert dict(zip(found.tolist(), decode(rows, shape), strict=True)) == live
        assert scanned == list(live.values())
    first.close()
    again.close()


def test_a_missing_file_is_named(tmp_path):
    first = store(tmp_path, disk=0)
    ref = first.write(random_rows(1, FIXED, 1), FIXED).ref
    os.unlink(tmp_path / "state" / ref.name)
    with pytest.raises(MillpondError) as caught:
        store(tmp_path, "2").open(ref, FIXED)
    assert isinstance(caught.value, StateDamagedError)
    assert ref.name in caught.value.file
    first.close()


def test_a_location_copied_from_an_object_store_is_read_all_the_same(tmp_path):
    first = store(tmp_path, disk=0)
    rows = sort_rows(random_rows(1000, MIXED, 1), MIXED)
    ref = first.write(rows, MIXED).ref
    again = store(tmp_path, far=False)
    runs = RunSet(MIXED, again.open_all([ref, ref], MIXED))
    assert len(runs.lookup(rows, np.arange(1000)).positions) == 1000
    with open(f"{tmp_path}/state/{ref.name}", "ab") as file:
        file.write(b"more")
    with pytest.raises(StateDamagedError):
        again.open(ref, MIXED)
    first.close()
    again.close()


def test_a_store_that_fails_for_a_moment_does_no_harm(tmp_path):
    url = f"faults+{tmp_path}/state?fail=0.2&torn=0.1&repeat=0.1&seed=1"
    first = RunStore(open_filesystem(url), f"{tmp_path}/local", disk=0, memory=0)
    rows = sort_rows(random_rows(20_000, FIXED, 1), FIXED)
    for _ in range(5):
        runs = RunSet(FIXED, [first.open(first.write(rows, FIXED).ref, FIXED)])
        assert len(runs.lookup(rows, np.arange(0, 20_000, 9)).positions) == len(range(0, 20_000, 9))
    first.close()


def many_pieces(count=20):
    """Pieces of one run, each longer than a part."""
    rows = sort_rows(random_rows(4000 * count, FIXED, 1), FIXED)
    for begin in range(0, rows.count, 4000):
        yield Rows(rows.words[begin : begin + 4000], rows.heap)


@pytest.fixture
def short_parts(monkeypatch):
    monkeypatch.setattr(uploads, "PART_BYTES", 50_000)


def test_a_run_goes_to_the_store_as_its_pieces_come_and_not_to_the_disk(tmp_path, short_parts):
    files = CountedFiles(open_filesystem(f"memory:{tmp_path}"))
    made = RunStore(files, f"{tmp_path}/local", disk=0, memory=0)
    sent = []

    def watched():
        for piece in many_pieces():
            assert os.listdir(tmp_path / "local") == []
            assert open_handles(tmp_path) == [], "nor to a file without a name"
            assert files.list("files/") == [], "nobody sees a part of it"
            sent.append(files.counts()["puts"])
            yield piece

    run_ = made.write(watched(), FIXED)
    assert all(before < after for before, after in pairwise(sent[1:]))
    assert files.counts()["puts"] == uploads.put_requests(run_.ref.bytes)
    assert files.size(run_.ref.name) == run_.ref.bytes
    assert sum(piece.count for piece in RunSet(FIXED, [run_]).scan()) == 80_000
    made.close()


def open_handles(folder):
    """Files below a folder that this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if path.startswith(str(folder))]


@pytest.mark.parametrize("disk", [0, 1 << 30])
def test_pieces_that_cannot_be_written_leave_nothing(tmp_path, short_parts, disk):
    files = open_filesystem(f"memory:{tmp_path}")
    made = RunStore(files, f"{tmp_path}/local", disk=disk, memory=0)

    def broken():
        yield from many_pieces(5)
        raise TransientError("no more of them")

    with pytest.raises(TransientError, match="no more of them"):
        made.write(broken(), FIXED)
    failing = RunStore(FaultyFiles(files, Faults(fail=1.0)), f"{tmp_path}/local", disk=disk, memory=0)
    with pytest.raises(TransientError, match="put failed"):
        failing.write(many_pieces(), FIXED)
    assert os.listdir(tmp_path / "local") == []
    torn = RunStore(FaultyFiles(files, Faults(torn=1.0)), f"{tmp_path}/local", disk=disk, memory=0)
    with pytest.raises(TransientError, match="torn"):
        torn.write(many_pieces(), FIXED)
    assert os.listdir(tmp_path / "local") == []
    for each in (made, failing, torn):
        each.close()


def test_rows_in_memory_are_written_again_and_pieces_are_not(tmp_path, short_parts, monkeypatch):
    monkeypatch.setattr("millpond.files.backends.retry._FIRST_PAUSE_SECONDS", 0.0)
    outcomes = set()
    for seed in range(20):
        files = FaultyFiles(open_filesystem(f"memory:{tmp_path}/{seed}"), Faults(fail=0.3, retries=30, seed=seed))
        made = RunStore(files, f"{tmp_path}/local", disk=1 << 30, memory=0)
        rows = Rows(*(np.concatenate(each) for each in zip(*many_pieces(5), strict=True)))
        run_ = made.write(rows, FIXED)
        assert [info.name for info in files.inner.list("")] == [run_.ref.name]
        assert cached(run_).mapped
        try:
            made.write(many_pieces(5), FIXED)
            outcomes.add("written")
        except TransientError:
            outcomes.add("failed")
        made.close()
    assert outcomes == {"written", "failed"}


def test_reading_much_of_a_file_piece_by_piece_brings_it_here(tmp_path):
    first = store(tmp_path, disk=0)
    rows = sort_rows(random_rows(100_000, FIXED, 1), FIXED)
    ref = first.write(rows, FIXED).ref
    again = store(tmp_path, "2", memory=0)
    runs = RunSet(FIXED, [again.open(ref, FIXED, HashRange(0, 1 << 63))])  # a part of it is not copied at once
    source = cached(runs.runs[0])
    pending = np.flatnonzero(rows.words[:, 0] < 1 << 63)[::500]
    for number in range(20):
        assert len(runs.lookup(rows, pending).positions) == len(pending)
        again._hydrator.submit(int).result()
        if number == 0:
            assert not source.mapped
    assert source.mapped
    assert source.remote().fetched < 4 * ref.bytes
    stats = again.stats()
    assert stats["disk_blocks"] > 0
    assert stats["remote_blocks"] > 0
    assert stats["copied_bytes"] == again.copies.bytes
    first.close()
    again.close()


def test_a_disk_that_holds_a_twentieth_is_not_copied_to_again_and_again(tmp_path):
    first = store(tmp_path, disk=0)
    rows = [sort_rows(random_rows(20_000, FIXED, seed), FIXED) for seed in range(20)]
    refs = [first.write(each, FIXED).ref for each in rows]
    raw = 20_000 * FIXED.width * 8
    again = store(tmp_path, "2", disk=raw + raw // 4, memory=raw // 4)
    runs = again.open_all(refs, FIXED)
    for _ in range(6):
        for run_, each in zip(runs, rows, strict=True):
            assert len(RunSet(FIXED, [run_]).lookup(each, np.arange(0, 20_000, 20)).positions) == 1000
    again._hydrator.submit(int).result()
    assert again.copies.bytes > 0
    assert again.stats()["copied_bytes"] < 3 * again.copies.bytes
    assert sum(cached(run_).mapped for run_ in runs) == 1
    first.close()
    again.close()


def test_a_scan_leaves_the_caches_as_they_are(tmp_path):
    first = store(tmp_path, disk=0)
    rows = [sort_rows(random_rows(20_000, FIXED, seed), FIXED) for seed in range(6)]
    refs = [first.write(each, FIXED).ref for each in rows]
    raw = 20_000 * FIXED.width * 8
    again = store(tmp_path, "2", disk=0, memory=2 * raw)
    runs = again.open_all(refs, FIXED)
    hot = RunSet(FIXED, runs[:1])
    hot.lookup(rows[0], np.arange(0, 20_000, 20))
    assert sum(piece.count for piece in RunSet(FIXED, runs).scan()) == 120_000
    assert again.cache.bytes <= again.cache.limit
    before = again.cache.misses
    hot.lookup(rows[0], np.arange(0, 20_000, 20))
    assert again.cache.misses == before
    assert again.cache.bytes > raw  # what there was room for
    first.close()
    again.close()


def test_a_copy_of_a_run_that_is_forgotten_meanwhile_does_not_stay(tmp_path):
    first = store(tmp_path, disk=0)
    ref = first.write(sort_rows(random_rows(20_000, FIXED, 1), FIXED), FIXED).ref
    again = store(tmp_path, "2")
    admit = again.copies.admit

    def late(*args, **kwargs):
        again.drop(opened)
        return admit(*args, **kwargs)

    again.copies.admit = late
    opened = again.open(ref, FIXED, HashRange(0, 1 << 63))
    again.hydrate(cached(opened))
    assert os.listdir(tmp_path / "local2") == []
    assert again.copies.bytes == 0
    first.close()
    again.close()


def test_partitions_that_share_a_file_share_its_copy(tmp_path):
    first = store(tmp_path, disk=0)
    rows = sort_rows(random_rows(20_000, FIXED, 1), FIXED)
    ref = first.write(rows, FIXED).ref
    other = first.write(sort_rows(random_rows(20_000, FIXED, 2), FIXED), FIXED).ref
    again = store(tmp_path, "2", disk=20_000 * FIXED.width * 8 * 3 // 2, memory=0)
    low, high = again.open(ref, FIXED, HashRange(0, 1 << 63)), again.open(ref, FIXED, HashRange(1 << 63, 1 << 64))
    again.hydrate(cached(low))
    above = np.flatnonzero(rows.words[:, 0] >= 1 << 63)[::100]
    for _ in range(2):
        assert len(RunSet(FIXED, [high]).lookup(rows, above).positions) == len(above)
    assert cached(low).mapped
    assert cached(high).mapped
    assert again.stats()["copied_bytes"] == again.copies.bytes
    cached(low).close()
    for _ in range(9):
        again.copies.read(other.name, 1.0)
    again.hydrate(cached(again.open(other, FIXED)))
    assert not cached(high).mapped  # it was notified
    assert len(RunSet(FIXED, [high]).lookup(rows, above).positions) == len(above)
    first.close()
    again.close()


def test_a_disk_that_is_too_small_for_a_copy_fails_nothing(tmp_path, monkeypatch):
    small = store(tmp_path, disk=500_000)
    rows = sort_rows(random_rows(50_000, FIXED, 1), FIXED)
    made = small.write(rows, FIXED)
    assert os.listdir(tmp_path / "local") == []
    assert len(RunSet(FIXED, [made]).lookup(rows, np.arange(0, 50_000, 50)).positions) == 1000
    small.close()

    class Full:
        """A file on a disk that is full."""

        def __init__(self, path, *_, **__):
            self.file = os.open(path, os.O_CREAT | os.O_WRONLY)

        def write(self, _):
            raise OSError(28, "No space left on device")

        def close(self):
            os.close(self.file)
            raise OSError(28, "No space left on device")

    large = store(tmp_path, "2")
    monkeypatch.setattr(local_copies, "open", Full, raising=False)
    made = large.write(rows, FIXED)
    assert os.listdir(tmp_path / "local2") == []
    assert len(RunSet(FIXED, [made]).lookup(rows, np.arange(0, 50_000, 50)).positions) == 1000
    large.close()


def test_a_full_disk_of_the_state_is_named(tmp_path):
    """Not that of the host's own folder, which may be another disk."""
    local = store(tmp_path, far=False)

    def full():
        yield sort_rows(random_rows(100, FIXED, 1), FIXED)
        raise OSError(28, "No space left on device")

    with pytest.raises(TransientError, match="The disk failed: No space left on device") as failed:
        local.write(full(), FIXED)
    assert failed.value.file.startswith(f"file:{tmp_path}/state/files/")
    assert str(tmp_path / "state") in failed.value.action
    assert os.listdir(tmp_path / "state" / "staging") == []
    local.close()


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), StateDamagedError("too short")])
def test_a_copy_that_cannot_be_mapped_fails_nothing(tmp_path, monkeypatch, error):
    made = store(tmp_path)
    rows = sort_rows(random_rows(50_000, FIXED, 1), FIXED)
    copied = made.write(rows, FIXED)

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(run_store, "MappedSource", fail)
        patch.setattr(made.copies, "should_copy_on_open", lambda *_: False)
        patch.setattr(made.copies, "should_copy", lambda *_: False)
        written = made.write(rows, FIXED)
        opened = made.open(copied.ref, FIXED)
        runs = RunSet(FIXED, [written, opened])
        assert len(runs.lookup(rows, np.arange(0, 50_000, 50)).positions) == 1000
    made.close()
    assert os.listdir(tmp_path / "local") == []


def test_copies_that_cannot_be_deleted_fail_nothing(tmp_path, monkeypatch):
    made = store(tmp_path)
    written = made.write(sort_rows(random_rows(1000, FIXED, 1), FIXED), FIXED)

    def fail(_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("millpond.files.tiers.local_copies.os.unlink", fail)
    made.drop(written)
    assert not made.copies.has(written.ref.name)
    made.close()


def test_a_folder_of_copies_that_is_deleted_is_made_again(tmp_path, caplog):
    made = store(tmp_path)
    rows = sort_rows(random_rows(50_000, FIXED, 1), FIXED)
    old = made.write(rows, FIXED)
    size = made.copies.bytes
    shutil.rmtree(tmp_path / "local")
    runs = RunSet(FIXED, [old, made.write(rows, FIXED)])
    assert not cached(old).mapped
    assert made.copies.bytes == size
    assert len(runs.lookup(rows, np.arange(0, 50_000, 50)).positions) == 1000
    made.hydrate(cached(old))
    assert cached(old).mapped
    assert len(os.listdir(tmp_path / "local")) == 2
    assert made.copies.bytes == 2 * size
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    made.close()


def test_a_folder_of_copies_that_cannot_be_made_again_fails_nothing(tmp_path):
    made = store(tmp_path)
    rows = sort_rows(random_rows(50_000, FIXED, 1), FIXED)
    shutil.rmtree(tmp_path / "local")
    (tmp_path / "local").write_bytes(b"")
    runs = RunSet(FIXED, [made.write(rows, FIXED), made.write(rows, FIXED)])
    assert len(runs.lookup(rows, np.arange(0, 50_000, 50)).positions) == 1000
    made.close()


def test_a_tombstone_is_not_the_oldest_row(tmp_path):
    """Expired rows are searched from the oldest row on, and a tombstone never expires."""
    stores = store(tmp_path)
    rows = [
        Entry(hash_, (hash_,), (1, 2), stamp, dead)
        for hash_, stamp, dead in ((1, 3, True), (2, 9, False), (3, 7, False))
    ]
    assert stores.write(encode(rows, FIXED), FIXED).ref.oldest == 7
    assert stores.write(encode(rows[:1], FIXED), FIXED).ref.oldest == 3
    stores.close()
