"""Kernels at the edges of their ranges, where whole batches seldom get."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.kernels.aggregate import byte_values, decimals, distinct_entries
from millpond.kernels.columns import arrow_words
from millpond.operators.columns.encode import ALL

MASK = 2**64 - 1


def pair(value: int) -> tuple[int, int]:
    """An integer as two words, low and high."""
    return value & MASK, (value >> 64) & MASK


@settings(deadline=None)
@given(
    st.integers(-(10**38) + 1, 10**38 - 1),
    st.integers(1, 10) | st.integers(1, 2**32 + 5) | st.integers(1, 2**62),
    st.integers(0, 4),
    st.integers(1, 38),
)
def test_average_rounds_half_up_exactly(total: int, count: int, shift: int, precision: int) -> None:
    sums = np.array([pair(total)], dtype=np.uint64)
    out, state = np.empty((1, 2), dtype=np.uint64), np.empty(1, dtype=np.uint8)
    limit = np.array(pair(10**precision), dtype=np.uint64)
    decimals.average(sums, np.array([count]), shift, limit[0], limit[1], out, state)
    quotient, rest = divmod(abs(total) * 10**shift, count)
    quotient += 2 * rest >= count
    if quotient >= 10**precision:
        assert state[0] == 2
    else:
        assert state[0] == 1
        assert tuple(out[0]) == pair(quotient if total >= 0 else -quotient)


def packed(values: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Byte strings in the row layout's form, and their heap."""
    offsets = np.cumsum([0, *map(len, values)]).astype(np.int32)
    data = np.frombuffer(b"".join(values), dtype=np.uint8)
    words = np.empty((len(values), 2), dtype=np.uint64)
    arrow_words.pack_bytes(words, 0, 0, np.uint64(0), offsets, data, 0, ALL)
    return words, data


TEXT = st.binary(max_size=20) | st.tuples(
    st.sampled_from([b"", b"abcd", b"abcdefgh", b"abcdefghijkl", b"abcdefghijklmnopqrst"]), st.binary(max_size=3)
).map(b"".join)


@settings(deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=12))
def test_byte_strings_pack_and_compare(values: list[bytes]) -> None:
    words, heap = packed(values)
    offsets = np.empty(len(values) + 1, dtype=np.int64)
    arrow_words.byte_offsets(words, 0, offsets)
    out = np.empty(int(offsets[-1]) + 8, dtype=np.uint8)
    arrow_words.unpack_bytes(words, 0, heap, offsets, out)
    assert bytes(out[: offsets[-1]]) == b"".join(values)

    for greatest in (False, True):
        slab = np.zeros((1, 6), dtype=np.uint64)  # hash, meta, nulls, the column
        slab[0, 2] = 1
        scratch = np.empty(2 * byte_values.SCRATCH, dtype=np.int64)
        rows, found = np.empty(2048, dtype=np.int64), np.empty(2048, dtype=np.int64)
        row_ids = np.zeros(len(values), dtype=np.int64)
        count = byte_values.extreme_bytes(
            *(slab, np.empty(0, np.uint8), row_ids, 0, 3, 2, np.uint64(1)),
            *(words, heap, ALL, greatest, False, ALL, scratch, rows, found),
        )
        assert count == 1
        assert values[found[0]] == (max if greatest else min)(values)


def test_hashes_of_side_tables_are_part_of_the_format() -> None:
    words = np.zeros((3, 6), dtype=np.uint64)
    words[:, 0] = 12345
    strings, heap = packed([b"", b"short", b"a string that does not fit a row"])
    words[:, 4:6] = strings
    words[:, 3] = 7
    references = np.array([0, 0, 0, 0, 0, 1], dtype=np.uint8)
    distinct_entries.hash_entries(words, heap, 3, 6, references)
    assert [hex(int(word)) for word in words[:, 0]] == HASHES
    moved = np.zeros((1, 6), dtype=np.uint64)
    moved[0] = (12345, 0, 0, 7, strings[2, 0], strings[2, 1] + np.uint64(3))
    distinct_entries.hash_entries(moved, np.concatenate([np.zeros(3, np.uint8), heap]), 3, 6, references)
    assert hex(int(moved[0, 0])) == HASHES[2]  # where the string lies does not matter


HASHES = ["0xd3712758ebc2405f", "0xed65e49836e780ba", "0x501937aaab38b8d3"]
