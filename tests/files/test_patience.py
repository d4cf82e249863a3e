"""Transient failures are tried again; permanent ones are raised."""

import time

import pytest

from millpond.errors import StateDamagedError, TransientError
from millpond.files.backends.retry import MAX_TRIES, with_retries


def test_it_tries_again_with_growing_pauses():
    pauses, answers = [], [TransientError("no"), TransientError("no"), 7]

    def action():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert with_retries(action, pause=pauses.append) == 7
    assert len(pauses) == 2
    assert pauses[0] < pauses[1]


@pytest.mark.parametrize(("error", "tries"), [(TransientError("no"), MAX_TRIES), (StateDamagedError("no"), 1)])
def test_it_gives_up(error, tries):
    seen = []

    def action():
        seen.append(1)
        raise error

    with pytest.raises(type(error)):
        with_retries(action, pause=lambda _: None)
    assert len(seen) == tries


def test_pauses_stay_bounded():
    pauses = []

    def action():
        raise TransientError("no")

    with pytest.raises(TransientError):
        with_retries(action, tries=100, pause=pauses.append)
    assert max(pauses) == pauses[-1] == 15.0


def test_it_leaves_what_has_taken_long():
    seen = []

    def action():
        seen.append(1)
        time.sleep(0.02)
        raise TransientError("no")

    with pytest.raises(TransientError):
        with_retries(action, within=0.01)
    assert seen == [1]
