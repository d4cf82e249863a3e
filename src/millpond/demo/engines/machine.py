"""What the demo stands on: Java, Python, cores, disk."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import msgspec

NEEDED_JAVA = 17
NEEDED_BYTES = 2 << 30


class Machine(msgspec.Struct, frozen=True):
    """This machine; `problem` says in one line what keeps the demo from running, if anything does."""

    java: str
    python: str
    cores: int
    free_bytes: int
    problem: str = ""
    cpu: str = ""

    def line(self) -> str:
        """All of it in one line."""
        free = f"{self.free_bytes / 1e9:.0f} GB of disk free"
        return f"Java {self.java} · Python {self.python} · {self.cores} cores · {free}"

    def hardware(self) -> str:
        """Processor and system in one line."""
        return " · ".join(each for each in (self.cpu, f"{self.cores} cores", platform.platform(terse=True)) if each)


def cpu_model() -> str:
    """What the processor calls itself, or an empty string."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return platform.processor()
    return found[1].strip() if found else platform.processor()


def java_version() -> str:
    """The version of the Java that PySpark would start, or an empty string."""
    home = os.environ.get("JAVA_HOME")
    command = str(Path(home) / "bin" / "java") if home else "java"
    try:
        told = subprocess.run([command, "-version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    found = re.search(r'version "([^"]+)"', told.stderr + told.stdout)
    return found[1] if found else ""


def look(folder: Path) -> Machine:
    """Look at the machine; `folder` (which exists) tells whose disk counts."""
    java, free = java_version(), shutil.disk_usage(folder).free
    problem = ""
    if not java:
        problem = f"Millpond needs Java {NEEDED_JAVA} or newer on the PATH (or JAVA_HOME), as PySpark does."
    elif int(java.split(".")[0]) < NEEDED_JAVA:
        problem = f"Millpond needs Java {NEEDED_JAVA} or newer, as PySpark does; this is Java {java}."
    elif free < NEEDED_BYTES:
        problem = f"The demo needs {NEEDED_BYTES / 1e9:.0f} GB of disk at {folder}; {free / 1e9:.1f} GB are free."
    return Machine(java or "missing", platform.python_version(), os.cpu_count() or 1, free, problem, cpu_model())
