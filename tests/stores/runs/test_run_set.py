"""Lookups and scans over several runs, against a dictionary."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.files.formats import blocks
from millpond.files.formats.blocks import sort_rows
from millpond.kernels.hot_table.state import TOMBSTONE
from millpond.layout import META, HashRange, Rows
from millpond.stores.runs.run import Run, memory_run
from millpond.stores.runs.run_set import RunSet
from tests.stores.shelf import found_rows
from tests.support.rows import FIXED, HASHES, LAYOUTS, MIXED, Entry, decode, encode, entries, in_order, random_rows


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "RUN_BLOCK", 3 * 8 * FIXED.width)


def expected(runs: list[list[Entry]]) -> dict[tuple, Entry]:
    model: dict[tuple, Entry] = {}
    for run in reversed(runs):
        model.update({(e.hash, e.key): e for e in run})
    return {k: e for k, e in model.items() if not e.dead}


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_lookup_finds_the_newest_version_of_each_key(data):
    shape = data.draw(st.sampled_from(LAYOUTS))
    one = entries(shape, data.draw(st.sampled_from([HASHES, st.integers(0, 3)])))
    runs = [in_order(run) for run in data.draw(st.lists(st.lists(one, max_size=25), max_size=4))]
    asked = data.draw(st.lists(one, max_size=20)) + [e for run in runs for e in run[::2]]
    keys = encode(asked, shape)
    width = data.draw(st.sampled_from([shape.key_stop, shape.width]))
    keys = Rows(keys.words[:, :width], keys.heap)
    pending = np.array(data.draw(st.permutations(range(len(asked)))), np.int64)[: data.draw(st.integers(0, len(asked)))]
    found, rows = found_rows(RunSet(shape, [memory_run(encode(r, shape), shape) for r in runs]), keys, pending)
    model = expected(runs)
    wanted = {int(i): model[asked[i].hash, asked[i].key] for i in pending if (asked[i].hash, asked[i].key) in model}
    assert dict(zip(found.tolist(), decode(rows, shape), strict=True)) == wanted


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_scan_yields_live_rows_in_hash_order(data):
    shape = data.draw(st.sampled_from(LAYOUTS))
    one = entries(shape, data.draw(st.sampled_from([HASHES, st.integers(0, 3)])))
    runs = [in_order(run) for run in data.draw(st.lists(st.lists(one, max_size=25), min_size=1, max_size=4))]
    lo = data.draw(HASHES)
    range_ = data.draw(st.sampled_from([HashRange(), HashRange(lo, 2**64), HashRange(0, lo)]))
    sources = [memory_run(encode(r, shape), shape) for r in runs]
    size = data.draw(st.sampled_from([1, 5, 1000]))
    if data.draw(st.booleans()):
        pieces = list(RunSet(shape, sources, range_).scan(size=size))
    else:
        pieces = list(RunSet(shape, sources[1:], range_).scan(encode(runs[0], shape), size))
    seen = [e for piece in pieces for e in decode(piece, shape)]
    assert [e.hash for e in seen] == sorted(e.hash for e in seen)
    assert len(seen) == len({(e.hash, e.key) for e in seen})
    live = {k: e for k, e in expected(runs).items() if range_.lo <= e.hash < range_.hi}
    assert {(e.hash, e.key): e for e in seen} == live


@pytest.mark.parametrize("shape", [FIXED, MIXED])
@pytest.mark.parametrize("bits", [64, 8])
def test_many_rows(shape, bits, monkeypatch):
    monkeypatch.setattr(blocks, "RUN_BLOCK", 65536)
    count = 30_000 if bits == 64 else 5_000
    batches = [random_rows(count, shape, seed, bits=bits) for seed in range(3)]
    runs = RunSet(shape, [memory_run(sort_rows(rows, shape), shape) for rows in batches])
    for rows in batches:
        pending = np.arange(0, count, 3)
        found, got = found_rows(runs, rows, pending)
        assert sorted(found.tolist()) == pending.tolist()
        assert (got.words[:, shape.offsets[0]] == rows.words[found, shape.offsets[0]]).all()
        assert decode(Rows(got.words[:50], got.heap), shape) == decode(Rows(rows.words[found[:50]], rows.heap), shape)
    absent = random_rows(count, shape, 9, bits=bits)
    assert len(runs.lookup(absent, np.arange(count)).positions) == 0
    pieces = list(runs.scan(size=4096))
    assert sum(p.count for p in pieces) == 3 * count
    if bits == 64:
        assert max(p.count for p in pieces) < 3 * 4096


def test_runs_are_replaced_in_place():
    made = [memory_run(encode([Entry(n, (n,), (n, n))], FIXED), FIXED) for n in range(4)]
    runs = RunSet(FIXED, made[1:])
    runs.add(made[0])
    assert runs.runs == tuple(made)
    runs.replace(made[1:3], made[:1])
    assert runs.runs == (made[0], made[0], made[3])
    with pytest.raises(ValueError, match="neighbours"):
        runs.replace([made[0], made[3]], [])


def _versions(shape, *numbers):
    """The same keys once for each number, which is their first value."""
    rows = sort_rows(random_rows(500, shape, 3), shape)
    for number in numbers:
        words = rows.words.copy()
        words[:, shape.offsets[len(shape.schema.keys)]] = number
        yield Rows(words, rows.heap)


def _first_values(runs, rows, shape):
    found, got = found_rows(runs, rows, np.arange(rows.count))
    assert sorted(found.tolist()) == list(range(rows.count))
    return set(got.words[:, shape.offsets[len(shape.schema.keys)]].tolist())


def test_what_was_fetched_stands_behind_newer_runs():
    old, new = _versions(FIXED, 1, 2)
    runs = RunSet(FIXED, [memory_run(old, FIXED)])
    fetched = runs.start_prefetch(old.words[:, 0].copy(), 0)
    fetched.read()
    assert _first_values(runs, old, FIXED) == {1}
    assert fetched.used == old.count
    runs.add(memory_run(new, FIXED))
    assert _first_values(runs, old, FIXED) == {2}


@pytest.mark.parametrize("among", ["the first", "others"])
def test_a_merge_of_runs_that_were_fetched_from(among):
    oldest, old, new = _versions(FIXED, 0, 1, 2)
    inputs = [memory_run(rows, FIXED) for rows in (old, oldest)]
    runs = RunSet(FIXED, inputs)
    fetched = runs.start_prefetch(old.words[:, 0].copy(), 0)
    fetched.read()
    if among == "the first":  # what was fetched stands for the merged run, too
        runs.replace(inputs, [memory_run(old, FIXED)])
        assert _first_values(runs, old, FIXED) == {1}
        assert fetched.used == old.count
    else:
        newer = memory_run(new, FIXED)
        runs.add(newer)
        runs.replace([newer, *inputs], [memory_run(new, FIXED)])
        assert _first_values(runs, old, FIXED) == {2}
        assert not runs.prefetched


def test_hashes_of_which_runs_hold_nothing_are_not_sought_again(monkeypatch):
    rows = sort_rows(random_rows(500, FIXED, 3), FIXED)
    run = memory_run(rows, FIXED)
    runs = RunSet(FIXED, [run])
    collisions = random_rows(300, FIXED, 4)
    fetched = runs.start_prefetch(np.unique(collisions.words[:, 0]), 0)
    fetched.read()
    sought = []
    monkeypatch.setattr(run, "_search", lambda query, select: sought.append(len(select)) or select)
    assert len(runs.lookup(collisions, np.arange(300)).positions) == 0
    assert not any(sought)


def test_keys_with_one_hash_are_told_apart_after_fetching():
    rows = random_rows(400, FIXED, 5, bits=4)
    one = sort_rows(rows, FIXED)
    runs = RunSet(FIXED, [memory_run(one, FIXED)])
    fetched = runs.start_prefetch(np.unique(one.words[:, 0]), 0)
    fetched.read()
    found, got = found_rows(runs, rows, np.arange(400))
    assert sorted(found.tolist()) == list(range(400))
    assert decode(got, FIXED) == decode(Rows(rows.words[found], rows.heap), FIXED)


def test_nothing_is_fetched_where_hashes_do_not_tell_what_counts():
    (rows,) = _versions(FIXED, 1)
    assert RunSet(FIXED).start_prefetch(rows.words[:, 0].copy(), 0) is None


@pytest.mark.parametrize("far", [(), (0, 1, 2, 3), (1, 3), (2,)])
def test_runs_that_are_far_are_searched_side_by_side(far, monkeypatch):
    """The newest that has a key counts, a tombstone too; those in front are searched first."""
    versions = list(_versions(FIXED, 1, 2, 3, 4))
    shares = [slice(0, 100), slice(50, 250), slice(200, 400), slice(0, 450)]
    runs = [
        memory_run(Rows(np.ascontiguousarray(one.words[share]), one.heap), FIXED)
        for one, share in zip(versions, shares, strict=True)
    ]
    gone = versions[0].words[40:60].copy()
    gone[:, META] |= np.uint64(TOMBSTONE)
    runs.insert(0, memory_run(Rows(gone, versions[0].heap), FIXED))
    going, most = 0, 0
    distant = [runs[number] for number in far]
    monkeypatch.setattr(Run, "remote", property(lambda self: self in distant))
    search = Run._search

    def watched(*asked):
        nonlocal going, most
        going += 1
        most = max(most, going)
        left = yield from search(*asked)
        going -= 1
        return left

    monkeypatch.setattr(Run, "_search", watched)
    rows = versions[0]
    found, got = found_rows(RunSet(FIXED, runs), rows, np.arange(rows.count))
    wanted = {}
    for number, share in reversed(list(enumerate(shares, 1))):
        wanted |= dict.fromkeys(range(*share.indices(500)), number)
    for number in range(40, 60):
        del wanted[number]
    place = FIXED.offsets[len(FIXED.schema.keys)]
    assert dict(zip(found.tolist(), got.words[:, place].tolist(), strict=True)) == wanted
    assert (most > 1) == (len(far) > 0)
