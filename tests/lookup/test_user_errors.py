"""Bugs in users' tables: they are reported, with their lines, and never taken for errors of a store."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from millpond.errors import UsageError
from millpond.lookup import Found, RedisTable
from millpond.lookup.fetch import FAILED, Answer, Fetcher
from millpond.lookup.secrets import redact_error
from millpond.spec.kinds.enrich import EnrichSpec
from tests.operators.rig import fields

KEYS = pa.record_batch({"id": [1, 2]})
ROWS = pa.record_batch({"name": ["one", "two"], "n": [1, 2]})
calls: list[str] = []


@dataclass(frozen=True)
class Table:
    """Does one thing where it is asked, or where it connects."""

    does: Callable[..., Any]
    connects: bool = False

    name = "mine"

    def connect(self, columns: pa.Schema, timeout: float) -> Any:
        if self.connects:
            calls.append("connect")
            return self.does()
        return _Connection(self.does)


class _Connection:
    def __init__(self, does: Callable[..., Any]) -> None:
        self.does = does

    def fetch(self, keys: pa.RecordBatch) -> Any:
        calls.append("fetch")
        return self.does(keys)

    def close(self) -> None:
        pass


class Narrow:
    name = "restrict"

    def connect(self, columns: pa.Schema) -> Any:
        raise AssertionError


class DataError(KeyError):
    """An error of a client's, which derives from one of Python's."""


@dataclass(frozen=True)
class Gives:
    """Gives one thing, whatever it is asked."""

    value: Any

    def __call__(self, *_: Any) -> Any:
        return self.value


def no_such_name(_: Any) -> Any:
    return nothing  # type: ignore[name-defined] # noqa: F821


def no_such_attribute(keys: Any) -> Any:
    return keys.colum("id")


def no_such_column(keys: Any) -> Any:
    return keys.column("ad_id").to_pylist()


def no_such_key(_: Any) -> Any:
    return {}["ad_id"]


def no_such_place(_: Any) -> Any:
    return [][0]


def no_such_module(_: Any) -> Any:
    import nowhere_at_all  # type: ignore[import-not-found] # noqa: F401


def wrong_arguments(_: Any) -> Any:
    return json.loads()  # type: ignore[call-arg]


def in_a_thread(keys: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(no_such_key, keys).result()


def no_connection() -> Any:
    return no_such_key(None)


def gone(_: Any) -> Any:
    raise ConnectionError("gone")


def slow(_: Any) -> Any:
    raise TimeoutError


def of_the_client(_: Any) -> Any:
    raise DataError("no row")


def bad_text(_: Any) -> Any:
    return json.loads("<html>")


def below_in_a_library(_: Any) -> Any:
    return json.load(None)  # type: ignore[arg-type]  # an attribute that no code of the user asks for


def spec_of(table: Any, **more: Any) -> EnrichSpec:
    given: dict[str, Any] = {"retries": 1, "timeout_ms": 1000, "on_error": "null", "name": table.name} | more
    return EnrichSpec(
        fields("id bigint"), (0,), ("id",), fields("name string; n int"), table=pickle.dumps(table), **given
    )


@pytest.fixture
def run() -> Iterator[Callable[..., Answer]]:
    calls.clear()
    made: list[Fetcher] = []

    def asked(table: Any) -> Answer:
        made.append(Fetcher(spec_of(table)))
        return made[-1].wait(made[-1].fetch(KEYS))

    yield asked
    for one in made:
        one.close()


class TestBugs:
    @pytest.mark.parametrize(
        ("does", "said"),
        [
            (no_such_name, "NameError: name 'nothing' is not defined"),
            (no_such_attribute, "AttributeError: .* has no attribute 'colum'"),
            (no_such_column, "KeyError: 'Field \"ad_id\" does not exist in schema'"),
            (no_such_key, "KeyError: 'ad_id'"),
            (no_such_place, "IndexError"),
            (no_such_module, "ModuleNotFoundError: No module named 'nowhere_at_all'"),
            (wrong_arguments, "TypeError: loads"),
            (in_a_thread, "KeyError: 'ad_id'.* in in_a_thread; .* in no_such_key"),
        ],
    )
    def test_in_fetch(self, run: Callable[..., Answer], does: Any, said: str) -> None:
        """Whatever `on_error` says, at the first try, and with the lines of the table's."""
        with pytest.raises(UsageError, match=rf"The table 'mine' has a bug: {said}") as raised:
            run(Table(does))
        line = does.__code__.co_firstlineno + 1 + (does is in_a_thread)
        assert f"{__file__}, line {line}, in {does.__name__}" in str(raised.value)
        assert "in fetch; " in str(raised.value)
        assert calls == ["fetch"]

    def test_in_connect(self, run: Callable[..., Answer]) -> None:
        with pytest.raises(UsageError, match=r"a bug: KeyError: 'ad_id' \(.* in connect; .* in no_connection; "):
            run(Table(no_connection, connects=True))
        assert calls == ["connect"]

    def test_it_cannot_be_called(self, run: Callable[..., Answer]) -> None:
        with pytest.raises(UsageError, match=r"a bug: TypeError: .*arguments? but 3 were given"):
            run(Narrow())

    @pytest.mark.parametrize("does", [gone, slow, of_the_client, bad_text, below_in_a_library])
    def test_what_is_the_stores(self, run: Callable[..., Answer], does: Any) -> None:
        """It is tried again, and then `on_error` says what becomes of it."""
        answer = run(Table(does))
        assert answer.states.tolist() == [FAILED, FAILED]
        assert calls == ["fetch", "fetch"]

    def test_of_ours(self, run: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch) -> None:
        """An error in one of Millpond's own tables is due to the data that its store gave."""
        table = RedisTable("redis://h", "x:{id}")
        monkeypatch.setattr(RedisTable, "_check_options", no_such_key)
        answer = run(table)
        assert answer.failure is not None
        assert "KeyError" in answer.failure.message


