"""Compile the Java functions with which Flink makes the same rows as Spark."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

from benchmarks import ROOT
from benchmarks.nexmark.generator import price_tables

FLINK_PYTHON = ROOT / ".venv-flink" / "bin" / "python"
"""Python of Flink's virtual environment, which `make engines` sets up."""
_SOURCES = Path(__file__).parent


class NoCompiler(Exception):
    """There is no `javac`; the message says what to install."""


def build() -> Path:
    """Return the jar with the functions; compile them against the installed Flink if the jar is missing or old.

    Raises:
        NoCompiler: only a Java runtime is installed.
    """
    venv = FLINK_PYTHON.parents[1]
    jar = venv / "millpond-benchmark.jar"
    sources = sorted(_SOURCES.glob("*.java"))
    if jar.exists() and jar.stat().st_mtime >= max(s.stat().st_mtime for s in sources):
        return jar
    compiler = shutil.which("javac")
    if compiler is None:
        raise NoCompiler("Flink's generator functions need javac: install a JDK (e.g. openjdk-17-jdk-headless)")
    libraries = ":".join(map(str, sorted(venv.glob("lib/python*/site-packages/pyflink/lib/flink-*.jar"))))
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([compiler, "-cp", libraries, "-d", folder, *map(str, sources)], check=True)
        with zipfile.ZipFile(Path(folder) / "made.jar", "w") as archive:
            for path in sorted(Path(folder).rglob("*.class")):
                archive.write(path, path.relative_to(folder))
            # The table of powers is in the jar, because Java's powers and NumPy's may differ in the last bit.
            archive.writestr("prices.bin", b"".join(table.astype(">f8").tobytes() for table in price_tables()))
        shutil.copy(Path(folder) / "made.jar", jar)
    return jar


if __name__ == "__main__":
    print(build())
