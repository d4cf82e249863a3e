"""Values that a Python function reads by name: globals, and members of the user's own modules.

Members of installed packages are left out: a package counts by its name.
"""

from __future__ import annotations

import dis
import importlib.util
import inspect
import os
import site
import sys
import sysconfig
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import py4j
import pyspark

_FOLDERS = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
    # PySpark may stand elsewhere, e.g. below SPARK_HOME, and so may Millpond.
    *(os.path.dirname(inspect.getfile(package)) for package in (py4j, pyspark)),
    str(Path(__file__).parents[3]),
)
_INSTALLED = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)

_READS_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})


def is_user_code(value: Any) -> bool:
    """Whether a module, function or class, or an object's class, is defined in the user's own code."""
    if isinstance(value, types.ModuleType):
        return value.__name__ == "__main__" or _is_user_path(_module_path(value))
    kind = value if isinstance(value, types.FunctionType | type) else type(value)
    module = sys.modules.get(kind.__module__ or "")
    return module is None or is_user_code(module)  # without a module, it was pickled with its code


def values_read(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each global, and of each member of a user's module, that a function may read.

    A member counts if the code has its name anywhere: which object an attribute is of is known only when the code runs.
    """
    codes = list(_nested(function.__code__))
    globals_ = function.__globals__
    read = {name for code in codes for name in _global_names(code)} & globals_.keys()
    values = {name: globals_[name] for name in sorted(read)}
    yield from values.items()
    names = {name for code in codes for name in code.co_names}
    modules = [value for value in (*values.values(), *_free_values(function)) if isinstance(value, types.ModuleType)]
    modules += [module for code in codes for module in _imports(code, globals_)]
    for module in modules:  # grows by modules in modules
        members = vars(module) if is_user_code(module) else {}
        for name in sorted(names & members.keys()):
            member = members[name]
            if not isinstance(member, types.ModuleType):
                yield f"{module.__name__}.{name}", member
            elif member not in modules:
                modules.append(member)


def cell_contents(cell: types.CellType) -> list[Any]:
    """Return the value of a cell in a list, which is empty if the cell is."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield code, and the code of functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _global_names(code: types.CodeType) -> Iterator[str]:
    return (str(part.argval) for part in dis.get_instructions(code) if part.opname in _READS_GLOBAL)


def _free_values(function: types.FunctionType) -> Iterator[Any]:
    return (value for cell in function.__closure__ or () for value in cell_contents(cell))


def _imports(code: types.CodeType, globals_: dict[str, Any]) -> Iterator[types.ModuleType]:
    """Yield the user's modules that code imports, as its import statements would find them.

    They are imported here: whether one is loaded already depends on what else the program has done.
    """
    parts = [part for part in dis.get_instructions(code) if part.opname != "EXTENDED_ARG"]
    # The two instructions before IMPORT_NAME load its level and its list of names.
    for level, members, part in zip(parts, parts[1:], parts[2:], strict=False):
        if part.opname != "IMPORT_NAME":
            continue
        name = str(part.argval)
        try:
            if level.argval or _is_user_path(_path_of_name(name.partition(".")[0])):
                yield __import__(name, globals_, None, members.argval or (), level.argval)
        except Exception:  # any exception of the user's own code; only the workers may have the module
            continue


def _path_of_name(name: str) -> str | None:
    """Return where a top-level module stands, without loading it; None if it is built in, or missing."""
    module = sys.modules.get(name)
    if module is not None:
        return _module_path(module)
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    return spec.origin if spec.has_location else next(iter(spec.submodule_search_locations or ()), None)


def _module_path(module: types.ModuleType) -> str | None:
    """Return a module's file, or the first folder of a package without a file; None if it is built in."""
    file: str | None = getattr(module, "__file__", None)
    return file or next(iter(getattr(module, "__path__", ())), None)


def _is_user_path(path: str | None) -> bool:
    if path is None or path.startswith(_INSTALLED):
        return False
    return not any(_has_packages(folder) for folder in Path(path).parents)


@cache
def _has_packages(folder: Path) -> bool:
    """Whether packages were installed into a folder, e.g. by `pip install --target`: their metadata is beside them."""
    return any(folder.glob("*.dist-info"))
