"""Workers in an environment with other packages than the driver's."""

import os
import pickle
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from pyspark import cloudpickle

from millpond.errors import SettingError
from millpond.plan.exchange.workers import named_function, portable
from millpond.worker.environment import Environment
from millpond.worker.slot_stage import SlotStage

CALL = "import pickle, sys; list(pickle.load(open(sys.argv[1], 'rb'))(iter([])))"


def with_package(folder: Path, name: str, number: str) -> dict[str, str]:
    """An environment of processes in which a package has another version, to all who ask for it."""
    metadata = folder / f"{name}-{number}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}


def test_an_environment_with_the_same_packages_is_accepted() -> None:
    assert pickle.loads(pickle.dumps(Environment())).versions == Environment().versions


@pytest.mark.parametrize("package", ["millpond", "numpy", "numba", "pyarrow"])
def test_another_package_is_named_before_the_task_is_read(package: str, tmp_path: Path) -> None:
    stage = SlotStage(Unreadable())
    (tmp_path / "function").write_bytes(cloudpickle.dumps(portable(named_function(stage, "count", 2))))
    command = [sys.executable, "-c", CALL, str(tmp_path / "function")]
    environment = with_package(tmp_path / "other", package, "0.0.1")
    failure = subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stderr
    last = failure.splitlines()[-1]
    assert last.startswith(f"{SettingError.__module__}.SettingError: [SETTING] The Python {sys.executable} on host ")
    assert f": {package} is 0.0.1 ({version(package)} on the driver). Install" in last
    assert "was read" in subprocess.run(command, capture_output=True, text=True, check=False).stderr


class Unreadable:
    """A task whose unpickling fails."""

    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("raise AssertionError('the task was read')",)


def test_a_missing_package_is_named() -> None:
    driver = Environment()
    driver.versions = {**driver.versions, "a-package-of-later": "3.1"}
    with pytest.raises(SettingError, match=r"a-package-of-later is not installed \(3\.1 on the driver\)"):
        pickle.loads(pickle.dumps(driver))
