"""The Python environment of a cluster's hosts: one that comes as an archive, and one that differs from the driver's."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

import millpond
from tests.chaos.truth import expected_updates, read_updates, write_input
from tests.integration.test_hosts import PATIENT, run, run_job
from tests.support.cluster import Hosts, hosts

pytestmark = [pytest.mark.xdist_group("hosts"), pytest.mark.timeout(600)]


def add_metadata(site: Path, package: str, number: str) -> None:
    """Make a package have a version for all who ask a Python with this folder."""
    metadata = site / f"{package}-{number}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {number}\n")


def pack_environment(folder: Path) -> Path:
    """Pack an environment with a copy of Millpond, which takes other packages from this Python's environment."""
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(millpond.__path__[0]), site / "millpond", ignore=ignored)
    add_metadata(site, "millpond", version("millpond"))
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    with tarfile.open(folder / "environment.tar.gz", "w:gz", compresslevel=1) as archive:
        archive.add(environment, ".")
    return folder / "environment.tar.gz"


def test_executors_run_the_environment_of_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write_input(tmp_path / "in", 7)
    archive = pack_environment(tmp_path)
    folders: set[Path] = set()

    def on_batch(batch: int) -> None:
        if batch == 2:
            folders.update(folder for number in range(2) for folder in folders_of_slots(cluster, number))

    paths = os.environ.get("PYTHONPATH")
    monkeypatch.delenv("PYTHONPATH", raising=False)  # hosts find Millpond in the archive alone
    with hosts(tmp_path, 2) as cluster:
        if paths is not None:
            monkeypatch.setenv("PYTHONPATH", paths)
        monkeypatch.setenv("PYSPARK_PYTHON", "./environment/bin/python")
        settings = {"spark.archives": f"{archive}#environment"} | PATIENT
        run(tmp_path, cluster, on_batch, f"file:{tmp_path}/state", pause=1.0, **settings)
    unpacked = {tmp_path / f"work-host{number}" for number in range(2)}
    assert {folder.parents[3] for folder in folders} == unpacked
    assert {folder.relative_to(folder.parents[1]) for folder in folders} == {Path("environment/bin")}
    assert read_updates(tmp_path / "out") == expected_updates(rows, tmp_path / "checkpoint")


def folders_of_slots(cluster: Hosts, number: int) -> list[Path]:
    """The folders of the Pythons that run a host's slots."""
    commands = [process.cmdline() for process in cluster.processes(number)]
    return [Path(command[0]).parent for command in commands if "millpond.slot.template" in command]


def test_a_host_with_another_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_input(tmp_path / "in", 7)
    add_metadata(tmp_path / "other", "numpy", "0.0.1")
    python = tmp_path / "python"
    # Hosts have one path of Python, and different packages there.
    python.write_text(
        f'#!/bin/sh\ncase "$TMPDIR" in */h1-*) export PYTHONPATH="{tmp_path}/other:$PYTHONPATH";; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setenv("PYSPARK_PYTHON", str(python))
    with hosts(tmp_path, 2) as cluster:
        done, log = run_job(tmp_path, cluster, lambda batch: None, f"file:{tmp_path}/state", **PATIENT)
    difference = f"on host {platform.node()} has other packages than the driver's: numpy is 0.0.1 ({version('numpy')}"
    assert not done
    assert difference in log
    assert difference in executor_logs(tmp_path, 1)


def executor_logs(folder: Path, number: int) -> str:
    """The logs of a host's executors."""
    return "".join(log.read_text() for log in (folder / f"work-host{number}").glob("*/*/stderr"))
