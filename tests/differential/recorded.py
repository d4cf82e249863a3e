"""Spark's answers, recorded: what native Spark gave for a query over given batches, so that it need not run again.

A record belongs to one comparison of one test and to one minor version of Spark. It holds as long as its question is
the same: input, output mode, settings, the native query's analysed plan, and the code of the tests where the plan does
not show all that Spark computes. Where none holds, Spark runs. `MILLPOND_ORACLE` says how records are used (see `Use`),
and `zcat tests/golden/4.3/differential/test_windows.jsonl.gz` shows them.
"""

from __future__ import annotations

import ast
import base64
import datetime as dt
import gzip
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import currently_in_test_context
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

Batches = dict[int, list[tuple[Any, ...]]]
"""Output rows by batch id."""


class Use(Enum):
    """How records are used."""

    RECORDED = "recorded"
    """A record that matches is believed, else Spark runs: `pytest` alone."""
    HELD = "held"
    """As recorded, but a record that is missing or does not match fails the test: `make test`."""
    LIVE = "live"
    """Spark runs, and its answer has to be the recorded one: `make test-all`."""
    WRITE = "write"
    """Records that match are kept; where there is none, Spark's answer becomes one: `make golden`."""


USE = Use(os.environ.get("MILLPOND_ORACLE", "recorded"))
TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "golden"
_PENDING = GOLDEN / ".pending"
"""What workers have recorded in this run, until it ends."""
_NOT_ORACLES = {"tests.differential.harness", "tests.differential.recorded", "tests.differential.processors.checks"}
"""Modules that run queries, and have no part in what a query computes."""

_TRANSPARENT = ("StreamingRelation", "OneRowRelation")
"""Relations that a plan shows whole: a stream's rows are those of the input."""
_OPAQUE = re.compile(
    r"Python|Pandas|Arrow|WithState|Scala|RDD|Relation$|Relation\b|StaticInvoke|AppendColumns|MapElements"
)
"""Classes of a plan whose text does not show all that they compute."""


@dataclass
class Answer:
    """The outcome of one run of a query.

    Attributes:
        batches: rows of each batch.
        schemas: those that the batches had.
        error: what the run failed with, or nothing.
    """

    batches: Batches = field(default_factory=dict)
    schemas: list[StructType] = field(default_factory=list)
    error: str = ""


class Question:
    """The inputs of an answer, as a digest that is the same in every process and on every machine."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, *parts: object) -> None:
        """Add plain values."""
        self._digest.update(repr(parts).encode())

    def add_tables(self, tables: Sequence[pa.Table]) -> None:
        """Add batches of input: names, types and values."""
        for table in tables:
            self.add(str(table.schema.remove_metadata()))
            for column in table.columns:
                self.add(_values(column))

    def add_query(self, build: Callable[[], DataFrame]) -> None:
        """Add a query: its plan, its session's settings and, if its plan does not show everything, the test's code."""
        try:
            df = build()
        except Exception:  # the test may want just that
            self._add_code()
            return
        analyzed = df._jdf.queryExecution().analyzed()
        self.add(_normalized(analyzed.treeString(True, False, 1 << 30, False, False)))
        conf = df.sparkSession.conf.getAll
        self.add(sorted(pair for pair in conf.items() if pair[0].startswith("spark.sql.") and "dir" not in pair[0]))
        if any(_OPAQUE.search(name) and name not in _TRANSPARENT for name in _classes(analyzed.toJSON())):
            self._add_code()

    def _add_code(self) -> None:
        self.add(_current.test, _sources(_module(_current.test)))

    def digest(self) -> str:
        """The digest of everything that was added."""
        return self._digest.hexdigest()[:32]


def _values(column: pa.ChunkedArray) -> object:
    """Return the values of a column as Python's; as Arrow's text where Python has no such time."""
    try:
        return column.to_pylist()
    except OverflowError:
        return column.to_string(window=len(column), container_window=len(column))


class Oracle:
    """Spark's answers to the runs of one comparison, from its record or from Spark."""

    def __init__(self, spark: SparkSession, ask: Callable[[Question], None]) -> None:
        """Look for a record; `ask` adds all that the answers depend on."""
        self._given: list[Answer] = []
        self._record: list[Answer] | None = None
        self._folder = GOLDEN / ".".join(spark.version.split(".")[:2])
        self._name = ""
        # Which examples are drawn is up to Hypothesis.
        kept = _current.test and not currently_in_test_context() and (USE is Use.WRITE or self._folder.is_dir())
        if not kept:
            return
        self._name = f"{_current.test} {_current.count}"
        _current.count += 1
        question = Question()
        ask(question)
        self._digest = question.digest()
        found = _records(self._file()).get(self._name)
        if found is not None and found["digest"] == self._digest:
            self._record = [_answer(one) for one in found["answers"]]

    def answer(self, run: Callable[[], Answer]) -> Answer:
        """The answer of the next run: as recorded, or of `run`."""
        known = None if USE is Use.LIVE else self._record
        found = run() if known is None else known[len(self._given)]
        self._given.append(found)
        return found

    def close(self, check: Callable[[Batches, Batches], None]) -> None:
        """Hold the answers against the record, or make them one.

        Args:
            check: raises if the rows of two answers differ.
        """
        if not self._name:
            return
        if USE is Use.WRITE:
            _put_aside(self._file(), self._name, self._digest, self._given)
        elif self._record is None:
            assert USE is Use.RECORDED, f"no record of Spark's answer holds for {self._name}: run `make golden`"
        elif USE is Use.LIVE:
            assert len(self._record) == len(self._given)
            for known, given in zip(self._record, self._given, strict=True):
                check(known.batches, given.batches)
                assert known.schemas == given.schemas
                assert bool(known.error) == bool(given.error)

    def _file(self) -> Path:
        path = _current.test.partition("::")[0].removeprefix("tests/")
        return (self._folder / path).with_suffix(".jsonl.gz")


