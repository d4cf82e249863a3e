"""The machine of the demo: Java, Python, cores, disk."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

NEEDED_JAVA = 17
NEEDED_BYTES = 2 << 30


def java_version() -> str:
    """Return the version of the Java that PySpark would start, or an empty string."""
    home = os.environ.get("JAVA_HOME")
    command = [f"{home}/bin/java" if home else "java", "-version"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        if match := re.search(r'version "([^"]+)"', done.stderr + done.stdout):
            return match[1]
    return ""


def problem_of(java: str, folder: Path) -> str:
    """Return in one line why the demo cannot run with this Java and this folder, or an empty string."""
    free = shutil.disk_usage(folder).free
    if not java:
        return f"Millpond needs Java {NEEDED_JAVA} or newer on the PATH (or JAVA_HOME), as PySpark does."
    if int(java.split(".")[0]) < NEEDED_JAVA:
        return f"Millpond needs Java {NEEDED_JAVA} or newer, as PySpark does; this is Java {java}."
    if free < NEEDED_BYTES:
        return f"The demo needs {NEEDED_BYTES / 1e9:.0f} GB of disk at {folder}; {free / 1e9:.1f} GB are free."
    return ""


def describe_machine() -> str:
    """Return Python, processor, cores and system in one line."""
    cpu = platform.processor()
    with suppress(OSError):
        cpu = (re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M) or [cpu])[0].strip()
    return f"Python {platform.python_version()} · {cpu} · {os.cpu_count()} cores · {platform.platform(terse=True)}"
