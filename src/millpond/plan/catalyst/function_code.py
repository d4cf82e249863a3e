"""Digest of a user's Python function: of its code and of everything it refers to, not of its location.

Two runs of one program give the same digest, even if code moved within its files. Another Python release may compile to
other bytecode, so its digest differs. Installed packages count by name only.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import os
import pickle
import sys
import sysconfig
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

from pyspark import cloudpickle
from pyspark.core.broadcast import Broadcast, _broadcastRegistry

_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))

_MAX_COMPARED_BYTES = 1 << 20
"""Broadcast variables that are larger count by their type only: to describe them would take longer than a start."""

_loading = threading.Lock()


def load_function(command: bytes, broadcasts: Mapping[int, str]) -> Any:
    """Unpickle a function as pickled by Spark. A large one is pickled as a broadcast variable.

    Args:
        command: the pickled function.
        broadcasts: the id of each broadcast variable that it refers to → the file with its pickled value.
    """
    # PySpark looks them up by their ids in a table that only its workers fill.
    variables: dict[int, Broadcast[Any]] = {number: Broadcast(path=path) for number, path in broadcasts.items()}
    with _loading:
        _broadcastRegistry.update(variables)
        try:
            return pickle.loads(command)
        finally:
            for number in variables:
                del _broadcastRegistry[number]


def code_digest(command: bytes, broadcasts: Mapping[int, str]) -> str | None:
    """Return a digest of a function as pickled by Spark; None if it cannot be read.

    Args:
        command: see `load_function`.
        broadcasts: see `load_function`. Their values are part of the digest, up to 1 MiB each.
    """
    try:
        loaded = load_function(command, broadcasts)
        if isinstance(loaded, Broadcast):
            loaded = load_function(loaded.value, broadcasts)
        described = _Describer().describe(loaded)
    except Exception:  # any exception of the user's own code; values of encrypted broadcasts cannot be read
        return None
    release = ".".join(map(str, sys.version_info[:2]))
    return hashlib.sha256(f"{release} {described}".encode()).hexdigest()[:32]


class _Describer:
    """Describes values as text; a repeated object is described by a number."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, object]] = {}  # keeps the object alive, so that its id stays unique

    def describe(self, value: Any) -> str:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes) or value is Ellipsis:
            return f"{type(value).__name__} {value!r}"
        if not isinstance(value, tuple | frozenset | types.CodeType):  # these do not contain themselves
            if id(value) in self._known:
                return f"again {self._known[id(value)][0]}"
            self._known[id(value)] = len(self._known), value
        return f"{type(value).__qualname__}({', '.join(self._parts(value))})"

    def _parts(self, value: Any) -> Iterator[str]:
        if isinstance(value, tuple | list):
            yield from map(self.describe, value)
        elif isinstance(value, set | frozenset):
            # Sets have no stable order: elements are described independently of each other, and the texts are sorted.
            yield from sorted(_Describer().describe(element) for element in value)
        elif isinstance(value, dict):
            for key, item in value.items():
                yield f"{self.describe(key)}: {self.describe(item)}"
        elif isinstance(value, types.ModuleType):
            yield value.__name__
        elif isinstance(value, types.CodeType):
            yield from self._code(value)
        elif isinstance(value, types.CellType):
            yield from (self.describe(content) for content in _contents(value))
        elif isinstance(value, types.MethodType):
            yield from (self.describe(value.__func__), self.describe(value.__self__))
        elif isinstance(value, Broadcast):
            yield self.describe(value.value) if os.path.getsize(value._path) <= _MAX_COMPARED_BYTES else "large"
        elif isinstance(value, functools.partial):
            yield from map(self.describe, (value.func, value.args, value.keywords))
        elif isinstance(value, types.FunctionType | type) or _is_users(type(value)):
            yield from self._users(value) if _is_users(value) else [f"{value.__module__}.{value.__qualname__}"]
        elif hasattr(value, "__qualname__"):  # built in
            yield f"{value.__module__}.{value.__qualname__}"
        else:
            yield _pickled(value)

    def _users(self, value: Any) -> Iterator[str]:
        """Describe a user's function or class, or an object of such a class."""
        if isinstance(value, types.FunctionType):
            yield self.describe(value.__code__)
            yield from map(self.describe, (value.__defaults__, value.__kwdefaults__, value.__closure__))
            for name in sorted(_globals(value.__code__)):
                if name in value.__globals__:
                    yield f"{name} = {self.describe(value.__globals__[name])}"
        elif isinstance(value, type):
            yield value.__qualname__
            yield from (self.describe(base) for base in value.__bases__)
            for name, member in sorted(vars(value).items()):
                if name not in _INCIDENTAL:
                    yield f"{name} = {self.describe(_function_in(member))}"
        else:
            yield self.describe(type(value))
            state = value.__getstate__() if hasattr(value, "__getstate__") else vars(value)
            yield self.describe(state)

    def _code(self, code: types.CodeType) -> Iterator[str]:
        # Line numbers and file names are left out: code may move within its files.
        yield from (code.co_code.hex(), code.co_exceptiontable.hex(), str(code.co_flags))
        yield from map(str, (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount))
        yield from map(str, (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))
        yield from map(self.describe, code.co_consts)


_INCIDENTAL = frozenset(
    {"__module__", "__dict__", "__weakref__", "__doc__", "__firstlineno__", "__static_attributes__"}
)


def _is_users(value: Any) -> bool:
    """Whether a function, a class or an object's class is defined in the user's own code."""
    kind = value if isinstance(value, types.FunctionType | type) else type(value)
    module = sys.modules.get(kind.__module__ or "")
    if kind.__module__ == "__main__" or module is None:  # pickled with its code
        return True
    file = getattr(module, "__file__", None)
    return file is not None and not file.startswith(_INSTALLED)


def _globals(code: types.CodeType) -> set[str]:
    """Return the names of the globals that code reads, nested code included."""
    names = {
        str(instruction.argval)
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    return names.union(*(_globals(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)))


def _contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # empty
        return []


def _function_in(member: Any) -> Any:
    """Return the function of a property, static method or class method; other members unchanged."""
    if isinstance(member, property):
        return member.fget, member.fset, member.fdel
    return member.__func__ if isinstance(member, staticmethod | classmethod) else member


def _pickled(value: Any) -> str:
    try:
        return hashlib.sha256(cloudpickle.dumps(value)).hexdigest()
    except Exception:  # the object came with the class, and has no picklable state of its own
        return type(value).__module__
