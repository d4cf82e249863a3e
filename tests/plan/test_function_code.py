"""The digest of a user's function: the same for the same code wherever it stands, another for any other code."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from pyspark.core.broadcast import _broadcastRegistry, _from_id
from pyspark.serializers import CloudPickleSerializer

from millpond.plan.catalyst.user_code.digest import _graph_digest, code_digest

PROGRAM = """
import re
import math as arithmetic
from collections import deque
from functools import partial
from types import SimpleNamespace
LIMIT, NAMES, KINDS = 3, {{"a": 1, "b": 2}}, {{"x", "y", "z", "w"}}

OPTIONS, LAST = SimpleNamespace(kinds=KINDS, other={{"x", "y"}}), deque([KINDS], maxlen=3)

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
    "set in an object": "lambda value: value in OPTIONS.kinds",
    "set in a deque": "lambda value: value in LAST",
    "method of a set": "KINDS.__contains__",
    "method of a pattern": "re.compile('a+').match",
    "another method of a pattern": "re.compile('b+').match",
}
CHANGES = {
    "closure": ["LIMIT = 4", "def helper(value):\n    return value + 2"],
    "object": ["Scale.base = 11", "Scale.__call__ = lambda self, value: value * self.by * 2"],
    "set": ["KINDS.add('v')"],
    "dictionary": ["NAMES['a'] = 3"],
    "recursive": ["def recursive(value):\n    return value if value < 3 else recursive(value - 1)"],
    "pattern": ["def matches(value):\n    return bool(re.match('b+', value))"],
    "set in an object": ["KINDS.add('v')", "OPTIONS.kinds = {'x'}"],
    "set in a deque": ["KINDS.add('v')", "LAST.append(1)"],
    "method of a set": ["KINDS.add('v')"],
}


def digest(function: str, change: str = "") -> str | None:
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(PROGRAM.format(function=FUNCTIONS[function], change=change), f"at {change}", "exec"), names)
    return code_digest(CloudPickleSerializer().dumps((names["FUNCTION"], "bigint")), {})


def test_other_functions_are_others() -> None:
    digests = {name: digest(name) for name in FUNCTIONS}
    assert all(digests.values())
    assert all(digests[name] != digests[other] for name, other in combinations(FUNCTIONS, 2)), digests


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_moved_is_the_same(name: str) -> None:
    assert digest(name) == digest(name, "\n\n# a comment\nother = 3\n")


@pytest.mark.parametrize(("name", "change"), [(name, text) for name, texts in CHANGES.items() for text in texts])
def test_what_it_refers_to_counts(name: str, change: str) -> None:
    assert digest(name) != digest(name, change)


def test_other_processes_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text(PROGRAM.format(function="None", change=""))
    asked = (
        "import users; from pyspark.serializers import CloudPickleSerializer as P;"
        "from millpond.plan.catalyst.user_code.digest import code_digest;"
        f"names = vars(users); functions = [eval(text, names) for text in {list(FUNCTIONS.values())!r}];"
        "print([code_digest(P().dumps((function, 'bigint')), {}) for function in functions])"
    )

    def output_with(seed: str) -> str:
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        }
        return subprocess.run(
            [sys.executable, "-c", asked], env=environment, check=True, capture_output=True, text=True
        ).stdout

    first = output_with("1")
    assert "None" not in first
    assert output_with("2") == first
    with (tmp_path / "users.py").open("a") as program:
        program.write("\ndef helper(value):\n    return value + 3\n")
    assert output_with("1") != first


