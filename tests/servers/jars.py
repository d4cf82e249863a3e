"""Java programs and libraries from Maven Central, downloaded once for all runs by the Ivy that PySpark contains."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pyspark

from tests.servers.process import Unavailable, downloads

SPARK = Path(pyspark.__file__).parent / "jars"


class Artifact(NamedTuple):
    """A library with its dependencies; `digest` is of the names and SHA-256 sums of all files (`_digest`)."""

    organisation: str
    module: str
    revision: str
    digest: str


@cache
def jars(artifact: Artifact) -> tuple[Path, ...]:
    """Return the jars of an artifact; download them if necessary.

    Raises:
        Unavailable: they cannot be downloaded.
        ValueError: their digest is not the artifact's.
    """
    home = downloads()
    place = home / f"{artifact.module}-{artifact.revision}"
    if not place.exists():
        with tempfile.TemporaryDirectory(dir=home) as folder:
            fresh = Path(folder) / "jars"
            _download(artifact, Path(folder), fresh)
            if (found := _digest(fresh)) != artifact.digest:
                raise ValueError(f"{artifact.module} {artifact.revision} has other files than expected: {found}")
            with suppress(OSError):  # another worker was faster
                fresh.rename(place)  # whole or not at all
    return tuple(sorted(place.iterdir()))


def beside_spark(artifact: Artifact) -> str:
    """Return the jars of an artifact for `spark.jars`, without the modules that Spark contains itself."""
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
