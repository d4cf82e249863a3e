"""Blocks and segments come back as they were written, or say that they were not."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.errors import StateDamagedError
from millpond.files.formats import blocks, codec
from millpond.files.formats.blocks import cut_blocks, cut_positions
from millpond.files.formats.codec import RAW, decode_block, decode_blocks, encode_block, encode_blocks, read_header
from millpond.files.formats.segment import decode_rows, encode_rows
from millpond.kernels.pointers import address
from millpond.layout import RowLayout, Rows
from tests.support.rows import FIXED, HASHES, LAYOUTS, MIXED, decode, encode, entries, random_rows


def joined(buffers) -> bytes:
    return b"".join(bytes(memoryview(b).cast("B")) for b in buffers)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_segments_round_trip(data):
    shape = data.draw(st.sampled_from(LAYOUTS))
    rows = data.draw(st.lists(entries(shape, HASHES), max_size=30))
    written = joined(encode_rows(encode(rows, shape), shape, data.draw(st.booleans())))
    assert len(written) % 8 == 0
    assert [e for piece in decode_rows(written, shape, "x") for e in decode(piece, shape)] == rows
    twice = [e for piece in decode_rows(written + written, shape, "x") for e in decode(piece, shape)]
    assert twice == rows + rows


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("shape", [FIXED, MIXED])
def test_large_segments_come_in_bounded_pieces(shape, compress):
    rows = random_rows(200_000, shape, 1)
    written = joined(encode_rows(rows, shape, compress))
    pieces = list(decode_rows(written, shape, "x"))
    assert len(pieces) > 1
    assert max(p.words.nbytes + p.heap.nbytes for p in pieces) < 8 << 20
    assert sum(p.count for p in pieces) == rows.count
    fixed = [0, 1, *shape.offsets[-1:]]
    assert (np.concatenate([p.words for p in pieces])[:, fixed] == rows.words[:, fixed]).all()
    last = pieces[-1]
    assert decode(Rows(last.words[-9:], last.heap), shape) == decode(Rows(rows.words[-9:], rows.heap), shape)


@pytest.mark.parametrize("shape", [FIXED, MIXED])
def test_a_block_too_large_for_lz4_stays_raw(monkeypatch, shape):
    class Codec:
        def compress(self, data, asbytes):
            raise OSError("Lz4 compression failure.")

    rows = random_rows(100, shape, 1)
    monkeypatch.setattr(codec, "_codec", Codec())
    monkeypatch.setattr(codec, "_MAX_LZ4_BYTES", 100, raising=False)
    cut = cut_blocks(rows.words, shape)
    assert len(cut.starts) == 1
    ((block,),) = encode_blocks(rows.packed(), shape, cut, [True])
    for pieces in (block, encode_block(rows.packed(), compress=True)):
        written = memoryview(joined(pieces))
        assert read_header(written, 0, "x").encoding == RAW
        again, end = decode_block(written, 0, shape, "x")
        assert end == len(written)
        assert decode(again, shape) == decode(rows, shape)


@pytest.mark.parametrize("compress", [False, True])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_damage_is_named(compress, data):
    shape = data.draw(st.sampled_from(LAYOUTS))
    rows = data.draw(st.lists(entries(shape, HASHES), min_size=1, max_size=10))
    written = bytearray(joined(encode_rows(encode(rows, shape), shape, compress)))
    if data.draw(st.booleans()):
        del written[data.draw(st.integers(0, len(written) - 1)) :]
    else:
        for bit in data.draw(st.lists(st.integers(0, len(written) * 8 - 1), min_size=1, max_size=3, unique=True)):
            written[bit // 8] ^= 1 << bit % 8
    try:
        read = [e for piece in decode_rows(written, shape, "a file") for e in decode(piece, shape)]
    except StateDamagedError as error:
        assert error.file == "a file"  # noqa: PT017
    else:
        assert read == rows


def test_rows_of_another_layout_are_damage():
    written = joined(encode_rows(random_rows(5, FIXED, 1), FIXED, False))
    with pytest.raises(StateDamagedError):
        list(decode_rows(written, MIXED, "x"))


def test_references_outside_of_the_heap_are_damage():
    rows = random_rows(5, MIXED, 1)
    words = rows.words.copy()
    words[3, MIXED.bytes_columns[1] + 1] = np.uint64(2**64 - 5)
    written = memoryview(joined(encode_block(Rows(words, rows.heap), compress=False)))
    with pytest.raises(StateDamagedError, match="refers to bytes outside"):
        decode_block(written, 0, MIXED, "x")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_blocks_that_are_decoded_together_are_those_decoded_one_by_one(data):
    shape = data.draw(st.sampled_from(LAYOUTS))
    some = [
        encode(one, shape)
        for one in data.draw(st.lists(st.lists(entries(shape, HASHES), min_size=1, max_size=9), min_size=1, max_size=4))
    ]
    compress = data.draw(st.booleans())
    encoded = [joined(encode_block(Rows(rows.words, rows.heap), compress=compress)) for rows in some]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)[:-1]
    counts = np.array([rows.count for rows in some], np.int64)
    written = bytearray(b"".join(encoded))
    decoded = decode_blocks(memoryview(written), offsets, counts, shape, "x")
    for at, rows in enumerate(some):
        alone, _ = decode_block(memoryview(written), int(offsets[at]), shape, "x")
        for got in (decoded.block(at), alone):
            assert (got.words == rows.words).all()
            assert (got.heap == rows.heap).all()
        assert decoded.words_at[at] == address(decoded.block(at).words)
        assert decoded.heap_at[at] == address(decoded.block(at).heap)
    if not written:
        return
    if data.draw(st.booleans()):
        del written[data.draw(st.integers(0, len(written) - 1)) :]
    else:
        bit = data.draw(st.integers(0, len(written) * 8 - 1))
        written[bit // 8] ^= 1 << bit % 8
    try:
        read = decode_blocks(memoryview(written), offsets, counts, shape, "a file")
    except StateDamagedError as error:
        assert error.file == "a file"  # noqa: PT017
    else:  # it was in what fills the last words
        assert (read.rows.words == decoded.rows.words).all()
        assert (read.rows.heap == decoded.rows.heap).all()


def test_a_block_of_another_count_or_with_stray_references_is_damage():
    rows = random_rows(5, MIXED, 1)
    written = memoryview(joined(encode_block(rows, compress=True)))
    at = np.zeros(1, np.int64)
    with pytest.raises(StateDamagedError, match="does not fit the footer"):
        decode_blocks(written, at, np.array([4]), MIXED, "x")
    words = rows.words.copy()
    words[3, MIXED.bytes_columns[1] + 1] = np.uint64(2**64 - 5)
    written = memoryview(joined(encode_block(Rows(words, rows.heap), compress=True)))
    with pytest.raises(StateDamagedError, match=r"block at byte 77 refers to bytes outside"):
        decode_blocks(written, at, np.array([5]), MIXED, "x", 77)


@given(st.lists(st.booleans(), max_size=30), st.lists(st.integers(0, 2), min_size=30, max_size=30))
def test_parts_hold_ties_together(ties, steps):
    tied, group = np.array(ties, np.bool_), np.cumsum(steps)[: len(ties)]
    stops = cut_positions(tied, group)
    assert stops == sorted(set(stops))
    assert (stops[0], stops[-1]) == (0, len(ties))
    assert not any(ties[stop] for stop in stops[1:-1])
    for begin, end in pairwise(stops):  # no part goes on where it could have ended in a later group
        first = next((i for i in range(begin + 1, end) if group[i] != group[begin]), end)
        assert all(ties[i] for i in range(first, end))


def blocks_of(rows: Rows, shape: RowLayout, most: int | None = None) -> list[Rows]:
    """Rows as blocks hold them, encoded in both forms and decoded again."""
    words = np.ascontiguousarray(rows.words)
    cut = cut_blocks(words, shape, most)
    forms = list(zip(*encode_blocks(Rows(words, rows.heap), shape, cut, [False, True]), strict=True))
    raw, small = (
        [decode_block(memoryview(joined(one)), 0, shape, "x")[0] for one in form] for form in forms or ((), ())
    )
    for one, other in zip(raw, small, strict=True):
        assert (one.words == other.words).all()
        assert (one.heap == other.heap).all()
    assert [one.count for one in raw] == (cut.stops - cut.starts).tolist()
    assert [one.heap.nbytes for one in raw] == cut.heaps.tolist()
    return raw


@pytest.mark.parametrize("shape", LAYOUTS)
@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000, 20_000])
def test_rows_that_are_encoded_together_are_those_decoded_block_by_block(shape, count):
    rows = random_rows(count, shape, 1, longest=100)
    for most in (None, 10_000):
        assert [e for b in blocks_of(rows, shape, most) for e in decode(b, shape)] == decode(rows, shape)


def test_blocks_of_runs_are_bounded_in_words_and_heap_together():
    cut = blocks_of(random_rows(1000, MIXED, 1, longest=100), MIXED, 10_000)
    assert all(b.words.nbytes + b.heap.nbytes <= 10_000 for b in cut)
    assert min(b.words.nbytes + b.heap.nbytes for b in cut[:-1]) > 9_000
    long = random_rows(3, MIXED, 1, longest=50_000)
    assert [b.count for b in blocks_of(long, MIXED, 10_000)] == [1, 1, 1]
    plain = blocks_of(random_rows(1000, FIXED, 1), FIXED, 10_000)
    assert {b.words.nbytes for b in plain[:-1]} == {10_000 // (8 * FIXED.width) * 8 * FIXED.width}


def test_blocks_are_bounded_in_rows_and_heap(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_HEAP", 10_000)
    cut = blocks_of(random_rows(1000, MIXED, 1, longest=100), MIXED)
    assert sum(b.count for b in cut) == 1000
    assert all(b.heap.nbytes <= 10_000 for b in cut)
    long = random_rows(3, MIXED, 1, longest=50_000)
    assert [b.count for b in blocks_of(long, MIXED)] == [1, 1, 1]