LIBRARY = """
import functools
import threading
from collections import defaultdict
from types import SimpleNamespace
import numpy as np

RATE = 3

class Rules:
    @staticmethod
    def score(value):
        return value * 15

    @staticmethod
    @functools.lru_cache
    def cached(value):
        return value * 16

def score(value):
    return value * RATE

@functools.lru_cache
def cached(value):
    return value + 5

def unused(value):
    return value + 6

class Locked:
    def __init__(self):
        self.lock, self.limit = threading.Lock(), 7

    @functools.cached_property
    def half(self):
        return self.limit / 8

    def __call__(self, value):
        return value > self.half

class Defaults(dict):
    def __missing__(self, key):
        return 9

@functools.singledispatch
def by_type(value):
    return 0

@by_type.register
def _(value: str):
    return 10

class Counted:
    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.function, self.times = function, 13

    def __call__(self, value):
        return self.function(value) * self.times

@Counted
def counted(value):
    return value + 14

vector = np.vectorize(lambda value: value + 11)
options = SimpleNamespace(change=lambda value: value + 12)
locked, defaults = Locked(), Defaults(a=1)
held = defaultdict(int, a=17, lock=threading.Lock())
"""
USERS = """
import library
import folder.below
from library import cached

def attribute(value):
    return library.score(value)

def in_a_folder(value):
    return folder.below.scaled(value)

def imported(value):
    import library as other
    return other.score(value)

def imported_by_name(value):
    from library import score
    return score(value)

def imported_below(value):
    from folder import later
    return later.shifted(value)

def caught():
    import library as other
    return lambda value: other.score(value)

in_a_closure = caught()

def kept(value):
    return cached(value)

def kept_there(value):
    return library.cached(value)

def called(value):
    return library.locked(value)

def looked_up(value):
    return library.defaults[value]

def dispatched(value):
    return library.by_type(value)

def vectorised(value):
    return library.vector(value)

def decorated(value):
    return library.counted(value)

def changed(value):
    return library.options.change(value)

def static(value):
    return library.Rules.score(value) + library.Rules.cached(value)

def held(value):
    return library.held[value]

def missing(value):
    import no_such_library
    return no_such_library.score(value)
"""
MODULES = {
    "library.py": LIBRARY,
    "users.py": USERS,
    # The folders have no __init__.py.
    "folder/below.py": "def scaled(value):\n    return value * 20\n",
    "folder/later.py": "def shifted(value):\n    return value + 30\n",
}
CHANGED_MODULES = {
    "attribute": ["RATE = 3", "value * RATE"],
    "in_a_folder": ["value * 20"],
    "imported": ["RATE = 3", "value * RATE"],
    "imported_by_name": ["RATE = 3", "value * RATE"],
    "imported_below": ["value + 30"],
    "in_a_closure": ["RATE = 3", "value * RATE"],
    "kept": ["value + 5"],
    "kept_there": ["value + 5"],
    "called": ["Lock(), 7", "self.limit / 8", "value > self.half"],
    "looked_up": ["return 9", "Defaults(a=1)"],
    "dispatched": ["return 10"],
    "vectorised": ["value + 11"],
    "decorated": ["function, 13", "(value) * self.times", "value + 14"],
    "changed": ["value + 12"],
    "static": ["value * 15", "value * 16"],
    "held": ["a=17"],
}
"""Function of `users.py` → texts in the modules, each of which changes what the function computes."""


@pytest.fixture
def in_modules(tmp_path: Path) -> Callable[..., str]:
    """The digest of a function of `users.py`, which is pickled by its name, after a change of a text in the modules."""

    def digest_after(name: str, old: str = "", new: str = "") -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for file, text in MODULES.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text.replace(old, new) if old else text)
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        try:
            function = getattr(importlib.import_module("users"), name)
            digested = code_digest(CloudPickleSerializer().dumps((function, "bigint")), {})
        finally:
            sys.path.remove(str(folder))
            for module in ("users", "library", "folder", "folder.below", "folder.later"):
                sys.modules.pop(module, None)
        assert digested is not None
        return digested

    return digest_after


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in CHANGED_MODULES.items() for text in texts])
def test_what_it_refers_to_in_modules_counts(in_modules: Callable[..., str], name: str, text: str) -> None:
    first = in_modules(name)
    assert in_modules(name) == first
    assert in_modules(name, "def unused(value):", "# Moved.\ndef unused(value):\n    value += 1") == first
    other = text.translate(str.maketrans("123456789*/>", "234567891+-<"))
    assert other != text
    assert in_modules(name, text, other) != first


