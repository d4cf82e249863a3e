"""Digest of a user's Python function: of its code and of everything it refers to, not of its location.

Two runs of one program give the same digest, even if code moved within its files. Another Python release may compile to
other bytecode, so its digest differs. Installed packages count by name only.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pyspark.cloudpickle import CloudPickler
from pyspark.core.broadcast import Broadcast, _broadcastRegistry

from millpond.plan.catalyst.user_code.names_read import cell_contents, is_user_code, values_read

_MAX_COMPARED_BYTES = 1 << 20
"""Broadcast variables that are larger count by their type only: to describe them would take longer than a start."""
_MAX_ROUNDS = 30
"""Two values may exchange their places unnoticed if they differ only in more steps of references than this."""

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
        described = _graph_digest(loaded)
    except Exception:  # any exception of the user's own code; values of encrypted broadcasts cannot be read
        return None
    release = ".".join(map(str, sys.version_info[:2]))
    return hashlib.sha256(f"{release} {described}".encode()).hexdigest()[:32]


def _graph_digest(root: Any) -> str:
    """Return a digest of a value and of all that it refers to, directly or not.

    Each value has a label: a digest of its type, of its texts, and of the labels of the values that it refers to. A
    label depends neither on the order of sets nor on the identity of equal objects. Values may refer to each other in
    cycles, and in more steps than Python's stack has frames. So labels are made in rounds. Each round follows
    references one step further, until a round distinguishes no more values than the one before (colour refinement, by
    Weisfeiler and Leman).
    """
    numbers: dict[int, int] = {}
    values: list[Any] = []  # keeps them alive, so that ids stay unique

    def refer(value: Any) -> str | int:
        """Return a plain value as text, and the number of any other."""
        if type(value) in _PLAIN:
            return f"{type(value).__name__} {value!r}"
        number = numbers.setdefault(id(value), len(values))
        if number == len(values):
            values.append(value)
        return number

    refer([root])  # a list, as the root may be a plain value
    labels: list[str] = []
    referring: dict[int, list[str | int]] = {}
    for number, value in enumerate(values):  # grows
        parts = [refer(part) for part in _parts(value)]
        if any(isinstance(part, int) for part in parts):
            referring[number] = parts
            labels.append("")
        else:  # its label is final: large constants are digested once, not in each round
            labels.append(_label(value, parts, labels))
    for _ in range(_MAX_ROUNDS):
        distinct = len(set(labels))
        labels = [
            _label(values[number], referring[number], labels) if number in referring else label
            for number, label in enumerate(labels)
        ]
        # Values that one round distinguishes differ in all later ones, so an equal count is an equal partition.
        if len(set(labels)) == distinct:
            break
    # The root's label reaches as many steps as there were rounds. All labels count, for values beyond.
    return _digest([labels[0], *sorted(set(labels))])


_PLAIN = frozenset({type(None), type(Ellipsis), bool, int, float, complex, str, bytes})


def _label(value: Any, parts: Sequence[str | int], labels: Sequence[str]) -> str:
    texts = [part if isinstance(part, str) else f"#{labels[part]}" for part in parts]
    return _digest([type(value).__qualname__, *(sorted(texts) if isinstance(value, set | frozenset) else texts)])


def _parts(value: Any) -> Iterator[Any]:
    """Yield what makes a value what it is: names, contents, and the values that it refers to."""
    if type(value) in (tuple, list, set, frozenset):
        yield from value
    elif type(value) is dict:
        for item in value.items():
            yield from item
    elif isinstance(value, _KINDS_WITH_PARTS):
        read = next(read for kind, read in _PARTS if isinstance(value, kind))
        yield from read(value)
    elif (wrapped := _wrapped(value)) is not None:
        yield wrapped
    else:
        yield type(value)
        yield from _pickled(value)


def _definition(value: Any) -> Iterator[Any]:
    """Yield the parts of a user's function or class; of an installed one, its name."""
    if not is_user_code(value):
        yield f"{value.__module__}.{value.__qualname__}"
    elif isinstance(value, types.FunctionType):
        yield from (value.__code__, value.__defaults__, value.__kwdefaults__, value.__closure__, vars(value))
        for name, read in values_read(value):
            yield from (name, read)
    else:
        yield from (value.__qualname__, value.__bases__)
        for name, member in sorted(vars(value).items()):
            if name not in _INCIDENTAL:
                yield from (name, member)


def _code(code: types.CodeType) -> Iterator[Any]:
    # Line numbers and file names are left out: code may move within its files.
    yield from (code.co_code, code.co_exceptiontable, code.co_flags)
    yield from (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    yield from map(str, (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))
    yield from code.co_consts


def _broadcast(variable: Broadcast[Any]) -> Iterator[Any]:
    yield variable.value if os.path.getsize(variable._path) <= _MAX_COMPARED_BYTES else "large"


_PARTS: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
    (set | frozenset, lambda value: (type(value), *value)),
    (types.ModuleType, lambda value: (value.__name__,)),
    (types.CodeType, _code),
    (types.CellType, cell_contents),
    (types.MethodType, lambda value: (value.__func__, value.__self__)),
    (staticmethod | classmethod, lambda value: (value.__func__,)),
    (types.BuiltinMethodType | types.MethodWrapperType, lambda value: (value.__qualname__, value.__self__)),
    (Broadcast, _broadcast),
    (functools.partial, lambda value: (value.func, value.args, value.keywords)),
    (types.FunctionType | type, _definition),
)
"""Kind of a value → its parts, read without pickling it. Pickled sets, for example, have no stable order."""
_KINDS_WITH_PARTS = tuple(kind for kind, _ in _PARTS)


_INCIDENTAL = frozenset(
    {
        *("__module__", "__dict__", "__weakref__", "__doc__", "__firstlineno__", "__static_attributes__"),
        # Python adds these when an object is first copied, or annotations are first read.
        *("__slotnames__", "__annotations_cache__"),
    }
)


def _wrapped(value: Any) -> Any:
    """Return the function that an installed decorator has wrapped, as `functools.lru_cache`; None for other values."""
    if not callable(value) or is_user_code(type(value)):
        return None
    return inspect.getattr_static(value, "__wrapped__", None)


def _pickled(value: Any) -> Iterator[Any]:
    """Yield a digest of an object's pickled state, and the values in it that have parts of their own."""
    state = hashlib.sha256()
    pickler = _Pickler(types.SimpleNamespace(write=state.update), value)
    try:
        pickler.dump(value)
    except Exception:  # it has a lock or a connection, say; workers get it as a member of a module
        if isinstance(value, dict):
            yield dict(value)
        elif isinstance(value, list | tuple):
            yield list(value)
        attributes = getattr(value, "__dict__", None)
        for name, member in sorted(attributes.items()) if isinstance(attributes, dict) else ():
            if is_user_code(type(value)) or isinstance(member, types.FunctionType):
                yield from (name, member)
    else:
        yield from (state.digest(), *pickler.parts)


class _Pickler(CloudPickler):  # type: ignore[misc]
    """Pickles one object, except for the values in it that have parts of their own; these are gathered in `parts`."""

    def __init__(self, file: Any, root: Any) -> None:
        super().__init__(file)
        self._root = root
        self.parts: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        """Return the number of a value that is left out; None for one that is pickled."""
        if value is self._root:
            return None
        if not isinstance(value, _KINDS_WITH_PARTS) and not is_user_code(type(value)) and _wrapped(value) is None:
            return None
        self.parts.append(value)
        return len(self.parts)


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode(errors="surrogatepass")).hexdigest()[:32]
