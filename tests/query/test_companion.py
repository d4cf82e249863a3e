"""Threads that accompany a query: their steps, and what they do at its end."""

from __future__ import annotations

from typing import Any

from millpond.query.running.companion import after, beside


class Query:
    """A query that ends after some waits, by a stop or by an error."""

    def __init__(self, waits: int, error: Exception | None = None) -> None:
        self.waits, self.error = waits, error

    def awaitTermination(self, seconds: float | None = None) -> bool | None:
        self.waits -= 1
        if seconds is not None and self.waits >= 0:
            return False
        if self.error is not None:
            raise self.error
        return None if seconds is None else True


def ran(thread: Any) -> None:
    assert thread.daemon
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_steps_are_repeated_until_the_query_ends() -> None:
    steps: list[int] = []
    ends: list[Exception | None] = []
    ran(beside(Query(3), "name", lambda: steps.append(1), 0.1, ends.append))
    assert (len(steps), ends) == (3, [None])


def test_the_first_action_comes_before_the_steps_also_if_the_query_has_ended() -> None:
    did: list[str] = []
    for waits in (2, 0):
        ran(beside(Query(waits), "name", lambda: did.append("step"), 0.1, first=lambda: did.append("first")))
    assert did == ["first", "step", "step", "first"]


def test_an_error_of_the_query_or_of_a_step_is_known_at_the_end() -> None:
    failure = ValueError("failed")
    ends: list[Exception | None] = []

    def fail() -> None:
        raise failure

    ran(beside(Query(3, failure), "name", lambda: None, 0.1, ends.append))
    ran(beside(Query(3), "name", fail, 0.1, ends.append))
    ran(after(Query(0, failure), "name", ends.append))
    ran(after(Query(0), "name", ends.append))
    assert ends == [failure, failure, failure, None]