def test_packages_beside_their_metadata_count_by_name(
    in_modules: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `pip install --target` leaves them in any folder."""
    monkeypatch.setitem(MODULES, "library-1.0.dist-info/METADATA", "")
    assert in_modules("attribute") == in_modules("attribute", "value * RATE", "value + RATE")


def test_a_missing_module_counts_by_name(in_modules: Callable[..., str]) -> None:
    first = in_modules("missing")
    assert in_modules("missing") == first
    assert in_modules("missing", "no_such_library", "no_other_library") != first


def test_a_program_of_many_functions_has_a_digest() -> None:
    """Each refers to the next, and the last to the first, in more steps than Python's stack has frames."""
    count = 2 * sys.getrecursionlimit()

    def digest_of_cycle(last: int) -> str | None:
        names: dict[str, object] = {"__name__": "__main__"}
        calls = "".join(f"def f{n}(value):\n    return f{(n + 1) % count}(value) + {n}\n" for n in range(count - 1))
        exec(f"{calls}def f{count - 1}(value):\n    return f0(value) + {last}\n", names)
        return _graph_digest(names["f0"])

    assert digest_of_cycle(1) == digest_of_cycle(1) != digest_of_cycle(2)


def test_objects_that_have_each_other_in_sets_have_a_digest() -> None:
    def digest_of_places(last: int) -> str | None:
        names: dict[str, object] = {"__name__": "__main__"}
        exec(
            "class Place:\n    def __init__(self, number):\n        self.number, self.near = number, set()\n"
            f"places = [Place(number) for number in (*range(20), {last})]\n"
            "for place in places:\n    place.near.update(places)\n"
            "def function(value):\n    return value in places[0].near\n",
            names,
        )
        return code_digest(CloudPickleSerializer().dumps((names["function"], "bigint")), {})

    assert digest_of_places(30) is not None
    assert digest_of_places(30) == digest_of_places(30) != digest_of_places(31)


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
    def digest_of(value: object, number: int = 3, code: str = "value in known.value") -> str | None:
        return code_digest(with_variable(number, code), {number: file_of(tmp_path, value)})

    first = digest_of({"a": 1})
    assert first is not None
    assert digest_of({"a": 1}) == digest_of({"a": 1}, number=8) == first
    others = [first, digest_of({"a": 2}), digest_of({"b": 1}), digest_of({"a": 1}, code="value not in known.value")]
    assert None not in others
    assert len(set(others)) == 4
    assert not _broadcastRegistry
    assert code_digest(with_variable(3, "known.value"), {3: str(tmp_path / "missing")}) is None


def test_the_value_of_a_large_broadcast_variable_does_not_count(tmp_path: Path) -> None:
    def digest_of(letter: str) -> str | None:
        return code_digest(with_variable(3, "known.value"), {3: file_of(tmp_path, letter * (1 << 20))})

    assert digest_of("a") == digest_of("b")
    assert digest_of("a") is not None


def test_a_large_function_is_what_its_broadcast_variable_has(tmp_path: Path) -> None:
    """Spark pickles it as a broadcast variable, whose value may refer to others."""
    values = file_of(tmp_path, {"a": 1})

    def digest_of(code: str) -> str | None:
        function = with_variable(3, code)
        large = CloudPickleSerializer().dumps(Variable(4))
        digested = code_digest(large, {3: values, 4: file_of(tmp_path, function)})
        assert digested == code_digest(function, {3: values})
        return digested

    both = digest_of("value in known.value"), digest_of("known.value")
    assert None not in both
    assert both[0] != both[1]


WITH_VARIABLE = """
import sys
from pyspark.core.broadcast import _from_id
from pyspark.serializers import CloudPickleSerializer
from millpond.plan.catalyst.user_code.digest import code_digest

class Variable:
    def __reduce__(self):
        return _from_id, (int(sys.argv[1]),)

known = Variable()
command = CloudPickleSerializer().dumps((lambda value: value in known.value, "boolean"))
print(code_digest(command, {int(sys.argv[1]): sys.argv[2]}))
"""


def test_other_processes_say_the_same_of_broadcast_variables(tmp_path: Path) -> None:
    def output_with(number: int, value: object) -> str:
        return subprocess.run(
            [sys.executable, "-c", WITH_VARIABLE, str(number), file_of(tmp_path, value)],
            env={**os.environ, "PYTHONHASHSEED": str(number)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    first = output_with(1, {"x", "y", "z", "w"})
    assert "None" not in first
    assert output_with(2, {"x", "y", "z", "w"}) == first
    assert output_with(1, {"x", "y", "z"}) != first
