"""Rows: their words by column, selections, and when words are copied."""

import numpy as np
import pytest

from millpond.layout import Rows

WIDTH = 6
LAYOUTS = {
    "packed": lambda words: words,
    "with gaps": lambda words: np.hstack([words, words])[:, :WIDTH],
    "column by column": np.asfortranarray,
    "reversed": lambda words: words[::-1].copy()[::-1],
}


@pytest.fixture(params=LAYOUTS)
def rows(request: pytest.FixtureRequest) -> Rows:
    words = np.arange(10 * WIDTH, dtype=np.uint64).reshape(10, WIDTH)
    return Rows(LAYOUTS[request.param](words), np.arange(5, dtype=np.uint8))


def assert_packed(array: np.ndarray) -> None:
    assert array.flags.c_contiguous  # kernels accept no other arrays


def test_words_of_each_row(rows: Rows) -> None:
    for array, dtype in ((rows.word(2), np.uint64), (rows.ints(2), np.int64)):
        assert_packed(array)
        assert array.dtype == dtype
        assert array.tolist() == [WIDTH * i + 2 for i in range(10)]
    assert_packed(rows.span(3, 2))
    assert rows.span(3, 2).tolist() == [[WIDTH * i + 3, WIDTH * i + 4] for i in range(10)]


def test_floats_have_the_bits_of_their_words() -> None:
    values = np.array([[0, 1.5], [0, -0.0], [0, np.nan]])
    floats = Rows(values.view(np.uint64), np.empty(0, np.uint8)).floats(1)
    assert floats.tobytes() == values[:, 1].tobytes()


def test_ints_are_signed() -> None:
    assert Rows(np.array([[2**64 - 1]], np.uint64), np.empty(0, np.uint8)).ints(0).tolist() == [-1]


@pytest.mark.parametrize(
    "which", [np.arange(10) % 3 == 0, np.array([7, 0, 7]), np.array([9, 3], np.uint32), np.zeros(10, np.bool_)]
)
def test_masks_and_positions_take_packed_copies(rows: Rows, which: np.ndarray) -> None:
    taken = rows.take(which)
    assert_packed(taken.words)
    assert taken.words.tolist() == rows.words[which].tolist()
    assert taken.heap is rows.heap
    assert not np.shares_memory(taken.words, rows.words)


def test_slices_refer_to_the_same_words(rows: Rows) -> None:
    taken = rows.take(slice(2, 5))
    assert taken.words.tolist() == rows.words[2:5].tolist()
    assert np.shares_memory(taken.words, rows.words)


def test_pieces_have_all_rows_in_order(rows: Rows) -> None:
    pieces = list(rows.pieces(4))
    assert [piece.count for piece in pieces] == [4, 4, 2]
    assert np.concatenate([piece.words for piece in pieces]).tolist() == rows.words.tolist()
    assert all(np.shares_memory(piece.words, rows.words) for piece in pieces)
    assert not list(rows.take(slice(0)).pieces(4))


@pytest.mark.parametrize(("count", "sizes"), [(0, [0, 0]), (1, [0, 1]), (2, [1, 1]), (9, [4, 5])])
def test_halves(rows: Rows, count: int, sizes: list[int]) -> None:
    halves = rows.take(slice(count)).halves()
    assert [half.count for half in halves] == sizes
    assert np.concatenate([half.words for half in halves]).tolist() == rows.words[:count].tolist()


def test_head_has_the_first_words(rows: Rows) -> None:
    head = rows.leading(4)
    assert_packed(head.words)
    assert head.words.tolist() == rows.words[:, :4].tolist()
    assert head.heap is rows.heap


def test_packed_copies_only_what_has_gaps(rows: Rows) -> None:
    packed = rows.packed()
    assert_packed(packed.words)
    assert packed.words.tolist() == rows.words.tolist()
    assert (packed is rows) == rows.words.flags.c_contiguous
    assert packed.packed() is packed


def test_contiguous_keeps_gaps_between_rows(rows: Rows) -> None:
    contiguous = rows.contiguous()
    assert contiguous.words.strides[1] == 8
    assert contiguous.words.tolist() == rows.words.tolist()
    assert (contiguous is rows) == (rows.words.strides[1] == 8)
