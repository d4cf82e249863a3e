"""Java programs and libraries from Maven Central, by the Ivy that PySpark carries; downloaded once for all runs."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pyspark

SPARK = Path(pyspark.__file__).parent / "jars"


class Unavailable(Exception):
    """The jars cannot be had here; the message says why."""


class Artifact(NamedTuple):
    """A library with all that it needs; `digest` is of the names and SHA-256 sums of all files (`_digest`)."""

    organisation: str
    module: str
    revision: str
    digest: str


@cache
def jars(artifact: Artifact) -> tuple[Path, ...]:
    """The jars of an artifact.

    Raises:
        Unavailable: they cannot be downloaded.
        ValueError: they are not those that the tests were written with.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millpond-tests"
    place = home / f"{artifact.module}-{artifact.revision}"
    if not place.exists():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as folder:
            fresh = Path(folder) / "jars"
            _download(artifact, Path(folder), fresh)
            if (found := _digest(fresh)) != artifact.digest:
                raise ValueError(f"{artifact.module} {artifact.revision} has other files than expected: {found}")
            with suppress(OSError):  # another worker was faster
                fresh.rename(place)  # whole or not at all
    return tuple(sorted(place.iterdir()))


def beside_spark(artifact: Artifact) -> str:
    """For `spark.jars`: the jars of an artifact, but for those of which Spark has a version of its own."""
    own = {_module(path) for path in SPARK.glob("*.jar")}
    return ",".join(str(path) for path in jars(artifact) if _module(path) not in own)


def _module(path: Path) -> str:
    return path.stem.rpartition("-")[0]


def _download(artifact: Artifact, folder: Path, place: Path) -> None:
    (ivy,) = SPARK.glob("ivy-*.jar")
    command = ["java", "-jar", str(ivy), "-warn", "-cache", str(folder / "ivy"), "-confs", "default"]
    command += ["-dependency", *artifact[:3], "-types", "jar", "bundle"]
    command += ["-retrieve", f"{place}/[artifact]-[revision](-[classifier]).[ext]"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"Ivy cannot download {artifact.module} {artifact.revision} in 240 s.") from error
    if done.returncode or not place.exists():
        raise Unavailable(f"Ivy cannot download {artifact.module} {artifact.revision}: {done.stderr.strip()[-300:]}")


def _digest(folder: Path) -> str:
    sums = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(folder.iterdir()))
    return hashlib.sha256("".join(sums).encode()).hexdigest()
