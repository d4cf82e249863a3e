from collections.abc import Iterator

import pytest

from tests.checkpoint.rig import slots


@pytest.fixture(autouse=True)
def _slots_end() -> Iterator[None]:
    """No slot outlives its test: a committer without a pause between tries takes a whole core, a lock stays open."""
    yield
    while slots:
        slots.pop().die()
