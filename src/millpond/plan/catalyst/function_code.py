"""What a user's Python function does, as a digest: of its code and of all that it refers to, not of where it stands.

Two runs of one program give one digest, whatever moved in its files; another release of Python, whose compiler may give
other code, gives another. What is installed in the environment counts by its name only.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import Any

from pyspark import cloudpickle

_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def code_digest(command: bytes) -> str | None:
    """A digest of a function as Spark has pickled it; None if it cannot be read (a large one lies in a broadcast)."""
    try:
        loaded = cloudpickle.loads(command)
    except Exception:  # whatever the user's own code raises
        return None
    release = ".".join(map(str, sys.version_info[:2]))
    return hashlib.sha256(f"{release} {_Teller().tell(loaded)}".encode()).hexdigest()[:32]


class _Teller:
    """Says what a value is; what refers to itself, by number."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, object]] = {}  # by identity; the object stays alive, so that it is unique

    def tell(self, value: Any) -> str:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes) or value is Ellipsis:
            return f"{type(value).__name__} {value!r}"
        if not isinstance(value, tuple | frozenset | types.CodeType):  # these do not contain themselves
            if id(value) in self._known:
                return f"again {self._known[id(value)][0]}"
            self._known[id(value)] = len(self._known), value
        return f"{type(value).__qualname__}({', '.join(self._parts(value))})"

    def _parts(self, value: Any) -> Iterator[str]:
        if isinstance(value, tuple | list):
            yield from map(self.tell, value)
        elif isinstance(value, set | frozenset):
            yield from sorted(_Teller().tell(one) for one in value)
        elif isinstance(value, dict):
            for key, one in value.items():
                yield f"{self.tell(key)}: {self.tell(one)}"
        elif isinstance(value, types.ModuleType):
            yield value.__name__
        elif isinstance(value, types.CodeType):
            yield from self._code(value)
        elif isinstance(value, types.CellType):
            yield from (self.tell(one) for one in _contents(value))
        elif isinstance(value, types.MethodType):
            yield from (self.tell(value.__func__), self.tell(value.__self__))
        elif isinstance(value, functools.partial):
            yield from map(self.tell, (value.func, value.args, value.keywords))
        elif isinstance(value, types.FunctionType | type) or _is_users(type(value)):
            yield from self._users(value) if _is_users(value) else [f"{value.__module__}.{value.__qualname__}"]
        elif hasattr(value, "__qualname__"):  # built in
            yield f"{value.__module__}.{value.__qualname__}"
        else:
            yield _pickled(value)

    def _users(self, value: Any) -> Iterator[str]:
        """A function or class of the user's, or an object of such a class."""
        if isinstance(value, types.FunctionType):
            yield self.tell(value.__code__)
            yield from map(self.tell, (value.__defaults__, value.__kwdefaults__, value.__closure__))
            for name in sorted(_globals(value.__code__)):
                if name in value.__globals__:
                    yield f"{name} = {self.tell(value.__globals__[name])}"
        elif isinstance(value, type):
            yield value.__qualname__
            yield from (self.tell(base) for base in value.__bases__)
            for name, one in sorted(vars(value).items()):
                if name not in _INCIDENTAL:
                    yield f"{name} = {self.tell(_function_in(one))}"
        else:
            yield self.tell(type(value))
            state = value.__getstate__() if hasattr(value, "__getstate__") else vars(value)
            yield self.tell(state)

    def _code(self, code: types.CodeType) -> Iterator[str]:
        yield from (code.co_code.hex(), code.co_exceptiontable.hex(), str(code.co_flags))
        yield from map(str, (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount))
        yield from map(str, (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))
        yield from map(self.tell, code.co_consts)


_INCIDENTAL = frozenset(
    {"__module__", "__dict__", "__weakref__", "__doc__", "__firstlineno__", "__static_attributes__"}
)


def _is_users(value: Any) -> bool:
    """Whether a function, a class or an object's class is of the user's own code."""
    kind = value if isinstance(value, types.FunctionType | type) else type(value)
    module = sys.modules.get(kind.__module__ or "")
    if kind.__module__ == "__main__" or module is None:  # pickled with its code
        return True
    file = getattr(module, "__file__", None)
    return file is not None and not file.startswith(_INSTALLED)


def _globals(code: types.CodeType) -> set[str]:
    """The names of the globals that code reads, and code within it."""
    names = {str(one.argval) for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return names.union(*(_globals(one) for one in code.co_consts if isinstance(one, types.CodeType)))


def _contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # empty
        return []


def _function_in(member: Any) -> Any:
    """What a class's member calls, where it is a property or a static or class method."""
    if isinstance(member, property):
        return member.fget, member.fset, member.fdel
    return member.__func__ if isinstance(member, staticmethod | classmethod) else member


def _pickled(value: Any) -> str:
    try:
        return hashlib.sha256(cloudpickle.dumps(value)).hexdigest()
    except Exception:  # then it came with the class, and has no state of its own that could be sent
        return type(value).__module__