@dataclass
class _Current:
    test: str = ""
    count: int = 0


_current = _Current()


def begin(test: str) -> None:
    """Take note of the test that begins, by its name, if it has records: where it is slow, Spark always runs."""
    _current.test = test
    _current.count = 0


def finish(whole: bool) -> None:
    """Make files of what has been put aside; `whole`: all tests of each module have run, so that no others are kept."""
    for part in sorted(_PENDING.rglob("*.jsonl")):
        path = (GOLDEN / part.relative_to(_PENDING)).with_suffix(".jsonl.gz")
        lines = [json.loads(line) for line in part.read_text().splitlines()]
        records = ({} if whole else dict(_records(path))) | {record["test"]: record for record in lines}
        text = "".join(_json(records[name]) + "\n" for name in sorted(records)).encode()
        if not path.exists() or gzip.decompress(path.read_bytes()) != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gzip.compress(text, mtime=0))
        part.unlink()


def _put_aside(path: Path, name: str, digest: str, answers: list[Answer]) -> None:
    part = _PENDING / path.relative_to(GOLDEN).with_suffix("")
    part.parent.mkdir(parents=True, exist_ok=True)
    record = {"test": name, "digest": digest, "answers": [_plain(answer) for answer in answers]}
    with part.open("ab", buffering=0) as file:  # workers share it: a line is one write
        file.write(f"{_json(record)}\n".encode())


@cache
def _records(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    return {record["test"]: record for record in map(json.loads, lines)}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def _plain(answer: Answer) -> dict[str, Any]:
    """An answer as JSON: rows in an order of their own, since Spark has none."""
    batches = {
        str(number): sorted((_encoded(list(row)) for row in rows), key=_json) for number, rows in answer.batches.items()
    }
    return {"batches": batches, "schemas": [schema.jsonValue() for schema in answer.schemas], "error": answer.error}


def _answer(record: dict[str, Any]) -> Answer:
    batches = {int(number): [tuple(map(_decoded, row)) for row in rows] for number, rows in record["batches"].items()}
    return Answer(batches, [StructType.fromJson(schema) for schema in record["schemas"]], record["error"])


def _encoded(value: Any) -> Any:
    """A value of a row as JSON, other types than JSON's beside their names."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_encoded(part) for part in value]
        case tuple():
            return {"tuple": [_encoded(part) for part in value]}
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case Decimal():
            return {"decimal": str(value)}
        case dt.datetime():
            return {"datetime": value.isoformat()}
        case dt.date():
            return {"date": value.isoformat()}
        case dt.timedelta():
            return {"timedelta": [value.days, value.seconds, value.microseconds]}
    raise TypeError(f"a value of type {type(value).__name__} cannot be recorded")


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(part) for part in value]
    if not isinstance(value, dict):
        return value
    ((kind, plain),) = value.items()
    readers: dict[str, Callable[[Any], Any]] = {
        "tuple": lambda parts: tuple(map(_decoded, parts)),
        "bytes": base64.b64decode,
        "decimal": Decimal,
        "datetime": dt.datetime.fromisoformat,
        "date": dt.date.fromisoformat,
        "timedelta": lambda parts: dt.timedelta(*parts),
    }
    return readers[kind](plain)


def _normalized(plan: str) -> str:
    """A plan's text without what is new each time: ids are numbered as they come, paths and addresses go."""
    ids: dict[str, str] = {}
    uuid = "-".join(f"[0-9a-f]{{{length}}}" for length in (8, 4, 4, 4, 12))
    plan = re.sub(r"FileSource\[[^\]]*\]", "FileSource", plan)
    plan = re.sub(r"(?<=[a-z]\.)([\w$]+)@[0-9a-f]{5,8}\b", r"\1", plan)
    return re.sub(rf"#\d+|{uuid}|_pyspark_\w+", lambda found: ids.setdefault(found.group(), f"#{len(ids)}"), plan)


def _classes(plan: str) -> set[str]:
    return {name.rpartition(".")[2] for name in re.findall(r'"class"\s*:\s*"([\w.$]+)"', plan)}


def _module(test: str) -> str:
    return test.partition("::")[0].removesuffix(".py").replace("/", ".")


@cache
def _sources(module: str) -> str:
    """A digest of the source of a test module and of all modules of the tests that it imports."""
    seen: dict[str, bytes] = {}

    def visit(name: str) -> None:
        if name in seen or name in _NOT_ORACLES:
            return
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            return
        seen[name] = Path(spec.origin).read_bytes()
        for imported in _imports(seen[name]):
            visit(imported)

    visit(module)
    return hashlib.sha256(repr(sorted(seen.items())).encode()).hexdigest()


def _imports(source: bytes) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests"):
            yield node.module
            for alias in node.names:
                with_name = TESTS.parent.joinpath(*node.module.split("."), alias.name)
                if with_name.with_suffix(".py").exists():
                    yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("tests"))
