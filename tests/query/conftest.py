"""What tests of whole queries share."""

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def own_slots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Slots that no other tests have: how much memory they have, an application's first query says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("slots")))
        yield
