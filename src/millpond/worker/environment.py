"""Versions of the Python packages that driver and executors must have in common."""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from millpond.errors import SettingError

_PACKAGES = ("millpond", "numpy", "numba", "pyarrow", "msgspec")
"""Packages that compute rows, or encode tasks and rows. Spark itself compares versions of Python."""

_MISSING = "not installed"


class Environment:
    """Versions of packages where this was created; unpickling it in an environment with other versions fails.

    A function that carries it as its first attribute is refused before anything else of it is unpickled, so that no
    version of Millpond reads the task of another one.
    """

    def __init__(self) -> None:
        self.versions = _installed()

    def __reduce__(self) -> tuple[object, ...]:
        return _checked, (self.versions,)


@functools.cache
def _installed() -> Mapping[str, str]:
    """Return the version of each package in this process, which stays the same as long as the process lives."""
    return {package: _version(package) for package in _PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return _MISSING


def _checked(driver: Mapping[str, str]) -> Environment:
    """Return this process's environment if it has the driver's versions.

    Raises:
        SettingError: it has others; the error names the host and each package that differs.
    """
    environment = Environment()
    here = environment.versions
    different = [
        f"{package} is {here.get(package, _MISSING)} ({expected} on the driver)"
        for package, expected in driver.items()
        if here.get(package, _MISSING) != expected
    ]
    if different:
        raise SettingError(
            f"The Python {sys.executable} on host {platform.node()} has other packages than the driver's: "
            f"{', '.join(different)}.",
            action="Install the driver's versions there, or give all hosts one environment: in their image, or with "
            "--archives (`millpond docs cluster`).",
        )
    return environment