class TestWrongAnswers:
    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (None, r"gave None where Found\(rows, at\) was expected"),
            ({"name": 1}, r"gave a dict where Found\(rows, at\) was expected"),
            ((ROWS, [0, 1]), r"gave a tuple where Found\(rows, at\) was expected"),
            (ROWS, r"gave a RecordBatch where Found\(rows, at\) was expected"),
            (Found(pa.Table.from_batches([ROWS]), [0, 1]), "gave a Table as `rows` of Found where a RecordBatch was"),  # type: ignore[arg-type]
            (Found(ROWS, [0]), "gave 2 rows and 1 positions in Found where one for each row was"),
            (Found(ROWS, None), "gave None as `at` of Found where a list of positions was"),  # type: ignore[arg-type]
            (Found(ROWS, [0.0, 1.0]), "gave a list as `at` of Found where a list of positions was"),  # type: ignore[list-item]
            (Found(ROWS, [0, 1], ["x"]), "gave a list as `unreadable` of Found where a dict"),  # type: ignore[arg-type]
            (Found(ROWS.select(["n"]), [0, 1]), "gave rows with the columns n where one column name among them was"),
            (Found(ROWS.set_column(1, "n", pa.array(["x", "y"])), [0, 1]), r"the column n as string where int \("),
        ],
    )
    def test_of_fetch(self, run: Callable[..., Answer], given: Any, said: str) -> None:
        with pytest.raises(UsageError, match=said) as raised:
            run(Table(Gives(given)))
        assert f"({__file__}, line {_Connection.fetch.__code__.co_firstlineno}, in fetch)" in str(raised.value)
        assert calls == ["fetch"]

    def test_of_connect(self, run: Callable[..., Answer]) -> None:
        with pytest.raises(UsageError, match=r"gave None where a connection, which has `fetch`.* in connect\)"):
            run(Table(Gives(None), connects=True))

    def test_what_is_good(self, run: Callable[..., Answer]) -> None:
        for rows, at in ((ROWS.slice(0, 0), ()), (ROWS, range(2)), (ROWS, pa.array([1, 0]))):
            assert run(Table(Gives(Found(rows, at)))).failure is None


@pytest.mark.parametrize(("on_error", "times"), [("null", 1), ("side", 0)])
def test_nulls_are_told_once(caplog: pytest.LogCaptureFixture, on_error: Any, times: int) -> None:
    fetcher = Fetcher(spec_of(Table(gone), on_error=on_error, retries=0))
    with caplog.at_level(logging.WARNING, "millpond"):
        for _ in range(3):
            fetcher.wait(fetcher.fetch(KEYS))
    fetcher.close()
    said = "'mine' could not be asked for 2 keys (unreachable: ConnectionError: gone)"
    assert [said in one for one in caplog.messages] == [True] * times


def test_pauses_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a server has seconds to come back."""
    waited: list[float] = []
    monkeypatch.setattr("threading.Event.wait", lambda _, seconds=None: bool(waited.append(seconds)))
    fetcher = Fetcher(spec_of(Table(gone), retries=7))
    assert fetcher._fetch(KEYS).failure is not None
    fetcher.close()
    assert len(waited) == 7
    for seconds, mean in zip(waited, [0.1, 0.3, 0.9, 2.7, 8.1, 10, 10], strict=True):
        assert 0.75 * mean <= seconds <= 1.25 * mean


def test_secrets_are_taken_out() -> None:
    error = ValueError("user joe, password abc or abcdef", 5)
    error.__context__ = OSError("abc is no host")
    redact_error(error, ["abc", "abcdef", ""])
    assert error.args == ("user joe, password … or …", 5)
    assert str(error.__context__) == "… is no host"
