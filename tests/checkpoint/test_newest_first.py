import pytest

from millpond.checkpoint.newest_first import NewestFirst
from millpond.errors import StateDamagedError


def test_items_are_read_newest_first_lazily_and_once():
    read = []

    def item(number):
        read.append(number)
        if number == 3:
            raise StateDamagedError("torn", action="")
        return number

    items = NewestFirst([1, 2, 3, 4], item)
    assert next(iter(items)) == 4
    assert read == [4]
    assert [(outer, list(items)) for outer in items] == [(number, [4, 2, 1]) for number in (4, 2, 1)]
    assert read == [4, 3, 2, 1]


def test_items_that_must_be_readable_raise_their_error_each_time():
    def item(number):
        if number == 2:
            raise StateDamagedError("altered", action="")
        return number

    items = NewestFirst([1, 2, 3], item, lambda number, error: number == 2)
    assert next(iter(items)) == 3
    for _ in range(2):
        with pytest.raises(StateDamagedError, match="altered"):
            list(items)
