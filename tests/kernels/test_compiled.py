"""When kernels are compiled: not before somebody calls them, and once among processes."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from numba import from_dtype, uint64

from millpond import kernels
from millpond.kernels import compile
from millpond.kernels.compiled import kernel

KERNELS = Path(kernels.__path__[0])

CALL = """
import numpy as np
import millpond.slot.serve
from millpond.kernels.columns import row_hash
state = np.zeros(4, np.uint64)
values = np.arange(4)
row_hash.mix_fixed(state, values.ctypes.data, 8, 0, 0)
first = state.copy()
state[:] = 0
row_hash.mix_fixed(state, values.ctypes.data, 8, 0, 0)
assert first.any() and (first == state).all()
"""


def start(cache: Path, *arguments: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "NUMBA_DEBUG_CACHE": "1"}
    return subprocess.Popen([sys.executable, *arguments], env=environment, text=True, stdout=subprocess.PIPE)


def finish(process: "subprocess.Popen[str]") -> str:
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0
    return said


def kept(cache: Path) -> set[str]:
    """The kernels that are on disk."""
    return {path.name.partition("-")[0] for path in cache.rglob("*.nbc")}


def test_what_nobody_calls_is_not_compiled(tmp_path: Path) -> None:
    finish(start(tmp_path, "-c", "import millpond.slot.serve"))
    assert kept(tmp_path) == set()
    finish(start(tmp_path, "-c", CALL))
    assert kept(tmp_path) == {"row_hash.mix_fixed"}


def test_processes_that_need_a_kernel_at_once_compile_it_once(tmp_path: Path) -> None:
    both = [start(tmp_path, "-c", CALL) for _ in range(2)]
    said = "".join(finish(process) for process in both)
    assert said.count("data saved to") == 1
    assert said.count("data loaded from") == 1


THREADS = """
from threading import Barrier, Thread
import numpy as np
from millpond.kernels.columns import row_hash
failed = []
together = Barrier(8)
def call():
    state, values = np.zeros(4, np.uint64), np.arange(4)
    together.wait()
    try:
        row_hash.mix_fixed(state, values.ctypes.data, 8, 0, 0)
    except BaseException as error:
        failed.append(error)
threads = [Thread(target=call) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failed, failed
"""


def test_threads_that_need_a_kernel_at_once_compile_it_once(tmp_path: Path) -> None:
    said = finish(start(tmp_path, "-c", THREADS))
    assert said.count("data saved to") == 1


def test_what_is_on_disk_is_loaded(tmp_path: Path) -> None:
    finish(start(tmp_path, "-c", CALL))
    said = finish(start(tmp_path, "-c", CALL))
    assert "data saved to" not in said
    assert "data loaded from" in said


def test_kernels_work_where_nothing_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that cannot be written to, for a user without a home."""
    refuse = "import numba.core.caching as c; c.CacheImpl._locator_classes = []; "
    finish(start(tmp_path, "-c", refuse + CALL))
    assert kept(tmp_path) == set()


COMPILE = """
import os
import sys
from pathlib import Path
from typing import Any
from millpond.kernels import compile, compiled
from millpond.kernels.runs import bloom
compile.import_all = lambda: None
compile.compile_behind(Path(sys.argv[1]), os.getppid())
assert not compiled.missing()
"""


def test_the_others_are_compiled_beside_the_first_query(tmp_path: Path) -> None:
    progress = tmp_path / "compiling"
    finish(start(tmp_path / "cache", "-c", COMPILE, str(progress)))
    assert kept(tmp_path / "cache") >= {"bloom.admit", "bloom.build_filters"}
    assert list(tmp_path.iterdir()) == [tmp_path / "cache"]


def test_nothing_is_compiled_once_the_template_has_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have died while this process was still importing."""
    monkeypatch.setattr(os, "nice", lambda _: None)
    monkeypatch.setattr(compile, "import_all", lambda: None)
    kernels = [Mock(kept=False)]
    monkeypatch.setattr(compile, "missing", lambda: kernels)
    for parent, compiled in ((os.getpid(), 0), (os.getppid(), 1)):
        compile.compile_behind(tmp_path / "compiling", parent)
        assert kernels[0].prepare.call_count == compiled


def test_another_thread_that_compiles_it_meanwhile_is_no_reason_to_fail() -> None:
    """Arguments that are converted match once nothing more is compiled, which it may be while they are looked at."""
    record = np.dtype([("value", np.uint64), (f"padding{id(object())}", np.uint8)])

    @kernel((from_dtype(record)[::1], uint64))
    def first(records: Any, factor: int) -> int:
        return records[0].value * factor

    looked_at = first.typeof_pyval

    def meanwhile(value: Any) -> Any:
        first.prepare()  # as another thread does
        return looked_at(value)

    first.typeof_pyval = meanwhile
    assert first(np.array([(3, 0)], record), 2) == 6
    with pytest.raises(TypeError, match="No matching definition"):
        first("text", 2)


def names_of_what_it_makes(function: ast.FunctionDef) -> set[str]:
    """The names that a function gives to what calls return."""
    assigned = [one for one in ast.walk(function) if isinstance(one, ast.Assign)]
    made = [one for one in assigned if any(isinstance(part, ast.Call) for part in ast.walk(one.value))]
    names = [name for one in made for target in one.targets for name in getattr(target, "elts", [target])]
    return {name.id for name in names if isinstance(name, ast.Name)}


def test_no_kernel_takes_the_address_of_an_array_that_it_makes() -> None:
    """Numba frees such an array behind its last mention, while what knows the address still writes there."""
    found = []
    for path in sorted(KERNELS.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                made = names_of_what_it_makes(function)
                asked = [one for one in ast.walk(function) if isinstance(one, ast.Attribute) and one.attr == "ctypes"]
                names = [ast.unparse(one.value) for one in asked]
                found += [f"{path.name}, {function.name}: {name}" for name in names if name in made]
    assert not found
