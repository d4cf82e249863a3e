"""The digest of a user's function: the same for the same code wherever it stands, another for any other code."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from pyspark.core.broadcast import _broadcastRegistry, _from_id
from pyspark.serializers import CloudPickleSerializer

from millpond.plan.catalyst.function_code import code_digest

PROGRAM = """
import re
import math as arithmetic
from functools import partial
LIMIT, NAMES, KINDS = 3, {{"a": 1, "b": 2}}, {{"x", "y", "z", "w"}}

class Scale:
    base = 10
    def __init__(self, by):
        self.by = by
    def __call__(self, value):
        return value * self.by

def helper(value):
    return value + 1

def outer(step):
    def inner(value, *, extra=4):
        "What it does."
        return helper(value) + step + extra + LIMIT
    return inner

def kinds(value):
    return value in KINDS or value in ("p", "q")

def known(value):
    return NAMES.get(value, [each for each in range(3) if each > 1])

def matches(value):
    return bool(re.match("a+", value))

def recursive(value):
    return value if value < 2 else recursive(value - 1)

{change}
FUNCTION = {function}
"""
FUNCTIONS = {
    "closure": "outer(2)",
    "another closure": "outer(3)",
    "lambda": "lambda value: value + 1",
    "another lambda": "lambda value: value + 2",
    "attribute": "lambda value: arithmetic.floor(value)",
    "another attribute": "lambda value: arithmetic.ceil(value)",
    "default": "lambda value, other=1: value + other",
    "another default": "lambda value, other=2: value + other",
    "object": "Scale(2)",
    "another object": "Scale(3)",
    "method": "Scale(2).__call__",
    "set": "kinds",
    "dictionary": "known",
    "pattern": "matches",
    "recursive": "recursive",
    "partial": "partial(helper, 1)",
    "another partial": "partial(helper, 2)",
    "function that is installed": "arithmetic.floor",
    "float": "lambda value: value == 0.0",
    "another float": "lambda value: value == -0.0",
    "caught": "outer(Scale(helper))",
}
CHANGES = {
    "closure": ["LIMIT = 4", "def helper(value):\n    return value + 2"],
    "object": ["Scale.base = 11", "Scale.__call__ = lambda self, value: value * self.by * 2"],
    "set": ["KINDS.add('v')"],
    "dictionary": ["NAMES['a'] = 3"],
    "recursive": ["def recursive(value):\n    return value if value < 3 else recursive(value - 1)"],
    "pattern": ["def matches(value):\n    return bool(re.match('b+', value))"],
}


def digest(function: str, change: str = "") -> str | None:
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(PROGRAM.format(function=FUNCTIONS[function], change=change), f"at {change}", "exec"), names)
    return code_digest(CloudPickleSerializer().dumps((names["FUNCTION"], "bigint")), {})


def test_other_functions_are_others() -> None:
    found = {name: digest(name) for name in FUNCTIONS}
    assert all(found.values())
    assert all(found[one] != found[other] for one, other in combinations(FUNCTIONS, 2)), found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_moved_is_the_same(name: str) -> None:
    assert digest(name) == digest(name, "\n\n# a comment\nother = 3\n")


@pytest.mark.parametrize(("name", "change"), [(name, change) for name, some in CHANGES.items() for change in some])
def test_what_it_refers_to_counts(name: str, change: str) -> None:
    assert digest(name) != digest(name, change)


def test_other_processes_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text(PROGRAM.format(function="None", change=""))
    asked = (
        "import users; from pyspark.serializers import CloudPickleSerializer as P;"
        "from millpond.plan.catalyst.function_code import code_digest;"
        f"names = vars(users); functions = [eval(text, names) for text in {list(FUNCTIONS.values())!r}];"
        "print([code_digest(P().dumps((function, 'bigint')), {}) for function in functions])"
    )

    def said(seed: str) -> str:
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        }
        return subprocess.run(
            [sys.executable, "-c", asked], env=environment, check=True, capture_output=True, text=True
        ).stdout

    first = said("1")
    assert "None" not in first
    assert said("2") == first
    with (tmp_path / "users.py").open("a") as program:
        program.write("\ndef helper(value):\n    return value + 3\n")
    assert said("1") != first


def test_what_cannot_be_read_has_no_digest() -> None:
    assert code_digest(b"what is this?", {}) is None


class Variable:
    """Stands for a broadcast variable on the driver, where one is pickled by its id."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_id, (self.number,)


def with_variable(number: int, code: str) -> bytes:
    """A pickled function of `value` that refers to a broadcast variable as `known`."""
    names: dict[str, object] = {"__name__": "__main__", "known": Variable(number)}
    return bytes(CloudPickleSerializer().dumps((eval(f"lambda value: {code}", names), "bigint")))


def file_of(folder: Path, value: object) -> str:
    """A file with a pickled value, as the driver has it for a broadcast variable."""
    path = folder / f"value {len(list(folder.iterdir()))}"
    path.write_bytes(pickle.dumps(value))
    return str(path)


def test_values_of_broadcast_variables_count_and_their_ids_do_not(tmp_path: Path) -> None:
    def found(value: object, number: int = 3, code: str = "value in known.value") -> str | None:
        return code_digest(with_variable(number, code), {number: file_of(tmp_path, value)})

    first = found({"a": 1})
    assert first is not None
    assert found({"a": 1}) == found({"a": 1}, number=8) == first
    others = [first, found({"a": 2}), found({"b": 1}), found({"a": 1}, code="value not in known.value")]
    assert None not in others
    assert len(set(others)) == 4
    assert not _broadcastRegistry
    assert code_digest(with_variable(3, "known.value"), {3: str(tmp_path / "missing")}) is None


def test_the_value_of_a_large_broadcast_variable_does_not_count(tmp_path: Path) -> None:
    def found(letter: str) -> str | None:
        return code_digest(with_variable(3, "known.value"), {3: file_of(tmp_path, letter * (1 << 20))})

    assert found("a") == found("b")
    assert found("a") is not None


def test_a_large_function_is_what_its_broadcast_variable_has(tmp_path: Path) -> None:
    """Spark pickles it as a broadcast variable, whose value may refer to others."""
    values = file_of(tmp_path, {"a": 1})

    def found(code: str) -> str | None:
        function = with_variable(3, code)
        large = CloudPickleSerializer().dumps(Variable(4))
        digested = code_digest(large, {3: values, 4: file_of(tmp_path, function)})
        assert digested == code_digest(function, {3: values})
        return digested

    both = found("value in known.value"), found("known.value")
    assert None not in both
    assert both[0] != both[1]


WITH_VARIABLE = """
import sys
from pyspark.core.broadcast import _from_id
from pyspark.serializers import CloudPickleSerializer
from millpond.plan.catalyst.function_code import code_digest

class Variable:
    def __reduce__(self):
        return _from_id, (int(sys.argv[1]),)

known = Variable()
command = CloudPickleSerializer().dumps((lambda value: value in known.value, "boolean"))
print(code_digest(command, {int(sys.argv[1]): sys.argv[2]}))
"""


def test_other_processes_say_the_same_of_broadcast_variables(tmp_path: Path) -> None:
    def said(number: int, value: object) -> str:
        return subprocess.run(
            [sys.executable, "-c", WITH_VARIABLE, str(number), file_of(tmp_path, value)],
            env={**os.environ, "PYTHONHASHSEED": str(number)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    first = said(1, {"x", "y", "z", "w"})
    assert "None" not in first
    assert said(2, {"x", "y", "z", "w"}) == first
    assert said(1, {"x", "y", "z"}) != first
