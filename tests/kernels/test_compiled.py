"""When kernels are compiled: not before somebody calls them, and once among processes."""

import ast
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from numba import from_dtype, uint64

from millpond import kernels
from millpond.kernels import compiled
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


FOLD = """
from millpond.kernels.aggregate import numeric
numeric.sum_ints.prepare()
"""


def test_the_kernel_of_a_step_is_loaded_by_other_processes(tmp_path: Path) -> None:
    finish(start(tmp_path, "-c", FOLD))
    assert kept(tmp_path) == {"numeric.sum_ints"}
    output = finish(start(tmp_path, "-c", FOLD))
    assert "data saved to" not in output
    assert "data loaded from" in output


REFUSE = """
import numba.core.caching as caching
def refuse(self):
    raise PermissionError
for one in caching.FunctionCache._impl_class._locator_classes:
    one.ensure_cache_path = refuse
"""


def test_kernels_work_where_nothing_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that cannot be written to, for a user without a home."""
    finish(start(tmp_path, "-c", REFUSE + CALL))
    assert kept(tmp_path) == set()


FEW = """
from millpond.kernels import compile, compiled
from millpond.kernels.runs import bloom
from millpond.kernels.compiled import KERNELS
compile.import_all = lambda: None
{}
assert not compiled.missing()
"""


def test_all_are_compiled_with_their_progress_shown(tmp_path: Path) -> None:
    said = finish(start(tmp_path, "-c", FEW.format("assert compile.compile_all() == 0")))
    assert kept(tmp_path) >= {"bloom.admit", "bloom.build_filters"}
    assert "100%" in said
    assert " compiled in " in said
    assert "all were compiled before" in finish(start(tmp_path, "-c", FEW.format("assert compile.compile_all() == 0")))


def test_what_is_left_is_compiled_behind(tmp_path: Path) -> None:
    finish(start(tmp_path, "-c", FEW.format("compile.compile_in_background()")))
    assert kept(tmp_path) >= {"bloom.admit", "bloom.build_filters"}


SIDE_BY_SIDE = """
children = compile.compile_in_two_processes(KERNELS)
assert len(set(children)) == 2
for pid in children:
    os.waitpid(pid, 0)
assert not any(one.ready for one in KERNELS)  # it was done elsewhere
"""


def test_two_processes_compile_what_a_first_batch_needs(tmp_path: Path) -> None:
    finish(start(tmp_path, "-c", f"import os{FEW.format(SIDE_BY_SIDE)}"))
    assert kept(tmp_path) >= {"bloom.admit", "bloom.build_filters"}


LEAVE = """
import millpond.kernels.columns.row_hash
from millpond.kernels import compile
compile.start_background_compiler()
compile.start_background_compiler()
assert compile._lock() is None
"""


def test_one_process_is_left_behind_and_yields_to_all_others(tmp_path: Path) -> None:
    finish(start(tmp_path, "-c", LEAVE))
    (left,) = [one for one in psutil.process_iter(["cmdline", "environ"]) if is_behind(one.info, tmp_path)]
    try:
        assert os.getsid(left.pid) != os.getsid(0)
        assert left.nice() == 19
        (lock,) = tmp_path.rglob("compiling.lock")
        with lock.open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        left.kill()
        left.wait(30)


def is_behind(process: dict[str, Any], cache: Path) -> bool:
    named = (process["environ"] or {}).get("NUMBA_CACHE_DIR") == str(cache)
    return named and "--behind" in (process["cmdline"] or [])


FIRST_BATCH = """
import sys
from pathlib import Path
import msgspec
from millpond.kernels.compiled import KERNELS
from millpond.slot.first_kernels import FIRST
from millpond.tasks.operator_task import OperatorTask, SlotSettings
from millpond.slot.partition.partitions import PartitionServer
from millpond.slot.process.messages import RunBatch
from tests.slot.conftest import GROUPED, begin, grouped
folder = sys.argv[1]
names = dict(application="a", query="q", run="r", operator=0, generation=1, partitions=1, slots=1)
task = OperatorTask(**names, spec=GROUPED, location=f"{folder}/state", offsets=f"{folder}/offsets")
begin(task)
server = PartitionServer(Path(folder))
keys = list(range(2000))
for _ in server.run(RunBatch(task, 0, 0, 0), iter([grouped(0, keys, keys)])):
    pass
server.close()
called = {one for one in KERNELS if one.ready}
assert set(FIRST) <= called, set(FIRST) - called
others = called - set(FIRST)
assert len(others) <= 2, others  # the sum's, and what Numba compiles into `pack` where that is not on disk
"""


def test_what_is_compiled_first_is_what_a_first_batch_calls(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", FIRST_BATCH, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_machine_code_of_another_version_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels' files may be the same, and the functions of other files that are compiled into them others."""
    finish(start(tmp_path / "kernels", "-c", CALL))
    metadata = tmp_path / "upgraded" / "millpond-0.0.1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: millpond\nVersion: 0.0.1\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(metadata.parent), *filter(None, sys.path)]))
    upgraded = finish(start(tmp_path / "kernels", "-c", CALL))
    assert "data loaded from" not in upgraded
    assert upgraded.count("data saved to") == 1
    assert "data loaded from" in finish(start(tmp_path / "kernels", "-c", CALL))


def test_machine_code_depends_on_the_files_that_its_kernels_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: tmp_path / name for name in ("kernels/sums.py", "kernels/words.py", "kernels/bits.py", "layout.py")}
    for file, imported in zip(files.values(), ["kernels.words", "kernels.bits", "layout", "conf"], strict=True):
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"from millpond.{imported} import it\n")
    monkeypatch.setattr(compiled, "_PACKAGE", tmp_path)

    def stamps(name: str) -> frozenset[tuple[str, int, int]]:
        compiled._stamps.cache_clear()
        return compiled._stamps(files[name])

    before = {name: stamps(name) for name in files}
    assert {name for name, _, _ in before["kernels/sums.py"]} == set(files)
    files["kernels/bits.py"].write_text("from millpond.layout import it, more\n")
    assert {name for name in files if stamps(name) != before[name]} == set(files) - {"layout.py"}


MODULE = """
from millpond.kernels.compiled import kernel

@kernel("int64(int64)")
def twice(number):
    return 2 * number
"""
INSTALLED = """
from millpond.kernels.compiled import missing
from package import twice
assert not missing()
assert twice(4) == 8
"""


def test_what_an_installation_has_compiled_serves_users_who_can_write_nowhere(tmp_path: Path) -> None:
    (tmp_path / "package.py").write_text(MODULE)
    environment = {**os.environ, "NUMBA_DEBUG_CACHE": "1", "PYTHONPATH": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)

    def said(code: str) -> str:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "data saved to" in said("import package; assert package.twice(4) == 8")
    assert list(tmp_path.rglob("package.twice*.nbc"))
    assert "data loaded from" in said(REFUSE + INSTALLED)


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
