"""The machine of the demo: Java, Python, cores, disk."""

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
    """This machine; `problem` gives in one line the reason why the demo cannot run, if there is one."""

    java: str
    python: str
    cores: int
    free_bytes: int
    problem: str = ""
    cpu: str = ""

    def line(self) -> str:
        """Return a summary in one line."""
        free = f"{self.free_bytes / 1e9:.0f} GB of disk free"
        return f"Java {self.java} · Python {self.python} · {self.cores} cores · {free}"

    def hardware(self) -> str:
        """Return processor and system in one line."""
        return " · ".join(part for part in (self.cpu, f"{self.cores} cores", platform.platform(terse=True)) if part)


def cpu_model() -> str:
    """Return the model name of the processor, or an empty string."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return platform.processor()
    return match[1].strip() if match else platform.processor()


def java_version() -> str:
    """Return the version of the Java that PySpark would start, or an empty string."""
    home = os.environ.get("JAVA_HOME")
    command = str(Path(home) / "bin" / "java") if home else "java"
    try:
        completed = subprocess.run([command, "-version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    match = re.search(r'version "([^"]+)"', completed.stderr + completed.stdout)
    return match[1] if match else ""


def look(folder: Path) -> Machine:
    """Inspect the machine.

    Args:
        folder: an existing folder on the disk for the demo.
    """
    java, free = java_version(), shutil.disk_usage(folder).free
    problem = ""
    if not java:
        problem = f"Millpond needs Java {NEEDED_JAVA} or newer on the PATH (or JAVA_HOME), as PySpark does."
    elif int(java.split(".")[0]) < NEEDED_JAVA:
        problem = f"Millpond needs Java {NEEDED_JAVA} or newer, as PySpark does; this is Java {java}."
    elif free < NEEDED_BYTES:
        problem = f"The demo needs {NEEDED_BYTES / 1e9:.0f} GB of disk at {folder}; {free / 1e9:.1f} GB are free."
    return Machine(java or "missing", platform.python_version(), os.cpu_count() or 1, free, problem, cpu_model())
