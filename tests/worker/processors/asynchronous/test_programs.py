"""Random programs: asynchronous and synchronous, with state that is there or not, give the same."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.worker.processors.asynchronous.controller import Controller
from tests.worker.processors.asynchronous.lacking import Far, make_far
from tests.worker.processors.asynchronous.twins import COLUMNS, SHOWN, Async, Single, Sync, waits
from tests.worker.processors.mini_slot import MiniSlot, few_at_a_time, user_processor

number, name = st.integers(0, 5), st.sampled_from(["value", "list", "map"])
word = st.sampled_from("xyz")
read = st.one_of(
    st.tuples(st.sampled_from(["get", "list", "entries", "keys", "values", "timers"])),
    st.tuples(st.sampled_from(["at", "has"]), word),
    st.tuples(st.just("exists"), name),
)
operation = st.one_of(
    read,
    st.tuples(st.sampled_from(["update", "append", "put", "extend"]), number),
    st.tuples(st.just("set"), word, number),
    st.tuples(st.just("remove"), word),
    st.tuples(st.just("clear"), name),
    st.tuples(st.sampled_from(["timer", "no timer"]), st.integers(0, 30)),
    st.tuples(st.just("gather"), st.lists(read, max_size=4)),
    st.tuples(st.just("say"), number),
)
batches = st.lists(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.lists(operation, max_size=4)), max_size=16),
    min_size=1,
    max_size=4,
)


@pytest.mark.filterwarnings("error")
@settings(max_examples=200, deadline=None)
@given(
    program=batches,
    seed=st.integers(0, 1000),
    share=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    limit=st.integers(1, 9),
    together=st.integers(1, 9),
    piece=st.sampled_from([1, 3, 10_000]),
    room=st.sampled_from([1, 5, 40_000]),
    ttl=st.sampled_from([0, 15]),
    kind=st.sampled_from([Async, Single]),
)
def test_any_program(
    program: Any, seed: int, share: float, limit: int, together: int, piece: int, room: int, ttl: int, kind: Any
) -> None:
    shape: Any = {"columns": COLUMNS, "shown": SHOWN, "mode": "processing"}
    tables = _numbered(program)
    due = program[0][0][1] if program[0] else [("get",)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("millpond.worker.processors.rows.ROWS_PER_BATCH", piece)
        patch.setattr("millpond.worker.processors.rows.RowResults.check_every", piece)
        patch.setattr("millpond.worker.processors.awaiting._MAX_QUEUED_ROWS", room)
        sync = MiniSlot(user_processor(Sync(ttl, due), **shape), together=together)
        synchronous = [sync.batch(rows, processing=number * 10) for number, rows in enumerate(tables)]
        far = make_far(patch, Far(random.Random(seed), share, whole=False))
        _shuffled(patch, seed)
        slot = MiniSlot(user_processor(kind(ttl, due), in_flight=limit, **shape), together=together)
        waits.most = 0
        for number, (rows, expected) in enumerate(zip(tables, synchronous, strict=True)):
            waits.log.clear()
            assert slot.batch(rows, processing=number * 10) == expected
            _check_turns(rows)
        assert waits.most <= limit
        assert share or not far.fetches
        for table in slot.types:
            assert _listed(slot, table) == _listed(sync, table)
        assert slot.expiries == sync.expiries


@pytest.mark.filterwarnings("error")
@settings(max_examples=200, deadline=None)
@given(
    program=batches,
    seed=st.integers(0, 1000),
    at_once=st.sampled_from([0, 200, 1 << 20]),
    limit=st.integers(1, 9),
    together=st.integers(1, 9),
    ttl=st.sampled_from([0, 15]),
    kind=st.sampled_from([Async, Single]),
)
def test_any_program_over_parts(
    program: Any, seed: int, at_once: int, limit: int, together: int, ttl: int, kind: Any
) -> None:
    """Missing state lies in parts; at the end, and again when some has expired, all keys report their state."""
    shape: Any = {"columns": COLUMNS, "shown": SHOWN, "mode": "processing"}
    everything = [
        ("get",),
        ("list",),
        ("entries",),
        ("timers",),
        *(("exists", one) for one in ("value", "list", "map")),
    ]
    asked = [(key, everything) for key in "abcdefgh"]
    tables = _numbered([*program, asked, asked])
    due = program[0][0][1] if program[0] else [("get",)]
    with pytest.MonkeyPatch.context() as patch:
        few_at_a_time(patch, at_once)
        _shuffled(patch, seed)
        sync = MiniSlot(user_processor(Sync(ttl, due), **shape), together=together)
        slot = MiniSlot(user_processor(kind(ttl, due), in_flight=limit, **shape), together=together)
        waits.most = 0
        for number, rows in enumerate(tables):
            waits.log.clear()
            assert slot.batch(rows, processing=number * 10) == sync.batch(rows, processing=number * 10)
            _check_turns(rows)
        assert waits.most <= limit


def _shuffled(patch: pytest.MonkeyPatch, seed: int) -> None:
    """Let those that have been answered go on in any order."""
    rng, fetch = random.Random(seed), Controller._fetch

    def fetched(controller: Controller) -> None:
        fetch(controller)
        rng.shuffle(controller._ready)

    patch.setattr(Controller, "_fetch", fetched)


def _check_turns(rows: list[tuple[str, int, str]]) -> None:
    """All keys are through; the records of each began in the order in which they came, then came its timers."""
    assert not waits.under_way
    for key in {key for key, *_ in rows}:
        mine = [at for other, at in waits.log if other == key]
        came = [at for other, at, _ in rows if other == key]
        assert mine[: len(came)] == came
        assert mine[len(came) :] == sorted(mine[len(came) :], reverse=True)


def _numbered(program: Any) -> list[list[tuple[str, int, str]]]:
    """Rows of each batch: with numbers, and operations as text."""
    numbers = itertools.count()
    return [[(key, next(numbers), repr(do)) for key, do in batch] for batch in program]


def _listed(slot: MiniSlot, table: str) -> dict[Any, pa.Array]:
    return {key: value.to_pylist() for key, value in slot.state[table].items()}
